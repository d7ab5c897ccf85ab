"""``on_ranks(n, function, *args)``: run a function of a test file on n real gloo processes, and get each rank's result.

The processes stay up for the whole session, so that a call costs milliseconds. Where new ones are needed they are
forked from others that have imported all there is to import (worker.py): one for each rank, as real ranks do not have
the order of sets of strings in common.
"""
from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

BOUND = 600  # seconds for a function on ranks: they are ended then (a rank that waits for another one waits for ever)


class Place:
    """A process that forks ranks, one after the other."""

    def __init__(self):
        script = os.path.join(os.path.dirname(__file__), "worker.py")
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own}
        )

    def say(self, message) -> None:
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()

    def hear(self):
        return pickle.load(self.process.stdout)

    def hear_last(self) -> int:
        """What the rank exited with, after all that it answered and nobody heard."""
        while not isinstance(code := self.hear(), int):
            pass
        return code

    def close(self) -> int:
        self.process.stdin.close()
        return self.process.wait(60)


class Pool:
    """A group of ranks, at their places. port: of a store that is there already."""

    def __init__(self, places: list[Place], port: int | None = None):
        self.directory, self.places = tempfile.TemporaryDirectory(), places
        for rank, place in enumerate(places):
            place.say((rank, len(places), port or os.path.join(self.directory.name, "store")))
        self.processes = [place.hear() for place in places]

    def run(self, function, *args, lost: int | None = None):
        """What it gives on each rank, but for one that is lost."""
        bound = threading.Timer(BOUND, self.end_ranks)
        bound.start()
        try:
            for place in self.places:
                place.say((function.__code__.co_filename, function.__name__, args))
            answers = [place.hear() for rank, place in enumerate(self.places) if rank != lost]
        finally:
            bound.cancel()
        answers = [(False, f"ended with {each}") if isinstance(each, int) else each for each in answers]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def say_stop(self) -> None:
        for place in self.places:
            place.say(None)

    def wait(self) -> list[int]:
        """What the ranks exited with."""
        codes = [place.hear_last() for place in self.places]
        self.directory.cleanup()
        return codes

    def end_ranks(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def kill(self) -> None:
        self.end_ranks()
        self.wait()

    def give_up(self) -> None:
        """Kill the ranks, and their places too: there may be half of an answer."""
        self.end_ranks()
        for place in self.places:
            place.process.kill()
            place.process.communicate()
        self.directory.cleanup()


@pytest.fixture(scope="session")
def places():
    """Of ranks, by how many there are of them."""
    found: dict[int, list[Place]] = {}
    yield found
    codes = [place.close() for each in found.values() for place in each]
    assert not any(codes), f"places of ranks ended with {codes}"


@pytest.fixture(scope="session")
def pools(places):
    running: dict[int, Pool] = {}
    yield running
    for pool in running.values():
        pool.say_stop()
    codes = {ranks: pool.wait() for ranks, pool in running.items()}
    assert all(code == 0 for each in codes.values() for code in each), f"ranks did not tear down cleanly: {codes}"


@pytest.fixture(scope="session")
def on_ranks(places, pools):
    def run(ranks: int, function, *args, port: int | None = None, **how):
        if port and ranks in pools:
            pools.pop(ranks).kill()
        if ranks not in pools:
            if ranks not in places:
                places[ranks] = [Place() for _ in range(ranks)]
            pools[ranks] = Pool(places[ranks], port)
        try:
            return pools[ranks].run(function, *args, **how)
        except BaseException:
            pools.pop(ranks).give_up()  # ranks may be out of step now
            del places[ranks]
            raise
    return run


@pytest.fixture
def on_new_ranks(pools, on_ranks):
    """The same; afterwards these processes are gone, as they may be out of step. lost: a rank that gives no result.
    port: of a TCP store over which they find one another."""
    def run(ranks: int, function, *args, **how):
        result = on_ranks(ranks, function, *args, **how)
        pools.pop(ranks).kill()
        return result
    return run
