"""Every spelling of an expert layer is as one process on the mean of the ranks' losses: with unequal batches, and with
none on a rank or on all. One that is one operator in one process sends its tokens to the ranks of their experts."""
from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.distribution import traffic

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "expert_loops"))

from spellings import BROKEN, LOWERED, SPELLINGS, D  # noqa: E402
from table import EVERY, layer, tensors  # noqa: E402

SIZES = ((6, 4), (4, 0), (0, 0))
# Not one graph with a mesh: where a size that data decide is assumed, a rank alone would leave the graph.
BREAK = {"moe_infer", "moe_infer_as_list", "counts_that_are_not_positive", "dispatched"}
# Without a token their result comes of nothing that is trained, and backward() raises as in one process.
NEED_TOKENS = {"python_lists", "low_rank_additions"}


class Model(nn.Module):
    """A spelling on tokens that come of a parameter."""

    def __init__(self, name):
        super().__init__()
        self.function, self.scale = EVERY[name].function, nn.Parameter(torch.linspace(0.5, 1.5, D, dtype=torch.float64))
        weights = tensors(0)[1:] if name in SPELLINGS else ()
        self.weights = nn.ParameterList(nn.Parameter(weight.detach()) for weight in weights)
        self.layer = None if name in SPELLINGS else layer()

    def forward(self, x):
        return self.function(x * self.scale, *(self.weights if self.layer is None else (self.layer,)))


def step(model, optimizer, parts):
    optimizer.zero_grad()
    results = [model(x) for x in parts]
    loss = 0
    for result in results:
        loss = loss + result.tanh().square().sum() / len(parts)
    loss.backward()
    optimizer.step()
    return results


def whole(tensor):
    return getattr(tensor, "full_tensor", tensor.detach)().detach()


def train(name):
    """Graph breaks, refusals, and whether tokens travelled."""
    both = []
    for _ in range(2):
        model = Model(name)
        both.append((model, torch.optim.SGD(model.parameters(), lr=1e-3)))
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(1)
    traffic.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sizes in SIZES[: 1 if name in NEED_TOKENS else None]:
            parts = [torch.randn(rows, D, generator=generator, dtype=torch.float64) for rows in sizes]
            try:
                expected = step(*both[1], parts)[dist.get_rank()]
            except Exception:  # not for so few tokens
                continue
            (found,) = run(*both[0], [parts[dist.get_rank()]])
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            for (what, mine), other in zip(both[0][0].named_parameters(), both[1][0].parameters(), strict=True):
                torch.testing.assert_close(whole(mine), other.detach(), rtol=1e-10, atol=1e-10, msg=what)
                assert (mine.grad is None) == (other.grad is None), (what, sizes)
                if mine.grad is not None:
                    torch.testing.assert_close(whole(mine.grad), other.grad, rtol=1e-10, atol=1e-10, msg=what)
    report = report_of(captured_of(run))
    return len(report.breaks), [one.refusal for one in report.expert_regions if not one.lowered], bool(traffic.dispatch)


@pytest.mark.share(20)
@pytest.mark.parametrize("name", [name for name, one in EVERY.items() if one.outcome == LOWERED])
def test_tokens_of_a_spelling_travel(on_ranks, name):
    for breaks, refusals, travelled in on_ranks(2, train, name):
        assert bool(breaks) == (name in BREAK)
        assert breaks or (travelled and not refusals)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [name for name, one in EVERY.items() if one.outcome != LOWERED])
def test_other_spellings_run_whole_on_each_rank(on_ranks, name):
    for _, refusals, travelled in on_ranks(2, train, name):
        assert not travelled and bool(refusals) == (EVERY[name].outcome != BROKEN)
