"""Ranks of a gloo group, processes of this machine, for benchmarks that start themselves again as each of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BOUND = 600  # seconds, for all of it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a process is given to be a rank."""
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)


def join(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=BOUND)
    )


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


def run_on_ranks(file: str, ranks: int, arguments: list[str]) -> list[list[Any]]:
    """What each rank tells, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, file, *arguments, "--store", os.path.join(folder, "store"), "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=environment)
                     for rank in range(ranks)]
        try:
            told = [process.communicate(timeout=BOUND)[0].splitlines() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [[json.loads(line) for line in lines] for lines in told]
