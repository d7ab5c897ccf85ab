"""A local that lives over a graph break is held by the frame alone: where the program lets go of it, it dies.

Programs are made of how the local comes to its object, what breaks the graph, how it is let go, and what sees it die.
"""

import itertools
import types
import weakref

import pytest
import torch

from moebius import capture
from moebius.hook import finish, leave_to


class Thing:
    def __init__(self, log):
        self.log = log

    def __del__(self):
        self.log.append("gone")


COMES = {
    "reference": "k = s.r()",
    "set": "for k in s.found: pass",
    "item": "k = s.table['k']",
    "shared": "k = s.r()\n    def inner(): return k",
}
BREAKS = {
    "print": "print(end='')",
    "text": "print(f'{x.sum():.2f}'[:0], end='')",
    "number": "float(x.sum().item()) if hash(str(x.sum().item())) else 0",
    "two": "print(end=''); y = x + 1; print(end='')",
    "handler": "\n    try: print(end=''); int('x')\n    except ValueError: print(end='')",
    "loop": "\n    for i in range(3): x = x + 1; print(end='')",
    "long": "\n    for i in range(70): x = x + 1; print(end='')",
}
LETS_GO = {
    "del": "s.kept = None; del k",
    "first": "del k; s.kept = None",
    "over": "k = 1; s.kept = None",
    "both": "s.kept = k = None",
    "break": "del k; print(end=''); s.kept = None",
}
SEES = {
    "reference": "s.r() is None",
    "set": "[1 for _ in s.found]",
    "table": "len(s.table), 'k' in s.table",
    "log": "list(s.log)",
}
ALL = [*itertools.product(COMES, BREAKS, LETS_GO, SEES)]


def made(comes, breaks, lets_go, sees):
    body = "\n    ".join([COMES[comes], BREAKS[breaks].strip("\n ") if "\n" in BREAKS[breaks] else BREAKS[breaks]])
    text = f"def step(x, s):\n    {body}\n    {LETS_GO[lets_go]}\n    seen = {SEES[sees]}\n    return x * 2, seen\n"
    names = {}
    exec(text, names)
    return names["step"]


def state():
    log = []
    thing = Thing(log)
    return types.SimpleNamespace(
        kept=thing, log=log, r=weakref.ref(thing), found=weakref.WeakSet([thing]),
        table=weakref.WeakValueDictionary(k=thing),
    )  # fmt: skip


@pytest.mark.share(30)
@pytest.mark.parametrize(("comes", "breaks", "lets_go", "sees"), ALL, ids=["-".join(one) for one in ALL])
def test_it_dies_where_it_is_let_go(comes, breaks, lets_go, sees):
    step = made(comes, breaks, lets_go, sees)
    captured = capture(step, backend="eager")
    for _ in range(3):
        want, found = step(torch.ones(2), state()), captured(torch.ones(2), state())
        assert found[1] == want[1] and torch.equal(found[0], want[0])


def test_values_are_taken_out_of_the_list():
    """What is left to is given the only list that holds them."""
    thing = Thing([])
    held, log = weakref.ref(thing), thing.log

    def goes_on(values):
        values.clear()
        return held() is None, log

    def leaves():
        nonlocal thing
        mine, thing = thing, None
        return leave_to(goes_on, mine)

    assert finish(leaves()) == (True, ["gone"])
    with pytest.raises(TypeError, match="needs a callable"):
        leave_to()
