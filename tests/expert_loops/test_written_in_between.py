"""A write in place into anything that an expert layer computes, at any line of it: captured as plain, with gradients
and without, or an error where plain Python has one too."""

from __future__ import annotations

import ast
import inspect
import linecache
import random
import textwrap

import pytest
import torch
from module_spellings import MODULES
from spellings import SPELLINGS, E, K, Spelling
from table import Runner, layer
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode

import moebius
from moebius.lowering.experts import proof, unrolled_loops

WRITES = ["{0}.mul_(1.25)", "{0}[0] = 0.5", "{0}.add_(0.1)", "{0}.zero_()", "{0}.clamp_(max=1)",
          "{0}.view(-1)[:3].mul_(2)", "{0}.detach().mul_(1.5)"]  # fmt: skip


def places(block, names=()):
    """(statements, where to insert, a name that has a value there)."""
    names = set(names)
    for i, statement in enumerate(block):
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.For) else targets
        bound = {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        for part in ("body", "orelse"):
            if not isinstance(statement, ast.FunctionDef):
                yield from places(getattr(statement, part, []), names | bound)
        if isinstance(statement, ast.Assign):
            names |= bound
        if not isinstance(statement, ast.Return | ast.Continue):
            yield from ((block, i + 1, name) for name in sorted(names))


def written(name, rng, number):
    """A spelling with a write somewhere; None where there is no place for one."""
    function = {**SPELLINGS, **MODULES}[name].function
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree.body[0].decorator_list = []
    found = list(places(tree.body[0].body))
    if not found:
        return None
    block, at, variable = rng.choice(found)
    block.insert(at, ast.parse(rng.choice(WRITES).format(variable)).body[0])
    text = ast.unparse(ast.fix_missing_locations(tree))
    file = f"<written spellings.py {number}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    namespace = dict(function.__globals__)
    exec(compile(text, file, "exec"), namespace)
    return namespace[function.__name__], text


class Filled(TorchFunctionMode):
    """``torch.empty`` and its like hold one number."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made.fill_(self.number) if func.__name__.startswith(("empty", "new_empty")) else made


def reads_what_nobody_wrote(modules, seed):
    """Whether the result hangs on what was in memory before: nothing can be asked of it."""
    results = []
    for number in (0, 1):
        runner = Runner("under_test")
        if modules:
            runner.layers = (layer(), layer())
        with Filled(number), torch.no_grad():
            results.append(runner.function(*runner.inputs(1, seed)[0]))
    return not torch.equal(*results)


def compare(function, modules, frozen, text=""):
    """None where plain Python fails, or reads what nobody wrote; else the captured function gives the same."""
    home = MODULES if modules else SPELLINGS
    home["under_test"] = Spelling(function, "")
    moebius.reset()
    try:
        runner = Runner("under_test")
        for seed in (0, 3):
            if modules:
                runner.layers = (layer(), layer(), layer())
            results = []
            for which, run in ((1, runner.function), (0, runner.captured)):
                given, leaves = runner.inputs(which, seed)
                if frozen:
                    for _, leaf in leaves:
                        leaf.requires_grad_(False)
                try:
                    out = run(*given)
                    if not isinstance(out, torch.Tensor):
                        return
                    if not frozen:
                        out.square().sum().backward()
                except Exception:
                    if which == 1:
                        return
                    raise
                results.append([out, *(leaf.grad for _, leaf in leaves)])
            if "empty" in text and reads_what_nobody_wrote(modules, seed):
                return
            for plain, ours in zip(*results, strict=True):
                assert (plain is None) == (ours is None), text
                if plain is not None:
                    torch.testing.assert_close(
                        ours, plain, rtol=1e-9, atol=1e-10, equal_nan=True, msg=lambda m: f"{m}\n{text}"
                    )
    finally:
        del home["under_test"]


@pytest.mark.share(2)
@pytest.mark.parametrize("number", range(12))
def test_any_line(number):
    rng = random.Random(number)
    for iteration in range(4):
        name = rng.choice([*SPELLINGS, *MODULES])
        made = written(name, rng, f"{number} {iteration}")
        if made is not None:
            compare(made[0], name in MODULES, rng.random() < 0.5, made[1])


def behind_a_branch(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    mask = one_hot(index, num_classes=len(moe.experts)).permute(2, 0, 1)
    for e in range(len(moe.experts)):
        token, slot = torch.where(mask[e])
        if token.numel() > 0:
            out.index_add_(0, token, moe.experts[e](x[token]) * weight[token, slot].unsqueeze(-1))
        weight.detach().mul_(1.5)
    return out


def gates_in_each_iteration(x, moe):
    weight, index = moe.route(x)
    gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(-1, index, weight)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        mask = (index == i).any(dim=-1)
        gates.view(-1)[:3].mul_(2)
        if mask.any():
            out[mask] += expert(x[mask]) * gates[mask, i].unsqueeze(1)
    return out


def weights_after_the_loop(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where(index == i)
        out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
    weight.mul_(K)
    return out + weight.sum()


def positions_of_one_tensor(x, moe):
    weight, index = moe.route(x)
    out = torch.zeros_like(x)
    for i, expert in enumerate(moe.experts):
        token, slot = torch.where(index == i)
        slot.zero_()
        out = out.index_add(0, token, expert(x[token]) * weight[token, slot, None])
    return out


@pytest.mark.share(2)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "function", [behind_a_branch, gates_in_each_iteration, weights_after_the_loop, positions_of_one_tensor]
)
def test_found_so(function, frozen):
    compare(function, True, frozen)


@pytest.mark.parametrize("written", [False, True])
def test_memory_that_nobody_wrote_is_told(written):
    def some_rows(x, moe):
        out = torch.empty_like(x)
        out[: len(x) if written else 1] = moe.experts[0](x)[: len(x) if written else 1]
        return out

    MODULES["under_test"] = Spelling(some_rows, "")
    try:
        assert reads_what_nobody_wrote(True, 0) is not written
    finally:
        del MODULES["under_test"]


def test_what_branches_read_counts(monkeypatch):
    original = unrolled_loops.Builder.check_order

    def careless(self):
        captured, self.captures = self.captures, {}
        original(self)
        self.captures = captured

    monkeypatch.setattr(unrolled_loops.Builder, "check_order", careless)
    with pytest.raises(AssertionError):
        compare(behind_a_branch, True, True)


def test_what_is_kept_counts(monkeypatch):
    monkeypatch.setattr(proof, "writer_before_backward", lambda *_: None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        compare(weights_after_the_loop, True, False)
