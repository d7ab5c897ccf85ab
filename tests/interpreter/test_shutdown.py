"""What is left when the process ends: generators are closed, and nothing is written that is not the program's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
sys.path.insert(0, {folder!r})
from fuzz.provide import provide_interpreter
provide_interpreter()
from moebius.interpreter import interpret

def steps(write=os.write):
    try:
        yield 1
    finally:
        write(1, b"closed ")

class Dying:
    def __del__(self, write=os.write):
        write(1, b"dies ")

def main():
    code = compile("def later(): yield 1\\nlast = later(); next(last)", "<text>", "exec")
    names = {{}}
    exec(code, names)
    it, dying = steps(), Dying()
    next(it)
    return it, dying, names, code

kept = interpret(main)()
kept[1].itself = kept[1]
"""


def test_what_lives_to_the_end_ends_as_it_does_natively() -> None:
    source = PROGRAM.format(folder=str(Path(__file__).parent))
    for text in (source, source.replace("interpret(main)()", "main()")):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
        assert (sorted(done.stdout.split()), done.stderr) == (["closed", "dies"], ""), text
