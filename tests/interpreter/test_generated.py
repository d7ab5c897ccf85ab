"""Generated programs: hypothesis builds statements with effects, and each program runs natively and interpreted."""
from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "b", "c"])
LITERALS = st.sampled_from(["[1, 2]", "'xy'", "None", "True", "1.5", "{}", "(3, a)", "E(2)"])
ATOMS = st.one_of(st.integers(-2, 9).map(str), NAMES, LITERALS)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    operator = st.sampled_from(["+", "-", "*", "//", "%", "<", "==", "and", "or", "in", "is", "&", "|"])
    return st.one_of(
        st.tuples(inner, operator, inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda e: f"t(log, {e})"),
        inner.map(lambda e: f"(not {e})"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]}, *t(log, ({t[1]},))]"),
        st.tuples(inner, inner).map(lambda t: f"[({t[0]}, x) for x in range(3) if {t[1]}]"),
        st.tuples(inner, NAMES).map(lambda t: f"({t[1]} := {t[0]})"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]})[{t[1]}]"),
        st.tuples(inner, inner).map(lambda t: f"(lambda p, q={t[0]}: (p, q))({t[1]})"),
        NAMES.map(lambda n: f"f'<{{{n}!r:>5}}>'"),
        inner.map(lambda e: f"list(g(log, {e}))"),
    )


EXPRESSIONS = st.recursive(ATOMS, combined, max_leaves=5)


def indent(body: list[str]) -> str:
    return "\n".join("    " + line for block in body for line in block.splitlines())


TRY = "try:\n{}\nexcept {} as e:\n{}\n    {}\nelse:\n    t(log, 'else')\nfinally:\n{}"
LOOP = "for {} in [4, 0]:\n{}\n    if {}: {}\nelse:\n{}"
MATCH = "match {}:\n    case [x, *{}]:\n{}\n    case int() | None: log.append('int')\n    case E(n=x): log.append(x)"
FUNCTION = "def f(a, b):\n{}\n    return a\nlog.append(repr(f(b, c)))"


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=3).map(indent)
    leave = st.sampled_from(["pass", "return a", "raise", "raise KeyError(a)", "raise ValueError from None", "b += 1"])
    caught = st.sampled_from(["KeyError", "(TypeError, ValueError)", "Exception", "ZeroDivisionError"])
    exit_loop = st.sampled_from(["pass", "break", "continue", "return b"])
    return st.one_of(
        st.tuples(EXPRESSIONS, body, body).map(lambda t: f"if {t[0]}:\n{t[1]}\nelse:\n{t[2]}"),
        st.tuples(NAMES, body, EXPRESSIONS, exit_loop, body).map(lambda t: LOOP.format(*t)),
        st.tuples(body, caught, body, leave, body).map(lambda t: TRY.format(*t)),
        st.tuples(body, leave).map(lambda t: f"try:\n{t[0]}\nfinally:\n    {t[1]}"),
        st.tuples(EXPRESSIONS, body).map(lambda t: f"with W(log, {t[0]}) as b:\n{t[1]}"),
        body.map(lambda text: FUNCTION.format(text)),
        st.tuples(EXPRESSIONS, NAMES, body).map(lambda t: MATCH.format(t[0], t[1], indent([t[2]]))),
    )


SIMPLE = st.one_of(
    st.tuples(NAMES, EXPRESSIONS).map(lambda t: f"{t[0]} = {t[1]}"),
    st.tuples(NAMES, st.sampled_from(["+=", "*=", "-=", "//="]), EXPRESSIONS).map(" ".join),
    EXPRESSIONS.map(lambda e: f"log.append(repr({e}))"),
    EXPRESSIONS.map(lambda e: f"a, *b = {e}"),
    NAMES.map(lambda n: f"del {n}"),
    EXPRESSIONS.map(lambda e: f"assert {e}, 'no'"),
)
STATEMENTS = st.recursive(SIMPLE, nested, max_leaves=6)
HEAD = """
class E:
    def __init__(self, n): self.n = n
    def __add__(self, o): return E(self.n + o) if isinstance(o, int) else NotImplemented
    def __radd__(self, o): return ('radd', o)
    def __eq__(self, o): return isinstance(o, E)
    def __bool__(self): return self.n > 2
    def __getitem__(self, k): return (self.n, k)[k]
    def __iadd__(self, o): self.n += 1; return self
    def __repr__(self): return f'E({self.n})'
    __hash__ = None
class W:
    def __init__(self, log, v): self.log, self.v = log, v
    def __enter__(self): self.log.append('enter'); return self.v
    def __exit__(self, k, v, tb): self.log.append(('exit', k and k.__name__)); return self.v is None
def t(log, v):
    log.append(repr(v)); return v
def g(log, v):
    try:
        got = yield v
        log.append(got)
        if v: yield from range(2)
    finally:
        log.append('g')
def main(log):
    a, b, c = 1, [2], 'c'
"""


def test_generated_programs(same: Any) -> None:
    reached = {"ran": 0}

    @settings(max_examples=150, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(STATEMENTS, min_size=1, max_size=6))
    def check(body: list[str]) -> None:
        source = HEAD + indent(body) + "\n"
        try:
            compile(source, "<program>", "exec", dont_inherit=True)
        except SyntaxError:
            return
        reached["ran"] += 1
        same(source)

    check()
    assert reached["ran"] > 75
