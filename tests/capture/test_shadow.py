"""Shadow mode: right steps verify, planted faults are named, and nothing happens twice."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

import moebius
from moebius import MoebiusWarning, capture, stats
from moebius.errors import OptionError
from moebius.tensors.graphs import GraphWriter


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return self.second(torch.nn.functional.dropout(torch.relu(self.first(x)), 0.5))


def training():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean() * (1 + random.random())
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.detach()

    return model, step


def test_a_training_step_verifies_and_happens_once():
    model, step = training()
    plain_model, plain_step = training()
    captured = capture(step, verify=2)
    random.seed(0)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="moebius")
        losses = [captured(torch.ones(2, 4)).item() for _ in range(7)]
    random.seed(0)
    torch.manual_seed(1)
    assert losses == pytest.approx([plain_step(torch.ones(2, 4)).item() for _ in range(7)], rel=1e-5)
    assert model.seen == plain_model.seen == [1, 2, 3, 4, 5, 6, 7]
    found = stats(captured)
    assert (found.verified, found.differences) == (4, [])


def function(x, y):
    z = x * 2 + y
    return z.relu() * 3


def wrong_result(gm, example_inputs):
    """A backend that computes something else than the graph says."""
    return lambda *inputs: tuple(o + 1 for o in gm.forward(*inputs))


def test_a_fault_in_the_graph_is_named_by_its_node_and_line(monkeypatch):
    original = GraphWriter.node

    def spoiled(self, op, target, args, kwargs):
        return original(self, op, target, (args[0], 4) if args[1:] == (3,) else args, kwargs)

    monkeypatch.setattr(GraphWriter, "node", spoiled)
    captured = capture(function, verify=1)
    with pytest.warns(MoebiusWarning, match="differs from plain Python"):
        captured(torch.ones(3), torch.ones(3))
    (difference,) = stats(captured).differences
    assert difference.what.startswith("result: numbers differ by 3")
    line = function.__code__.co_firstlineno + 2
    assert "mul_1" in difference.node and f"test_shadow.py:{line}" in difference.node


STATEMENTS = {
    "new": "x = torch.mul(x, 3.0)",
    "reflected": "x = 3.0 * x",
    "in place": "x = x.mul_(3.0)",
    "augmented": "x *= 3.0",
    "subtracted": "x -= 3.0",
    "item": "x[0] = 3.0",
    "row": "x[:, 0] = x[:, 0] * 3.0",
    "several results": "x = x + sum(torch.var_mean(x, 1, correction=3.0, keepdim=True))",
    "out of a list": "x = torch.cat(torch.chunk(x * 3.0, 2))",
}
AROUND = {
    "alone": "{s}",
    "one side": "if x.sum() > -9:\n        {s}\n    x = x + 1",
    "other side": "if x.sum() < -9:\n        x = x + 1\n    else:\n        {s}",
    "called": "def helper(x):\n        {s}\n        return x\n    x = helper(x + 1)",
    "iteration": "for e in (x.sum(1) > 1).nonzero()[:, 0]:\n        {s}",
    "experts": "for e in range(3):\n        t = torch.where(c == e)[0]\n        if len(t) == 0: continue\n        "
    "x, y = x[t], x\n        {s}\n        x = y.index_add(0, t, x)",
    "after a break": "moebius.disable(len)(x)\n    {s}",
    "a second time": "x = x * 2.0; x = x * 2.0\n    {s}",
}


@pytest.mark.share(3)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_first_operator_that_differs_is_found_wherever_it_stands(statement, around, tmp_path, monkeypatch):
    body = AROUND[around].format(s=STATEMENTS[statement])
    lines = f"def step(x, c):\n    x = x + 0\n    {body}\n    return x * 5.0\n"
    path = tmp_path / "program.py"
    path.write_text(lines)
    namespace = {"torch": torch, "moebius": moebius}
    exec(compile(lines, str(path), "exec"), namespace)
    original = GraphWriter.node

    def other(value):
        return 4.0 if type(value) is float and value == 3.0 else value

    def spoiled(self, op, target, args, kwargs):
        changed = tuple(map(other, args)), {key: other(value) for key, value in kwargs.items()}
        return original(self, op, target, *changed)

    monkeypatch.setattr(GraphWriter, "node", spoiled)
    captured = capture(namespace["step"], backend="eager", verify=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured(torch.arange(32.0).view(4, 8) % 5 + 1, torch.tensor([0, 1, 2, 1]))
    (difference,) = stats(captured).differences
    number = next(i for i, line in enumerate(lines.splitlines(), 1) if "3.0" in line)
    assert f"program.py:{number})" in difference.node, difference


def test_a_fault_of_the_backend_is_told_from_one_of_the_graph():
    captured = capture(function, backend=wrong_result, verify=1)
    with pytest.warns(MoebiusWarning, match="differs from plain Python"):
        captured(torch.ones(3), torch.ones(3))
    (difference,) = stats(captured).differences
    assert difference.node.startswith("none of the 4 operators")


def test_one_in_n_and_what_the_captured_call_gives_is_returned():
    captured = capture(function, backend=wrong_result, verify=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [captured(torch.ones(1), torch.ones(1)).item() for _ in range(7)]
    assert results == [10.0] * 7
    assert [d.call for d in stats(captured).differences] == [1, 4, 7]
    assert len([w for w in caught if "differs" in str(w.message)]) == 3


def test_mutations_are_compared():
    def step(x, log):
        x.add_(1)
        log.append(x.shape[0])
        return log

    def lazy(gm, example_inputs):
        clone = [torch.zeros(3)]
        return lambda *inputs: tuple(gm.forward(*clone))

    right = capture(step, verify=1)
    x, log = torch.zeros(3), []
    assert right(x, log) == [3] and x.tolist() == [1, 1, 1] and stats(right).differences == []
    wrong = capture(step, backend=lazy, verify=1)
    with pytest.warns(MoebiusWarning, match=r"args\[0\]: numbers differ"):
        wrong(torch.zeros(3), [])


def test_exceptions_are_compared_and_raised():
    def step(x):
        if x.shape[0] > 2:
            raise KeyError("too long")
        return x * 2

    captured = capture(step, verify=1)
    captured(torch.ones(2))
    with pytest.raises(KeyError, match="too long"):
        captured(torch.ones(3))
    assert stats(captured).differences == []


def test_what_cannot_be_copied_is_said_and_runs():
    def step(x, stream):
        return x * 2

    captured = capture(step, verify=1)
    with pytest.warns(MoebiusWarning, match="cannot be verified"):
        assert captured(torch.ones(1), (n for n in [1])).item() == 2
    assert stats(captured).verified == 0


@pytest.mark.parametrize("value", [-1, True, 0.5, "all"])
def test_the_option_is_checked(value):
    with pytest.raises(OptionError, match="verify"):
        capture(function, verify=value)
