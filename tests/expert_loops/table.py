"""Runs every spelling of an expert layer with @capture and plainly, and writes what became of it to a page.

``python tests/expert_loops/table.py --docs docs/expert-loops.md``. Compared in float64: the result and the gradient of
everything that the layer uses, over several batches (one of them sends all tokens to the same experts).
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import published_spellings  # noqa: F401 (adds to MODULES)
from module_layers import Layer
from module_spellings import MODULES
from spellings import BROKEN, CAPTURED, LOWERED, PROJECTED, SPELLINGS, D, E, K, N, T

import moebius
from moebius import capture, stats
from moebius.api import captured_of, report_of
from moebius.lowering.experts.rows_written import KERNEL

SEEDS = range(4)
UNSEEN = "no experts were found"
PUBLIC = "\n## Layers of public repositories\n"  # what the page says from there on is not made here
EXPERTS = "(the experts; the lookups and sums around them stay)"


@dataclass
class Outcome:
    """What became of one spelling. faults: where it differs from plain PyTorch. why: the first refusal or break."""

    name: str
    says: str
    outcome: str
    graphs: int
    breaks: int
    faults: list[str]
    why: str

    def row(self) -> str:
        equal = "no" if self.faults else "yes"
        return f"| {self.says} | {equal} | {self.graphs} | {self.outcome} | {self.why} |"


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((T, D), (E, D), (E, 2 * N, D), (E, D, N))
    made = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    if seed == SEEDS[-1]:
        made[0] = made[0][:1] + 0.001 * made[0]  # all tokens go the same way: experts without rows
    return [t.requires_grad_() for t in made]


def layer() -> Layer:
    torch.manual_seed(0)
    made = Layer().double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


class Runner:
    """One spelling, its captured form, and their two sets of weights."""

    def __init__(self, name: str, backend: str = "moebius"):
        self.name, self.with_modules = name, name in MODULES
        self.spelling = (MODULES if self.with_modules else SPELLINGS)[name]
        self.function: Callable = self.spelling.function
        self.captured = capture(self.function, backend=backend)
        self.layers = (layer(), layer()) if self.with_modules else ()

    def inputs(self, which: int, seed: int) -> tuple[list, list[tuple[str, torch.Tensor]]]:
        """Arguments of a call, and what gets gradients, by name. which: 0 the captured one's, 1 the plain one's."""
        values = tensors(seed)
        if not self.with_modules:
            return values, list(zip(("x", "router", "gate_up", "down"), values, strict=True))
        module = self.layers[which]
        module.zero_grad()
        return [values[0], module], [("x", values[0]), *module.named_parameters()]

    def call(self, seed: int, exact: bool = False) -> list[str]:
        """Where the captured call differs from the plain one. exact: in any bit."""
        mine, my_leaves = self.inputs(0, seed)
        plain, leaves = self.inputs(1, seed)
        pairs = [("the result", self.captured(*mine), self.function(*plain))]
        for _, mine_out, plain_out in pairs[:1]:
            mine_out.square().sum().backward()
            plain_out.square().sum().backward()
        faults = []
        for (name, a), (_, b) in zip(my_leaves, leaves, strict=True):
            if (a.grad is None) != (b.grad is None):
                faults.append(f"gradient of {name}: {'none' if a.grad is None else 'one'}, not as in eager")
            elif a.grad is not None:
                pairs.append((f"gradient of {name}", a.grad, b.grad))
        for what, a, b in pairs:
            same = torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-10, atol=1e-11)
            if not same:
                faults.append(f"{what}: off by {(a - b).abs().max().item():.1e} (batch {seed})")
        return faults

    def report(self) -> tuple[str, str]:
        """(outcome, the first reason why it is not better)."""
        report = report_of(captured_of(self.captured))
        if report.breaks:
            first = report.breaks[0]
            detail = first.detail.splitlines()[0][:120]
            return BROKEN, f"{first.reason}: {detail} (line {line_of(first.stack, first.line)})"
        regions = report.expert_regions
        if regions and all(region.lowered for region in regions):
            outcome = PROJECTED if any(region.kernel == KERNEL for region in regions) else LOWERED
            return outcome, EXPERTS if any("rows of its own" in region.idiom for region in regions) else ""
        refusals = [region.refusal for region in regions if not region.lowered and region.refusal]
        return CAPTURED, shortened(refusals[0]) if refusals else UNSEEN


def line_of(stack: tuple, line: int) -> int:
    """The innermost line in the spelling itself."""
    own = [place[1] for place in stack if "spellings.py" in place[0]]
    return own[-1] if own else line


def shortened(refusal: str) -> str:
    """A refusal without the folder of its file."""
    head, _, place = refusal.rpartition("(")
    return f"{head}({Path(place).name}" if place.endswith(")") else refusal


def measure(name: str) -> Outcome:
    """Runs one spelling on every batch."""
    moebius.reset()
    runner = Runner(name)
    faults = [fault for seed in SEEDS for fault in runner.call(seed)]
    outcome, why = runner.report()
    counted = stats(runner.captured)
    says = runner.spelling.says
    return Outcome(name, says, outcome, counted.graphs, counted.breaks, faults, why.replace("|", "\\|"))


INTRODUCTION = """\
# Expert loops

How people write the loop over experts, and what becomes of each spelling. *One operator*: the loop became the grouped
experts operator, with its own backward. *Projections of sorted rows*: the loop is gone, and each projection is one for
the rows of all experts. *One graph*: captured as it was written; nothing breaks, and nothing is saved. *Graph breaks*:
the answer is right, part of it runs natively.

Experts that run one after another on rows of their own, whatever the rows are (slices of sorted tokens, the best tokens
of each expert, the tokens up to a capacity) and whatever is done with what comes out, become the operator on all these
rows together; the lookups and sums around them stay as they were written. The last column says so.

The proof decides, not the spelling: a loop of which it cannot be shown that every turn adds one expert's rows, and
depends on no other turn, stays a loop, and the report says at which line the proof ended and why.

A loop that Python runs by itself (over a ModuleList, a while loop, a generator, a dictionary of rows) leaves its turns
one after another in the graph. Turns that are alike but for the expert's number and the expert's own parameters are put
to the same proof. Parameters that each expert has of its own go to the operator where
they lie on a CPU; on a GPU they are stacked, a copy at each call that is not kept for backward. An expert whose turn
would not have run gets no gradient, as in eager.
An `if` on values without `else` is part of the graph, and so is `list.append` of rows in it where the list is joined or
counted afterwards; with `else`, or with a `return` or another change of a Python object in it, it is a graph break.
Experts behind such branches (DeepSeek's `if count == 0: continue`) are taken out of them, each on the rows that it has
where its branch is taken; one whose branch is not taken gets no gradient. So are those behind `if token.numel() == 0:
continue` whose rows are added in place, whatever made the list of tokens. `tensor.numpy()` of integers is followed.
How many tokens an expert has may be asked in any form (`mask.sum() > 0`, `int(count) < 1`, `if n <= 0: continue`): a
count, made by `bincount`, a sum of booleans, or ones scattered into zeros, is known not to be negative; of numbers of
which that is not known, `n <= 0` is a graph break.

Experts computed on all tokens and masked by a gate run on the tokens that chose them, where the gate is certainly zero
for all others (`zeros.scatter`, a mask, -inf before a softmax): as turns, as one stack that is weighted or of which the
chosen rows are picked, or as one batched product whose rows the gate scales (Llama 4). So do those that a condition
takes out of the sum (`torch.where`, `masked_fill`), if it is the choice itself or compares the gate. Tokens [batch, T,
D] are put under one another for it, also where the gate is one number for a whole batch entry (VitPose). They differ
where x, or an expert's output for a token that did not choose it, is not finite: 0 · inf is NaN.

`(weight * (index == e)).sum(-1)[token]`, the weight of an expert's tokens taken out of those of all, is a column of one
matrix of gates, where index is what `topk` gave; it differs where a token's weight for another expert is not finite.

Rows with several axes ([batch, slots, D], as experts of soft slots have them) are put under one another as a matrix,
where each expert has rows of its own.

Experts in phases, all first projections joined, an activation of the whole, cut up again (JetMoE), are taken apart.
An expert whose result nobody reads, or reads without gradients, stays out of the operator: it has no gradient.

What no front end takes stands in the report too, with the line where the results meet and a reason: wherever results
of the same computation, with parameters of their own, are added up, joined, written into one tensor or chosen from,
and data say how much of each a token gets. So are dense mixtures of other experts than the operator's (all of them on
all tokens), batched products with something else between them, experts of different widths or activations. Layers one
after another, heads, classifiers and ensembles are no experts: nothing routes. Not seen: experts of different
structure, gates that are multiplied in transposed, grouped convolutions; where a graph breaks, the break has the line.

Between the operator's projections: any elementwise function of torch (`softplus`, `elu`, `hardswish`, …),
`torch.where` on a comparison, `glu`, and what is written with them.

Weights of all experts in one tensor may be cut into an expert's each (`w.chunk(E)`, DBRX), and weights or tokens may go
through another precision in the turn (`w[e].to(torch.float8_e4m3fn).to(x.dtype)`).

Other experts are lowered projection by projection (the report's kernel says so): of a single one (JetMoE's attention, a
mixture of linear layers) or of three and more, with low-rank additions (peft's LoRA on each expert's layers, its
dropout too), with norms, residuals, the routing weight or a layer that all share between. The rows of all experts are
sorted once, in the order in which the turns would run; what is computed of each row is computed of all of them, each
projection with the matrix of the row's own expert. It keeps for backward what the loop keeps, sums are taken in the
loop's order, and under autocast each projection is in the dtype that it has in the loop. What looks at more than one
row (a mean over the rows, their number, a batch norm) keeps the loop.

Dropout in such experts draws the numbers that the loop draws, expert by expert, each for the rows that it has: outputs,
gradients and the generator's state are eager's. It stays a loop on a GPU, where something else draws between the turns,
and where the experts run in no certain order.

Experts as batched products (bmm or einsum with the weights of all of them, or weights gathered for each row) are put
under one another, a row for each entry of the last product, and go to the same operator, if every axis between the
products is known to be one of rows or of features; gates, dispatch and combine masks and sums over slots stay as they
were written. The copies of weights that `w[index]` makes for each slot are neither made nor kept: of `gathered_weights`
below, with {gathered_sizes}, eager keeps {gathered_eager} KiB for backward beside its
inputs, the operator {gathered_mine} KiB.
Turns that pass tokens on (zero-computation experts) stay beside the operator of those with weights.

Products of rows that are sorted by expert (`torch._grouped_mm`, `torch.nn.functional.grouped_mm` in bfloat16, and
transformers' `grouped_mm`, which stock models run unless they are told otherwise) go to the same operator, where the
offsets are the cumsum of `histc` or `bincount` of what `topk` chose. Where rows are the slots of tokens, sorted or
repeated, and what the experts give is weighted, put back and added up for each token, the operator runs on the tokens:
neither the rows nor the results are kept for backward. So it is with transformers' `batched_mm`.

Made by `python tests/expert_loops/table.py --docs docs/expert-loops.md` on {date}, torch {torch}. Each spelling is
written out in tests/expert_loops (spellings.py and what ends in _spellings.py) and runs with `@capture`
and plainly, in float64.
*Equal*: the result and every gradient, a missing one included, on {batches} batches.

{counts}

| spelling | equal | graphs | becomes | why not one operator |
|---|---|---|---|---|
"""


SIZES = {"E": 8, "T": 64, "K": K, "D": 64, "N": 96}


def kept_for_backward(name: str) -> tuple[int, int]:
    """Bytes that one spelling of SPELLINGS keeps beside its inputs, in float32 at SIZES: (plainly, captured)."""
    e, t, d, n = (SIZES[size] for size in "ETDN")
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((t, d), (e, d), (e, 2 * n, d), (e, d, n))]
    own = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    function = SPELLINGS[name].function
    captured = capture(function)
    captured(*inputs)
    found = []
    for form in (function, captured):
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = form(*inputs)
        found.append(sum(storage.nbytes() for place, storage in kept.items() if place not in own))
        del out
    return found[0], found[1]


def page(outcomes: list[Outcome]) -> str:
    words = (LOWERED, PROJECTED, CAPTURED, BROKEN)
    counts = [f"- {word}: {sum(o.outcome == word for o in outcomes)}" for word in words]
    around = sum(o.why == EXPERTS for o in outcomes if o.outcome == LOWERED)
    counts[0] += f", of which {around} with lookups and sums left around the experts"
    equal = f"- Equal to plain PyTorch: **{sum(not o.faults for o in outcomes)} of {len(outcomes)}**"
    plain, mine = kept_for_backward("gathered_weights")
    head = INTRODUCTION.format(
        gathered_sizes=", ".join(f"{name} = {size}" for name, size in SIZES.items()),
        gathered_eager=round(plain / 1024),
        gathered_mine=round(mine / 1024),
        date=datetime.datetime.now(datetime.UTC).date(),
        torch=torch.__version__,
        batches=len(SEEDS),
        counts="\n".join([equal, *counts]),
    )
    return head + "".join(f"{outcome.row()}\n" for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="spellings; all of them if none is named")
    parser.add_argument("--docs", type=Path, help="the page to write")
    given = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for name in given.names or [*SPELLINGS, *MODULES]:
        outcomes.append(measure(name))
        done = outcomes[-1]
        equal = "; ".join(done.faults[:3]) or "equal"
        print(f"{name:32} {equal:8} {done.graphs:3} {done.outcome:13} {done.why}", flush=True)
    if given.docs:
        _, mark, kept = given.docs.read_text().partition(PUBLIC) if given.docs.exists() else ("", "", "")
        given.docs.write_text(page(outcomes) + mark + kept)


if __name__ == "__main__":
    main()
