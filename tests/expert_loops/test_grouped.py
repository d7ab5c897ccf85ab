"""Experts as grouped products of sorted rows, and what is done with a row for each slot, become the operator on tokens
where it is known which row is of which expert; what only looks like them stays as it was written, and equal."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
from torch.nn.functional import grouped_mm, silu

import moebius
from moebius import explain
from moebius.lowering.experts import grouped, slots

pytest.importorskip("transformers.integrations.moe")  # registers an operator

E, T, K, D, N = 4, 12, 2, 16, 8
FURTHER = 4.0  # sums are taken in another order: as far off as plain Python's, a few times at most

COUNTS = {
    "histc": "torch.histc({}.float(), bins=E, min=0, max=E - 1)",
    "histc to E": "torch.histc({}.float(), bins=E, min=0, max=E)",
    "histc of ints": "torch.histc({}.to(torch.float64), E, 0, E - 1)",
    "bincount": "torch.bincount({}, minlength=E)",
    "one_hot": "torch.nn.functional.one_hot({}, E).sum(0)",
    "compared": "({}[:, None] == torch.arange(E)).sum(0)",
    "compared with a column": "(torch.arange(0, E).unsqueeze(0) == {}.unsqueeze(1)).float().sum(dim=0)",
    "scatter_add": "torch.zeros(E).scatter_add(0, {0}, torch.ones({0}.shape))",
    "scatter_add_": "torch.zeros(E, dtype=torch.int64).scatter_add_(0, {0}, torch.ones_like({0}))",
    "index_add": "torch.zeros(E).index_add(0, {0}, torch.full({0}.shape, 1.0))",
    "a table": "torch.zeros(len(x), E, dtype=torch.int64).scatter_(1, index, 1).sum(0)",
    "a mask": "torch.zeros(len(x), E, dtype=torch.bool).scatter(1, index, True).sum(dim=0)",
}
COUNTED_OTHERWISE = {
    "an axis that is kept": "torch.nn.functional.one_hot({}, E).sum(0, keepdim=True)[0]",
    "others first": "({}[:, None] == torch.arange(E).flip(0)).sum(0)",
    "others next": "({}[:, None] == torch.arange(1, E + 1)).sum(0)",
    "picked": "({}[:, None] == torch.arange(E)[torch.tensor([1, 0, 3, 2])]).sum(0)",
    "two for each": "torch.zeros(E, dtype=torch.int64).scatter_add(0, {0}, torch.full_like({0}, 2)) // 2",
    "of the whole": "torch.ones(E, dtype=torch.int64).scatter_add(0, {0}, torch.ones_like({0})) - 1",
    "added before": "added(torch.zeros(E, dtype=torch.int64)).scatter_add(0, {0}, torch.ones_like({0}))",
    "added twice": "twice(torch.zeros(E, dtype=torch.int64), {0})",
    "a table of twins": "torch.zeros(len(x), E, dtype=torch.int64).scatter_(1, index * 0, 1).sum(0)",
    "small numbers": "torch.zeros(E, dtype=torch.int8).scatter_add(0, {0}, torch.ones({0}.shape, dtype=torch.int8))",
}
ORDERS = {
    "sort": "ids, order = torch.sort(index.reshape(-1))",
    "argsort": "order = torch.argsort(index.reshape(-1)); ids = index.reshape(-1)[order]",
    "stable": "order = index.view(-1).argsort(stable=True); ids = index.view(-1).index_select(0, order)",
}
COUNTED = {"sorted": "ids", "unsorted": "index.reshape(-1)"}
PRODUCTS = ("fallback(rows, {}, ends)", "grouped_mm(rows, {}, offs=ends)", "torch_grouped_mm(rows, {}, ends)")
ROWS = ("x[order // K]", "x.index_select(0, torch.div(order, K, rounding_mode='floor'))",
        "x.repeat_interleave(K, 0)[order]",
        "torch.gather(x, 0, (order // K).reshape(-1, 1).expand(-1, D))")  # fmt: skip
INVERSES = (
    "torch.argsort(order)",
    "torch.empty_like(order).scatter(0, order, torch.arange(len(order)))",  # (not read: the rows stay rows)
    "written(order)",
)
SUMS = (
    "(y * weight.reshape(-1)[order].unsqueeze(-1))[back].view(-1, K, D).sum(1)",
    "(y * weight.reshape(-1)[order][:, None])[back].reshape(len(x), K, D).sum(dim=-2)",
    "(y[back].view(-1, K, D) * weight.unsqueeze(-1)).sum(1)",
)
TOKEN_SUMS = (  # each row to its token at once
    "torch.zeros_like(x).index_add(0, order // K, y * weight.reshape(-1)[order][:, None])",
    "x.new_zeros(x.shape).index_add_(0, order.floor_divide(K), y * weight.reshape(-1)[order].view(-1, 1))",
    "torch.zeros_like(x).scatter_add(0, (order // K).reshape(-1, 1).expand(-1, D), "
    "(y.float() * weight.reshape(-1)[order].reshape(-1, 1)).to(y.dtype))",
    "(x * 2).scatter_add(0, (order // K)[:, None].repeat(1, D), y * weight.flatten()[order].unsqueeze(1))",
    "stated(torch.zeros_like(x), order // K, y * weight.flatten()[order].unsqueeze(1))",
)
HEAD = """
def written(order):
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    return back

def added(counts):
    counts[0] += 1; counts[0] -= 1
    return counts

def twice(counts, numbers):
    counts.scatter_add_(0, numbers, torch.ones_like(numbers))
    counts[0] += 1
    counts[1] -= 1
    return counts.clamp(min=0)

def stated(out, token, rows):
    out.index_add_(0, token, rows.to(out.dtype))
    return out * 1

def layer(x, logits, up, down):
    weight, index = logits.softmax(-1).topk(K)
"""
Choice = tuple[str, ...]


def source_of(counts: str, order: str, counted: str, product: str, rows: str, inverse: str, total: str) -> str:
    lines = [
        ORDERS[order],
        f"ends = torch.cumsum({COUNTS[counts].format(COUNTED[counted])}, 0, dtype=torch.int32)",
        f"rows = {rows}",
        f"h = {product.format('up.transpose(1, 2)')}",
        "gate, rest = h.chunk(2, -1)",
        "rows = silu(gate) * rest",
        f"y = {product.format('down.transpose(1, 2)')}",
        f"back = {inverse}",
        f"return {total}",
    ]
    return HEAD + "".join(f"    {line}\n" for line in lines)


def product(rows, weight, offs):
    """In float64, which torch's own does not take."""
    return grouped_mm(rows, weight, offs=offs) if rows.dtype == torch.bfloat16 else fallback(rows, weight, offs)


def older(rows, weight, offs):
    return torch._grouped_mm(rows, weight, offs) if rows.dtype == torch.bfloat16 else fallback(rows, weight, offs)


def made(source: str):
    space = dict(torch=torch, grouped_mm=product, silu=silu, E=E, K=K, D=D, fallback=fallback, torch_grouped_mm=older)
    exec(source, space)
    return space["layer"]


def fallback(rows, weight, ends):
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


def compared(layer, *, backend="moebius", dtype=torch.float32):
    """The regions; how far result and gradients are from those in float64, as a multiple of plain Python's distance."""
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64) for shape in ((T, D), (T, E), (E, 2 * N, D), (E, D, N))]
    given = [t.to(dtype).double() for t in given]
    report = explain(layer, backend=backend)
    exact, plain, captured = (run(f, given, d) for f, d in ((layer, torch.float64), (layer, dtype), (report, dtype)))
    moebius.reset()
    worst = 0.0
    for e, p, c in zip(exact[1], plain[1], captured[1], strict=True):
        rounding = torch.finfo(dtype).eps * max(float(e.abs().max()), 1e-9)
        worst = max(worst, float((c - e).abs().max()) / max(float((p - e).abs().max()), rounding))
    return captured[0].expert_regions, worst


def run(layer, given, dtype):
    """(what it returned or its report, the result and the gradients)."""
    inputs = [t.detach().to(dtype, copy=True).requires_grad_() for t in given]
    found = layer(*inputs)
    result = getattr(found, "result", found)
    (result * torch.linspace(0.5, 2.0, D, dtype=dtype)).sum().backward()
    return found, [result.detach().double(), *(t.grad.double() for t in inputs)]


SPELLINGS = list(itertools.product(COUNTS, ORDERS, COUNTED, PRODUCTS, ROWS, INVERSES, SUMS))
SPELLINGS += itertools.product(COUNTS, ORDERS, COUNTED, PRODUCTS, ROWS, INVERSES[:1], TOKEN_SUMS)
# (transformers' operator compares the number of offsets, which bincount leaves open: a graph break)
CHOSEN = [s for s in random.Random(7).sample(SPELLINGS, 120) if s[0] != "bincount" or s[3] != PRODUCTS[0]]


@pytest.mark.share(12)
@pytest.mark.parametrize("choice", CHOSEN, ids=str)
def test_every_spelling_becomes_the_operator(choice: Choice) -> None:
    dtype = torch.float32 if choice[3] == PRODUCTS[0] else torch.bfloat16  # (torch's own has no fake for others)
    regions, worse = compared(made(source_of(*choice)), dtype=dtype)
    assert worse < FURTHER
    (region,) = regions
    assert region.lowered, region.refusal
    assert region.top_k == (1 if "scatter" in choice[5] else K)
    assert region.num_experts == E


@pytest.mark.parametrize("name", COUNTED_OTHERWISE)
def test_other_counts_say_nothing(name: str) -> None:
    """Grouped products stay, and end where they end in plain Python: the operator's rows would be others."""
    source = source_of(*USUAL).replace(COUNTS["histc"].format("ids"), COUNTED_OTHERWISE[name].format("ids"))
    assert COUNTED_OTHERWISE[name].format("ids") in source
    regions, worse = compared(made(source))
    assert worse < FURTHER
    assert [region.lowered for region in regions] == [False]


USUAL = ("histc", "sort", "sorted", PRODUCTS[0], ROWS[0], INVERSES[2], SUMS[0])
# What the usual spelling is changed to, and how many slots a row of the operator has then: 0 where it stays as it was.
CHANGED = {
    "other offsets": ("min=0, max=E - 1)", "min=0, max=E - 1).flip(0)", 0),
    "numbers changed after they were counted": ("rows = x[", "ids.copy_(ids.flip(0)); rows = x[", 0),
    "offsets changed": ("rows = x[", "ends.sub_(1); rows = x[", 0),
    "largest first": ("torch.sort(index.reshape(-1))", "torch.sort(index.reshape(-1), descending=True)", 0),
    "numbers that may be anything": ("ids, order", "index = (index + 1).where(index < 2, index // 2); ids, order", 0),
    "counts of another index": ("{}".join(("torch.histc(", ".float()")).format("ids"),
                                "torch.histc(index.flip(0)[:1].expand_as(index).reshape(-1).float()", 0),
    "rows of other tokens": ("x[order // K]", "x[(order + 1) % len(order) // K]", 1),
    "weights of other rows": ("weight.reshape(-1)[order]", "weight.reshape(-1)[back]", 1),
    "weights of other slots": ("weight.reshape(-1)[order]", "weight.t().reshape(-1)[order]", K),
    "never put back": ("[back].view", ".view", 1),
    "put back twice": ("[back].view", "[back][back].view", 1),
    "another sum": ("view(-1, K, D).sum(1)", "view(K, -1, D).sum(0)", 1),
    "one weight for all": ("(y * weight.reshape(-1)[order].unsqueeze(-1))[back].view(-1, K, D)",
                           "(y[back].view(-1, K, D) * weight[:1].unsqueeze(-1))", 1),
    "results that are read": (".view(-1, K, D).sum(1)", ".view(-1, K, D).sum(1) + y.mean()", 1),
    "the order changed": ("h = ", "order.copy_(order.flip(0)); h = ", None),
    "tokens changed": ("back = written", "x = x * 1; x.mul_(2); back = written", K),
    "no weights": ("(y * weight.reshape(-1)[order].unsqueeze(-1))[back].view(-1, K, D).sum(1)",
                   "y[back].view(-1, K, D).sum(1) + 0 * logits.sum()", K),
    "the inverse of something else": ("back = written(order)", "back = written(order.flip(0))", 1),
}  # fmt: skip


# The same, after the reader of lines like these has said what breaks a proof that looks at its ends alone: each thing
# that the proof goes through is written to, or made without history. None: it may be lowered, and is equal.
STEPS = """
    weight, index = logits.softmax(-1).topk(K)
    flat = index.reshape(-1)
    ids, order = torch.sort(flat)
    counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    tok = order // K
    rows = x[tok]
    h = fallback(rows, up.transpose(1, 2), ends)
    gate, rest = h.chunk(2, -1)
    mid = silu(gate) * rest
    y = fallback(mid, down.transpose(1, 2), ends)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0])
    w = weight.reshape(-1)[order]
    z = y * w.unsqueeze(-1)
    return z[back].view(-1, K, D).sum(1)
"""
AFTER = "    {0}\n    {1}\n"
COUNTED_SO = "counts = torch.histc(ids.float(), bins=E, min=0, max=E - 1)"
BROKEN = {
    "weights doubled": ("w = weight.reshape(-1)[order]", "w.mul_(2)"),
    "weights dropped": ("w = weight.reshape(-1)[order]", "w.masked_fill_(w < 0.4, 0)"),
    "weights detached": ("w = weight.reshape(-1)[order]", "w.detach_()"),
    "tokens turned": ("tok = order // K", "tok.copy_(tok.flip(0))"),
    "counts turned": (COUNTED_SO, "counts.copy_(counts.flip(0))"),
    "counts moved": (COUNTED_SO, "counts[1] += counts[0]; counts[0] = 0"),
    "numbers turned": ("flat = index.reshape(-1)", "flat = flat.clone(); flat.add_(1).remainder_(E)"),
    "rows by another order": ("z = y * w.unsqueeze(-1)", "p = torch.arange(len(z)).flip(0); z = z[p, :]"),
    "rows by a list": ("z = y * w.unsqueeze(-1)", "z = z[list(range(len(z)))[::-1]]"),
    "rows by two axes": ("z = y * w.unsqueeze(-1)", "z = z[torch.arange(len(z)).flip(0)[:, None]].squeeze(1)"),
    "small numbers": ("ids, order = torch.sort(flat)", "ids, order = torch.sort(flat.to(torch.int8))"),
    "history of rows": ("tok = order // K", "with torch.no_grad(): rows = x[tok]"),
    "a longer middle": ("mid = silu(gate) * rest", "mid = torch.nn.functional.pad(mid, (0, 0, 0, 4))[: len(mid)]"),
    "weights as a mask": ("w = weight.reshape(-1)[order]", "w = (weight > 0.3).reshape(-1)[order]"),
}
END = "return z[back].view(-1, K, D).sum(1)"
REPLACED = {
    "added to others": (END, "return torch.zeros_like(x).index_add(0, tok.flip(0), z)"),
    "added twice over": (END, "return torch.zeros_like(x).index_add(0, tok, z, alpha=2)"),
    "added in rows of columns": (END, "return torch.zeros_like(z.t()).index_add(1, tok, z.t()).t()[: len(x)]"),
    "added to halves": (END, "return torch.zeros_like(x).scatter_add(0, tok[:, None].expand(-1, 8), z[:, 8:])"),
    "zeros that are read before": (END, "o = torch.zeros_like(x); p = o.view(-1); q = o + 1; o.index_add_(0, tok, z); "
                                        "return o + q + p.view_as(o)"),
    "zeros that are not": (END, "o = torch.zeros_like(x); o += 1; o.index_add_(0, tok, z); return o"),
    "zeros that change later": (END, "o = torch.zeros_like(x); o.index_add_(0, tok, z); o += x; return o * x"),
    "tokens that change later": (END, "x = x * 1; o = x.index_add(0, tok, z); x += 1; return o * x"),
    "added without history": (END, "with torch.no_grad(): o = torch.zeros_like(x).index_add(0, tok, z)\n"
                                   "    return o + x + logits.sum() * 0"),
    "places turned": (END, "at = order // K; at.copy_(at.flip(0)); return torch.zeros_like(x).index_add(0, at, z)"),
    "added in place to x": (END, "x = x * 1; x.index_add_(0, tok, z); return x"),
    "turned inverse": ("back[order] = torch.arange(order.shape[0])",
                       "r = torch.arange(order.shape[0]); r.copy_(r.flip(0)); back[order] = r"),
    "an axis before the sum": (".view(-1, K, D).sum(1)", ".view(-1, K, D).unsqueeze(1).sum(1)"),
    "slots turned": (".view(-1, K, D).sum(1)", ".view(-1, K, D)[:, :, torch.arange(D).flip(0)].sum(1)"),
    "a big table": ("rows = x[tok]", "big = x.repeat_interleave(K, 0); big[0] = 0; rows = big[order]"),
    "a residual": ("return z[back].view(-1, K, D).sum(1)",
                   "x = x * 1; out = x[tok] * 0 + z; x += out[back].view(-1, K, D).sum(1); return x"),
    "the inverse is given out": ("return z[back].view(-1, K, D).sum(1)",
                                 "return z[back].view(-1, K, D).sum(1) + 0 * logits.sum() + back.sum() * 0"),
    "no history of weights": ("w = weight.reshape(-1)[order]", "with torch.no_grad(): w = weight.reshape(-1)[order]"),
    "a part of what was chosen": ("weight, index = logits.softmax(-1).topk(K)",
                                  "weight, full = logits.softmax(-1).topk(K + 1); full = full.clone(); full[:3] = 0; "
                                  "weight = weight[:, :K]; index = full[:, :K]"),
}  # fmt: skip


def steps_of(name: str) -> str:
    if name in BROKEN:
        line, more = BROKEN[name]
        assert line in STEPS
        changed = STEPS.replace(f"    {line}\n", AFTER.format(line, more))
        return changed.replace("    rows = x[tok]\n", "") if name == "history of rows" else changed
    old, new = REPLACED[name]
    assert old in STEPS
    return STEPS.replace(old, new)


@pytest.mark.parametrize("name", [*BROKEN, *REPLACED])
def test_each_step_that_the_proof_goes_through(name: str) -> None:
    layer = made(HEAD.partition("    weight, index")[0] + steps_of(name).lstrip("\n"))
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in ((T, D), (T, E), (E, 2 * N, D), (E, D, N))]
    seen = []
    for call in (layer, moebius.capture(layer)):
        inputs = [t.clone().requires_grad_() for t in given]
        result = call(*inputs)
        result.double().square().sum().backward()
        seen.append([result.detach(), *(t.grad for t in inputs)])
    moebius.reset()
    for plain, captured in zip(*seen, strict=True):
        assert (plain is None) == (captured is None)
        if plain is not None:
            torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)


AS_WRITTEN = HEAD.partition("    weight, index")[0] + STEPS.lstrip("\n")


def inputs_of(frozen: tuple[int, ...] = ()) -> list[torch.Tensor]:
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in ((T, D), (T, E), (E, 2 * N, D), (E, D, N))]
    return [t.requires_grad_(i not in frozen) for i, t in enumerate(given)]


def test_autocast_leaves_grouped_products_alone() -> None:
    layer = made(AS_WRITTEN)
    given = inputs_of()
    with torch.autocast("cpu", torch.bfloat16):
        plain, report = layer(*given), explain(layer)(*given)
    moebius.reset()
    torch.testing.assert_close(report.result, plain, rtol=1e-3, atol=1e-3)
    (region,) = report.expert_regions
    assert not region.lowered and "autocast" in region.refusal


def test_autocast_elsewhere_leaves_them_experts() -> None:
    layer, given = made(AS_WRITTEN), inputs_of()

    def step(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            narrow = x @ x.T
        return layer(x, *others) + narrow.float().mean()

    report = explain(step)(*given)
    torch.testing.assert_close(report.result, step(*given))
    assert [region.lowered for region in report.expert_regions] == [True]


@pytest.mark.parametrize("frozen", [(3,), (2, 3), (0, 2, 3), (0, 1, 2, 3)], ids=str)
def test_frozen_weights_are_experts_too(frozen: tuple[int, ...]) -> None:
    layer, seen = made(AS_WRITTEN), []
    for call in (layer, explain(layer)):
        given = inputs_of(frozen)
        found = call(*given)
        result = getattr(found, "result", found)
        if result.requires_grad:
            result.square().sum().backward()
        seen.append([result.detach(), *(t.grad for t in given)])
    moebius.reset()
    assert [region.top_k for region in found.expert_regions if region.lowered] == [K]
    for plain, captured in zip(*seen, strict=True):
        assert (plain is None) == (captured is None)
        if plain is not None:
            torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)


BIASES = {
    "above": ("gate, rest = h.chunk(2, -1)", "h += above[ids]; gate, rest = h.chunk(2, -1)"),
    "behind": ("back = torch.empty_like(order)", "y += behind[ids]; back = torch.empty_like(order)"),
    "doubled": ("back = torch.empty_like(order)", "y = y * 2; back = torch.empty_like(order)"),
    "behind, out of place": ("back = torch.empty_like(order)", "y = behind[ids] + y; back = torch.empty_like(order)"),
}


@pytest.mark.parametrize("names", [("above",), ("behind",), ("doubled",), ("above", "behind, out of place")])
def test_biases(names: tuple[str, ...]) -> None:
    source = AS_WRITTEN.replace("up, down)", "up, down, above, behind)")
    for old, new in map(BIASES.__getitem__, names):
        assert old in source
        source = source.replace(old, new)
    on_tokens(made(source))


# As stock models have it that gather the weights, and add biases in place to a view of the product.
EACH_ROW = """
def layer(x, logits, up, down, above, behind):
    weight, index = logits.softmax(-1).topk(K)
    flat = {numbers}
    rows = x.repeat_interleave(K, 0)
    h = torch.bmm(up[flat], rows.unsqueeze(-1)).squeeze(-1)
    {first}
    gate, rest = h.chunk(2, -1)
    y = torch.bmm(down[flat], (silu(gate) * rest).unsqueeze(-1)).squeeze(-1)
    {second}
    return (y * weight.reshape(-1).unsqueeze(-1)).view(-1, K, D).sum(1)
"""
NUMBERS = ("index.reshape(-1)", "torch.arange(E).flip(0)[index].reshape(-1)")  # (a table's numbers may be any)
FIRST = ("pass", "h.add_(above[flat])", "h = h + above[flat]")
SECOND = ("pass", "y.add_(behind[flat])", "y = y + behind[flat]", "y = y * 2", "y += behind[flat]; y *= 0.5")


@pytest.mark.share(8)
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_weights_gathered_for_each_row(numbers: str, first: str, second: str) -> None:
    on_tokens(made(EACH_ROW.format(numbers=numbers, first=first, second=second)))


ONE_AFTER_ANOTHER = """
def layer(x, logits, up, down, above, behind):
    weight, index = logits.softmax(-1).topk(K)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(index == e)
        gate, rest = (x[token] @ up[e].T).chunk(2, -1)
        y = (silu(gate) * rest) @ down[e].T
        {}
    return out
"""
ADDED = "out.index_add_(0, token, y * weight[token, slot, None]{})"
SCALED = {
    "weights gathered": EACH_ROW.format(numbers=NUMBERS[0], first="pass", second="y = y * {}"),
    "after its weight": ONE_AFTER_ANOTHER.format(ADDED.format(" * {}")),
    "before its weight": ONE_AFTER_ANOTHER.format("y = y * {}; " + ADDED.format("")),
    "divided": ONE_AFTER_ANOTHER.format("y = y / (1 / {}); " + ADDED.format("")),
}


@pytest.mark.parametrize("way", SCALED)
@pytest.mark.parametrize("number, size", [(2e5, 1e-4), (1e-6, 30.0), (100.0, 0.1), (0.25, 1.0)])
def test_numbers_that_float16_has_not(number: float, size: float, way: str) -> None:
    """Weights times the number are computed where that is a number of their type: 2e5 is none, 1e-6 a coarse one."""
    layer, seen = made(SCALED[way].replace("{}", str(number))), []
    for call in (layer, moebius.capture(layer)):
        torch.manual_seed(2)
        given = [*inputs_of(), torch.zeros(0), torch.zeros(0)]
        given = [(t * (size if i == 3 else 1)).half().detach().requires_grad_() for i, t in enumerate(given)]
        result = call(*given)
        (result.float().mean() * (1e4 if number < 1 else 1)).backward()
        seen.append([result.detach(), *(t.grad for t in given[:4])])
    moebius.reset()
    for plain, captured in zip(*seen, strict=True):  # float16 has 11 bits; sums are taken in another order
        torch.testing.assert_close(captured, plain, rtol=2e-2, atol=2e-2 * float(plain.abs().max()))


@pytest.mark.parametrize("names", [*itertools.permutations(("histc", "bincount", "one_hot"), 2)], ids=", then ".join)
def test_each_product_has_ends_of_its_own(names: tuple[str, str]) -> None:
    """Counted twice, of slots that the program itself does not sort: the rows are of the same experts."""
    first, second = (eval(f"lambda flat: {COUNTS[name].format('flat')}") for name in names)

    def layer(x, router, gate_up, down):
        weight, index = (x @ router.T).softmax(-1).topk(K, -1)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        ends = [counts(flat).cumsum(0).to(torch.int32) for counts in (first, second)]
        gate, up = grouped_mm(x[order // K], gate_up.mT, offs=ends[0]).chunk(2, -1)
        y = grouped_mm(silu(gate) * up, down.mT, offs=ends[1])
        return torch.zeros_like(x).index_add(0, order // K, y * weight.flatten()[order, None])

    given = [torch.randn(shape) for shape in ((T, D), (E, D), (E, 2 * N, D), (E, D, N))]
    report, captured = run(explain(layer), given, torch.float32)
    assert [region.lowered for region in report.expert_regions] == [True]
    for mine, plain in zip(captured, run(layer, given, torch.float32)[1], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_a_view_without_history_is_not_written_out_of_place(backend: str) -> None:
    first = "\n    with torch.no_grad():\n        h = h[:]\n        h *= 2"
    layer = made(EACH_ROW.format(numbers=NUMBERS[0], first=first, second="pass"))
    for call in (layer, moebius.capture(layer, backend=backend)):
        with pytest.raises(RuntimeError, match="no_grad"):
            call(*inputs_of(), None, None).sum().backward()
    moebius.reset()


def on_tokens(layer) -> None:
    """It is the operator on tokens, and what it gives is equal, gradients too."""
    seen = []
    for call in (layer, explain(layer)):
        torch.manual_seed(1)
        given = [*inputs_of(), torch.randn(E, 2 * N, requires_grad=True), torch.randn(E, D, requires_grad=True)]
        found = call(*given)
        result = getattr(found, "result", found)
        result.square().sum().backward()
        seen.append([result.detach(), *(t.grad for t in given)])
    moebius.reset()
    assert [region.top_k for region in found.expert_regions if region.lowered] == [K]
    for plain, captured in zip(*seen, strict=True):
        assert (plain is None) == (captured is None)
        if plain is not None:
            torch.testing.assert_close(captured, plain, rtol=1e-3, atol=1e-3)


REASONS = {
    "a value is given out": ("return z[back].view(-1, K, D).sum(1)", "return z[back].view(-1, K, D).sum(1), h",
                             "a value that the loop's iterations compute is given out"),
    "numbers written to": ("tok = order // K", "tok = order // K; counts.copy_(counts.flip(0))", "copy_ changes"),
    "nothing counted": ("ends = torch.cumsum(counts, 0, dtype=torch.int32)",
                        "ends = torch.arange(6, 25, 6, dtype=torch.int32)", "which expert each row"),
    "rows by their features": ("mid = silu(gate) * rest", "mid = h.sort(-1)[0][:, : D // 2]", "between the products"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_the_report_has_the_reason(name: str) -> None:
    old, new, wanted = REASONS[name]
    assert old in AS_WRITTEN
    report = explain(made(AS_WRITTEN.replace(old, new)))(*inputs_of())
    moebius.reset()
    assert [region.lowered for region in report.expert_regions] == [False]
    assert wanted in report.expert_regions[0].refusal


@pytest.mark.faults
@pytest.mark.parametrize("where", [(grouped, "expert_of_each_row"), (slots, "stands_still")], ids=["weights", "tokens"])
def test_an_error_in_the_proof_costs_nobody_the_graph(where, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("of the test")

    monkeypatch.setattr(*where, fails)
    layer = made(AS_WRITTEN)
    report = explain(layer)(*inputs_of())
    moebius.reset()
    torch.testing.assert_close(report.result, layer(*inputs_of()), rtol=1e-4, atol=1e-4)
    (region,) = report.expert_regions
    assert region.lowered == (where[0] is slots) and "defect" in region.refusal and "of the test" in region.refusal


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_not_known_stays(name: str) -> None:
    old, new, wanted = CHANGED[name]
    source = source_of(*USUAL)
    assert old in source
    regions, worse = compared(made(source.replace(old, new)))
    assert worse < FURTHER, source
    (region,) = regions
    if wanted is not None:
        assert (region.top_k if region.lowered else 0) == wanted, (region.refusal, region.top_k)
    assert region.lowered or region.refusal


CHOICES = {
    "two maxima": "torch.cat((logits.argmax(-1, keepdim=True), logits.min(-1, keepdim=True)[1]), -1)",
    "sorted": "torch.sort(logits, dim=-1)[1][:, :K].contiguous()",
    "stacked": "torch.stack((logits.max(dim=1)[1], logits.argsort(-1)[:, 0]), 1)",
}


class OwnGradient(torch.autograd.Function):
    """Its backward writes into a tensor that it makes (as phimoe's router does)."""

    @staticmethod
    def forward(ctx, weight, index):
        ctx.save_for_backward(index)
        return weight * 1

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        made = torch.zeros_like(grad)
        made.scatter_add_(1, torch.arange(K).expand_as(index), grad)
        return made, None


class ChangesNumbers(OwnGradient):
    """It writes into a tensor that it is given."""

    @staticmethod
    def forward(ctx, weight, index):
        ctx.save_for_backward(index)
        index.copy_(index.flip(0))
        return weight * 1


@pytest.mark.parametrize("function", [OwnGradient, ChangesNumbers])
def test_a_function_beside_the_routing(function) -> None:
    usual = "weight, index = logits.softmax(-1).topk(K)"
    layer = made(source_of(*USUAL).replace(usual, f"{usual}; index = index.clone(); weight = function(weight, index)"))
    layer.__globals__["function"] = function.apply
    regions, worse = compared(layer)
    assert worse < FURTHER
    assert [region.lowered for region in regions] == [function is OwnGradient], [region.refusal for region in regions]


def test_layers_of_one_line_are_told_one_by_one() -> None:
    """The second layer's routing is a table's: the report has a region for it too."""
    both = AS_WRITTEN.replace("def layer(x, logits, up, down):", "def one(x, weight, index, up, down):").replace(
        "    weight, index = logits.softmax(-1).topk(K)\n", ""
    )
    both += (
        "\ndef layer(x, logits, up, down):\n    weight, index = logits.softmax(-1).topk(K)\n"
        "    x = x + one(x, weight, index, up, down)\n"
        "    return one(x, weight, torch.tensor([[0, 1], [2, 3]] * (len(x) // 2)), up, down)\n"
    )
    regions, worse = compared(made(both))
    assert worse < FURTHER
    assert sorted(region.lowered for region in regions) == [False, True]


RANGES = {
    "a remainder": ("(index * 3 - 5) % E", True),
    "clamped": ("(index * 3 - 5).clamp(0, E - 1)", True),
    "clamped above": ("index.clamp(max=E)", True),
    "clamped below": ("(index * 3 - 5).clamp(min=0) % (E + 1) % E", True),
    "too many": ("(index * 3 - 5) % (E + 1)", False),
    "a choice": ("torch.where(index < 2, index, E - 1)", True),
    "beyond": ("torch.where(index < 2, index, E)", False),
    "below": ("torch.where(index < 2, index, -1)", False),
    "one for others": ("more.masked_fill(more == E, 0)", True),  # (a class that is no expert: zaya)
    "from one on": ("more.masked_fill(more >= E, 1)", True),
    "others than the last": ("more.masked_fill(more == E - 1, 0)", False),
    "more than one": ("further.masked_fill(further == E, 0)", False),
    "wider": ("index.to(torch.int32).long()", True),
}


@pytest.mark.parametrize("name", RANGES)
def test_numbers_whose_range_follows(name: str) -> None:
    numbers, known = RANGES[name]
    lines = (
        "weight, index = logits.softmax(-1).topk(K); more = torch.cat((logits, logits[:, :1]), 1).topk(K)[1]; "
        f"further = torch.cat((logits, logits[:, :2]), 1).topk(K)[1]; index = {numbers}"
    )
    source = source_of(*USUAL).replace("weight, index = logits.softmax(-1).topk(K)", lines)
    regions, worse = compared(made(source))
    assert worse < FURTHER
    assert [region.lowered for region in regions] == [known], regions[0].refusal


@pytest.mark.parametrize("chosen", CHOICES)
def test_positions_along_the_axis_of_experts_are_their_numbers(chosen: str) -> None:
    usual = "weight, index = logits.softmax(-1).topk(K)"
    source = source_of(*USUAL)
    assert usual in source
    line = f"index = {CHOICES[chosen]}; weight = logits.softmax(-1).gather(1, index)"
    regions, worse = compared(made(source.replace(usual, line)))
    assert worse < FURTHER
    assert [region.lowered for region in regions] == [True], regions[0].refusal


def test_switched_off() -> None:
    """Without the one, grouped products stay; without the other, rows do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "gather_weights", lambda work: grouped.Gathered())
        (region,) = compared(made(source_of(*USUAL)))[0]
        assert not region.lowered and grouped.NO_LAYER in region.refusal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "at_tokens", lambda work, node: None)
        (region,) = compared(made(source_of(*USUAL)))[0]
        assert region.lowered and region.top_k == 1


def test_another_backend_keeps_its_products() -> None:
    regions, worse = compared(made(source_of(*USUAL)), backend="aot_eager")
    assert worse < FURTHER
    (region,) = regions
    assert not region.lowered and "backend aot_eager" in region.refusal


def test_memory_is_that_of_the_tokens() -> None:
    """x [T, D], H [S, 2N] and the routing: not the rows [S, D], not the results."""
    (region,) = compared(made(source_of(*USUAL)))[0]
    rows, routing = 4 * (T * D + T * K * 2 * N), 4 * (T * K + E + 1) + 8 * T * K + 4 * T * K
    assert rows <= region.saved_bytes <= rows + routing


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_a_stock_model(implementation: str) -> None:
    """What transformers runs unless it is told otherwise."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    config._experts_implementation = implementation
    seen = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config)
        tokens = torch.randint(0, 64, (2, 8))

        def step(model, tokens):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            return loss.detach()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            report = explain(step)(model, tokens) if captured else None
        loss = step(model, tokens) if report is None else report.result
        seen.append([loss, *(p.grad for p in model.parameters())])
        if report is not None:
            assert [(region.lowered, region.top_k) for region in report.expert_regions] == [(True, 2)] * 2
    moebius.reset()
    assert all(torch.allclose(a, b, atol=1e-6, rtol=1e-4) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_torchs_own_product_in_types_that_only_a_cpu_takes(dtype: torch.dtype) -> None:
    """torch's fake form of it takes bfloat16 alone; the operator is one graph all the same."""
    source = source_of("histc", "sort", "sorted", PRODUCTS[1], *USUAL[4:])
    space = dict(torch=torch, grouped_mm=grouped_mm, silu=silu, E=E, K=K, D=D)
    exec(source, space)
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((T, D), (T, E))]
    weights = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((E, 2 * N, D), (E, D, N))]
    report = explain(space["layer"])(*inputs, *weights)
    assert (len(report.graphs), report.breaks) == (1, []) and report.expert_regions[0].lowered
    plain = space["layer"](*inputs, *weights)
    # eager rounds to float16 between the products, the operator adds up in float32
    loose = 1e-5 if dtype == torch.float32 else 5e-2
    assert report.result.dtype == plain.dtype == dtype
    torch.testing.assert_close(report.result, plain, rtol=loose, atol=loose)
    moebius.reset()
