"""Inputs that lie apart when a step is captured, and have memory in common in a later call: what reads one of them was
moved past what writes into the other, so another capture is needed. Guards say so."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
import torch
from torch import nn

from moebius import GuardError, capture, load, stats
from moebius.hook import memory_overlaps
from moebius.tensors import aliases
from moebius.torch_facts import spans
from moebius.torch_facts.torch_memory import calibrate_tensor_guards

T, D, E, K = 12, 8, 4, 2
WRITES = {
    "add_": "seen.add_(0.05)",
    "mul_": "seen.mul_(1.01)",
    "copy_": "seen.copy_(seen + 0.1)",
    "an item": "seen[e] += 0.5",
    "data": "seen.data.sub_(0.1)",
    "foreach": "torch._foreach_add_([seen], 0.1)",
    "out": "torch.add(seen, 0.1, out=seen)",
}
LOOPS = {  # a: before the expert, b: behind it
    "dense": ("out = out + layer.mlps[e](x) * gates[:, e, None]",),
    "masked": ("m = (index == e).any(-1)", "if m.any():", "    out[m] += layer.mlps[e](x[m]) * gates[m, e, None]"),
    "looked up": ("t = torch.where(index == e)[0]", "out.index_add_(0, t, layer.mlps[e](x[t]))"),
    "listed": ("m = (index == e).any(-1, keepdim=True)", "out = torch.where(m, out + layer.mlps[e](x), out)"),
    "stacked": ("t, k = torch.where(index == e)", "out.index_add_(0, t, (x[t] @ layer.w1[e]).relu() @ layer.w2[e])"),
}
WHERE = ("before", "behind")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(D, 16), nn.GELU(), nn.Linear(16, D)) for _ in range(E))
        self.w1, self.w2 = nn.Parameter(torch.randn(E, D, 16)), nn.Parameter(torch.randn(E, 16, D))


def written(loop, write, where):
    lines = [WRITES[write], *LOOPS[loop]] if where == "before" else [*LOOPS[loop], WRITES[write]]
    text = "\n".join((
        "def step(layer, x, seen):",
        "    weight, index = layer.gate(x).softmax(-1).topk(K)",
        "    out, gates = torch.zeros_like(x), torch.zeros(len(x), E).scatter(1, index, weight)",
        "    for e in range(E):",
        *(f"        {line}" for line in lines),
        "    return out",
    ))  # fmt: skip
    namespace = {"torch": torch, "E": E, "K": K}
    exec(compile(text, f"<{loop}, {write} {where}>", "exec"), namespace)
    return namespace["step"]


def places(kind, generator):
    """(x, seen, all memory)."""
    one, other = (torch.randn(20, D, generator=generator) for _ in range(2))
    x = one[:T]
    seen = {"apart": other[:T], "the same": one[:T], "shifted": one[4 : T + 4], "x itself": x}
    return x, seen[kind], (one, other)


def outcome(step, layer, kind):
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        x, seen, memory = places(kind, generator)
        return [step(layer, x, seen).clone(), *memory]


def compare(loop, write, where, kinds):
    torch.manual_seed(0)
    layer, step = Layer(), written(loop, write, where)
    captured = capture(step)
    for kind in kinds:
        for ours, plain in zip(outcome(captured, layer, kind), outcome(step, layer, kind), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    return stats(captured)


ORDERS = (("apart", "the same", "shifted", "apart"), ("shifted", "apart", "x itself", "shifted"), ("the same", "apart"))


@pytest.mark.share(13)
@pytest.mark.parametrize(
    ("loop", "write", "where", "kinds"), list(itertools.product(LOOPS, WRITES, WHERE, ORDERS)),
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)  # fmt: skip
def test_is_as_in_plain_python(loop, write, where, kinds):
    compare(loop, write, where, kinds)


def test_without_the_guard_it_is_wrong(monkeypatch):
    monkeypatch.setattr(aliases, "guard_overlaps", lambda *_: None)
    with pytest.raises(AssertionError):
        compare("dense", "add_", "before", ORDERS[0])


def test_those_that_overlapped_are_taken_for_such():
    """What lay in one memory when it was captured is never moved."""
    assert compare("dense", "add_", "before", ("shifted", "shifted")).graphs == 1


def test_no_guard_where_nothing_is_written():
    captured = capture(lambda x, y: x.sin() + y)
    one = torch.randn(8)
    captured(one[:4], one[4:])
    captured(one[:4], one[2:6])
    assert stats(captured).graphs == 1


def test_says_what_has_changed():
    recompiles = compare("dense", "add_", "before", ("apart", "the same")).recompiles
    assert any("lie apart in memory" in str(each) for each in recompiles), recompiles


def test_a_loaded_step_asks_too(tmp_path):
    def step(x, seen):
        before = x.sin()
        seen.add_(1)
        return before - x.sin()

    captured, one = capture(step), torch.randn(8)
    for _ in range(2):
        captured(one[:4], torch.randn(4))
    captured.export(tmp_path / "step")
    loaded = load(tmp_path / "step")
    assert loaded(one[:4], one[4:].clone()).abs().max() == 0
    with pytest.raises(GuardError, match="lie apart in memory"):
        loaded(one[:4], one[:4])


# ----------------------------------------------------------------------------------------------------------------------
# Which overlap
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_in_memory():
    assert calibrate_tensor_guards() is None


def drawn(seed):
    draw, memory = random.Random(seed), torch.zeros(100)
    found = []
    for _ in range(draw.randint(2, 9)):
        a, b = sorted((draw.randint(0, 99), draw.randint(0, 99)))
        found.append(draw.choice((
            memory[a:b], memory[a:b:3], torch.zeros(5), memory[a : b - (b - a) % 2].view(-1, 2).t(), memory[a],
            memory[a].expand(3, 4), nn.Parameter(memory[a:b]),
        )))  # fmt: skip
    return tuple(found)


@pytest.mark.share(20)
@pytest.mark.parametrize("seed", range(3000))
def test_c_and_python_agree(seed, read_in_memory):
    tensors = drawn(seed)
    order = bytearray(struct.pack(f"{len(tensors)}i", *random.Random(seed).sample(range(len(tensors)), len(tensors))))
    reaches = [random.Random(seed + i).choice((spans.reach(t), -t.itemsize)) for i, t in enumerate(tensors)]
    read = memory_overlaps(tensors, struct.pack(f"{len(tensors)}q", *reaches), order)
    assert read is not None
    firsts = spans.firsts_of(list(map(spans.span, tensors)))
    assert list(struct.unpack(f"{len(tensors)}i", read)) == firsts
    places = struct.unpack(f"{len(tensors)}i", order)
    begins = [spans.span(tensors[place])[0] for place in places]
    assert sorted(places) == list(range(len(tensors))) and begins == sorted(begins)


def test_what_cannot_be_read_is_asked_by_attributes(read_in_memory):
    class Other(torch.Tensor):
        pass

    tensors = torch.zeros(2), torch.zeros(2).as_subclass(Other)
    assert memory_overlaps(tensors, struct.pack("2q", 8, 8), bytearray(struct.pack("2i", 0, 1))) is None
    with pytest.raises(ValueError, match="a reach and a place for each tensor"):
        memory_overlaps((torch.zeros(2),), b"", bytearray(4))
