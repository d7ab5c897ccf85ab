"""What a first call does beside capturing: it imports no compiler that it has no use for."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from moebius import capture, stats

experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
optimizer = torch.optim.AdamW(experts.parameters())

def step(x, chosen):
    y = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        rows = torch.where(chosen == i)[0]
        if len(rows) == 0:
            continue
        y.index_add_(0, rows, expert(x[rows]))
    loss = y.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()

batches = [(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in (8, 8, 5, 12)]
step(*batches[0])
before = set(sys.modules)
captured = capture(step, backend=sys.argv[1])
for batch in batches:
    captured(*batch)
assert stats(captured).hits, stats(captured)
print(*sorted(set(sys.modules) - before), sep="\\n")
"""
COMPILERS = ("torch._inductor", "torch.export", "torch._export", "torch._functorch", "networkx", "triton")


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_imports_no_compiler(backend: str) -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM, backend], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert [name for name in found.stdout.split() if name.startswith(COMPILERS)] == []
