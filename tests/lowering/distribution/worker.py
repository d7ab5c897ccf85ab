"""Ranks of the tests' process pool, one after the other: ``python worker.py``. Imports once, then forks each rank.

Reads pickled messages from stdin and writes pickled answers to stdout. (rank, ranks, store) begins a rank; the answer
is its process id. store: a file, or a port. That rank reads on, (file, function, args) of functions of test files, and
answers (True, result) or (False, traceback), until None, or until it is killed. The last answer is what it exited with.
"""
from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp  # noqa: F401 - what tests' functions import costs seconds

import moebius.lowering.distribution  # noqa: F401


def load(path: str, modules: dict):
    if path not in modules:
        spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py") + "_on_a_rank", path)
        modules[path] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[path]
        spec.loader.exec_module(modules[path])
    return modules[path]


def be_rank(rank: int, ranks: int, store: Any, answers: Any) -> None:
    found = dist.TCPStore("127.0.0.1", store) if isinstance(store, int) else dist.FileStore(store, ranks)
    dist.init_process_group("gloo", store=found, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    commands, modules = open(0, "rb", closefd=False), {}
    while (command := pickle.load(commands)) is not None:
        path, name, args = command
        try:
            answer = (True, getattr(load(path, modules), name)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        answers.write(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    commands = open(0, "rb", buffering=0, closefd=False)  # what is for the rank is not read before
    answers = open(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the functions print must not mix with the answers
    torch.set_num_threads(1)
    gc.freeze()  # a collection in a rank would copy every page, and look through all that was imported
    while True:
        try:
            begin = pickle.load(commands)
        except EOFError:
            break
        if not (child := os.fork()):
            be_rank(*begin, answers)
            break
        answers.write(pickle.dumps(child))
        answers.write(pickle.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


if __name__ == "__main__":
    main()
