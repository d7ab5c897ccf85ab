"""Rows of unknown number that meet others: as many, or one that is spread over these."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import kl_div, mse_loss, pairwise_distance, smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from moebius import capture, explain, stats
from moebius.lowering.step import require_equal
from moebius.tensors import counts, tensors
from moebius.torch_facts.torch_fakes import Fakes
from moebius.torch_facts.torch_pointwise import PointwiseOnRows
from moebius.torch_facts.torch_relations import ShapeEnv, Sizes


def written_into_all(rows, y_KD):
    made = y_KD.clone()
    made[:] = rows
    return made


def added_to_products(rows_K11, y_KD):
    return torch.baddbmm(rows_K11, y_KD[:, None], y_KD[:, :, None])


# Of rows of unknown number and others.
OPERATORS = {
    "add": lambda rows, y_KD: rows + y_KD,
    "the other way round": lambda rows, y_KD: y_KD - rows.relu(),
    "where": lambda rows, y_KD: torch.where(y_KD > 0, rows, y_KD),
    "three": lambda rows, y_KD: torch.addcmul(y_KD, rows, y_KD),
    "maximum": torch.maximum,
    "compared": lambda rows, y_KD: (rows < y_KD).float() * y_KD,
    "masked": lambda rows, y_KD: y_KD.masked_fill(rows[:, :1] > 0, 1.0),
    "clamp": lambda rows, y_KD: torch.clamp(y_KD, min=rows),
    "loss": lambda rows, y_KD: mse_loss(rows, y_KD, reduction="none"),
    "another loss": lambda rows, y_KD: smooth_l1_loss(rows, y_KD, reduction="none"),
    "divergence": lambda rows, y_KD: kl_div(rows, y_KD, reduction="none"),
    "distance": lambda rows, y_KD: pairwise_distance(rows, y_KD)[:, None] * y_KD,
    "with an axis in front": lambda rows, y_KD: (rows + y_KD[:, None])[:, 0],
    "twice": lambda rows, y_KD: (rows + y_KD) * rows + y_KD,
    "in place": lambda rows, y_KD: y_KD.clone().add_(rows),
    "expanded": lambda rows, y_KD: rows.expand(len(y_KD), 4) * y_KD,
    "expanded as": lambda rows, y_KD: rows.expand_as(y_KD) + 0,
    "copied": lambda rows, y_KD: torch.zeros_like(y_KD).copy_(rows),
    "spread": lambda rows, y_KD: torch.broadcast_tensors(rows, y_KD)[0] + 0,
    "put": lambda rows, y_KD: torch.zeros_like(y_KD).index_put((torch.arange(len(y_KD)),), rows),
    "written into all": written_into_all,
    "product in batches": lambda rows, y_KD: (rows[:, None] @ y_KD[:, :, None])[:, :, 0],
    "added to a product": lambda rows, y_KD: added_to_products(rows[:, None, None, 0], y_KD)[:, 0],
    "added to rows": lambda rows, y_KD: torch.addmm(rows, y_KD, torch.eye(4)),
    "transposed": lambda rows, y_KD: (rows.T + y_KD.T).T,
    "einsum": lambda rows, y_KD: torch.einsum("td,td->td", rows, y_KD),
    "joined": lambda rows, y_KD: torch.cat([rows, rows]) + torch.cat([y_KD, y_KD]),
    "stacked": lambda rows, y_KD: torch.stack([rows, y_KD]).sum(0),
    "picked": lambda rows, y_KD: y_KD[torch.arange(len(y_KD)), rows.long().abs().sum(1) % 4][:, None],
    "inner": lambda rows, y_KD: rows.T @ y_KD,
    "each with each": lambda rows, y_KD: torch.cdist(rows[:, None], y_KD[:, None])[:, 0],
    "of a list": lambda rows, y_KD: sum([rows, y_KD]),
    "less the first": lambda rows, y_KD: (rows - rows[:1]).sum(0) + y_KD,
    "the first of both": lambda rows, y_KD: rows[:1] - y_KD[:1],
    "the first with one": lambda rows, y_KD: rows[:1] * torch.ones(1, 4),
    "the first for all": lambda rows, y_KD: (torch.zeros_like(rows).copy_(rows[:1]) * rows).sum() + y_KD,
    "below C code": lambda rows, y_KD: [*map(lambda each: each + y_KD, [rows])][0],
}
# What is asked of the number of rows behind the operator.
ASKED = {
    "number": lambda out, rows, index: out.sum() * 0 + index.numel() + 10 * rows.shape[0],
    "size of the result": lambda out, rows, index: out.sum() + out.shape[0],
    "size of the rows": lambda out, rows, index: out.sum() + rows.shape[0] * 2,
    "as a size": lambda out, rows, index: out.sum() + torch.ones(index.numel()).sum(),
    "mean": lambda out, rows, index: out.sum() / max(len(index), 1),
    "decides": lambda out, rows, index: out.sum() * (2.0 if len(index) == 3 else 1.0),
}


def handled(operator):
    def tried(rows, y_KD):
        try:
            return operator(rows, y_KD)
        except RuntimeError:
            return y_KD * 2

    return tried


class Layer(torch.nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def forward(self, rows, y_KD):
        return self.operator(rows, y_KD)


def of_layers(operator):
    layers = torch.nn.ModuleList([Layer(operator) for _ in range(3)])
    return lambda rows, y_KD: [layer(rows, y_KD) for layer in layers][-1]


WHERE = {
    "in the step": lambda operator: operator,
    "handled": handled,
    "checkpointed": lambda operator: lambda *given: checkpoint(operator, *given, use_reentrant=False),
    "in equal layers": of_layers,
    "behind a branch": lambda operator: lambda rows, y_KD: operator(rows, y_KD) if y_KD.sum() > -1e9 else y_KD,
}
# Of seven rows, and of seven others: what is chosen in each call.
CHOSEN = (
    ([0, 1, 2], [0, 2, 4]), ([3], [0, 1, 2]), ([0, 2, 5], [6]), ([6], [5]), ([0, 1], [0, 1, 2]), ([], [1]),
    ([], [0, 1, 2]), ([2], []), ([0, 1, 2], [4, 5, 6]),
)  # fmt: skip


def outcome(step, chosen, x_TD, y_TD):
    x_TD.grad = y_TD.grad = None
    masks = [torch.zeros(7, dtype=torch.bool) for _ in chosen]
    for mask_T, places in zip(masks, chosen, strict=True):
        mask_T[places] = True
    try:
        result = step(*masks, x_TD, y_TD)
    except (RuntimeError, IndexError) as error:
        return type(error)
    return [result.item(), *(None if one.grad is None else one.grad.tolist() for one in (x_TD, y_TD))]


def step_of(operator, asked, trains: bool, several: bool):
    def step(mask_T, other_T, x_TD, y_TD):
        index_t = torch.where(mask_T)[0]
        rows_tD = x_TD[index_t]
        out = asked(operator(rows_tD, y_TD[other_T] if several else y_TD[:3]), rows_tD, index_t)
        if trains:
            out.backward()
        return out.detach()

    return step


def differing(operator, asked, trains: bool = False, several: bool = False) -> list[int]:
    """The calls that differ from plain Python. several: whether the others are of unknown number, too."""
    step = step_of(operator, asked, trains, several)
    torch.manual_seed(0)
    captured = capture(step, backend="eager")
    x_TD, y_TD = (torch.randn(7, 4, requires_grad=trains) for _ in range(2))
    calls = [[repr(outcome(each, chosen, x_TD, y_TD)) for each in (captured, step)] for chosen in CHOSEN]
    assert stats(captured).graphs
    return [number for number, (ours, plain) in enumerate(calls) if ours != plain]


@pytest.mark.share(40)
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.filterwarnings("ignore::moebius.MoebiusWarning")
@pytest.mark.parametrize("several", (False, True))
@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("operator", OPERATORS)
def test_as_in_python(operator, asked, where, trains, several):
    assert differing(WHERE[where](OPERATORS[operator]), ASKED[asked], trains, several) == []


def test_where_they_are_taken_to_be_as_many(monkeypatch):
    monkeypatch.setattr(PointwiseOnRows, "spread", lambda self, args: args)
    monkeypatch.setattr(Sizes, "_maybe_guard_rel", ShapeEnv._maybe_guard_rel)
    assert differing(OPERATORS["add"], ASKED["number"])


@pytest.mark.parametrize("operator", ("expanded", "in place", "product in batches", "spread", "written into all"))
def test_where_nobody_holds_the_data_to_it(operator, monkeypatch):
    monkeypatch.setattr(Sizes, "_maybe_guard_rel", ShapeEnv._maybe_guard_rel)
    assert differing(OPERATORS[operator], ASKED["number"])


def asks(captured, *given) -> int:
    """How many comparisons of sizes its graphs hold."""
    graphs = [each.gm.graph for each in explain(captured)(*given).graphs]
    return sum(node.target is require_equal for graph in graphs for node in graph.nodes)


def test_what_is_learnt():
    """Once in a while the operator runs as plain Python; where it is often otherwise, it is a graph break."""
    step = step_of(OPERATORS["expanded"], ASKED["number"], False, False)
    captured = capture(step, backend="eager")
    x_TD, y_TD = torch.randn(7, 4), torch.randn(7, 4)
    usual, other = CHOSEN[0], CHOSEN[1]
    for chosen in [usual] * 25 + [other] + [usual] * 3:
        assert outcome(captured, chosen, x_TD, y_TD) == outcome(step, chosen, x_TD, y_TD)
    assert (stats(captured).graphs, stats(captured).recompiles, stats(captured).breaks) == (1, [], 0)
    for chosen in [other, usual] * 4:
        assert outcome(captured, chosen, x_TD, y_TD) == outcome(step, chosen, x_TD, y_TD)
    assert stats(captured).breaks == 1
    (told,) = (each for each in stats(captured).recompiles if each.guard == "sizes that an operator met")
    assert (told.old, told.new) == ("are equal", "1 and 3")
    every_T = torch.arange(7) < 3
    (found,) = explain(captured)(every_T, every_T, x_TD, y_TD).breaks
    assert "n == 3, where n is a size that only the running step knows" in found.detail


class Counter:
    calls = 0


def test_effects_before_it_are_done_once():
    counter, log = Counter(), []

    def step(mask_T, y_KD, x_TD):
        counter.calls += 1
        made = y_KD.clone().mul_(2)
        log.append(counter.calls)
        made[:] = x_TD[mask_T]
        counter.calls += 10
        return made.sum()

    def seen(each):
        counter.calls = 0
        log.clear()
        torch.manual_seed(1)
        y_KD, x_TD = torch.randn(3, 4), torch.randn(7, 4)
        given = [[0, 1, 2], [4], [3, 5, 6], [2]]
        found = [each(torch.isin(torch.arange(7), torch.tensor(chosen)), y_KD, x_TD).item() for chosen in given]
        return found, counter.calls, [*log]

    assert seen(capture(step, backend="eager")) == seen(step)


def in_a_branch(mask_T, other_T, x_TD, y_KD):
    """What a branch takes for granted is so in it alone."""
    index_t = torch.where(mask_T)[0]
    rows_tD = x_TD[index_t]
    if other_T.any():
        y_KD = y_KD.clone().copy_(rows_tD)
    return y_KD.sum() + 10 * index_t.numel()


def in_a_loop(mask_T, other_T, x_TD, y_KD):
    index_t = torch.where(mask_T)[0]
    out_KD = torch.zeros(3, 4)
    for expert in range(2):
        hit = torch.where(other_T[:3] == expert)[0]
        if len(hit) == 0:
            continue
        out_KD.index_add_(0, hit, y_KD[hit].clone().copy_(x_TD[index_t]))
    return out_KD.sum() + 10 * index_t.numel()


def equal_in_a_branch(mask_T, other_T, x_TD, y_KD):
    """What a branch has asked is so in it alone, and needs no comparison there."""
    one, other = (torch.where(each_T)[0] for each_T in (mask_T, other_T))
    if len(one) == len(other):
        y_KD = y_KD + (x_TD[one][:, :, None] @ x_TD[other][:, None]).sum()
    return y_KD.sum() + (10 if len(one) == len(other) else 20)


@pytest.mark.parametrize("step", (in_a_branch, in_a_loop, equal_in_a_branch))
def test_in_regions(step):
    captured = capture(step, backend="eager")
    x_TD, y_KD = torch.randn(7, 4), torch.randn(3, 4)
    given = [[[0, 1, 2], [0, 1, 2]], [[3], []], [[4], [0]], [[1, 2, 3], [0, 2]], [[0, 1], [1]], [[], []], [[0], [2, 1]]]
    for chosen, _ in itertools.product(given, range(2)):
        assert outcome(captured, chosen, x_TD, y_KD) == outcome(step, chosen, x_TD, y_KD)


def test_what_a_branch_cuts_to_as_many_rows_has_as_many():
    def step(mask_T, other_T, x_TD, y_KD):
        token_t, weight_t = torch.where(mask_T)[0], y_KD[:, 0].repeat(3)[:7][mask_T]
        out_TD = torch.zeros_like(x_TD)
        for _ in range(2):
            if token_t.numel() > 2:
                weight_t, best_t = weight_t.topk(2)
                token_t = token_t[best_t]
            out_TD.index_add_(0, token_t, torch.zeros_like(x_TD[token_t]).copy_(weight_t[:, None]))
        return out_TD.sum()

    captured = capture(step, backend="eager")
    x_TD, y_KD = torch.randn(7, 4), torch.randn(3, 4)
    for chosen in CHOSEN:
        assert outcome(captured, chosen, x_TD, y_KD) == outcome(step, chosen, x_TD, y_KD)


def between_numbers(x_TD, ends):
    out_TD = torch.zeros_like(x_TD)
    start, end = ends[0], ends[1]
    out_TD[start:end] = x_TD[start:end] * 2
    return out_TD


@pytest.mark.parametrize("off", ("nothing", "slices", "numbers"))
def test_between_the_same_numbers_lie_as_many(off, monkeypatch):
    if off == "slices":
        monkeypatch.setattr(Fakes, "compare_slices", lambda *args, **kwargs: None)
    if off == "numbers":
        monkeypatch.setattr(tensors, "number_in", lambda proxy: counts.unknown_number(proxy.operations.world, proxy))
    captured = capture(between_numbers, backend="eager")
    x_TD = torch.randn(6, 2)
    for ends in ([1, 4], [2, 3], [0, 0], [3, 9], [4, 2]):
        assert torch.equal(captured(x_TD, torch.tensor(ends)), between_numbers(x_TD, torch.tensor(ends)))
    doubts = stats(captured).breaks + asks(captured, x_TD, torch.tensor([1, 4]))
    assert doubts == (off != "nothing") and stats(captured).graphs == 1


def test_slices_between_other_numbers():
    def step(x_TD, ends):
        out_TD = torch.zeros_like(x_TD)
        out_TD[ends[0] : ends[1]] = x_TD[ends[2] : ends[3]] * 2
        return out_TD

    captured = capture(step, backend="eager")
    x_TD = torch.randn(6, 2)
    for ends in ([1, 4, 0, 3], [2, 3, -2, -1], [0, 0, 4, 2], [3, 9, -3, 6], [1, 4, 2, 3], [0, 2, 3, 4]):
        assert torch.equal(captured(x_TD, torch.tensor(ends)), step(x_TD, torch.tensor(ends)))
    assert (stats(captured).graphs, stats(captured).breaks) == (1, 0)


def test_a_number_that_is_written_between_is_another():
    def step(x_TD, end):
        first = x_TD[: end[0]].sum()
        end.add_(1)
        return first, x_TD[: end[0]].sum(), end[0].item()

    captured = capture(step, backend="eager")
    x_TD = torch.randn(6, 2)
    for number in (1, 3, 0, 5):
        assert captured(x_TD, torch.tensor([number])) == step(x_TD, torch.tensor([number]))
