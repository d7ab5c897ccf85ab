"""Numbers that the sides of a branch on values compute: every kind × what each side leaves × where × the condition ×
what the step does with it then, as plain Python has them. Where nobody has to know the number, in one graph."""

from __future__ import annotations

import itertools
import linecache
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.regions import chosen_numbers

CALLS = 10
CONDITIONS = {
    "tensor": "x.sum() > 0",
    "number": "v > 0",
    "kept": "v < kept.best",
    "asked_of_tensor": "x.sum() < kept.best",
    "counted": "kept.count > 2",
}
PLACES = {"local": "n", "attribute": "kept.{0}", "entry": "kept.table['{0}']", "item": "kept.{0}s[1]"}
# kind -> the name of what is kept, and what a side may leave: constants, what was there, what is computed of it
LEFT = {
    "float": ("best", ("2.5", "v", "v * 0.9", "{old} - v", "max({old}, v)", "x.sum().item()", "v / 2", "-{old}")),
    "int": ("count", ("3", "{old} + 1", "0", "{old} * 2 - 1", "min({old}, 4)")),
    "bool": ("flag", ("True", "False", "v > 1.0", "not {old}")),
    "either": ("rate", ("1", "0.5", "True", "v", "2", "{old} * 2", "{old} - 0.5")),
}
SIDES = {
    "one": "if {c}:\n    {p} = {a}",
    "two": "if {c}:\n    {p} = {a}\nelse:\n    {p} = {b}",
    "ternary": "{p} = {a} if {c} else {b}",
    "elif": "if {c}:\n    {p} = {a}\nelif v < -0.5:\n    {p} = {b}",
    "nested": "if {c}:\n    if v > 0.5:\n        {p} = {a}\n    else:\n        {p} = {b}",
    "a_tensor_as_well": "if {c}:\n    x = x * 2\n    {p} = {a}\nelse:\n    {p} = {b}",
    "behind_a_branch": "if {c}:\n    if v > 0.5:\n        x = x * 2\n    {p} = {a}",
    "returns": "def of(x):\n    for k in (1.0, 2.0):\n        if x.sum() * k > v and {c}:\n            return x - 1, "
    "{a}\n    return x, {b}\nx, {p} = of(x)",
    "behind_a_write": "if {c}:\n    x.mul_(3)\n    {p} = {a}",
}
USES = {
    "returned": "return {p}, x",
    "compared": "y = x * 2 if {p} >= 1 else x - 1\nreturn y, {p}",
    "computed_with": "return {p} * v, x",
    "scales": "return x * {p}",
    "said": "return '{{}}'.format({p}), x",
    "told_apart": "return {p} is True, isinstance({p}, int), type({p}).__name__, x",
    "indexes": "return (x, x[:2], x[1:])[int({p} > 1)], {p}",
    "counts_loops": "for _ in range(int({p}) % 3):\n    x = x + 1\nreturn x, {p}",
}
IN_ONE_GRAPH = ("returned", "computed_with")


def program(kind: str, place: str, condition: str, sides: str, a: str, b: str, use: str) -> Callable[..., Any]:
    name, _ = LEFT[kind]
    kept = PLACES["attribute"].format(name)
    p = PLACES[place].format(name)
    old = kept if place == "local" else p
    lines = ["v = x.sum().item()", f"n = {kept}"]
    lines += SIDES[sides].format(c=CONDITIONS[condition], p=p, a=a.format(old=old), b=b.format(old=old)).splitlines()
    lines += [f"{kept} = {p}"] if place == "local" else []
    lines += USES[use].format(p=p).splitlines()
    text = "def step(x, kept):\n" + "".join(f"    {line}\n" for line in lines)
    file = f"<{kind} {place} {condition} {sides} {a} {b} {use}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    namespace: dict[str, Any] = {}
    exec(compile(text, file, "exec"), namespace)
    return namespace["step"]


def cases() -> list[tuple[str, ...]]:
    found = []
    for kind, place, condition, sides, use in itertools.product(LEFT, PLACES, CONDITIONS, SIDES, USES):
        for a, b in itertools.permutations(LEFT[kind][1], 2):
            found.append((kind, place, condition, sides, a, b, use))
    return found


def things() -> SimpleNamespace:
    kept = SimpleNamespace(best=1e9, count=0, flag=False, bests=[0.0, 1e9, 2.0], counts=[7, 0, 7], flags=[True, False])
    kept.rate, kept.rates = 1, [0.5, 1]
    kept.table = {"best": 1e9, "count": 0, "flag": False, "rate": 1}
    return kept


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)


def compared(step: Callable[..., Any], said: str) -> Any:
    captured, kept, wanted = capture(step, backend="eager"), things(), things()
    generator = torch.Generator().manual_seed(3)
    for x in torch.randn(CALLS, 3, generator=generator):
        assert same(captured(x.clone(), kept), step(x.clone(), wanted)), said
        assert kept == wanted, said
    return captured


CHOSEN = random.Random("numbers of sides").sample(cases(), 1600)


@pytest.mark.share(8)
@pytest.mark.parametrize("case", CHOSEN, ids="-".join)
def test_as_plain_python_has_them(case: tuple[str, ...]) -> None:
    captured = compared(program(*case), str(case))
    sides, use = case[3], case[6]
    of_tensors = sides in ("a_tensor_as_well", "behind_a_branch", "behind_a_write", "returns")
    if use not in IN_ONE_GRAPH or of_tensors or "item()" in "".join(case[4:6]):
        return
    if use == "computed_with" and case[0] != "float":
        return  # (an int of which nothing is known, times a float)
    if case[0] == "either" and "{old}" in "".join(case[4:6]):
        return  # (nor does an int of which nothing is known have a half less)
    assert report_of(captured_of(captured)).breaks == [], case
    assert not any(r.guard == "branch on data" for r in stats(captured).recompiles), case


RAISING = ("1.0 / v", "v % v", "v ** -1.0", "n / v", "1e300 ** v", "(n + 10 ** 400) * 0.5", "x[1].item()")


@pytest.mark.parametrize("computed", RAISING)
def test_what_may_raise_does_so_where_its_side_runs_alone(computed: str) -> None:
    def runs(runner: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Any]:
        namespace: dict[str, Any] = {}
        text = f"def step(x, n):\n    v = x.item()\n    if v != 0:\n        n = {computed}\n    return n"
        exec(text, namespace)
        step, found = runner(namespace["step"]), []
        for value in (2.0, 0.0, 3.0, 0.0, 1000.0):
            try:
                found.append(step(torch.tensor([value]), 5))
            except Exception as error:
                found.append((type(error), str(error)))
        return found

    assert runs(lambda f: capture(f, backend="eager")) == runs(lambda f: f)


def test_a_number_is_read_behind_a_branch_in_a_side() -> None:
    for condition in CONDITIONS:
        case = ("float", "attribute", condition, "behind_a_branch", "x.sum().item()", "v", "returned")
        compared(program(*case), str(case))


@pytest.mark.parametrize("kind", LEFT)
def test_switched_off_the_branch_leaves_the_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = program(kind, "attribute", "number", "two", *LEFT[kind][1][:2], "returned")
    monkeypatch.setattr(chosen_numbers, "KINDS", chosen_numbers.KINDS - {float, int, bool})
    assert any(r.guard == "branch on data" for r in stats(compared(step, kind)).recompiles)
