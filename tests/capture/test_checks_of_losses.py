"""``if not math.isfinite(loss): raise …``: the way that does not raise is the one that a graph holds, however the
check is written; data that fails it raises as in plain Python."""

import itertools
import math

import pytest
import torch

from moebius import capture, stats

GOOD = {  # true of a number that nothing is wrong with
    "math": lambda loss: math.isfinite(loss.item()),
    "itself": lambda loss: loss.item() == loss.item(),
    "torch": lambda loss: torch.isfinite(loss),
    "below": lambda loss: loss.item() < 1e6,
    "tensor below": lambda loss: loss < 1e6,
    "chained": lambda loss: -1e6 < loss.item() < 1e6,
}
CHECKS = {
    "if not": "if not good: raise ValueError('wrong')",
    "if": "if good: pass\n    else: raise ValueError(f'wrong {x.shape[0]}')",
    "assert": "assert good",
    "assert with a text": "assert good, f'wrong {loss.item()}'",
    "or": "if not good or not good: raise ValueError",
    "and": "if good and good: y = x + 1\n    else: raise ValueError",
    "printed": "if not good:\n        print('wrong')\n        raise ValueError",
    "in a call": "check(good)",
    "caught": "try:\n        assert good\n    except AssertionError: return x * 5",
    "in a loop": "for i in range(3):\n        if not good: raise ValueError(i)",
}


def check(good):
    if not good:
        raise ValueError("wrong")


def program(question, form):
    before = "loss = (x * 2).exp().sum()\n    y, good = x * 3, question(loss)"
    text = f"def step(x):\n    {before}\n    {CHECKS[form]}\n    return y, loss\n"
    names = {"question": GOOD[question], "check": check}
    exec(text, names)  # noqa: S102
    return names["step"]


def outcome(function, x):
    try:
        return str(function(x))
    except (ValueError, AssertionError) as error:
        return type(error), str(error)


@pytest.mark.share(14)
@pytest.mark.parametrize(("question", "form"), [*itertools.product(GOOD, CHECKS)])
def test_the_way_without_an_error(question, form):
    step = program(question, form)
    captured = capture(step, backend="eager")
    for _ in range(3):
        x = torch.ones(4)
        assert outcome(captured, x) == outcome(step, x)
    assert (stats(captured).graphs, stats(captured).breaks, stats(captured).hits) == (1, 0, 2)
    for bad in (float("inf"), 1.0, float("nan"), 1.0):
        x = torch.tensor([bad, 1.0])
        assert outcome(captured, x) == outcome(step, x)
