"""Numbers that only the running step has: operators and builtins give Python's value, of Python's type, or its error.

The step catches what an expression raises, as programs do: an error of the tracer's own would be taken for Python's.
"""

from __future__ import annotations

import math
import operator
import os
import zlib

import pytest
import torch

from moebius import capture, stats

SOURCES = {
    "count": "(x > 0).sum().item()",
    "size": "x.shape[0]",
    "float": "x.sum().item()",
    "rows": "x.nonzero().shape[0]",
    "answer": "(x.sum() > 7).item()",
    "question": "(x.shape[0] > 4)",
}
OTHERS = ["2", "1.5", "True", "n", "'a'", "[1, 3]", "None", "1j", "-1", "0", "3"]
OPERATORS = [*"+ - * / // % ** << >> & | ^ @ == != < <= > >= is in and or".split(), "is not", "not in"]
UNARIES = ["~n", "-n", "+n", "not n", "~(n > 2)", "-(n > 2)"]
QUESTIONS = [
    f"(n > 2) {rest}"
    for rest in ("is True", "== True", "< 1", "& (n < 9)", "| (n < 9)", "^ (n < 9)", "+ 1", "* n", "/ 2")
]
CALLS = [
    f"{name}({given})"
    for name in "abs bin bool chr complex divmod float format hash hex int iter len list max min next oct ord pow repr "
    "range reversed round set slice sorted str sum tuple type callable ascii any all".split()
    for given in ("n", "n, 2", "2, n", "n, n", "[n, 1]", "[n, 4.5]", "n, 'd'", "1.26, n", "n > 2")
]
MATHS = [
    f"math.{name}({given})"
    for name in dir(math)
    if not name.startswith("_")
    for given in ("n", "n, 2", "2, n", "n, 1.5", "[n, 1]")
]
FUNCTIONS = [
    f"operator.{name}({given})"
    for name in operator.__all__
    if name not in ("attrgetter", "itemgetter", "methodcaller")
    for given in ("n", "n, 2", "2, n", "n, 1.5", "n, True", "[1, 2, 3], n")
]
METHODS = [
    f"n.{name}({given})"
    for name in sorted({*dir(int), *dir(float)} - set(dir(object)) - {"__getnewargs__"})
    for given in ("", "2", "1.5")
]
SPELLINGS = [
    "f'{n}'", "f'{n:05.1f}'", "f'{n!r:>4}'", "f'{n:x}'", "'%d' % n", "'%s %r' % (n, n)", "'{:e}'.format(n)", "n.real",
    "n.imag", "n.numerator", "{n: 1}[3]", "{3: 1}[n]", "[1, 2, 3, 4, 5][n]", "[1, 2, 3, 4, 5][-n:]", "'abcdef'[:n]",
    "[i for i in range(n)]", "1 < n < 5", "type(n)", "isinstance(n, (int, float))", "isinstance(n, bool)", "{n}",
    "int('12', n + 5)", "max(n, 2, key=lambda v: -v)", "pow(2, n, 5)", "range(n).index(1)", "range(0, 10, n)[1]",
]  # fmt: skip
BINARIES = [f"{a} {op} {b}" for op in OPERATORS for other in OTHERS for a, b in (("n", other), (other, "n"))]
EXPRESSIONS = list(dict.fromkeys([*UNARIES, *QUESTIONS, *SPELLINGS, *BINARIES, *CALLS, *MATHS, *FUNCTIONS, *METHODS]))
XS = (torch.tensor([1.0, 2.0, -1.0, 3.0]), torch.tensor([1.0, 2.0, 4.0, 3.0, -2.0]))


def step_of(kind: str, expression: str):
    source = (
        "def step(x, said):\n"
        f"    n = {SOURCES[kind]}\n"
        f"    try: said.append(repr({expression}))\n"
        "    except Exception as error: said.append(type(error).__name__)\n"
        "    return x * 1\n"
    )
    names = {"math": math, "operator": operator}
    exec(compile(source, f"<{kind}: {expression}>", "exec", dont_inherit=True), names)
    return names["step"]


def differences(kind: str, expressions: list[str]) -> list[tuple[str, str, str]]:
    found = []
    for expression in expressions:
        step = step_of(kind, expression)
        captured = capture(step, backend="eager", dynamic=True if kind in ("size", "question") else None)
        for x in XS:
            mine, plain = [], []
            captured(x, mine)
            step(x, plain)
            if mine != plain and " at 0x" not in plain[0]:
                found.append((expression, *mine, *plain))
    return found


def some(kind: str) -> list[str]:
    """One in sixteen of the table, others for each kind; all with MOEBIUS_NUMBERS=all."""
    if os.environ.get("MOEBIUS_NUMBERS") == "all":
        return EXPRESSIONS
    return [e for e in EXPRESSIONS if (zlib.crc32(e.encode()) + len(kind)) % 16 == 0]


@pytest.mark.share(1)
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_a_number_of_the_step_is_pythons(kind):
    assert differences(kind, [*UNARIES, *QUESTIONS, *some(kind)]) == []


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    ("kind", "expression"),
    [
        ("count", "min([n, 4.5])"),
        ("count", "max(1.26, n)"),
        ("count", "n << 1.5"),
        ("count", "n == True"),
        ("count", "(n > 2) == True"),
        ("count", "(n > 2) is True"),
        ("answer", "n | True"),
        ("answer", "n is True"),
    ],
)
def test_what_was_wrong_once(kind, expression):
    assert differences(kind, [expression]) == []


def test_answers_of_the_step_stay_in_the_graph():
    """``found = a.any().item() & b.all().item()``, as logging code has it."""

    def step(x, y, out):
        out.append((x > 1).any().item() & (y > 1).all().item() | (x.sum() > 100).item())
        return x + y

    captured = capture(step, backend="eager", fullgraph=True)
    for x, y in (
        (torch.zeros(3), torch.ones(3)),
        (torch.full((3,), 2.0), torch.full((3,), 2.0)),
        (torch.full((3,), 99.0), torch.full((3,), 99.0)),
    ):
        mine, plain = [], []
        assert torch.equal(captured(x, y, mine), step(x, y, plain))
        assert mine == plain and type(mine[0]) is bool
    assert stats(captured).graphs == 1


def test_the_table_is_not_small():
    assert len(EXPRESSIONS) > 1200 and all(len(some(kind)) > 50 for kind in SOURCES)
