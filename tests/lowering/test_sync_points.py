"""Where a step would wait for a GPU, read off the fakes of what was captured on a CPU."""

from __future__ import annotations

import inspect
import json
import textwrap

import pytest
import torch
from torch import nn

from moebius import capture, explain
from moebius.lowering.sync_points import BRANCH, MASKED, NUMBER, SIZE

# expression of a tensor x [8] -> why it waits; None: it does not
EXPRESSIONS = {
    "x + x.sum().item()": NUMBER,
    "x * float(x.max())": NUMBER,
    "x * x.argmax().item()": NUMBER,
    "x * x.long().tolist()[0]": NUMBER,
    "x if torch.equal(x, x + 1) else x * 2": NUMBER,
    "x[(x > 0).nonzero()[:, 0]]": SIZE,
    "x[torch.where(x > 0)[0]]": SIZE,
    "x[x > 0]": SIZE,
    "torch.masked_select(x, x > 0)": SIZE,
    "x.long().unique() * 1.0": SIZE,
    "torch.repeat_interleave(x, (x > 0).long())": SIZE,
    "x.clone().index_put((x > 0,), x.sum()[None])": MASKED,
    "x + len(x) + x.shape[0] + x.numel()": None,
    "torch.where(x > 0, x, 0.0)": None,
    "x.masked_fill(x > 0, 0.0)": None,
    "x[x.argsort()]": None,
    "x[x.argmax()]": None,
    "x.cumsum(0)[x.topk(3).indices]": None,
    "torch.zeros_like(x).index_add_(0, x.argsort(), x)": None,
    "torch.repeat_interleave(x, (x > 0).long(), output_size=4)[:0]": None,
}
PLACES = {
    "as it is": "def step(x):\n    return ({0}).sum()",
    "in a function": "def below(x):\n    return {0}\ndef step(x):\n    return below(x * 2).sum()",
    "in a module": (
        "class Below(torch.nn.Module):\n    def forward(self, x):\n        return {0}\nbelow = Below()\n"
        "def step(x):\n    return below(x).sum()"
    ),
    "below a gradient": (
        "def step(x):\n    w = torch.ones(8, requires_grad=True)\n    x = x * w\n"
        "    (({0}).sum() * x.sum()).backward()\n    return w.grad"
    ),
}


def explained(text: str, tmp_path, name: str = "step"):
    """The report of a program that stands in a file, and its lines."""
    path, names = tmp_path / "program.py", {"torch": torch}
    path.write_text(text)
    exec(compile(text, str(path), "exec"), names)
    return explain(capture(names[name]))(torch.tensor([3.0, -1, 2, -4, 0, 6, 1, -2])), text.splitlines()


@pytest.mark.share(24)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_waits_is_named_with_its_line(expression, place, tmp_path):
    why = EXPRESSIONS[expression]
    report, lines = explained(PLACES[place].format(expression), tmp_path)
    assert not report.breaks
    assert {point.why for point in report.sync_points} == ({why} if why else set())
    assert bool(report.cuda_graph) == bool(why)
    for point in report.sync_points:
        assert expression in lines[point.place[1] - 1]
        assert f"program.py:{point.place[1]}" in str(report)
    assert ("Waits for the device" in str(report)) == bool(why)
    data = json.loads(report.to_json())
    assert [point["line"] for point in data["sync_points"]] == [point.place[1] for point in report.sync_points]


def test_a_branch_on_a_tensor_waits(tmp_path):
    text = "def step(x):\n    y = x * 2\n    if y.sum() > 0:\n        y = y + 1\n    return y"
    report, _ = explained(text, tmp_path)
    assert not report.breaks
    assert {(point.why, point.place[1]) for point in report.sync_points} == {(BRANCH, 3)}


def test_what_a_branch_leaves_is_read_at_the_branch(tmp_path):
    """Not where its ways meet, which is the next line of the user's; and torch's word is said for it."""
    text = "def step(x, s):\n    if x.sum() > 0:\n        s[0] = s[0] * 0.5\n    y = x * 2\n    return y"
    path = tmp_path / "program.py"
    path.write_text(text)
    names = {}
    exec(compile(text, str(path), "exec"), names)
    captured, s = capture(names["step"]), [1.0]
    for value in (1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0):
        captured(torch.full((2,), value), s)
    report = explain(captured)(torch.ones(2), s)
    assert {(point.operator, point.place[1]) for point in report.sync_points} >= {("bool", 2)}
    assert {point.place[1] for point in report.sync_points} == {2}


def test_writes_where_a_mask_says(tmp_path):
    """A number is written without asking how many places there are; numbers of a tensor are not."""
    text = "def step(x):\n    y = x.clone()\n    y[x > 0] = {}\n    return y"
    assert not explained(text.format("0.0"), tmp_path)[0].sync_points
    points = explained(text.format("x[:1]"), tmp_path)[0].sync_points
    assert [(point.why, point.place[1]) for point in points] == [(MASKED, 3)]


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adagrad": torch.optim.Adagrad,
    "Rprop": torch.optim.Rprop,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_step_is_on_the_cpu(name, reads):
    """It is read as a number, and torch keeps it there; a loss that is logged is not."""
    model = nn.Linear(8, 8)
    optimizer = OPTIMIZERS[name](model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item() if reads else loss.detach()

    captured, x = capture(step), torch.randn(4, 8)
    for _ in range(7):  # (RAdam takes another way after the fifth)
        report = explain(captured)(x)
    lines, first = inspect.getsourcelines(step)
    points = [lines[point.place[1] - first].strip() for point in report.sync_points]
    assert points == ["return loss.item() if reads else loss.detach()"] * reads


def test_experts_as_one_operator_do_not_wait(tmp_path):
    """The loop over experts asks which are hit; the operator in its place does not."""
    text = textwrap.dedent("""
        w = torch.randn(4, 8, 8)
        def step(x):
            x = x.outer(x)
            weight, chosen = x[:, :4].softmax(-1).topk(2)
            mask = torch.nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
            out = torch.zeros_like(x)
            for expert in mask.sum((1, 2)).nonzero()[:, 0]:
                slot, token = torch.where(mask[expert])
                out.index_add_(0, token, (x[token] @ w[expert]) * weight[token, slot, None])
            return out
    """)
    path, names = tmp_path / "experts.py", {"torch": torch}
    path.write_text(text)
    exec(compile(text, str(path), "exec"), names)
    x = torch.randn(8)
    lowered, as_written = explain(capture(names["step"]))(x), explain(capture(names["step"], backend="eager"))(x)
    assert lowered.lowered == 1 and not lowered.sync_points and not lowered.cuda_graph
    assert {point.place[1] for point in as_written.sync_points} >= {8, 9}
