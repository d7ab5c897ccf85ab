"""Relations of sizes in a file say what the guards of the capture say."""

from __future__ import annotations

import ast
import json

import pytest
import torch

from moebius.errors import ExportError
from moebius.export.operators import functions
from moebius.export.relations import read_number, write_relation
from moebius.torch_facts.torch_sizes import compiled

TEXTS = (
    "(t0.shape[0] >= 2) and (t1 == t0.shape[0])", "2 <= t0.shape[0] <= 4", "t0.shape[1] == 3 or 5 % t1 == 0",
    "t1 != 0 and 6 // t1 == 2", "not t0.shape[0] == t1", "t0.stride(0) == 3", "-t1 + 2*t0.shape[0] < 4",
    "t0.shape[0]**2 - t1 > 0", "max(t1, t0.shape[0]) == t1", "math.floor(t1 / 2) == 1", "True", "int(t1) == 3",
)  # fmt: skip
GIVEN = [(torch.zeros(rows, columns), number) for rows in (1, 2, 3, 5) for columns in (1, 3) for number in (1, 2, 3)]


@pytest.mark.parametrize("text", TEXTS)
def test_a_file_holds_what_was_guarded(text):
    written = json.loads(json.dumps(write_relation(ast.parse(text, mode="eval").body)))
    holds, expected = read_number(written, 2), compiled(text, ["t0", "t1"])
    for given in [*GIVEN, (torch.zeros(3, 3).T, 3)]:
        assert holds(given) is expected(*given), given


@pytest.mark.parametrize("text", ["t1 @ t1 == 1", "+t1 == 1", "t1 in (1, 2)", "t1 if t0 else 2", "[t1][0]"])
def test_what_no_file_can_hold(text):
    with pytest.raises(ExportError):
        write_relation(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize("given", [(torch.zeros(2, 3), 0), (torch.zeros(2, 1), 0)], ids=["3", "1"])
def test_what_decides_is_asked_first(given):
    text = "t0.shape[1] == 3 or 5 % t1 == 0"
    holds = read_number(write_relation(ast.parse(text, mode="eval").body), 2)
    if given[0].shape[1] == 3:
        assert holds(given) is True
    else:
        with pytest.raises(ZeroDivisionError):
            holds(given)


@pytest.mark.parametrize("name", sorted(n for n in functions() if n.startswith(("operator.", "math.", "builtins."))))
def test_no_number_is_large(name):
    """What is given two plain numbers ends soon, and with no number that fills the memory."""
    try:
        found = read_number({"call": [name, 1 << 40, 1 << 40]}, 0)(())
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return
    assert not isinstance(found, int) or found.bit_length() < 1 << 13
