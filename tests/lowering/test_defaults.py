"""torch's default dtype and device are the program's: what we make for ourselves names both.

A training step whose model says all its dtypes gives the same bits under any default. Its experts run in C code, which
writes float32 into rooms that Python makes: made as the default says, bfloat16 was half of what is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moe_models import EXPERTS, Model, V, loss_of

from moebius import explain

DEFAULTS = (torch.bfloat16, torch.float16, torch.float64, "meta")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    set_default(torch.float32)


def set_default(default: Any) -> None:
    torch.set_default_dtype(torch.float32 if default == "meta" else default)
    torch.set_default_device("meta" if default == "meta" else None)


def train(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, tokens)
    loss.backward()
    return loss.detach()


def trained(experts: str, loop: str, dtype: torch.dtype, default: Any) -> list[torch.Tensor]:
    """Loss and gradients of a captured step."""
    torch.manual_seed(0)
    model = Model(experts, loop, "plain", "nothing").to(dtype)
    tokens = torch.randint(V, (40, 9))
    set_default(default)
    report = explain(train)(model, tokens)
    set_default(torch.float32)
    assert not report.breaks and all(region.lowered for region in report.expert_regions)
    return [report.result, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.share(3)
@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("experts", EXPERTS)
def test_a_step_under_other_defaults(experts: str, dtype: torch.dtype, default: Any) -> None:
    want, found = (trained(experts, "hits", dtype, each) for each in (torch.float32, default))
    assert [torch.equal(a, b) for a, b in zip(found, want, strict=True)] == [True] * len(want)
