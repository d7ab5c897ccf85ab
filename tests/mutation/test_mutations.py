"""A part of the mutation fuzzer's changes in each test run; all of them are `make mutate`."""

from __future__ import annotations

import os
import subprocess
import sys

import fuzzer
import pytest
from changes import all_changes
from fuzzer import NAMES, noticed_without, run
from world import make_world

from moebius.heap.identities import Identities
from moebius.hook import CHECKS

# How many changes of a program there are to one that is tried here: models have thousands, and each takes 0.4 s.
SPARSE = {  # primes, so that many kinds are among them
    "mixtral": 353,
    "qwen3_moe": 353,
    "deepseek": 449,
    "training_step": 50,
    "momentum_step": 40,
    "custom_gradients": 30,
    "module_tree": 60,
    "buffers_and_effects": 80,
    "aliases": 40,
    "containers": 26,
}


@pytest.mark.share(2)
@pytest.mark.parametrize("name", NAMES)
def test_after_a_change_the_answer_is_that_of_plain_python(name):
    outcomes = list(run([name], SPARSE.get(name, 13)))
    assert len({o.change.kind for o in outcomes}) >= 5
    assert [o for o in outcomes if o.what == "WRONG"] == []
    assert any(o.what == "hit" for o in outcomes) and any(o.what != "hit" for o in outcomes)


def test_each_program_offers_changes_of_many_kinds():
    kinds = {change.kind for name in NAMES for change in all_changes(make_world(name))}
    wanted = "alias,tensor,tensor in place,module,class,object,switch,library,function,list,dict,set,float: minus zero"
    for beginning in [*wanted.split(","), "float: NaN", "int: True for it", "str: a subclass"]:
        assert any(kind.startswith(beginning) for kind in kinds), beginning


# kind of guard -> a program and kinds of change that nothing but such a guard notices
NEEDED = {
    "same": ("aliases", "object: an equal copy"),
    "none_of": ("aliases", "alias: two tensors"),
    "distinct": ("containers", "alias"),
    "static_tensor": ("buffers_and_effects", "tensor in place"),
    "is_weak": ("aliases", "alias: two objects"),
    "instance": ("static_config", "object: __class__"),
    "function": ("static_config", "function: __code__"),
    "answers": ("tensors", "switch: no_grad"),
    "contents": ("static_config", "list"),
    "length": ("containers", "list"),
    "absent": ("containers", "dict: key added"),
    "keys": ("containers", "dict"),
    "equal": ("config_object", "float"),
    "type": ("config_object", "object: __class__"),
    "is": ("closures", "function: __code__"),
    "dict": ("static_config", "float"),
    "class": ("static_config", "class"),
    "tensor": ("tensors", "tensor:"),
    "python": ("containers", "deque"),
}


@pytest.mark.share(6)
@pytest.mark.parametrize("kind", NEEDED)
def test_with_a_kind_of_guard_switched_off_the_fuzzer_notices(kind):
    program, changes = NEEDED[kind]
    assert noticed_without(kind, [program], kinds=changes) is not None


@pytest.mark.parametrize("kind", ["pin", "guard_distinct", "guard_tuples"])
def test_without_a_kind_of_identity_the_fuzzer_notices(kind, monkeypatch):
    monkeypatch.setattr(Identities, kind, lambda *args: None)
    kinds = {"pin": "object: an equal", "guard_distinct": "alias: two obj", "guard_tuples": "tuple: an equal"}
    assert any(o.what == "WRONG" for o in run(["identities"], kinds=kinds[kind]))


def test_every_kind_of_guard_is_among_them():
    assert set(NEEDED) == set(CHECKS)


IN_CHILDREN = """
import os, fuzzer
for outcome in fuzzer.run(["{program}"], {each}, forks=True):
    print(f"{{outcome.what}}: {{outcome.change.kind}}, {{outcome.change.where}}")
print(fuzzer.in_child(lambda: os.abort()))
"""


def test_in_copies_of_one_process_comes_out_what_comes_out_in_worlds_made_anew():
    """As ``make mutate`` does it, and in a process of its own, as this one may have threads."""
    program, each = "static_config", 21
    script = IN_CHILDREN.format(program=program, each=each)
    here = {**os.environ, "PYTHONPATH": os.path.dirname(fuzzer.__file__)}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=here)
    lines = ran.stdout.splitlines()
    assert lines[:-1] == [f"{o.what}: {o.change.kind}, {o.change.where}" for o in run([program], each)], ran.stderr
    assert len(lines) > 20
    assert "WRONG" in lines[-1] and "status 6" in lines[-1]
