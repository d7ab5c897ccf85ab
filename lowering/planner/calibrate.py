"""This machine as a device: its CPU on one thread, and gloo between two of its processes, measured in half a minute.

As a program (``python -m moebius.lowering.planner.calibrate RANK STORE``) it is one of the two processes.
"""
from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.hardware import Device, Reached

ROUNDS = 9
SMALL, LARGE = 1 << 10, 1 << 23  # bytes of an exchange
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)  # of an expert, at which products are measured
TIMEOUT = 120  # seconds, of the two processes


def seconds(call: Callable[[], object], rounds: int = ROUNDS, clock: Callable[[], float] = time.process_time) -> float:
    """Median of some rounds, after one that is not counted. By default of this process's own time on its one thread,
    which other programs do not lengthen; what waits for another process wants the wall clock."""
    call()
    found = []
    for _ in range(rounds):
        start = clock()
        call()
        found.append(clock() - start)
    return statistics.median(found)


def measure(link: tuple[float, float] | None = None) -> Device:
    """Rates of products, of memory, of starting an operator, and of gloo. Sets torch to one thread while it runs.

    link: instead of measuring it, what gloo takes (seconds of starting, bytes/s).
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            numbers: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
            large, small = torch.randn(768, 768, **numbers), torch.randn(64, 256, **numbers)
            weights = torch.randn(256, 512, **numbers)
            dense = 2 * 768**3 / seconds(lambda: large @ large)
            grouped = 2 * 64 * 256 * 512 / seconds(lambda: small @ weights, 99)
            heads = torch.randn(1, 4, 256, 64, **numbers)
            attend = torch.nn.functional.scaled_dot_product_attention
            looked = 2 * 256 * 128.5 * 4 * 128 / seconds(lambda: attend(heads, heads, heads, is_causal=True), 29)
            by_rows = tuple((rows, grouped_rate(rows) / dense) for rows in ROWS)
            fresh = torch.empty(1 << 24, **numbers)
            first = seconds(lambda: torch.empty(1 << 24, **numbers).fill_(1.0))
            again = seconds(lambda: fresh.fill_(1.0))
            block, copy = torch.randn(1 << 22, **numbers), torch.empty(1 << 22, **numbers)
            rate = 2 * 4 * (1 << 22) / seconds(lambda: copy.copy_(block))
            one = torch.randn(8, **numbers)
            launch = seconds(lambda: [one + one for _ in range(100)]) / 100
    finally:
        torch.set_num_threads(threads)
    start, rate_of_link = exchange() if link is None else link
    reached = Reached(
        dense=1.0, grouped=grouped / dense, attention=looked / dense, tile=1, memory=1.0, near=1.0,
        far=1.0, launch=launch, near_start=start, far_start=start, peer_start=0.0, kept=0.9,
        by_rows=by_rows, overlaps=False, fresh=min(1.0, again / first),
    )
    return Device("this CPU, one thread a rank", {"fp32": dense}, _memory() / 2, rate, rate_of_link,
                  rate_of_link, per_node=2,
                  reserved=0.0, reached=reached, source="measured here", element=4)


def grouped_rate(rows: int) -> float:
    """FLOP/s of products of so many rows with one expert's matrix after the other, as they lie in memory, by what
    multiplies them in a layer."""
    import torch

    from moebius.kernels.panels import Panel, Segment
    from moebius.kernels.products import linear, matrices

    used = max(4, min(64, 4096 // rows))
    numbers: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    weights, x = torch.randn(64, 512, 256, **numbers), torch.randn(used * rows, 256, **numbers)
    out = torch.empty(used * rows, 512, **numbers)
    panel = Panel(0, used * rows, [Segment(one, one * rows, (one + 1) * rows, True) for one in range(used)])
    return 2 * rows * 512 * 256 * used / seconds(lambda: linear(x, matrices(weights), panel, out))


def _memory() -> float:
    """Bytes of this machine's memory."""
    import os

    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def exchange() -> tuple[float, float]:
    """(seconds of an exchange of almost nothing, bytes/s) of gloo between two processes. Raises PlannerError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "moebius.lowering.planner.calibrate"]
        store = str(Path(folder) / "store")
        other = subprocess.Popen([*command, "1", store], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            first = subprocess.run([*command, "0", store], capture_output=True, text=True, timeout=TIMEOUT)
            other.wait(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            raise PlannerError(f"two processes did not exchange anything over gloo in {TIMEOUT} s") from None
        finally:
            other.kill()
            other.wait()
    if first.returncode:
        raise PlannerError(f"gloo between two processes failed: {first.stderr.strip().splitlines()[-1:]}")
    small, large = json.loads(first.stdout.splitlines()[-1])
    return small, (LARGE - SMALL) / max(large - small, 1e-9)


def main(rank: int, store: str) -> None:
    """One of the two processes: the first prints the seconds of a small and of a large exchange."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT / 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit)
    found = []
    for size in (SMALL, LARGE):
        sent = torch.zeros(2 * size // 4, dtype=torch.float32, device="cpu")  # half of it to the other
        received = torch.empty_like(sent)
        found.append(seconds(partial(dist.all_to_all_single, received, sent), 29, time.perf_counter))
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
