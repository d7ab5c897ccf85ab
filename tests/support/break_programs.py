"""Programs with a graph break in a given place: one construct of Python's inside another, and the break inside both.

Each construct holds a block of statements over the name ``y``; what it needs besides (a function, a class) is written
at the module's level. Everything that runs is logged, so that what runs twice or not at all shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from textwrap import indent
from typing import Any

import torch

import moebius

LOG: list[Any] = []


@moebius.disable
def native(y: torch.Tensor) -> torch.Tensor:
    """The break: it runs as plain Python."""
    LOG.append("native")
    return y * 2 + 1


class Managed:
    """A context that holds a KeyError back."""

    def __enter__(self) -> Managed:
        LOG.append("enter")
        return self

    def __exit__(self, kind: Any, error: Any, place: Any) -> bool:
        LOG.append(("exit", kind and kind.__name__))
        return kind is KeyError


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        LOG.append("before")
        try:
            return function(*args, **kwargs)
        finally:
            LOG.append("after")

    return wrapper


def drive(coroutine: Any) -> Any:
    """The coroutine's result; nothing in it waits."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value


# [name], then what is written at the module's level, a line of dashes, and the statements. N: a number of their own
TEXT = """
[plain]
BODY
[for]
for i in range(2):
    BODY
    LOG.append(i)
else:
    LOG.append('else')
[while]
nN = 0
while True:
    nN += 1
    if nN == 3:
        break
    BODY
    if nN == 1:
        continue
    LOG.append(nN)
[with]
with Managed() as held:
    BODY
    y = y - 1
LOG.append(type(held).__name__)
[with_error]
with Managed():
    BODY
    raise KeyError('k')
[try]
try:
    BODY
except ValueError:
    LOG.append('no')
else:
    y = y + 3
[try_error]
try:
    BODY
    raise ValueError('v')
except ValueError as errorN:
    LOG.append(str(errorN))
    y = y * 3
[except]
try:
    raise ValueError('v')
except ValueError as errorN:
    BODY
    LOG.append(str(errorN))
[finally]
try:
    y = y + 1
finally:
    BODY
    LOG.append('finally')
[finally_error]
try:
    try:
        raise ValueError('v')
    finally:
        BODY
except ValueError:
    LOG.append('caught')
[if]
if y.dim() == 2:
    BODY
else:
    y = y * 100
[comprehension]
def inN(y):
    BODY
    return y
---
y = sum([inN(y * k) for k in range(2)])
[genexpr]
def inN(y):
    BODY
    return y
---
y = sum(inN(y * k) for k in range(2))
[map]
def inN(y):
    BODY
    return y
---
y = sum(map(inN, [y, y + 1]))
[generator]
def inN(y):
    for k in range(2):
        BODY
        yield y + k
---
for y in inN(y):
    LOG.append('item')
[yield_from]
def deepN(y):
    BODY
    yield y
    return 5
def inN(y):
    got = yield from deepN(y)
    LOG.append(got)
---
for y in inN(y):
    y = y + 1
[property]
class InN:
    def __init__(self, y):
        self.y = y
    @property
    def value(self):
        y = self.y
        BODY
        return y
---
y = InN(y).value
[init]
class InN:
    def __init__(self, y):
        self.before = 1
        BODY
        self.y = y
---
made = InN(y)
y = made.y + made.before
[operator]
class InN:
    def __init__(self, y):
        self.y = y
    def __add__(self, other):
        y = self.y
        BODY
        return y + other
---
y = InN(y) + 1
[deep]
def innerN(y):
    BODY
    return y + 1
def middleN(y):
    return innerN(y * 2) - 1
def inN(y):
    y = middleN(y)
    return y * 3
---
y = inN(y)
[lambda]
def inN(y):
    BODY
    return y
---
y = (lambda t, k=2: inN(t) * k)(y)
[decorated]
@logged
def inN(y, *rest, scale=1):
    BODY
    return y * scale
---
y = inN(y, scale=3)
[recursion]
def inN(y, depth):
    if depth:
        return inN(y * 2, depth - 1) + depth
    BODY
    return y
---
y = inN(y, 2)
[closure]
def makeN(y):
    count = 0
    def step():
        nonlocal count, y
        count += 1
        BODY
        return y + count
    return step
---
step = makeN(y)
y = step() + step()
[async]
async def inN(y):
    BODY
    return y
---
y = drive(inN(y))
[module]
class InN(torch.nn.Module):
    def forward(self, y):
        BODY
        return y
moduleN = InN()
---
y = moduleN(y)
"""


def constructs() -> dict[str, tuple[str, str]]:
    found = {}
    for part in TEXT.strip().split("\n["):
        name, _, body = part.lstrip("[").partition("]\n")
        above, _, block = body.rpartition("\n---\n")
        found[name] = (above, block)
    return found


CONSTRUCTS = constructs()


def write(*names: str) -> str:
    """The source of ``step(x)``: each construct holds the next one, and the innermost one the break."""
    above, body = "", "y = native(y + 1)"
    for number, name in enumerate(reversed(names)):
        outside, block = (text.replace("N", str(number)) for text in CONSTRUCTS[name])
        above += hold(outside, body) + "\n"
        body = hold(block, body) if "BODY" in block else block
    return f"{above}\ndef step(x):\n    y = x * 2\n{indent(body, '    ')}\n    return y + x\n"


def hold(text: str, body: str) -> str:
    lines = []
    for line in text.splitlines():
        place = line.find("BODY")
        lines.append(line if place < 0 else indent(body, " " * place))
    return "\n".join(lines)


def program(*names: str) -> Callable[[torch.Tensor], Any]:
    source = write(*names)
    namespace: dict[str, Any] = {"__name__": "break_programs", "torch": torch}
    namespace |= {"LOG": LOG, "Managed": Managed, "logged": logged, "drive": drive, "native": native}
    exec(compile(source, f"<{' in '.join(reversed(names))}>", "exec"), namespace)
    return namespace["step"]


def outcome(step: Callable[[torch.Tensor], Any], rows: int) -> Any:
    """Result, gradient and log of one call."""
    LOG.clear()
    x = torch.linspace(-1, 1, rows * 2).reshape(rows, 2).requires_grad_()
    result = step(x)
    result.sum().backward()
    return result.tolist(), x.grad.tolist(), LOG.copy()
