"""One rank of the tests' process pool: ``python worker.py RANK RANKS STORE``. Runs functions of test files by name.

Reads (file, function, args) pickled from stdin, writes (True, result) or (False, traceback) pickled to stdout.
"""
from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist


def load(path: str, modules: dict):
    if path not in modules:
        spec = importlib.util.spec_from_file_location(os.path.basename(path).removesuffix(".py") + "_on_a_rank", path)
        modules[path] = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = modules[path]
        spec.loader.exec_module(modules[path])
    return modules[path]


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    commands, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the functions print must not mix with the answers
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=30)
    )
    modules: dict = {}
    while True:
        command = pickle.load(commands)
        if command is None:
            break
        path, name, args = command
        try:
            answer = (True, getattr(load(path, modules), name)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
