"""``data[i : i + 8]``, where the data say ``i``: one graph with known sizes, and Python where the part is shorter."""

import itertools

import pytest
import torch
from answers import same

from moebius import capture, stats
from moebius.api import captured_of

DATA, TABLE, LAYER = torch.arange(40.0), torch.arange(400.0).view(40, 10), torch.nn.Linear(8, 8)
# Each is given two numbers in a tensor.
STEPS = {
    "stacked": "return torch.stack([DATA[i : i + 8] for i in ix]).sum(1)",
    "of a list": "return LAYER(torch.stack([DATA[i : i + 8] for i in ix.tolist()])).sum()",
    "second axis": "return torch.stack([TABLE[:, i : i + 3] for i in ix]).sum(1)",
    "both axes": "return torch.stack([TABLE[j : j + 2, i : i + 3] for i, j in zip(ix, ix)]).sum(1)",
    "ellipsis": "return torch.stack([TABLE[..., i : i + 3] for i in ix]).sum(1)",
    "distances": "i = ix[0].item(); return DATA[i : i + 8].sum(), DATA[i + 1 : i + 9].sum(), DATA[i - 1 : i + 2].shape",
    "length": "x = DATA[int(ix[0]) : int(ix[0]) + 8]; return x * len(x), x.shape[0]",
    "written": "i = int(ix[0]); d = DATA.clone(); d[i : i + 8] = 1.0; d[i : i + 4].mul_(2); return d",
    "added to": "i = int(ix[0]); d = DATA.clone(); d[i + 2 : i + 6] += torch.ones(4); return d",
    "written after": "i, j = ix.tolist(); d = DATA.clone(); a = d[i : i + 8]; d[j : j + 8] = 0.0; return a + 1, d",
    "overlapping": "i, j = ix.tolist(); d = DATA.clone(); a, b = d[i : i + 8], d[j : j + 8]; a.add_(b); return a, b, d",
    "offset": "i = int(ix[0]); x = DATA[i : i + 8]; return x.storage_offset(), x.stride(), x.is_contiguous()",
    "strided": "i = int(ix[0]); return DATA[i : i + 8].as_strided((4,), (2,)).sum()",
    "gradient": "i = int(ix[0]) % 4; LAYER.zero_grad(); LAYER.weight[:, i : i + 3].sum().backward(); "
    "return LAYER.weight.grad.clone()",
    "new axes": "i = int(ix[0]); return DATA[None, i : i + 8, None].shape, DATA[i : i + 8, None] * 2",
    "summed": "return sum(DATA[i : i + 8].sum() + DATA[i + 1 : i + 9].sum() for i in ix)",
    "handled": "i = ix[0]\n    try:\n        return torch.ones(8) + DATA[i : i + 8]\n"
    "    except RuntimeError:\n        return ix * 2",
    "nothing": "i = int(ix[0]); return DATA[i + 8 : i].shape, DATA[i:i].shape",
    "of two tensors": "i, j = ix[0], ix[1]; return DATA[i:j].sum(), DATA[i : i + j].sum()",
    "changed between": "i = ix[0].clone(); j = i + 4; i += 2; return DATA[i:j].sum(), DATA[i : i + 2].sum()",
    "changed after": "i = ix[0]; j = i + 4; i.add_(1); return DATA[i:j].sum(), DATA[i:j].shape[0]",
    "viewed": "i = int(ix[0]); x = TABLE[i : i + 4]; return x.view(-1)[:5], x.reshape(-1, 5).sum(0), x.flatten()",
    "beside a flag": "i = int(ix[0]) - 30; w = TABLE.view(10, 40); return w[True, i : i + 3].shape, w[True, i : i + 3]",
    "in steps": "i, j = ix.tolist(); return DATA[i : i + 8 : j % 3 + 1], DATA[i : i + 8 : 2], DATA[i : i + 8 : 1]",
    "named": "i = int(ix[0]); return f'{len(DATA[i : i + 8])}', str(DATA[i : i + 3].shape)",
}
CALLS = {
    "inside": [(3, 4), (5, 9), (1, 2), (30, 31)],
    "over the end": [(3, 4), (33, 36), (38, 1), (5, 6), (39, 39), (2, 3)],
    "from the end": [(3, 4), (-3, 2), (-9, -10), (4, 4)],
    "shorter at first": [(38, 37), (3, 4), (2, 2), (39, 1)],
}


def made(body, **more):
    names = {"torch": torch, "DATA": DATA, "TABLE": TABLE, "LAYER": LAYER, **more}
    exec(f"def step(ix):\n    {body}", names)
    return names["step"]


def outcome(step, numbers):
    try:
        return step(torch.tensor(numbers))
    except (RuntimeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.share(60)
@pytest.mark.parametrize(("name", "calls", "backend"), [*itertools.product(STEPS, CALLS, ("eager", "moebius"))])
def test_each_call_is_pythons(name, calls, backend):
    step = made(STEPS[name])
    captured = capture(step, backend=backend)
    for numbers in CALLS[calls]:
        assert same(outcome(captured, numbers), outcome(step, numbers)), numbers


@pytest.mark.parametrize("name", [name for name in STEPS if name not in ("offset", "beside a flag", "in steps")])
def test_parts_inside_are_one_graph(name):
    captured = capture(made(STEPS[name]), backend="eager")
    of_few = "TABLE[" in STEPS[name] and name != "viewed"
    for numbers in ((3, 4), (5, 6), (1, 2), (4, 5)) if of_few else ((3, 12), (5, 16), (1, 9), (20, 30)):
        captured(torch.tensor(numbers))
    assert (stats(captured).graphs, stats(captured).breaks, stats(captured).misses) == (1, 0, 1)


SUMS = ("i + 8", "8 + i", "i.add(8)", "torch.add(i, 8)", "torch.add(i, 8, alpha=1)", "i - -8", "i.sub(-8) + 1 - 1")
OTHERS = ("2 * i", "torch.add(i, 4, alpha=2)", "8 - i", "i.clone().add_(8)", "torch.rsub(i, 8)")


@pytest.mark.parametrize(("stop", "known"), [*((one, True) for one in SUMS), *((one, False) for one in OTHERS)])
def test_what_reads_them_has_known_sizes(stop, known):
    step, given = made(f"return torch.stack([DATA[i : {stop}] for i in ix])"), torch.tensor((3, 3))
    captured = capture(step, backend="eager")
    assert same(captured(given), step(given))
    graph = captured_of(captured).segments[0].captured.gm.graph
    (node,) = graph.find_nodes(op="call_function", target=torch.stack)
    assert [type(size) is int for size in node.meta["val"].shape] == [True, known]
