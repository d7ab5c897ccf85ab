"""Assembled code has tables that Python can read: also under a trace function, which has Python spread them out."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bytecode import Bytecode, Instr
from bytecode.instr import InstrLocation

from moebius.bytecode.code_tables import with_tables

COLUMNS = [0, 1, 63, 64, 71, 72, 127, 128, 129, 200, 254, 255, 256, 5000]
FIRST = 7

# A graph break in a line with columns over 127, below one without: it goes on in code of ours.
PROGRAM = f"""
import torch, moebius

@moebius.disable
def broken(x):
    return x

def step(x):
    y = x + 1
    z = broken(x * 2 + {" + ".join("y" * 30)}) + broken(y {"+ y " * 20})
    return z + broken(x)

for _ in range(3):
    report = moebius.explain(step)(torch.ones(2))
    assert torch.equal(report.result, step(torch.ones(2)))
print(len(report.breaks))
"""


def assembled(places: list[InstrLocation]) -> Bytecode:
    """Code with an instruction at each of the places."""
    made = Bytecode([Instr("RESUME", 0, location=InstrLocation(FIRST, FIRST, 90, 91))])
    for place in places:
        made += [Instr("LOAD_CONST", None, location=place), Instr("POP_TOP", location=place)]
    last = places[-1]
    made += [Instr("LOAD_CONST", None, location=last), Instr("RETURN_VALUE", location=last)]
    made.first_lineno = FIRST
    return made


@pytest.mark.parametrize("lines", range(-1, 4))
@pytest.mark.parametrize("over", range(2))
def test_each_place_is_read_as_it_was_written(lines: int, over: int) -> None:
    """From one line to another that many lines further; columns over more than one line, too."""
    for first in COLUMNS:
        for last in (column for column in COLUMNS if column >= first or over):
            line = FIRST + 1 + lines
            places = [
                InstrLocation(FIRST + 1, FIRST + 1, 3, 5),
                InstrLocation(line, line + over, first, last),
                InstrLocation(line + 1, line + 1, 1, 2),
            ]
            code = with_tables(assembled(places).to_code())
            assert max(end for _, end, _ in code.co_lines()) == len(code.co_code)
            read = [place for place, _ in itertools.groupby(code.co_positions())][1:]
            assert read == [(p.lineno, p.end_lineno, p.col_offset, p.end_col_offset) for p in places]


def test_nothing_is_written_behind_a_table(tmp_path: Path) -> None:
    """Python's own allocator looks for that."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONMALLOC": "debug"}
    ran = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stdout) == (0, "3\n"), ran.stderr[-2000:]
