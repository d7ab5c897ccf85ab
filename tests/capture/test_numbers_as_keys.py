"""Numbers that vary as keys, items of sets and counts of C code, also where a handler waits for what C code raises."""

import collections
import itertools
import linecache

import pytest
import torch

from moebius import capture, stats

NUMBERS = ("n", "-n % 4", "x.shape[0]", "int(x.sum())", "n > 2", "n / 2", "n * 0.5", "x.sum().item()")
USES = (
    "items.add(k)",
    "items.discard(k)",
    "items.update([k])",
    "items |= {k}",
    "table[k] = 1",
    "table[k, 1] = 1; table[k, 1] = 2; found.append(len(table))",
    "table.update([(k, 1)])",
    "found.append((table.get(k), k in table, k in items, k in {1, 2}, k in (1, 2), k in range(5)))",
    "found.append(table.setdefault(k, 2))",
    "found.append(table.pop(k, None))",
    "found.append({k: 1}[k])",
    "found.append(dict.fromkeys([k]))",
    "found.append(dict([(k, 1)]))",
    "found.append({other for other in (k,)})",
    "found.append({(k, 1): 2}[k, 1])",
    "found.append(({k: 1}.get(k), k in {k: 1}, {k} == {k}))",
    "found.append(collections.deque(range(5), k))",
    "found.append(collections.deque(range(5), maxlen=k))",
    "found.append((list(itertools.islice(range(9), k)), next(itertools.count(k))))",
    "made = {}; made[k] = 1; made[k] = 2; made[k + 0] = 3; found.append(made)",
    "made = set(); made.add(k); made.add(k * 1); found.append(made)",
)
PLAIN = "    {use}\n"
HANDLED = "    try:\n        {use}\n    except (TypeError, KeyError):\n        found.append('handled')\n"


def made(number, use, form):
    source = (
        "def step(items, table, x, n):\n    found = []\n    x = x * 2\n"
        f"    k = {number}\n{form.format(use=use)}    return x * 2, found\n"
    )
    name = f"<{hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace = {"collections": collections, "itertools": itertools}
    exec(compile(source, name, "exec"), namespace)
    return namespace["step"]


def answer(function, n):
    items, table = {1, 7}, {1: 0}
    try:
        return repr((function(items, table, torch.ones(n), n), sorted(map(repr, items)), table))
    except Exception as error:
        return repr((error, sorted(map(repr, items)), table))


@pytest.mark.share(2)
@pytest.mark.parametrize("form", [PLAIN, HANDLED], ids=["plain", "handled"])
@pytest.mark.parametrize("number", NUMBERS)
def test_as_plain(number, form):
    captured = 0
    for use in USES:
        plain = made(number, use, form)
        step = capture(plain, backend="eager")
        for n in (1, 2, 4):
            assert answer(step, n) == answer(plain, n), (use, n)
        captured += stats(step).graphs > 0
    assert captured == len(USES)
