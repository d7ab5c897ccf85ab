"""A refused loop over experts names the line that blocks it: without that line it is lowered."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch

from moebius import explain

SHAPES = [(16, 8), (4, 8), (4, 12, 8), (4, 8, 6)]
BLOCKERS = {
    "a mean over rows": "gate = gate - gate.mean(0)",
    "a list": "seen.append(t)",
    "rows in another order": "gate = gate.sort(0).values",
    "a number that is read": "seen.append(gate.abs().max().item())",
    "a print": "print(int(e), gate.shape)",
}
LOOPS = {"all": "range(len(router))", "hits": "mask.sum((1, 2)).nonzero()[:, 0]", "list": "range(len(router))[:]"}
LOOP = """\
import torch

def moe(x, router, gate_up, down):
    seen, counts = [], {{}}
    weight, chosen = (x @ router.T).softmax(-1).topk(2)
    mask = torch.nn.functional.one_hot(chosen, len(router)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for e in {experts}:
        slot, t = torch.where(mask[e])
        if len(t) == 0:
            continue
        gate, up = (x[t] @ gate_up[e].T).chunk(2, -1)
        {blocker}
        h = torch.nn.functional.silu(gate) * up
        out.index_add_(0, t, h @ down[e].T * weight[t, slot, None])
    return out
"""


def explained(tmp_path: Any, blocker: str, experts: str) -> tuple[Any, str]:
    path = tmp_path / "moe.py"
    path.write_text(LOOP.format(blocker=blocker, experts=experts))
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    torch.manual_seed(0)
    return explain(namespace["moe"])(*(torch.randn(shape, requires_grad=True) for shape in SHAPES)), str(path)


@pytest.mark.parametrize("loop", LOOPS)
def test_without_a_blocker_it_is_lowered(tmp_path: Any, loop: str) -> None:
    report, _ = explained(tmp_path, "pass", LOOPS[loop])
    assert [region.lowered for region in report.expert_regions] == [True]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", BLOCKERS)
def test_the_line_that_blocks_is_named(tmp_path: Any, name: str, loop: str) -> None:
    report, path = explained(tmp_path, BLOCKERS[name], LOOPS[loop])
    refused = [region for region in report.expert_regions if not region.lowered]
    if not refused:  # (one operator is as well)
        assert report.lowered and loop != "hits"
        return
    assert len({(region.line, region.refusal) for region in refused}) == 1
    region = refused[0]
    assert linecache.getline(path, region.line).strip().startswith("for e in ")
    (stays,) = report.stays.values()
    (excerpt,) = stays.excerpts
    assert excerpt.text == BLOCKERS[name] and excerpt.expression in BLOCKERS[name]
    assert f"│ {excerpt.text}\n" in str(report) and f"│ {excerpt.underline}\n" in f"{report}\n"
    assert f"{path}:13" in region.refusal and "moebius." not in region.refusal, region.refusal
    assert "moebius." not in report.verdict
