"""``torch.equal``, ``allclose``, ``is_nonzero`` and ``in``: a yes or no of the graph, however it is used."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius import capture, explain, stats

QUESTIONS = {
    "equal": "torch.equal(a, b)",
    "Tensor.equal": "a.equal(b)",
    "allclose": "torch.allclose(a, b)",
    "Tensor.allclose": "(a * 2).allclose(b * 2, rtol=1e-3, equal_nan=True)",
    "is_nonzero": "torch.is_nonzero((a - b).sum())",
    "Tensor.is_nonzero": "a[:1].is_nonzero()",
    "in": "2.0 in b",
    "tensor in": "a[1] in b",
    "not in": "7.0 not in b",
}
USES = {
    "if": "if {}:\n        y = y * 2",
    "if not": "if not {}:\n        y = y * 2\n    else:\n        y = y - 1",
    "and": "if {} and a.sum() > 0:\n        y = y * 2",
    "assert": "try:\n        assert {}\n    except AssertionError:\n        y = y + 5",
    "number": "y = y + float({})",
    "kept": "out.append({})",
}
SAME, NAN = torch.arange(4.0), torch.tensor([float("nan"), 1.0, 2.0, 3.0])
PAIRS = [(SAME, SAME.clone()), (SAME, SAME + 1), (SAME, SAME + 1e-9), (NAN, NAN), (NAN, NAN.clone()), (SAME + 1, SAME)]


def step_of(question: str, use: str):
    """The question as a step asks it."""
    text = f"def step(a, b, out):\n    y = a.exp()\n    {USES[use].format(QUESTIONS[question])}\n    return y\n"
    names: dict = {"torch": torch}
    exec(text, names)
    return names["step"]


@pytest.mark.share(13)
@pytest.mark.parametrize(("question", "use"), list(itertools.product(QUESTIONS, USES)))
def test_each_answer_is_plain_pythons_in_one_graph(question, use):
    step = step_of(question, use)
    captured = capture(step, backend="eager")
    for a, b in PAIRS * 2:
        ours, theirs = [], []
        assert repr(captured(a, b, ours)) == repr(step(a, b, theirs))
        assert repr(ours) == repr(theirs)
    assert explain(step, backend="eager")(*PAIRS[0], []).breaks == []
    assert use != "kept" or stats(captured).misses == 2, "one where a tensor is given twice, one where not"


SHAPES = [((3,), (3,)), ((4,), (4,)), ((5,), (4,)), ((6,), (6,)), ((1,), (6,)), ((3,), (3, 1)), ((0,), (0,))]


@pytest.mark.parametrize("question", ["equal", "Tensor.equal"])
def test_shapes_that_differ_are_a_plain_no(question):
    step = step_of(question, "kept")
    captured = capture(step, backend="eager")
    for one, other in SHAPES * 2:
        ours, theirs = [], []
        captured(torch.ones(one), torch.ones(other), ours), step(torch.ones(one), torch.ones(other), theirs)
        assert ours == theirs


@pytest.mark.parametrize("a, b", [(torch.ones(2), torch.ones(2).double()), (torch.ones(2), torch.ones(3))])
def test_what_torch_refuses_is_refused(a, b):
    step = step_of("allclose", "if")
    for run in (step, capture(step, backend="eager")):
        with pytest.raises(RuntimeError, match="match"):
            run(a, b, [])
