"""A rank's own sizes decide nothing of what it asks other ranks for: a layer of experts has one form of exchange with
sizes that are constants (a first batch), with ones that vary, and without a token. On the fake group, in one process.
"""
from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moebius import capture
from moebius.lowering import distribution
from moebius.lowering.distribution.expert_parallel import dispatch

sys.path.insert(0, str(Path(__file__).parent))

from test_spellings_on_ranks import BREAK, EVERY, LOWERED, NEED_TOKENS, D, Model, step  # noqa: E402

BATCHES = {"a first batch": [8], "sizes that vary": [8, 6], "others that vary": [10, 4], "no token": [0]}


def runs(name, rows):
    """Whether plain Python takes so few tokens (the best tokens of each expert may be more)."""
    model = Model(name)
    try:
        step(model, torch.optim.SGD(model.parameters()), [torch.randn(rows, D, dtype=torch.float64)])
    except Exception:
        return False
    return True


def forms(gm):
    """What ranks compare before each exchange, but for names: where, of how many experts, how many for each row, the
    types of what travels, and whether experts without a token are skipped."""
    found = []
    for node in gm.graph.find_nodes(op="call_function", target=dispatch):
        x, index, weight, experts, _, place, *_, skips = node.args
        travels = [None if one is None else one.meta["val"].dtype for one in (x, index, weight)]
        found.append((place.partition(", ")[2], experts, index.meta["val"].shape[1], *travels, skips))
    return found


@pytest.mark.share(8)
@pytest.mark.parametrize("name", [
    name for name, one in EVERY.items() if one.outcome == LOWERED and name not in NEED_TOKENS | BREAK
])
def test_no_size_decides_what_travels(name, monkeypatch):
    graphs, found = [], {}
    own = distribution.place

    def place(gm, options):
        graphs.append(own(gm, options))
        return graphs[-1]

    monkeypatch.setattr(distribution, "place", place)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        for what, batches in BATCHES.items():
            if not all(runs(name, rows) for rows in batches):
                continue
            model = Model(name)
            run = capture(step, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
            optimizer, generator = torch.optim.SGD(model.parameters(), lr=1e-3), torch.Generator().manual_seed(1)
            for rows in batches:
                graphs.clear()
                with warnings.catch_warnings(), contextlib.suppress(RuntimeError):  # (what came back means nothing)
                    warnings.simplefilter("ignore")
                    run(model, optimizer, [torch.randn(rows, D, generator=generator, dtype=torch.float64)])
            found[what] = next((one for gm in graphs[::-1] if (one := forms(gm))), None)
    finally:
        dist.destroy_process_group()
    first, *others = found.values()
    assert first and all(one == first for one in others)
