"""What a program has set on tensors, or a shell in builtins, before it imports moebius."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNTING = """
class Count:
    asked = 0
    def __get__(self, owner, cls):
        Count.asked += owner is not None
        return Count.asked
torch.Tensor.asked = Count()
"""
ONCE = """
looked = []
torch.Tensor.twice = functools.cached_property(lambda self: (looked.append(len(looked)), self * 2)[1])
torch.Tensor.twice.__set_name__(torch.Tensor, "twice")
"""
NOBODYS = """
space = {}
exec("def less(self): return self - 1", space)
assert space["less"].__module__ is None
torch.Tensor.less = space["less"]
"""
PROGRAMS = {  # what is set, what a step does with it, what is looked at after the calls
    "a descriptor": (COUNTING, "x * x.asked", "Count.asked"),
    "a property that is asked once": (ONCE, "x.twice + x.twice", "looked"),
    "a function of no module": (NOBODYS, "x.less() * 2", "None"),
}


def printed(code: str) -> str:
    code = "import builtins, functools, torch\n" + code
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.share(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_tensors_have_before_the_import_is_the_programs(program):
    before, step, after = PROGRAMS[program]
    calls = f"print([step(torch.ones(2) + i).tolist() for i in range(3)], {after})"
    plain = printed(f"{before}\nstep = lambda x: {step}\n{calls}")
    assert printed(f"{before}\nimport moebius\nstep = moebius.capture(lambda x: {step})\n{calls}") == plain


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["_", "get_ipython", "display"])
def test_names_that_shells_set_anew_are_no_matter_of_capture(name):
    """What was shown last is ``_``; the others are there while a cell runs."""
    found = printed(
        f"builtins.{name} = torch.nn.ReLU()\nfrom moebius import capture, stats\ndel builtins.{name}\n"
        "step = capture(lambda x: x + 1, backend='eager')\n"
        "print(step(torch.ones(1)).item(), step(torch.ones(1)).item(), stats(step).hits)"
    )
    assert found.split() == ["2.0", "2.0", "1"]
