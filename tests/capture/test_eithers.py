"""A number or a tensor, as the data say: ``max(norm, 1.0)``. One graph where only its number is asked for; bits, types
and identities as Python's wherever it goes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from moebius import capture, stats
from moebius.tensors import bounds

# How the two are chosen between: t is a tensor of one float, r a number that another tensor holds.
CHOICES = {
    "max": lambda t, r: max(t, 1.0),
    "number first": lambda t, r: max(1.0, t),
    "min": lambda t, r: min(t, 1.0),
    "an int": lambda t, r: max(t, 1),
    "of what is computed": lambda t, r: max(t * 2 + 0.1, 1.0),
    "a number of the graph": lambda t, r: min(t, r.item() * 3),
    "not a number": lambda t, r: max(t, math.nan),
    "no end": lambda t, r: min(math.inf, t),
    "of one row": lambda t, r: max(t.reshape(1), 1.0),
}
BETWEEN = {
    "itself": lambda e: e,
    "divides": lambda e: 0.3 / (e + 1e-8),
    "negative": lambda e: -e * 0.1,
    "power": lambda e: (e * 2.5) ** 2 - e,
}


def scaled(x, e):
    return x * e


def divided(x, e):
    return e / (x + 3)


def in_place(x, e):
    return x.clone().mul_(e)


def operator_in_place(x, e):
    x = x.clone()
    seen = x
    x *= e
    return seen, x


def number_in_place(x, e):
    total = before = 0.5
    total += e
    return x * total, before


def alpha(x, e):
    return x.add(x, alpha=-e)


def value(x, e):
    return torch.addcdiv(x, x, x + 5, value=e)


def foreach(x, e):
    return torch._foreach_mul([x, x + 1], e)


def stored(x, e):
    HELD["e"] = e
    return x * e


def returned(x, e):
    return e, x * 2


HELD = {}
USES = [scaled, divided, in_place, operator_in_place, number_in_place, alpha, value, foreach, stored, returned]


def kind(x, e):
    return type(e).__name__, x


def method(x, e):
    return e.sqrt() if isinstance(e, torch.Tensor) else x * e


def asked(x, e):
    return x * 2 if e > 0.9 else x


def read(x, e):
    return x * float(e)


def written(x, e):
    if isinstance(e, torch.Tensor):
        e.add_(1)
    return x * e


def changed(x, e):
    f = e
    f += 0.7
    return x * e, f


def written_after(x, e, t):
    t.mul_(3)
    return x * e


SEES = [changed, kind, method, asked, read, written]
CASES = list(itertools.product(CHOICES, BETWEEN, USES))
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def named(part):
    return getattr(part, "__name__", str(part))


def bits(value):
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.double().nan_to_num(1e9).tolist())
    if isinstance(value, (tuple, list)):
        return [bits(item) for item in value]
    return (type(value), str(value))


def compared(step, tensor_dtype=torch.float32, dtype=torch.float32, backend="eager"):
    """The outcomes of calls on which the data go one way and the other; the captured step."""
    run = capture(step, backend=backend)
    for i, number in enumerate((0.25, 1.75, 0.5, 3.0, 0.7, float("nan"), 1.0, 0.3, 2.2)):
        outcomes = []
        for called in (step, run):
            HELD.clear()
            x = torch.linspace(-2, 2, 7, dtype=torch.float64).to(dtype)
            t, r = torch.tensor(number, dtype=tensor_dtype), torch.tensor(0.2 * (i + 1))
            try:
                outcomes.append(bits([called(x, t, r), t, HELD.get("e")]))
            except (RuntimeError, TypeError) as error:  # (float16 has no such operator, an int no such alpha)
                outcomes.append((type(error), str(error)))
        assert outcomes[0] == outcomes[1], (i, number)
    return run


def step_of(choice, between, use):
    @torch.no_grad()
    def step(x, t, r):
        return use(x, BETWEEN[between](CHOICES[choice](t, r)))

    return step


@pytest.mark.share(30)
@pytest.mark.parametrize(("choice", "between", "use"), CASES, ids=named)
def test_one_graph_has_either(choice, between, use):
    run = compared(step_of(choice, between, use))
    raises = choice == "a number of the graph" and between in ("divides", "power")  # 0.3 / 0.0, on one way alone
    reads = choice == "of one row" and use in (alpha, value, foreach)  # whose fakes have no number
    if not raises and not reads:
        assert stats(run).breaks == 0 and len(stats(run).recompiles) <= 1, stats(run).recompiles


OF_DTYPES = [*itertools.product(DTYPES, [*DTYPES, torch.int64], ("max", "an int", "of what is computed"), USES)]


@pytest.mark.share(20)
@pytest.mark.parametrize(("tensor_dtype", "dtype", "choice", "use"), OF_DTYPES, ids=named)
def test_dtypes(tensor_dtype, dtype, choice, use):
    compared(step_of(choice, "divides", use), tensor_dtype, dtype)



@pytest.mark.parametrize("use", SEES)
@pytest.mark.parametrize("choice", ["max", "number first", "an int", "of one row"])
@pytest.mark.parametrize("between", ["itself", "negative"])
def test_what_sees_more_is_a_branch(choice, between, use):
    compared(step_of(choice, between, use))


@pytest.mark.parametrize("between", BETWEEN)
def test_a_write_into_the_tensor(between):
    @torch.no_grad()
    def step(x, t, r):
        return written_after(x, BETWEEN[between](max(t, 1.0)), t)

    compared(step)


@pytest.mark.parametrize("use", USES)
def test_our_own_backend(use):
    compared(step_of("max", "divides", use), backend="moebius")


def test_gradients_go_through_the_tensor():
    def step(x, t, r):
        t = t.clone().requires_grad_()
        (x * max(t * 2, 1.0)).sum().backward()
        return t.grad if t.grad is not None else x

    compared(step)


def test_another_condition_beside():
    @torch.no_grad()
    def step(x, t, r):
        return x * max(t, 1.0) * (max(t, 0.5) / max(r, 0.9))

    compared(step)


def test_the_loop_of_an_optimizer_is_one_graph():
    """The trust ratio of each weight: without an Either each flip of each of them captures the step again."""

    def step(model, optimizer, x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for weight in model.parameters():
                ratio = 0.1 / max(weight.grad.norm() / (weight.norm() + 1e-3), 0.1)
                weight.add_(weight.grad, alpha=-0.05 * ratio)
        return model(x).sum()

    def trained(captured):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run = capture(step, backend="eager") if captured else step
        losses = [run(model, optimizer, torch.randn(3, 4) * (1 + i % 3)) for i in range(16)]
        return bits([*losses, *model.parameters()]), run

    plain, _ = trained(False)
    found, run = trained(True)
    assert found == plain
    told = stats(run)
    assert told.breaks == 0 and not any("branch" in r.guard for r in told.recompiles) and told.hits >= 13


def test_without_it_the_data_capture_again(monkeypatch):
    monkeypatch.setattr(bounds, "of_extreme", lambda *_: None)
    run = compared(step_of("max", "divides", scaled))
    assert len(stats(run).recompiles) > 1
