"""``for …: if condition on values: …; return``: which iteration ends the loop only the running step knows.

Loops × branches × what is returned, each with several thresholds, so that every iteration is once the last.
"""

from __future__ import annotations

import functools
import linecache

import pytest
import torch
from plain_python import graph_breaks

from moebius import capture, stats

LOOPS = {
    "a list": "for a in xs:",
    "a tuple": "for a in (x, y, x + y):",
    "enumerated": "for i, a in enumerate(xs):",
    "zipped": "for a, b in zip(xs, [y, x, y]):",
    "a range": "for i in range(3):\n        a = xs[i]",
    "backward": "for a in reversed(xs):",
    "two lists": "for a, i in zip(xs, range(3)):",
    "functions": "for f in (torch.sin, torch.cos):\n        a = f(x)",
    "held by a name": "its = iter(xs)\n    for a in its:",
    "held in a list": "for a in held[0]:",
    "zipped of one": "its = iter(xs)\n    for a, b in zip(its, its):",
    "nested": "for b in (x, y):\n      for a in (b, b * 2):",
    "a while": "i = -1\n    while i < 2:\n        i += 1\n        a = xs[i]",
    "generated": "for a in (b * 2 for b in xs):",
    "rows": "for a in torch.stack(xs):",
    "hits": "for h in (x + y > 0).nonzero()[:, 0]:\n        a = x * h + y",
}
BRANCHES = {
    "returns": "if a.sum() > limit:\n            t, w = a * 2, 0.1\n            return t, w",
    "returns in place": "if a.sum() > limit:\n            t -= a\n            w = 0.25\n            return t, w",
    "goes on": "if a.sum() <= limit:\n            continue\n        return a * 3, w",
    "adds up": "t = t + a\n        if t.sum() > limit:\n            return t * 2, w",
    "counts": "w = w * 0.5\n        if (a * w).sum() > limit:\n            return t + a, w",
    "else": "if a.sum() > limit:\n            return t * 2, w\n        else:\n            t = t + a",
    "twice": "if a.sum() > limit:\n            return t * 2, 0.5\n"
    "        if a.sum() < -limit:\n            return t * 4, 0.75",
    "other types": "if a.sum() > limit:\n            return t * 2, None",
    "an int": "if a.sum() > limit:\n            return t * 2, 3",
    "a break": "if a.sum() > limit:\n            t = t * 2\n            break",
}
AFTER = {
    "the same": "return t, w",
    "else of the loop": "else:\n        t = t + 1\n    return t, w",
    "a name": "r = t, w\n    return r",
}


def made(loop, branch, after):
    source = "def leaves(x, y, limit, held):\n    t, w, xs = x.clone(), 1.0, [x, y, x + y]\n"
    source += f"    {LOOPS[loop]}\n        {BRANCHES[branch]}\n    {AFTER[after]}\n"
    source += "def step(x, y, limit):\n    held = [iter([x, y, x * 2])]\n    t, w = leaves(x, y, limit, held)\n"
    source += "    y.mul_(0.5)\n    return t * (0.5 if w is None else w), w, [*held[0]]\n"
    name = f"<{hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace = {"torch": torch}
    exec(compile(source, name, "exec"), namespace)
    return namespace["step"]


def shown(value):
    if isinstance(value, list | tuple):
        return [*map(shown, value)]
    return value.tolist() if isinstance(value, torch.Tensor) else (type(value).__name__, value)


@pytest.mark.share(8)
@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("loop", LOOPS)
def test_as_plain_python(loop, branch):
    for after in AFTER:
        plain = made(loop, branch, after)
        step = capture(plain, backend="eager")
        for call in range(8):
            generator = torch.Generator().manual_seed(call)
            x, y = torch.randn(3, generator=generator), torch.randn(3, generator=generator)
            both = [(x.clone(), y.clone()) for _ in range(2)]
            limit = (0.0, 1.0, -1.0)[call % 3] + 0 * call
            found = [shown(run(*given, limit)) for run, given in zip((step, plain), both, strict=True)]
            assert found[0] == found[1], (after, call)
            assert shown(both[0]) == shown(both[1]), (after, call)
        assert not any("Recursion" in one.detail for one in graph_breaks(step)), after


@pytest.mark.share(16)
@pytest.mark.parametrize("branch", ["returns", "returns in place", "goes on", "adds up", "else"])
@pytest.mark.parametrize("loop", ["a list", "a tuple", "enumerated", "zipped", "a range", "backward", "functions"])
def test_one_graph_for_all_ways(loop, branch):
    step = capture(made(loop, branch, "the same"), backend="eager")
    for call in range(12):
        generator = torch.Generator().manual_seed(call)
        step(torch.randn(3, generator=generator), torch.randn(3, generator=generator), 0.5)
    assert stats(step).hits == 11 and stats(step).graphs == 1 and stats(step).breaks == 0


ALONE = {
    "a tuple": "for a in (x, y):",
    "enumerated": "for i, a in enumerate([x, y], start=1):",
    "enumerated and zipped": "for i, (a, b) in enumerate(zip([x, y], reversed([y, x]))):",
    "zipped and enumerated": "for a, (i, b) in zip([x, y], enumerate([y, x])):",
    "a range": "for i in range(2):\n        a = (x, y)[i]",
}
HELD = {  # ``it`` is the iterator, which the caller reads from afterwards; what the loop runs over
    "by a name": ("iter([x, y])", "a in it"),
    "an enumerate": ("enumerate([x, y])", "i, a in it"),
    "within a zip": ("iter([x, y, x])", "a, b in zip(it, [x, y])"),
    "by an enumerate within": ("enumerate([x, y])", "a, (i, b) in zip([x, y], it)"),
    "chosen": ("enumerate([x, y])", "i, a in (it if limit else enumerate([y, x]))"),
    "by a list": ("enumerate([x, y])", "i, a in [it].pop()"),
    "by its class": ("keep(iter([x, y]))", "a in Again()"),
    "by its class, backward": ("keep(reversed([x, y]))", "a in reversed(Again())"),
    "by a cache": ("kept((x, y))", "i, a in kept((x, y))"),
    "by its maker": ("first(x, y, listed := [])", "i, a in first(x, y, listed)"),
}


class Again:
    def __iter__(self):
        return self.held

    __reversed__ = __iter__


def keep(it):
    Again.held = it
    return it


def first_made(x, y, listed):
    if not listed:
        listed.append(enumerate([x, y]))
    return listed[0]


def loop_in(opening, before=""):
    kept = functools.lru_cache(enumerate)
    namespace = {"torch": torch, "Again": Again, "kept": kept, "keep": keep, "first": first_made}
    source = f"def leaves(x, y, limit, held):\n    t = x.clone()\n    {before}\n    {opening}\n"
    source += "        if a.sum() > limit:\n            return t * 2\n        t = t + a\n    return t\n"
    source += "def step(x, y, limit):\n    held = []\n    return leaves(x, y, limit, held), [*held[0]]\n"
    name = f"<{hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("opening", ALONE)
def test_the_captured_function_itself_is_one_graph(opening):
    plain = loop_in(ALONE[opening])["leaves"]
    step = capture(plain, backend="eager")
    for call in range(12):
        generator = torch.Generator().manual_seed(call)
        x, y = torch.randn(3, generator=generator), torch.randn(3, generator=generator)
        assert torch.equal(step(x, y, 0.5, []), plain(x, y, 0.5, [])), call
    assert stats(step).hits == 11 and stats(step).graphs == 1 and stats(step).breaks == 0


@pytest.mark.parametrize("opening", HELD)
def test_who_else_has_the_iterator_sees_how_far_it_went(opening):
    it, over = HELD[opening]
    # (two of them: from a cache that they share one would take all)
    plain, own = (loop_in(f"for {over}:", f"it = {it}; held[:] = [it]")["step"] for _ in range(2))
    step = capture(own, backend="eager")
    for call in range(8):
        generator = torch.Generator().manual_seed(call)
        x, y = torch.randn(3, generator=generator), torch.randn(3, generator=generator)
        assert shown(step(x, y, 0.5)) == shown(plain(x, y, 0.5)), call


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_gradients(backend):
    layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))

    def halts(x):
        for i, layer in enumerate(layers):
            x = torch.tanh(layer(x))
            if x.norm() < 0.9:
                return x * (i + 1), 0.5
        return x, 2.0

    def step(x):
        layers.zero_grad()
        y, weight = halts(x)
        loss = (y * weight).square().sum()
        loss.backward()
        return loss.detach()

    run, ways = capture(step, backend=backend), set()
    for call in range(12):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(call)) * (0.2 + call / 8)
        found = []
        for one in (run, step):
            loss = one(x)
            found.append([loss, *(torch.zeros(0) if p.grad is None else p.grad.clone() for p in layers.parameters())])
        assert all(map(torch.equal, *found)), call
        ways.add(sum(part.numel() > 0 for part in found[1]))
    assert len(ways) > 1
