"""``on_ranks(n, function, *args)``: run a function of a test file on n real gloo processes, and get each rank's result.

The processes stay up for the whole session, so that a call costs milliseconds. Where new ones are needed they are
forked from others that have imported all there is to import (worker.py): one for each rank, as real ranks do not have
the order of sets of strings in common.
"""
from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile

import pytest


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

    def close(self) -> int:
        self.process.stdin.close()
        return self.process.wait(60)


class Pool:
    """A group of ranks, at their places."""

    def __init__(self, places: list[Place]):
        self.directory, self.places = tempfile.TemporaryDirectory(), places
        for rank, place in enumerate(places):
            place.say((rank, len(places), os.path.join(self.directory.name, "store")))
        self.processes = [place.hear() for place in places]

    def run(self, function, *args):
        for place in self.places:
            place.say((function.__code__.co_filename, function.__name__, args))
        answers = [place.hear() for place in self.places]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def say_stop(self) -> None:
        for place in self.places:
            place.say(None)

    def wait(self) -> list[int]:
        """What the ranks exited with."""
        codes = [place.hear() for place in self.places]
        self.directory.cleanup()
        return codes

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process, signal.SIGKILL)
        self.wait()

    def give_up(self) -> None:
        """Kill the ranks, and their places too: there may be half of an answer."""
        for place, process in zip(self.places, self.processes, strict=True):
            place.process.kill()
            os.kill(process, signal.SIGKILL)
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
    def run(ranks: int, function, *args):
        if ranks not in pools:
            if ranks not in places:
                places[ranks] = [Place() for _ in range(ranks)]
            pools[ranks] = Pool(places[ranks])
        try:
            return pools[ranks].run(function, *args)
        except BaseException:
            pools.pop(ranks).give_up()  # ranks may be out of step now
            del places[ranks]
            raise
    return run


@pytest.fixture
def on_new_ranks(pools, on_ranks):
    """The same; afterwards these processes are gone, as they may be out of step."""
    def run(ranks: int, function, *args):
        result = on_ranks(ranks, function, *args)
        pools.pop(ranks).kill()
        return result
    return run
