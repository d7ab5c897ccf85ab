"""``any(…)`` and ``all(…)`` of what data decide: one truth in the graph, where nobody can tell what it leaves out."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebius import capture, stats
from moebius.python import quantifiers

NET = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
ASKED = {
    "tensor": "torch.isnan({}).any()",
    "compared": "{}.sum() > 0",
    "number": "{}.sum().item() > 0",
    "few": "len(torch.where({} > 0)[0]) <= 1",
    "known": "{}.dim() == 2",
    "some_known": "({0}.dim() == 2 or {0}.sum() > 0)",
}
ITEMS = {
    "tuple": "any(ASK for t in (x, y, z))",
    "list": "any([ASK for t in (x, y, z)])",
    "zip": "any(ASK for t, u in zip((x, y), (y, z)))",
    "nested": "any(ASK for ts in [(x, y), (z,)] for t in ts)",
    "parameters": "any(ASK for t in (*NET.parameters(), x))",
    "generator": "any(ASK for t in NET.parameters())",
    "filtered": "any(ASK for t in (x, y, z) if t.shape[0] > 1)",
    "of_values": "any({'a': x.sum() > 0, 'b': y.sum() > 0}.values())",
}
ENDS = {
    "branch": "return (x * 2 if {} else x - 1), 0",
    "returned": "return x, {}",
    "negated": "return (x if not {} else y), 1",
}
# What a program may tell by: it sees how many items were taken, or what asking them does. Each in the place of ITEMS.
TELLS = {
    "iterator": """it = iter([x, y, z])
        found = any(t.sum() > 0 for t in it)
        return found, len([*it])""",
    "parameters": """it = NET.parameters()
        found = any(t.sum() > x[0] for t in it)
        return found, len([*it])""",
    "kept": """g = (t.sum() > 0 for t in (x, y, z))
        found = any(g)
        return found, [*g]""",
    "inner": """it = iter([x, y])
        found = any(t.sum() > 0 for t, u in zip([y, z], it))
        return found, len([*it])""",
    "mapped": """it = iter([x, y])
        found = any(t.sum() > 0 for t in map(torch.neg, it))
        return found, len([*it])""",
    "chained": """import itertools
        it = iter([x, y])
        found = any(t.sum() > 0 for t in itertools.chain(it, [z]))
        return found, len([*it])""",
    "within": """it = iter([x, y, z, x])
        found = any(t.sum() > 0 for k in (1, 2) for t, n in zip(it, (1, 2)))
        return found, len([*it])""",
    "numbered": """it = iter([x, y, z])
        found = any(t.sum() > n for n, t in enumerate(it))
        return found, len([*it])""",
    "by_a_generator": """it = iter([x, y, z])
        def of(a):
            for n, t in zip((0, 1), a): yield t
        found = any(t.sum() > 0 for t in of(it))
        return found, len([*it])""",
    "given": """its = [NET.parameters()]
        def of():
            return its[0]
        found = any(t.sum() > x[0] for t in of())
        return found, len([*its[0]])""",
    "given_pairs": """its = [zip((x, y, z), (x, y, z))]
        def of():
            return its[0]
        found = any(t.sum() > u[0] for t, u in of())
        return found, len([*its[0]])""",
    "appends": """log = []
        found = any((log.append(1), t.sum() > 0)[1] for t in (x, y, z))
        return found, log""",
    "older": """found = any((LOG.append(1), t.sum() > 0)[1] for t in (x, y, z))
        return found, x""",
    "writes": """found = any(t.add_(1).sum() > 0 for t in (x, y, z))
        return found, x""",
    "draws": """found = any(t.sum() > torch.rand(()) for t in (x, y, z))
        return found, torch.rand(2)""",
    "raises": """return any(t.sum() > 0 or 1 / 0 for t in (x, y)), x""",
    "raises_of_data": """return any(t[(t > 0).long().sum() + 1] > -9 for t in (x, y)), x""",
    "counts": """n = 0
        def one(t):
            nonlocal n
            n += 1
            return t.sum() > 0
        return any(one(t) for t in (x, y, z)), n""",
    "stored": """log = []
        def one(t):
            if not log: log.append([])
            log[0].append(1)
            return t.sum() > 0
        return any(one(t) for t in (x, y, z)), log""",
}
LOG: list = []


def made(body):
    namespace = {"torch": torch, "NET": NET, "LOG": LOG}
    exec(f"@torch.no_grad()\ndef step(x, y, z):\n        {body}\n", namespace)
    return namespace["step"]


def bits(value):
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.nan_to_num(77.0).tolist()) if value.is_floating_point() else value.tolist()
    return [bits(v) for v in value] if isinstance(value, (tuple, list)) else (type(value), value)


def compared(body):
    step, found = made(body), []
    run = capture(step, backend="eager")
    for i in range(9):
        outcomes = []
        for called in (step, run):
            torch.manual_seed(i)
            LOG.clear()
            tensors = [torch.randn(3) + (i % 3 - 1) for _ in range(3)]
            if i % 4 == 3:
                tensors[i % 3][0] = float("nan")
            try:
                result = called(*tensors)
            except Exception as error:
                result = type(error).__name__
            outcomes.append((bits(result), bits(tensors), [*LOG], torch.rand(()).item()))
        assert outcomes[0] == outcomes[1], (i, body)
        found.append(outcomes[0])
    return run


def body_of(items, asked, word, end):
    return ENDS[end].format(ITEMS[items].replace("ASK", ASKED[asked].format("t")).replace("any", word, 1))


@pytest.mark.share(30)
@pytest.mark.parametrize(("items", "asked", "word", "end"), [*itertools.product(ITEMS, ASKED, ("any", "all"), ENDS)])
def test_one_truth(items, asked, word, end):
    run = compared(body_of(items, asked, word, end))
    if asked in ("tensor", "compared", "number") and end != "negated" and items != "of_values":
        assert stats(run).breaks == 0 and not any("branch" in r.guard for r in stats(run).recompiles)


@pytest.mark.parametrize("word", ["any", "all"])
@pytest.mark.parametrize("what", TELLS)
def test_what_can_tell_is_as_python_has_it(what, word):
    compared(TELLS[what].replace("any(", f"{word}("))


def test_switched_off_it_breaks(monkeypatch):
    monkeypatch.setattr(quantifiers, "open_truth", lambda *_: None)
    assert stats(compared(body_of("tuple", "tensor", "any", "branch"))).breaks > 0
