"""What a graph break says of a value calls it as Python does, not as the class that stands for it while tracing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius import explain

ROOT = Path(__file__).resolve().parents[2]
OURS = {
    name
    for folder in ("capture", "interpreter", "lowering")
    for path in (ROOT / folder).rglob("*.py")
    for name in re.findall(r"^class ([A-Z]\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}
MADE = [
    "x.numpy()", "x.numpy().sum", "x.sum().item()", "x.numpy().argmax()", "x.sum().item().hex", "x.tolist()",
    "x.nonzero().shape[0]", "iter(x)", "iter(x.numpy())", "x.nonzero()[:, 0].tolist()", "{x.sum().item(), 2}",
    "sys.stdout.write('')", "x.sum", "str(x.sum().item())", "x.numpy().dtype", "'a' if x.sum() > 0 else 'b'",
]  # fmt: skip
USES = [
    "v[0] = 1", "del v[0]", "v()", "v.foo", "v.foo = 1", "len(v)", "v + object()", "hash(v)", "isinstance(x, v)",
    "list(v)", "next(v)", "with v: pass", "v @ x", "reversed(v)", "-v", "x[v]", "v < 3", "float(v)", "torch.tensor(v)",
    "super(v)", "range(v)",
]  # fmt: skip


@pytest.mark.parametrize("made", MADE)
def test_no_class_of_ours_is_named(made: str) -> None:
    said: set[str] = set()
    for use in USES:
        lines = ["import sys, torch", "def step(x):", f"    v = {made}", "    try:", f"        {use}"]
        space: dict[str, Any] = {}
        exec("\n".join([*lines, "    except Exception:", "        pass", "    return x + 1"]), space)
        said |= {f"{one.reason}: {one.detail}; {one.hint}" for one in explain(space["step"])(torch.ones(3)).breaks}
    assert said
    assert not {text for text in said if OURS & set(re.findall(r"\w+", text.replace("Variables", ""))) - {"Tensor"}}
