"""Sets of numbers that vary: how they are made × of what × what is asked of them, in calls where others are equal."""

from __future__ import annotations

import linecache

import pytest
import torch

from moebius import capture, stats

ITEMS = {
    "sizes": "x.shape[0], x.shape[1], 3",
    "computed": "x.shape[0] // 2, x.shape[1], x.shape[0] % 3",
    "an argument": "n, -n, n * 0.5, x.shape[0]",
    "of one": "x.shape[0], n - n + x.shape[0]",
    "floats": "x.shape[0] / 2, 2, 2.0, True, n / 4",
    "tuples": "(x.shape[0], 'a'), (x.shape[1], 'a'), (3, 'a')",
    "shapes": "x.shape, x.t().shape, (3, 3)",
    "in tuples": "(x.shape[0], (n, None)), (3, (4, None))",
    "texts too": "x.shape[0], 'a', None, x.dtype, x.shape[1]",
    "nothing that varies": "3, 'a', 5",
    "a tensor's": "x.shape[0], int(x.sum())",
}
FORMS = (
    "{{{items}}}",
    "{{k for k in ({items},)}}",
    "{{k for k in ({items},) if k}}",
    "set(({items},))",
    "set(map(lambda k: k, [{items}]))",
    "frozenset([{items}])",
    "set(k for k in [{items}])",
)
USES = {
    "length": "found.append(len(s))",
    "length of one": "assert len(s) == 1",
    "truth": "found.append(1 if s else 2)",
    "membership": "found.append((3 in s, n in s, x.shape[0] in s, 'a' in s, x.shape in s, [].__class__ in s))",
    "not hashable": "found.append([] in s)",
    "equal": "found.append((s == {3}, s != {x.shape[0]}, {3, 'a', 5} == s, s == [3], s == frozenset([x.shape[0]])))",
    "less": "found.append(s <= {3, 4, 5})",
    "kind": "found.append((type(s).__name__, isinstance(s, (set, frozenset)), s is None))",
    "iterated": "for k in s: found.append(k)",
    "only one": "(found.append(next(iter(s))) if len(s) == 1 else None)",
    "sorted": "found.append(sorted(s, key=repr))",
    "unions": "found.append(list(s | {1, 9}))",
    "methods": "found.append(list(s.union([2, 17])))",
    "added to": "s.add(17) if type(s) is set else None; found.append(len(s))",
    "taken out": "(found.append((s.pop(), len(s), n in s)) if type(s) is set else None)",
    "taken and put": "t = s if type(s) is set else set(); f = t.add; f(n); found += [len(t), len(t) == 1 and t.pop()]",
    "all taken out": "found += [s.pop() if type(s) is set else 0 for _ in range(len(s))] if len(s) == 1 else []",
    "none left": "\n    try: found.append((s.pop(), s.pop()) if type(s) is set and len(s) == 1 else 0)\n"
    "    except KeyError as error: found.append(str(error))",
    "returned": "found.append(s)",
    "behind a break": "float(x.sum()); print(end='', flush=True); found += [len(s), s]",
    "a key": "found.append(len({frozenset(s): 1}))",
    "hashed": "found.append(hash(s))",
    "in a function": "found.append((lambda t: len(t) + (3 in t))(s))",
    "text": "found.append(repr(s))",
}


def made(items, form, use):
    source = f"def step(x, n):\n    found, x = [], x * 2\n    s = {form.format(items=items)}\n"
    source += f"    {use}\n    return x + 1, found\n"
    name = f"<{hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace = {}
    exec(compile(source, name, "exec"), namespace)
    return namespace["step"]


def shown(value):
    """In words, the items of a set in the order in which they stand."""
    if isinstance(value, list | tuple | set | frozenset):
        return type(value).__name__, [shown(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else (type(value).__name__, repr(value))


def answer(step, rows, n):
    try:
        return shown(step(torch.ones(rows, 3), n))
    except (AssertionError, TypeError) as error:
        return type(error).__name__, str(error)


CALLS = ((4, 2), (8, 5), (3, 6), (6, 3), (8, 16), (17, 1), (9, 0), (4, 2))


@pytest.mark.share(6)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("items", ITEMS)
def test_as_plain_python(items, use):
    for form in FORMS:
        plain = made(ITEMS[items], form, USES[use])
        step = capture(plain, backend="eager")
        for rows, n in CALLS:
            assert answer(step, rows, n) == answer(plain, rows, n), (form, rows, n)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_equal_is_a_guard_and_no_break(form):
    use = "assert len(s) == 1; found.append(s.pop() if type(s) is set else 0)"
    step = capture(made("x.shape[0], n + 1", form, use), backend="eager")
    for rows in range(4, 12):
        step(torch.ones(rows, 3), rows - 1)
    assert stats(step).breaks == 0 and stats(step).hits >= 5
    with pytest.raises(AssertionError):
        step(torch.ones(4, 3), 5)
