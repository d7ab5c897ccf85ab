"""``on_ranks(n, function, *args)``: run a function of a test file on n real gloo processes, and get each rank's result.

The processes stay up for the whole session, so that a call costs milliseconds.
"""
from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile

import pytest


class Pool:
    def __init__(self, ranks: int):
        self.directory = tempfile.TemporaryDirectory()
        store = os.path.join(self.directory.name, "store")
        script = os.path.join(os.path.dirname(__file__), "worker.py")
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
        environment = {**os.environ, **own}
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), str(ranks), store], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(ranks)
        ]

    def run(self, function, *args):
        command = (function.__code__.co_filename, function.__name__, args)
        for process in self.processes:
            pickle.dump(command, process.stdin)
            process.stdin.flush()
        answers = [pickle.load(process.stdout) for process in self.processes]
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def say_stop(self) -> None:
        for process in self.processes:
            pickle.dump(None, process.stdin)
            process.stdin.close()

    def wait(self) -> list[int]:
        codes = [process.wait(60) for process in self.processes]
        self.directory.cleanup()
        return codes

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.directory.cleanup()


@pytest.fixture(scope="session")
def pools():
    running: dict[int, Pool] = {}
    yield running
    for pool in running.values():
        pool.say_stop()
    codes = {ranks: pool.wait() for ranks, pool in running.items()}
    assert all(code == 0 for each in codes.values() for code in each), f"ranks did not tear down cleanly: {codes}"


@pytest.fixture(scope="session")
def on_ranks(pools):
    def run(ranks: int, function, *args):
        if ranks not in pools:
            pools[ranks] = Pool(ranks)
        try:
            return pools[ranks].run(function, *args)
        except BaseException:
            pools.pop(ranks).kill()  # ranks may be out of step now
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
