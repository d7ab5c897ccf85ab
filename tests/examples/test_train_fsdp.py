"""The example for torchrun: what it saves on 2 ranks goes on at 4, with the losses of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_fsdp.py"


def run(ranks: int, *words: str) -> list[str]:
    """The lines of the first of so many ranks, which are started as torchrun starts them; 0: of one process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    each = [environment] * (ranks == 0)
    if ranks:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": str(ranks)}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        each = [{**environment, **of_all, **agent, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    command = [sys.executable, str(EXAMPLE), *words]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for env in each]
    try:
        told = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in started), "\n".join(error for _, error in told)
    return told[0][0].splitlines()


@pytest.mark.slow
@pytest.mark.distributed
def test_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    lines = [*run(2, "--steps", "3", "--save", str(tmp_path)), *run(4, "--steps", "6", "--resume", str(tmp_path))]
    expected = run(0, "--steps", "6")
    assert len(lines) == len(expected) == 6
    for ours, theirs in zip(lines, expected, strict=True):
        (step, loss), (number, value) = ours.split(": loss "), theirs.split(": loss ")
        assert step == number and abs(float(loss) - float(value)) <= 2e-5  # float32, five digits printed
