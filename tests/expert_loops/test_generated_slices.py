"""Generated layers whose experts run on slices of the sorted tokens, as counts in Python drive them; right, and with
one mistake.

Each is compared with plain Python in float64: the result and every gradient, a missing one included, on batches of
which one leaves experts without tokens. A layer whose iterations depend on one another must not be lowered.
"""

from __future__ import annotations

import functools
import textwrap

import hypothesis.strategies as st
import pytest
import torch
from beside_eager import compare
from hypothesis import HealthCheck, Phase, given, settings
from seeds import examples
from spellings import E, K
from table import SEEDS

COUNTS = {
    "scatter": "counts = index.new_zeros((len(x), E)).scatter_(1, index, 1).sum(dim=0)",
    "bincount": "counts = torch.bincount(index.view(-1), minlength=E)",
    "one_hot": "counts = torch.nn.functional.one_hot(index.view(-1), E).sum(0)",
}
# how Python gets the numbers, and how an iteration gets (start, end, n)
HEADS = {
    "a list": ("start = 0", "for e, n in enumerate(counts.tolist()):", "end = start + n"),
    "numbers": ("start = 0", "for e, n in enumerate([int(count) for count in counts.unbind()]):", "end = start + n"),
    "an array": ("start = 0", "for e, n in enumerate(counts.cpu().numpy()):", "end = start + n"),
    "ends of an array": (
        "ends = counts.numpy().cumsum(0)",
        "for e, end in enumerate(ends):",
        "start = 0 if e == 0 else ends[e - 1]\nn = end - start",
    ),
    "ends of a list": (
        "ends, start = counts.cumsum(0).tolist(), 0",
        "for e in range(E):",
        "end = ends[e]\nn = end - start",
    ),
    "zip": ("start = 0", "for e, (n, _) in enumerate(zip(counts.numpy(), moe.experts)):", "end = start + n"),
}
SKIPS = {
    "none": "",
    "== 0": "if n == 0:\n    continue",
    "same": "if start == end:\n    start = end\n    continue",
    "> 0": "if not n > 0:\n    continue",
    "<= 0": "if n <= 0:\n    continue",
    "< 1": "if n < 1:\n    continue",
}
EXPERTS = {
    "module": "y = moe.experts[e](rows)",
    "bias": "y = moe.mlps[e](rows)",
    "matmul": "y = torch.relu(rows @ moe.w1[e]) @ moe.w2[e]",
}
COLLECTS = {
    "append": ("parts = []", "parts.append(y)", "y = torch.cat(parts)"),
    "append, asked": ("parts = []", "parts.append(y)", "y = torch.cat(parts) if len(parts) else sorted_x * 0"),
    "write": ("out = torch.zeros_like(sorted_x)", "out[start:end] = y", "y = out"),
    "index_add": (
        "out, places = torch.zeros_like(sorted_x), torch.arange(len(x) * K)", "out.index_add_(0, places[start:end], y)",
        "y = out",
    ),
}  # fmt: skip

# anchor, line, whether it takes the anchor's place
MISTAKES = {
    "off by one": ("rows = ", "rows = sorted_x[start : end + 1]", True),
    "one too few": ("rows = ", "rows = sorted_x[start : max(end - 1, 0)]", True),
    "reversed rows": ("y = ", "y = y.flip(0)", False),
    "reads what an earlier iteration gave": ("y = ", "y = y + before\nbefore = y.sum()", False),
    "rows of an earlier iteration": ("rows = ", "rows = rows + before\nbefore = rows.sum() * 0.1", False),
    "scaled less and less": ("y = ", "y = y * before\nbefore = before * 0.5", False),
    "a count that changes": ("rows = ", "counts[(e + 1) % E] -= 1", False),
    "the next expert": ("y = ", None, True),
    "twice": ("y = ", "y = y * 2", False),
    "detached": ("y = ", "y = y.detach()", False),
    "leaves out single rows": ("rows = ", "if n <= 1:\n    continue\nrows = sorted_x[start:end]", True),
    "the mean": ("y = ", "y = y - y.mean(0)", False),
}


def source(counts, head, skip, expert, collect, mistake):
    before, loop, start = HEADS[head]
    prepare, keep, whole = COLLECTS[collect]
    iteration = [start, SKIPS[skip], "rows = sorted_x[start:end]", EXPERTS[expert], keep, "start = end"]
    if mistake is not None:
        anchor, line, replaces = MISTAKES[mistake]
        at = next(i for i, text in enumerate(iteration) if text.startswith(anchor))
        line = iteration[at].replace("[e]", "[(e + 1) % E]") if line is None else line
        iteration[at : at + 1] = [line] if replaces else [iteration[at], line]
    body = "\n".join(line for line in iteration if line)
    result = "torch.zeros_like(x).index_add_(0, order // K, y * weight.view(-1)[order, None])"
    if mistake in ("off by one", "one too few", "a count that changes", "leaves out single rows"):  # of another length
        result = "y.sum(0) * x"
    return f"""\
def layer(x, moe):
    weight, index = moe.route(x)
    before = torch.zeros((), dtype=x.dtype) + 0.5
    {COUNTS[counts]}
    order = index.view(-1).argsort(stable=True)
    sorted_x = x[order // K]
    {before}
    {prepare}
    {loop}
{textwrap.indent(body, "        ")}
    {whole}
    return {result}
"""


@functools.cache
def compiled(text):
    namespace = {"torch": torch, "E": E, "K": K}
    exec(compile(text, f"<layer {hash(text) & 0xFFFFFF:x}>", "exec"), namespace)
    return namespace["layer"]


def check(text):
    """Compares; whether there are expert regions and all of them were lowered."""
    return compare(compiled(text), (SEEDS[0], SEEDS[-1]), text, (RuntimeError, ValueError))[1]


SETTINGS = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
LAYERS = {
    "counts": st.sampled_from(sorted(COUNTS)),
    "head": st.sampled_from(sorted(HEADS)),
    "skip": st.sampled_from(sorted(SKIPS)),
    "expert": st.sampled_from(sorted(EXPERTS)),
    "collect": st.sampled_from(sorted(COLLECTS)),
}


@settings(SETTINGS, max_examples=examples(30))
@given(**LAYERS)
def test_right_layers(**form):
    check(source(**form, mistake=None))


@settings(SETTINGS, max_examples=examples(50))
@given(mistake=st.sampled_from(sorted(MISTAKES)), **LAYERS)
def test_subtly_wrong_layers(mistake, **form):
    check(source(**form, mistake=mistake))


@pytest.mark.share(4)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("skip", ["none", "== 0"])
@pytest.mark.parametrize("collect", ["append", "append, asked"])
def test_usual_layers_become_one_operator(head, skip, collect):
    assert check(source("bincount", head, skip, "module", collect, None))
