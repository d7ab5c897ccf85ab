"""A part of the mutation fuzzer's changes in each test run; all of them are `make mutate`."""

from __future__ import annotations

import pytest
from changes import all_changes
from fuzzer import NAMES, call, capture_world, noticed_without, run
from world import make_world

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
    "static_tensor": ("tensors", "tensor in place"),
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


@pytest.mark.parametrize("kind", NEEDED)
def test_with_a_kind_of_guard_switched_off_the_fuzzer_notices(kind):
    program, changes = NEEDED[kind]
    assert noticed_without(kind, [program], kinds=changes) is not None


def test_every_kind_of_guard_is_among_them():
    from moebius.guards import program as guards

    met = set()
    original = guards.CompiledGuards.__init__

    def spy(self, *args):
        original(self, *args)
        met.update(fact.check[0] for fact in self.facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards.CompiledGuards, "__init__", spy)
        for name in NAMES:
            world = capture_world(name)
            for _ in range(3):
                call(world)
    assert met <= set(NEEDED)
