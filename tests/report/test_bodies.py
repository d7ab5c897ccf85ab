"""The bodies of loops and branches that one node of a graph says count as often as the data of this call runs them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from reconciling import counted_call, plain_counts, reported_counts
from torch.utils.checkpoint import checkpoint

from moebius import capture, explain, reset
from moebius.cache import calls
from moebius.lowering import how_often
from moebius.regions import branches

D, E = 4, 3
WEIGHTS_EDD = torch.randn(E, D, D)

# What decides, of a tensor x; and what is done with it.
CONDITIONS = {
    "sum": "x.sum() > 0",
    "item": "x.sum().item() > 0",
    "none": "not (x > 0).any()",
    "two": "x.sum() > 0 and x.max() < 3",
    "either": "x.sum() > 0 or x.max() > 3",
    "random": "x.sum() * torch.rand(()) > 0",
    "python's": "x.sum() > 0 and random.random() < 0.5",
    "numpy's": "x.sum() * (np.random.rand() - 0.5) > 0",
    "dropout": "F.dropout(x, 0.5).sum() > 0",
}
SHAPES = {
    "one side": ["if {c}:", "    x = x + 1", "    y = x * 2", "x = x - y"],
    "two sides": ["if {c}:", "    x = x + 1", "else:", "    x = x * 2", "    y = x + y", "x = x - y"],
    "nested": ["if {c}:", "    x = x + 1", "    if y.sum() < 9:", "        x = x * 2", "else:", "    x = x - 1"],
    "chain": ["if {c}:", "    x = x + 1", "elif y.max() > 1:", "    x = x * 2", "else:", "    x = x - 1", "x = x + y"],
    "in a loop": ["for k in range(3):", "    if {c}:", "        x = x - k", "    x = x * 0.5"],
    "goes on": ["for k in range(3):", "    if {c}:", "        x = x - k", "        continue", "    x = x + y"],
    "expression": ["x = x + (y if {c} else y * 2)"],
    "returns": ["if {c}:", "    x = x + 1", "    return x * 3", "x = x - y"],
    "with": ["with torch.no_grad():", "    if {c}:", "        x = x + 1", "x = x - y"],
    "handled": ["try:", "    if {c}:", "        x = x + 1", "finally:", "    x = x - y"],
    "called": ["x = helper(x)", "if {c}:", "    x = helper(x - 3)"],
    "written": ["if {c}:", "    z.add_(1)", "    x = x + z", "x = x - z"],
    "experts": [
        "for e in range(E):", "    token = torch.where(y[:, 0] > e)[0]", "    if len(token) == 0:", "        continue",
        "    x = x.index_add(0, token, y[token] @ W[e])", "if {c}:", "    x = x + 1",
    ],
    "hit": [
        "for e in (y.sum(0)[:E] > 0).nonzero()[:, 0]:", "    token = torch.where(y[:, 1] > e)[0]",
        "    x = x.index_add(0, token, y[token] @ W[e])", "if {c}:", "    x = x + 1",
    ],
}  # fmt: skip
HELPER = """
def helper(x):
    if x.sum() > 0:
        return x + 1
    return x - 1

def step(x, z):
    y = x * 2
    {body}
    return x, y
"""
DATA = [torch.full((5, D), float(value)) for value in (1, -1, 4, -4)] + [
    torch.randn(5, D, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
]


def made_of(shape: str, condition: str) -> Callable[..., Any]:
    source = HELPER.format(body="\n    ".join(SHAPES[shape]).format(c=CONDITIONS[condition]))
    namespace: dict[str, Any] = {"torch": torch, "random": random, "np": np, "F": torch.nn.functional}
    namespace |= {"W": WEIGHTS_EDD, "E": E}
    exec(compile(source, "<bodies>", "exec"), namespace)
    return namespace["step"]


def differing(shape: str, condition: str) -> list[str]:
    """The calls whose counts are others than on the plain run, or of which a part was counted once."""
    reset()
    step, found = made_of(shape, condition), []
    captured = capture(step)
    for number, x in enumerate(DATA):
        expected = run(lambda x=x: plain_counts(step, x.clone(), torch.ones(5, D)))
        report = run(lambda x=x: explain(captured)(x.clone(), torch.ones(5, D)))
        if reported_counts(report) != expected or report.in_loops:
            found.append(f"call {number} ({report.status}): {expected} against {reported_counts(report)}")
    return found


def run(call: Callable[[], Any]) -> Any:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    return call()


@pytest.mark.share(3)
@pytest.mark.parametrize(("shape", "condition"), [*itertools.product(SHAPES, CONDITIONS)])
def test_each_side_counts_as_the_data_has_it(shape: str, condition: str) -> None:
    assert not differing(shape, condition)


# What was done before; ``net`` and ``optimizer`` are there.
BEFORE = {
    "backward": ["net(x).sum().backward()", "x = x + net.weight.grad"],
    "step": [
        "y = net(x)", "y.sum().backward()", "optimizer.step()", "optimizer.zero_grad()", "x = x + net(x).detach()",
    ],
    "adds up": ["net(x).sum().backward()", "net(-x).mean().backward()", "x = x * net.bias.grad.max()"],
    "clipped": ["net(x).sum().backward()", "x = x * torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)"],
    "grad": ["g, = torch.autograd.grad(net(x).sum(), [net.weight])", "x = x + g"],
    "own leaf": ["p = x.detach().requires_grad_()", "(p * p).sum().backward()", "x = x + p.grad"],
    "checkpoint": ["checkpoint(net, x, use_reentrant=False).sum().backward()", "x = x + net.weight.grad"],
    "autocast": [
        "with torch.autocast('cpu', torch.bfloat16):", "    y = net(x)", "y.float().sum().backward()",
        "x = x + net.weight.grad",
    ],
    "many": [
        "for _ in range(3):", "    net(x).sum().backward()", "    optimizer.step()", "    optimizer.zero_grad()",
        "    x = x + net(x).detach()",
    ],
    "function": ["p = x.detach().requires_grad_()", "Square.apply(p).sum().backward()", "x = x + p.grad"],
    "hook": [
        "p = x.detach().requires_grad_()", "q = p * 2", "q.register_hook(lambda g: g * -3)", "q.sum().backward()",
        "x = x + p.grad",
    ],
    "functional": ["F.cross_entropy(F.dropout(net(x), 0.1), x.softmax(1)).backward()", "x = x + net.weight.grad"],
    "array": ["x = x + torch.from_numpy(np.arange(4.0)).float()"],
}  # fmt: skip
AT_BACKWARD = ("function", "hook")  # counted once, whatever decides


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 * ctx.saved_tensors[0]


AFTER = ("one side", "two sides", "goes on", "called", "experts")


@pytest.mark.share(3)
@pytest.mark.parametrize(("before", "after"), [*itertools.product(BEFORE, AFTER)])
def test_gradients_may_decide(before: str, after: str) -> None:
    """They are computed beside the graph, on copies: the call itself gives what it gives, and leaves the same."""
    body = [line.format(c="x.sum() > 0") for line in (*BEFORE[before], "y = x", *SHAPES[after])]
    once: list[Any] = []
    states: list[list[Any]] = []
    for explained in (False, True):
        reset()
        net = torch.nn.Linear(D, D)
        torch.nn.init.constant_(net.weight, 0.1), torch.nn.init.constant_(net.bias, 0.2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        namespace: dict[str, Any] = {"torch": torch, "np": np, "checkpoint": checkpoint, "Square": Square}
        namespace |= {"W": WEIGHTS_EDD, "E": E, "net": net, "optimizer": optimizer, "F": torch.nn.functional}
        exec(compile(HELPER.format(body="\n    ".join(body)), "<after>", "exec"), namespace)
        captured = capture(namespace["step"])
        optimizer.step()  # (the first one imports)
        states.append([])
        for x in (DATA[0][:4], DATA[1][:4], DATA[4][:4]):
            given = x.clone(), torch.ones(4, D)
            torch.manual_seed(3)
            if explained:
                report = explain(captured)(*given)
                counts, result = reported_counts(report), report.result
                once += [key for key in report.in_loops if before not in AT_BACKWARD or key[1] == "step"]
            else:
                counts, result = counted_call(namespace["step"], *given)
            gradients = [parameter.grad for parameter in net.parameters()]
            states[-1].append((counts, *result, *map(copied, (*net.parameters(), *gradients)), torch.is_grad_enabled()))
    assert not once
    for plain, ours in zip(*states, strict=True):
        assert plain[0] == ours[0]
        torch.testing.assert_close(ours[1:], plain[1:])


def copied(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()


def test_an_explained_call_gives_what_it_gives() -> None:
    """What decides is computed beside the graph: no number is drawn twice, nothing is written twice."""
    for shape, condition in itertools.product(("written", "experts"), ("random", "dropout", "python's", "numpy's")):
        step = made_of(shape, condition)
        captured, results = capture(step), []
        for explained in (None, False, False, True):
            z = torch.ones(5, D)
            call = step if explained is None else explain(captured) if explained else captured
            result = run(lambda call=call, z=z: call(DATA[0].clone(), z))
            drawn = torch.rand(()), random.random(), np.random.rand()
            results.append((*(result.result if explained else result), z, *drawn))
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                torch.testing.assert_close(a, b)


def test_what_may_do_more_than_compute_is_counted_once() -> None:
    """A generator of the program's has a state of its own; the report says so."""
    generator = torch.Generator()

    def step(x: torch.Tensor) -> torch.Tensor:
        if torch.rand((), generator=generator) < 2:
            x = x + 1
        return x

    report = explain(step)(torch.ones(3))
    assert report.in_loops and "counted once" in str(report)


def test_where_there_are_ranks_nothing_is_computed_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would not take part in an exchange."""
    monkeypatch.setattr(how_often.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(how_often, "Plan", None)
    report = explain(made_of("one side", "sum"))(DATA[0], torch.ones(5, D))
    assert report.in_loops and not report.breaks


@pytest.mark.parametrize("off", ["runs", "jumps", "gradients"])
def test_each_part_of_it_is_needed(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if off == "runs":
        monkeypatch.setattr(calls, "how_often", lambda gm, inputs: {})
    elif off == "jumps":
        monkeypatch.setattr(branches, "count_jumps", lambda *args: None)
    else:
        monkeypatch.setattr(how_often, "is_of_gradients", lambda node: False)
        with pytest.raises(AssertionError):
            test_gradients_may_decide("step", "one side")
        return
    assert differing("goes on", "sum") or differing("experts", "sum")


def test_what_is_saved_for_backward_is_packed_once() -> None:
    packed: list[int] = []
    net = torch.nn.Linear(3, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        net(x).pow(2).sum().backward()
        return x + 1 if net.weight.grad.sum() > 0 else x

    for call in (step, explain(capture(step))):
        packed.append(0)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed[-1] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call(torch.ones(2, 3))
    assert packed[0] == packed[1] > 0


def test_random_numbers_are_drawn_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.rand(3)
        if torch.rand(()) > 0.5:
            x = x + 1
        return x, y

    def differ() -> bool:
        captured = capture(step)
        x = torch.ones(3)
        seeds = range(8)
        found = []
        for seed in seeds:
            torch.manual_seed(seed)
            expected = plain_counts(step, x)
            torch.manual_seed(seed)
            found.append(reported_counts(explain(captured)(x)) != expected)
        return any(found)

    assert not differ()
    monkeypatch.setattr(how_often, "may_draw", lambda node: False)
    reset()
    assert differ()
