"""``one_hot(index) * keep``: slots dropped before the loop. Right ones become the operator; where what the mask
was made of changes before the loop, or the mask counts, the loop stays. All give eager's output and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, one_hot, silu

from moebius import capture
from moebius.api import captured_of, report_of
from moebius.lowering.experts import rewrite, rules_routing

T, D, N, E, K = 12, 6, 5, 4, 2


def loop(x, mask, weight, w1, w2):
    out = torch.zeros_like(x)
    for hit in (mask.sum((1, 2)) > 0).nonzero():
        e = hit[0]
        slot, token = torch.where(mask[e])
        out.index_add_(0, token, linear(silu(linear(x[token], w1[e])), w2[e]) * weight[token, slot, None])
    return out


def dropped(x, weight, index, keep, w1, w2):
    return loop(x, (one_hot(index, E) * keep).permute(2, 1, 0), weight, w1, w2)


def keep_first(x, weight, index, keep, w1, w2):
    return loop(x, (keep & one_hot(index, E).bool()).permute(2, 1, 0), weight, w1, w2)


def in_another_shape(x, weight, index, keep, w1, w2):
    mask = (one_hot(index.view(3, 4, K), E) * keep.view(3, 4, K, E)).reshape(-1, K, E)
    return loop(x, mask.permute(2, 1, 0), weight, w1, w2)


def some_tokens():
    return (torch.arange(T)[:, None, None] % 3 > 0).expand(T, K, E)


def dropped_twice(x, weight, index, keep, w1, w2):
    mask = one_hot(index, E) * keep
    return loop(x, (mask * some_tokens()).permute(2, 1, 0), weight, w1, w2)


def dropped_by_capacity_twice(x, weight, index, keep, w1, w2):
    mask = one_hot(index, E)
    for most in (4, 2):
        mask = mask * (mask.cumsum(0) <= most)
    return loop(x, mask.permute(2, 1, 0), weight, w1, w2)


def dropped_again_in_another_shape(x, weight, index, keep, w1, w2):
    mask = (one_hot(index, E) * keep).view(3, 4, K, E) * some_tokens().reshape(3, 4, K, E)
    return loop(x, mask.reshape(-1, K, E).permute(2, 1, 0), weight, w1, w2)


def dropped_by_capacity(x, weight, index, keep, w1, w2):
    mask = one_hot(index, E)
    return loop(x, (mask * (mask.cumsum(0) <= 2)).permute(2, 1, 0), weight, w1, w2)


def capacity_in_another_shape(x, weight, index, keep, w1, w2):
    mask = one_hot(index.view(3, 4, K), E)
    mask = (mask * (mask.cumsum(1) < 3)).reshape(-1, K, E)
    return loop(x, mask.permute(2, 1, 0), weight, w1, w2)


def no_capacity(x, weight, index, keep, w1, w2):
    mask = one_hot(index, E)
    return loop(x, (mask * (mask.cumsum(0) < 1)).permute(2, 1, 0), weight, w1, w2)


def sentinel_beyond(x, weight, index, keep, w1, w2):
    """More classes than experts: the iterations of the others are skipped."""
    mask = (one_hot(index + (index == 1) * E, E + 2)[:, :, : E + 1] * keep[:, :, [0, 1, 2, 3, 0]]).permute(2, 1, 0)
    return loop(x, mask[:E], weight, w1, w2)


def keep_changes(x, weight, index, keep, w1, w2):
    mask = (one_hot(index, E) * keep).permute(2, 1, 0)
    keep.logical_not_()
    return loop(x, mask, weight, w1, w2)


def index_changes(x, weight, index, keep, w1, w2):
    mask = (one_hot(index, E) * keep).permute(2, 1, 0)
    index.add_(1).remainder_(E)
    return loop(x, mask, weight, w1, w2)


def keep_changes_between(x, weight, index, keep, w1, w2):
    mask = one_hot(index, E) * keep
    keep.logical_not_()
    return loop(x, (mask * (keep | some_tokens())).permute(2, 1, 0), weight, w1, w2)


def mask_changes_between(x, weight, index, keep, w1, w2):
    mask = one_hot(index, E) * keep
    mask[1] = 1
    return loop(x, (mask * (keep | some_tokens())).permute(2, 1, 0), weight, w1, w2)


def mask_changes(x, weight, index, keep, w1, w2):
    mask = (one_hot(index, E) * keep).permute(2, 1, 0)
    mask[1] = 1
    return loop(x, mask, weight, w1, w2)


def keep_counts(x, weight, index, keep, w1, w2):
    """Numbers that are no booleans: a sum of them may be zero though some are not."""
    return loop(x, (one_hot(index, E) * (keep.long() * 3 - 1)).permute(2, 1, 0), weight, w1, w2)


def keep_of_another_shape(x, weight, index, keep, w1, w2):
    return loop(x, (one_hot(index, E) * keep[:, :1]).permute(2, 1, 0), weight, w1, w2)


RIGHT = [dropped_by_capacity, capacity_in_another_shape, dropped_by_capacity_twice]
WRONG = [keep_changes, index_changes, mask_changes, keep_counts, keep_of_another_shape, sentinel_beyond,
         keep_changes_between, mask_changes_between]  # fmt: skip
PERHAPS_ALL = [dropped, keep_first, in_another_shape, dropped_twice, dropped_again_in_another_shape,
               no_capacity]  # fmt: skip


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    double = {"dtype": torch.float64, "generator": g}
    index = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)])
    keep = torch.rand(T, K, E, generator=g) < (0.1, 0.6, 1.0, 0.0)[seed]
    grown = [torch.randn(*shape, **double).requires_grad_() for shape in ((T, D), (T, K), (E, N, D), (E, D, N))]
    return grown[0], grown[1], index, keep, *grown[2:]


@pytest.mark.parametrize("function", [*RIGHT, *WRONG, *PERHAPS_ALL], ids=lambda f: f.__name__)
def test_as_plain_python(function):
    captured = capture(function)
    for seed in range(4):
        results = []
        for run in (captured, function):
            given = tensors(seed)
            out = run(*given)
            (out + given[0]).sin().sum().backward()
            results.append([out, *(t.grad for t in given if t.requires_grad)])
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
    region = report_of(captured_of(captured)).expert_regions[0]
    assert region.lowered == (function in RIGHT), region.refusal
    if function in PERHAPS_ALL:
        assert "may drop every slot" in region.refusal


def test_that_one_is_kept_counts(monkeypatch):
    """Without the question whether a slot stays, parameters get gradients of zeros where no iteration runs, unless that
    is asked when the graph runs (which other backends do not)."""
    monkeypatch.setattr(rules_routing, "keeps_some", lambda keep, mask: True)
    monkeypatch.setattr(rewrite, "where_iterations_ran", lambda work, claim, result, *rest: result)
    with pytest.raises(AssertionError, match="None mismatch"):
        test_as_plain_python(no_capacity)
