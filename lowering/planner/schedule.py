"""When the exchanges and the products of one layer of experts run, where its tokens go in chunks: a software pipeline
over two resources, the link and the device, each of which does one thing at a time."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

LINK, DEVICE = "link", "device"


@dataclass(frozen=True)
class Task:
    """after: names of the tasks that come before. Of tasks that can begin at once the first given begins."""

    name: str
    on: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """A task, from when to when."""

    task: Task
    begin: float
    end: float


def run(tasks: Iterable[Task]) -> list[Run]:
    """Each resource takes, when it is free, the first of its tasks that can begin soonest."""
    left, ends, free, found = list(tasks), dict[str, float](), dict[str, float](), list[Run]()
    while left:
        ready = [(max([free.get(t.on, 0.0), *(ends[name] for name in t.after)]), i) for i, t in enumerate(left)
                 if all(name in ends for name in t.after)]
        if not ready:
            raise ValueError(f"{left[0].name} waits for what never ends")
        begin, number = min(ready)
        task = left.pop(number)
        found.append(Run(task, begin, begin + task.seconds))
        ends[task.name] = free[task.on] = begin + task.seconds
    return found


def forward(chunks: int, dispatch: float, products: float, combine: float, filling: float = 0.0) -> list[Task]:
    """Seconds are of all chunks together. filling: what the device can do at any time (the shared experts)."""
    tasks = list[Task]()
    for i in range(chunks):
        tasks.append(Task(f"dispatch {i}", LINK, dispatch / chunks))
        tasks.append(Task(f"experts {i}", DEVICE, products / chunks, (f"dispatch {i}",)))
        tasks.append(Task(f"combine {i}", LINK, combine / chunks, (f"experts {i}",)))
    tasks.append(Task("shared experts", DEVICE, filling))
    return tasks if chunks > 1 else one_by_one(tasks)


def backward(chunks: int, combine: float, products: float, dispatch: float, filling: float = 0.0) -> list[Task]:
    """The way back: gradients of results out, gradients of tokens home."""
    def called(name: str) -> str:
        return name.replace("dispatch", "results' gradients").replace("combine", "tokens' gradients")

    return [replace(task, name=called(task.name), after=tuple(map(called, task.after)))
            for task in forward(chunks, combine, products, dispatch, filling)]


def one_by_one(tasks: Sequence[Task]) -> list[Task]:
    """The same, each after the one before: nothing overlaps, as in a step without chunks."""
    return [replace(task, after=(tasks[i - 1].name,) if i else ()) for i, task in enumerate(tasks)]


def length(tasks: Sequence[Task]) -> float:
    """Seconds from the first task's begin to the last one's end."""
    return max(one.end for one in run(tasks))


def hidden(tasks: Sequence[Task]) -> float:
    """Seconds that are saved against one task after the other."""
    return sum(task.seconds for task in tasks) - length(tasks)


def trace(parts: Iterable[tuple[str, Sequence[Task]]], title: str) -> dict[str, list[dict[str, object]]]:
    """Parts, one after the other, as a file that Perfetto opens (Chrome's trace format; microseconds)."""
    lines = {LINK: 1, DEVICE: 2}
    events: list[dict[str, object]] = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
                                       for name, tid in lines.items()]
    events.append({"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}})
    at = 0.0
    for part, tasks in parts:
        for one in run(tasks):
            task = one.task
            if task.seconds:
                events.append({"ph": "X", "name": f"{part}: {task.name}", "pid": 0, "tid": lines[task.on],
                               "ts": 1e6 * (at + one.begin), "dur": 1e6 * task.seconds})
        at += length(tasks)
    return {"traceEvents": events}
