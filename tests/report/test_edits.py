"""A break shows the user's line as it could be: applied to the program it takes the break away and leaves the results.

Each cause of a break stands in several spellings of an expression, and each of these in several statements.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import linecache
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from json_schema import faults

from moebius import capture, explain
from moebius.hook import ABSENT
from moebius.python.parts import tensors_in
from moebius.report import Report
from moebius.report.edits import edit_of
from moebius.report.schema import SCHEMA
from moebius.tensors.array_calls import ArrayCalls


@pytest.fixture(autouse=True)
def numpy_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's functions are breaks, as they are in a loop over experts or a checkpointed call."""
    monkeypatch.setattr(ArrayCalls, "call", lambda *_: ABSENT)


HEAD = """\"\"\"A program.\"\"\"
import logging
import math
import sys

import numpy as np
import torch
from tqdm import tqdm, trange

RATES = [0.1, 0.25, 0.5, 2.0]
WIDTHS = (3, 1, 2, 5)


def step(x, whole, flags):
"""
# Cause: expressions over x (float32[4, 4]), whole (int64[4]), flags (bool[4]) that are a number or a tensor; any may
# stand in any statement below.
EXPRESSIONS = {
    "numpy asked": [
        "torch.from_numpy(np.tanh(x.numpy()))", "float(np.mean(x.detach().cpu().numpy()))",
        "torch.as_tensor(np.abs(np.sin(x.numpy())) * 2.0)", "np.max(x.numpy()[0]).item()",
        "torch.from_numpy(-x.numpy()[1:, ::2]).sum()", "float(x.numpy().mean())", "torch.from_numpy(3 * x.numpy() + 1)",
        "torch.from_numpy(np.clip(x.numpy(), -0.5, 0.5))", "torch.as_tensor(np.sum(x.numpy(), axis=1, keepdims=True))",
    ],
    "a tensor of tensors": [
        "torch.tensor([x.sum(), x.max()]).mean()", "torch.tensor(x)", "torch.tensor(x > 0, dtype=torch.float64)",
        "torch.tensor((x[0, 0], x[1, 1], x[2, 2], x[3, 3]))",
        "torch.as_tensor([x.mean(), x[0, 1]], dtype=torch.float64).sum()",
    ],
    "rounded": ["math.ceil(x.sum())", "math.floor(x.abs().sum())"],
    "a list of numbers": [  # (short ones break no graph)
        "max(x.repeat(1, 17)[0].tolist())", "min((x.repeat(1, 17)[0] * 2).tolist())", "len(x.tolist())",
        "x.repeat(1, 17)[0].tolist()[-1]", "torch.tensor(x.tolist())",
        "sum(v * 2 for v in x.repeat(1, 17)[0].tolist())",
        "sum(i * v for i, v in enumerate(x.repeat(1, 17)[1].tolist()))", "sum(len(r) for r in x.tolist())",
    ],
    "a list that a tensor indexes": [
        "RATES[x[0].argmax()]", "WIDTHS[whole[0]]", "[1.5, 2.5, 3.5, 4.5][int(x[0].argmax())]",
        "RATES[x[0].argmax().item()]", "(7, 8, 9, 10)[whole.argmax()]",
    ],
    "membership": ["(3 in whole.tolist())", "(2 not in (whole % 3).tolist())"],
    "how many": ["len(set(whole.tolist()))", "len(set((whole % 2).tolist()))"],
    "identities": ["(id(x) == id(x))", "(id(x) != id(whole))"],
}  # fmt: skip
STATEMENTS = [
    "return x * {0}",
    "y = x + 1\nz = (y * {0}\n    + 2)\nreturn z",
    "scale = {0}\nif flags.dim() == 1:\n    x = x * scale\nreturn x, scale",
    "parts = [part * {0} for part in (x, x - 1)]  # größer\nreturn parts[0], {{'größe': parts[1]}}",
    "def inner(v):\n    return v + {0}\nreturn inner(x) + inner(x * 2)",
]
# Whole bodies: what is a statement of its own.
BODIES = {
    "loggers": [
        "logging.getLogger(__name__).debug('a')\nreturn x * 2",
        "logging.getLogger('a.b').debug('b %s', 1)\nreturn x + 1",
        "log = logging.getLogger()\nlog.debug('c')\nreturn x - 1",
    ],
    "bars": [
        "for i in tqdm(range(3)):\n    x = x + i\nreturn x",
        "for i in trange(3, desc='a'):\n    x = x * (i + 2)\nreturn x",
        "for i, v in enumerate(tqdm([1.0, 2.0])):\n    x = x * v + i\nreturn x",
        "return torch.stack([x + i for i in tqdm((1, 2, 3), leave=False)])",
    ],
}  # fmt: skip
CASES = [
    (cause, statement.format(expression))
    for cause, expressions in EXPRESSIONS.items()
    for expression, statement in itertools.product(expressions, STATEMENTS)
] + [(cause, body) for cause, bodies in BODIES.items() for body in bodies]


def values() -> tuple[torch.Tensor, ...]:
    drawn = torch.Generator().manual_seed(5)
    return torch.randn(4, 4, generator=drawn), torch.tensor([3, 0, 3, 1]), torch.tensor([True, False, True, True])


def program(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


def loaded(text: str, path: Path) -> Callable[..., object]:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.step


@pytest.mark.share(16)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_edit_takes_the_break_away(case: int, tmp_path: Path) -> None:
    cause, body = CASES[case]
    text, edits = program(body), 0
    for number in itertools.count():
        step = loaded(text, tmp_path / f"program_{case}_{number}.py")
        wanted = step(*values())
        report: Report = explain(step)(*values())
        assert close(report.result, wanted), text
        if not report.breaks:
            break
        edit = next((item.edit for item in report.breaks if item.edit is not None), None)
        assert edit is not None, f"{text}\n{report}"
        assert faults(json.loads(report.to_json()), SCHEMA) == []
        assert all(f"{sign} {line[:60]}" in str(report) for _, sign, line in edit.rows())
        before, text, edits = wanted, edit.applied(text), edits + 1
        assert edits < 6, text
        after = loaded(text, tmp_path / f"program_{case}_{number}_after.py")(*values())
        assert close(after, before), text
    assert edits, f"no break: {text}"
    step = capture(step, fullgraph=True)
    assert close(step(*values()), before), text


def close(a: object, b: object) -> bool:
    """Whether results are equal, but for the last bits of what numpy and torch compute each in its way."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    if isinstance(a, float) or isinstance(b, float):
        return abs(a - b) <= 1e-5 * (1 + abs(b))  # type: ignore[operator]
    return a == b


@pytest.mark.parametrize(
    "expression",
    [
        "float(np.std(x.numpy()))", "np.max(x.numpy(), axis=0).mean()",
        "torch.from_numpy(np.rint(x.numpy()[0] / whole.numpy()))",
        "torch.tensor([x.sum(), 2.0]).sum()", "id(x)", "sorted(x[0].tolist())[0]",
        "sum(x.repeat(1, 17)[0].tolist())",
        "[RATES, WIDTHS][whole[1]][0]", "{float(x.sum()): 1}[float(x.sum())]", "len(set(x.numpy()[0].tolist()) | {1})",
    ],
)  # fmt: skip
def test_where_no_line_is_known_to_be_right_none_is_said(expression: str, tmp_path: Path) -> None:
    report = explain(loaded(program(f"return x * {expression}"), tmp_path / "program.py"))(*values())
    assert report.breaks and not any(item.edit for item in report.breaks), report


def test_a_file_that_has_changed_gets_no_edit(tmp_path: Path) -> None:
    report = explain(loaded(program("return x * math.ceil(x.sum())"), tmp_path / "program.py"))(*values())
    (item,) = report.breaks
    assert item.edit is not None and item.edit.after == ("    return x * int(x.sum().ceil().long())",)
    path = tmp_path / "program.py"
    for text in ("def (", "\n" + path.read_text(), path.read_text().replace("ceil(x.sum())", "ceil(x.max())"), ""):
        path.write_text(text)
        linecache.checkcache(str(path))
        assert item.edit is None


def test_the_edit_is_in_the_text_and_on_the_page(tmp_path: Path) -> None:
    body = "if x.dim() == 2:\n    log = logging.getLogger('<a>')\n    log.debug('a')\nreturn x"
    report = explain(loaded(program(body), tmp_path / "program.py"))(*values())
    text, page = str(report), report.to_html(tmp_path / "page.html").read_text()
    assert "   16 - log = logging.getLogger('<a>')" in text and "   16 + log = logger" in text
    assert "    9 + logger = logging.getLogger('<a>')" in text
    assert "logger = logging.getLogger(&#x27;&lt;a&gt;&#x27;)</ins>" in page


def test_a_tensor_on_another_device_is_not_stacked(tmp_path: Path) -> None:
    """``torch.tensor([a, b])`` is made on the default device, ``torch.stack`` where its tensors are."""
    text = program("return torch.tensor([x.sum(), x.max()]) * 2")
    edit = explain(loaded(text, tmp_path / "program.py"))(*values()).breaks[0].edit
    assert edit is not None and "torch.stack" in edit.after[0]
    excerpt = explain(loaded(text, tmp_path / "program.py"))(*values()).breaks[0].excerpt
    reason = "tensor made from tensors' numbers"
    assert edit_of(reason, "torch.tensor of tensors", excerpt) == edit
    assert edit_of(reason, "torch.tensor of tensors on cuda:0", excerpt) is None
    torch.set_default_device("meta")
    try:
        assert edit_of(reason, "torch.tensor of tensors", excerpt) is None
    finally:
        torch.set_default_device(None)
    assert tensors_in([[torch.ones(1)], 1]) == "tensors"
