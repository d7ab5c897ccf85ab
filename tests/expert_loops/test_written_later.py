"""What an expert computes on its way, and what routes it, written into after the experts have run, past autograd's
versions or not: backward in plain Python reads what was put there, or raises an error; and so it does captured."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import silu

from moebius import disable, explain, reset
from moebius.lowering.step import written_later

E, T, K, D, N = 3, 7, 2, 4, 3
FORMS = {
    "iterations": """
out = torch.zeros_like(x)
for e in range(E):
    token, slot = torch.where(index == e)
    h = x[token] @ up[e]; a = silu(h); seen.append(VALUE)
    out.index_add_(0, token, a @ down[e] * weight[token, slot, None])""",
    "parts": """
flat = index.view(-1); order = flat.argsort(); ys = []
for e, part in enumerate(x[order // K].split(torch.bincount(flat, minlength=E).tolist())):
    h = part @ up[e]; a = silu(h); seen.append(VALUE); ys.append(a @ down[e])
out = torch.zeros_like(x).index_add(0, order // K, torch.cat(ys) * weight.view(-1)[order][:, None])""",
    "dense": """
gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight); out = torch.zeros_like(x)
for e in range(E):
    h = x @ up[e]; a = silu(h); seen.append(VALUE)
    out = out + a @ down[e] * gates[:, e, None]""",
    "stack": """
gates = torch.zeros(len(x), E, dtype=x.dtype).scatter_(1, index, weight); ys = []
for e in range(E):
    h = x @ up[e]; a = silu(h); seen.append(VALUE); ys.append(a @ down[e])
out = (torch.stack(ys, 1) * gates[:, :, None]).sum(1)""",
    "batched": """
gates = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, index, weight)
h = torch.bmm(x.expand(E, -1, -1), up); a = silu(h); seen.append(VALUE)
out = (torch.bmm(a, down) * gates.t()[:, :, None]).sum(0)""",
    "gathered": """
h = torch.einsum("td,tkdn->tkn", x, up[index]); a = silu(h); seen.append(VALUE)
out = torch.einsum("tkn,tknd,tk->td", a, down[index], weight)""",
    "grouped": """
flat = index.view(-1); order = flat.argsort(); counts = torch.nn.functional.one_hot(flat, E).sum(0)
ends = counts.cumsum(0).to(torch.int32); h = grouped(x[order // K], up, ends); a = silu(h); seen.append(VALUE)
out = torch.zeros_like(x).index_add(0, order // K, grouped(a, down, ends) * weight.view(-1)[order][:, None])""",
}
WRITES = {
    "data": "VALUE.data.mul_(1.5)",
    "an alias": "VALUE.detach().add_(0.5)",
    "under no_grad": "torch.no_grad().__enter__(); VALUE.mul_(1.5); torch.set_grad_enabled(True)",
    "a part": "VALUE.data[0].mul_(2)",
}
CASES = [(form, v, w) for form, v, w in itertools.product(FORMS, "ha", WRITES)]
CASES += [(form, v, "data") for form, v in itertools.product(FORMS, ("x", "up", "down", "weight", "logits"))]
CASES += [(form, "index", "turned") for form in FORMS]
WRITES["turned"] = "VALUE.data.copy_(VALUE.flip(0))"


ALIASES = {
    "data": "VALUE.data", "detached": "VALUE.detach()", "a part": "VALUE.data[0]",
    "a view": "VALUE.data.view(-1)",
}
LATER = list(itertools.product(FORMS, "ha", ALIASES))


@disable
def native() -> None:
    """What is given out of the graph here, anybody may write into."""


def layer_of(form: str, value: str, write: str):
    body = "seen = []\nweight, index = logits.softmax(-1).topk(K)"
    body += FORMS[form].replace("VALUE", value if value in "ha" else "h") + "\n"
    later = f"other = {ALIASES[write[6:]]}; native(); other.mul_(1.5)" if write.startswith("later ") else WRITES[write]
    body += later.replace("VALUE", value) + "\nreturn out\n"
    source = "def layer(x, logits, up, down):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    grouped = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    space = dict(torch=torch, silu=silu, native=native, E=E, K=K, grouped=grouped)
    exec(source, space)
    return space["layer"]


def outcome(call) -> tuple[object, list | str]:
    torch.manual_seed(0)
    shapes = ((T, D), (T, E), (E, D, N), (E, N, D))
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    found = call(*given)
    result = getattr(found, "result", found)
    try:
        (result * torch.linspace(1, 2, D, dtype=torch.float64)).sum().backward()
    except RuntimeError as error:
        return found, str(error)[:60]
    return found, [result.detach(), *(t.grad for t in given)]


@pytest.mark.share(4)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward_reads_what_was_written(case: tuple[str, str, str]) -> None:
    pytest.importorskip("transformers.integrations.moe")  # registers an operator
    layer = layer_of(*case)
    (_, plain), (_, captured) = outcome(layer), outcome(explain(layer))
    reset()
    if isinstance(plain, str) or isinstance(captured, str):
        assert plain == captured
        return
    for one, other in zip(plain, captured, strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.share(4)
@pytest.mark.parametrize(("form", "value", "alias"), LATER)
def test_what_is_given_out_of_a_graph_may_be_written(form: str, value: str, alias: str) -> None:
    test_backward_reads_what_was_written((form, value, f"later {alias}"))


@pytest.mark.parametrize("form", FORMS)
def test_switched_off_what_is_given_out_is_another(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written_later, "given_out", lambda graph, storage: [])
    with pytest.raises(AssertionError):
        test_backward_reads_what_was_written((form, "h", "later data"))
    reset()


def test_what_is_handed_from_layer_to_layer_may_be_given_out() -> None:
    def two(x, logits, up, down):
        first = layer(x, logits, up, down)
        return layer(first, logits, up, down), first, first.detach()

    layer = layer_of("iterations", "out", "data")
    shapes = ((T, D), (T, E), (E, D, N), (E, N, D))
    report = explain(two)(*(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes))
    reset()
    assert [region.lowered for region in report.expert_regions] == [True, True]


@pytest.mark.parametrize("form", FORMS)
def test_without_such_a_write_they_are_operators(form: str) -> None:
    """So the cases above are not equal for want of an operator; what the experts give may be written into."""
    pytest.importorskip("transformers.integrations.moe")
    report, _ = outcome(explain(layer_of(form, "out", "data")))
    reset()
    assert any(region.lowered for region in report.expert_regions), [r.refusal for r in report.expert_regions]
