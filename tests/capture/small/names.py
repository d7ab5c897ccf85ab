"""Functions over models and tensors that globals, cells, dicts, lists and objects name, the names given anew between
two calls: each answer is plain Python's, and what has no name any more dies."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import torch
from fuzz.choices import Choices, pick
from torch import nn

from moebius import capture, reset, stats

CALLS = 6
READS = (
    "m1(x)", "m2(x)", "m3(x)", "d['a'](x)", "l[0](x)", "box.m(x)", "x * t1", "x * d['b']", "x + l[1]", "x - box.t",
    "m1[0].weight.sum() + x", "cellm(x)", "x * cellt", "(m1 is m3) * x", "len(list(m1.parameters())) * x",
    "d.get('a', m1)(x)", "sum(p.sum() for p in box.m.parameters()) + x",
)  # fmt: skip
EFFECTS = (
    "t1 = t1 * 0.5 + x.mean(0)", "m1, m2 = m2, m1", "d['b'] = x[0] * 1", "box.t = box.t + 1", "l[1] = x[1] + 0",
    "m3 = m2", "d['a'] = m1", "box.m.train(not box.m.training)", "cellt = cellt + 1",
)  # fmt: skip
HEAD = """\
def make(net):
    cellm, cellt = net(9), torch.ones(3)
    def give(model):
        nonlocal cellm
        cellm = model
    def held():
        return cellm, cellt
    def step(x):
        global m1, m2, m3, t1
        nonlocal cellt
"""


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def generate(choices: Choices) -> str:
    lines = []
    for _ in range(2 + choices.below(6)):
        reads = choices.below(10) < 7
        lines.append(f"x = x + {pick(choices, READS)}" if reads else pick(choices, EFFECTS))
    if choices.below(10) < 3:
        lines.insert(choices.below(len(lines) + 1), "float(x.detach().sum())")
    return HEAD + "".join(f"        {line}\n" for line in lines) + "        return x\n    return step, give, held\n"


class World:
    """One program with what it names."""

    def __init__(self, source: str):
        self.box = types.SimpleNamespace(m=net(5), t=torch.ones(3))
        self.names: dict[str, Any] = {
            "torch": torch, "m1": net(1), "m2": net(2), "t1": torch.ones(3), "d": {"a": net(3), "b": torch.ones(3)},
            "l": [net(4), torch.ones(3)], "box": self.box,
        }  # fmt: skip
        self.names["m3"] = self.names["m1"]
        exec(compile(source, "<program>", "exec"), self.names)
        self.step, self.give, self.held = self.names["make"](net)

    def named(self) -> dict[str, Any]:
        """What may be given another name, or lose its only one."""
        names = self.names
        return {
            "m1": names["m1"], "m2": names["m2"], "m3": names["m3"], "t1": names["t1"], "d['a']": names["d"]["a"],
            "d['b']": names["d"]["b"], "l[0]": names["l"][0], "l[1]": names["l"][1], "box.m": names["box"].m,
            "box.t": names["box"].t, "cellm": self.held()[0], "cellt": self.held()[1],
        }  # fmt: skip

    def give_anew(self, kind: str, seed: int) -> None:
        names = self.names
        if kind == "cellm":
            self.give(net(seed))
        elif kind in ("t1", "d['b']", "l[1]", "box.t"):
            exec(f"{kind} = torch.full((3,), {float(seed)})", names)
        elif kind == "box":
            names["box"] = types.SimpleNamespace(m=net(seed), t=torch.ones(3) * 2)
        elif kind == "d":
            names["d"] = {"a": net(seed), "b": torch.ones(3) * 3}
        elif kind == "l":
            names["l"] = [net(seed), torch.ones(3) * 4]
        elif kind == "shared":
            names["m3"], names["d"]["a"] = names["m1"], names["box"].m
        elif kind == "layer":
            names["m1"][0] = nn.Linear(3, 3)
            names["m1"][0].load_state_dict(net(seed)[0].state_dict())
        else:
            names["made"] = net(seed)
            exec(f"{kind} = made; del made", names)

    def state(self) -> str:
        values = list(self.named().values())
        shown = [list(v.state_dict().values()) if isinstance(v, nn.Module) else v for v in values]
        alike = [a is b for i, a in enumerate(values) for b in values[:i]]
        return repr([shown, alike, self.names["box"].m.training])


KINDS = (
    "m1", "m2", "m3", "t1", "d['a']", "d['b']", "l[0]", "l[1]", "box.m", "box.t", "cellm", "box", "d", "l", "shared",
    "layer",
)  # fmt: skip
DIE = frozenset({"m1", "m2", "t1", "d['a']", "box.m", "cellm"})  # at once, the others with the next call


def last_named(world: World, kind: str) -> weakref.ref | None:
    """What is about to lose its name, if that is its only one."""
    held = world.named()
    value = held.get(kind)
    return None if value is None or sum(other is value for other in held.values()) > 1 else weakref.ref(value)


def difference(source: str, choices: Choices) -> tuple[str, int]:
    """What differs between the program captured and plain, or lives though nothing names it, and how many graphs."""
    reset()
    gc.collect()
    gc.freeze()  # what is there by now need not be looked through after each change
    try:
        return difference_of(World(source), World(source), choices)
    finally:
        gc.unfreeze()


def difference_of(ours: World, plain: World, choices: Choices) -> tuple[str, int]:
    captured = capture(ours.step, backend="eager")
    for number in range(CALLS):
        x = torch.full((2, 3), float(number))
        got, expected = captured(x), plain.step(x)
        if not torch.equal(got, expected) or ours.state() != plain.state():
            return f"call {number}: {got.tolist()} captured, {expected.tolist()} plain", 0
        del got, expected
        kind = pick(choices, KINDS)
        references = [last_named(world, kind) for world in (ours, plain)]
        for world in (ours, plain):
            world.give_anew(kind, number + 20)
        if kind in DIE and references[0] is not None:
            gc.collect()
            lives, lived = (reference is not None and reference() is not None for reference in references)
            if lives and not lived:  # (a graph of autograd's may keep a tensor)
                return f"call {number}: {kind} lives on", 0
    return "", stats(captured).graphs
