"""Processes that run tasks one after another; one that takes too long or grows too large is ended, and so is its task.

multiprocessing's own pools wait for ever for a task whose process died, and cannot end one that loops inside C code.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
PAGE = os.sysconf("SC_PAGE_SIZE")


def batches(count: int, size: int) -> Iterator[tuple[int, int]]:
    """The number of each batch and how many programs are in it, ``count`` in all."""
    for number in range((count + size - 1) // size):
        yield number, min(size, count - number * size)


@dataclass
class Ended:
    """What came of a task: what the function returned, or the reason why its process was ended or died."""

    task: Any
    result: Any = None
    reason: str = ""


@dataclass
class Limits:
    """Of one task: CPU time of its process in seconds, and its memory in bytes. Looked at once a second, on Linux."""

    seconds: float
    memory: int


class Worker:
    """A process and the task that it has."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.channel, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(function, other), daemon=True)
        self.process.start()
        other.close()
        self.task: Any = None
        self.seconds_before = 0.0

    def give(self, task: Any) -> None:
        self.task, self.seconds_before = task, self.used()[0]
        self.channel.send(task)

    def used(self) -> tuple[float, int]:
        """CPU seconds so far and bytes resident now; zeros where there is no /proc."""
        folder = Path(f"/proc/{self.process.pid}")
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            pages = int((folder / "statm").read_text().split()[1])
        except OSError:
            return 0.0, 0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * PAGE

    def beyond(self, limits: Limits) -> str:
        """Which limit the task has passed, or ''."""
        seconds, memory = self.used()
        if seconds - self.seconds_before > limits.seconds:
            return f"took more than {limits.seconds:.0f} s of CPU time"
        return f"grew beyond {limits.memory >> 20} MiB" if memory > limits.memory else ""

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.channel.close()


def serve(function: Callable[[Any], Any], channel: Any) -> None:
    while True:
        try:
            task = channel.recv()
        except EOFError:
            return
        channel.send(function(task))


def run_tasks(function: Callable[[Any], Any], tasks: Iterable[Any], jobs: int, limits: Limits) -> Iterator[Ended]:
    """Run `function(task)` for each task in `jobs` processes; what came of each, as they end."""
    waiting = iter(tasks)
    workers: list[Worker] = []
    try:
        for _, task in zip(range(jobs), waiting, strict=False):
            workers.append(Worker(function))
            workers[-1].give(task)
        while workers:
            ready = multiprocessing.connection.wait([worker.channel for worker in workers], timeout=1)
            for worker in list(workers):
                if worker.channel in ready:
                    try:
                        ended = Ended(worker.task, result=worker.channel.recv())
                    except EOFError:
                        worker.process.join()
                        ended = Ended(worker.task, reason=f"died with exit code {worker.process.exitcode}")
                else:
                    ended = Ended(worker.task, reason=worker.beyond(limits))
                    if not ended.reason:
                        continue
                try:
                    following = next(waiting)
                except StopIteration:
                    worker.end()
                    workers.remove(worker)
                else:
                    if ended.reason:
                        worker.end()
                        workers[workers.index(worker)] = worker = Worker(function)
                    worker.give(following)
                yield ended
    finally:
        for worker in workers:
            worker.end()
