"""A part of the mutation fuzzer's changes in each test run; all of them are `make mutate`."""

from __future__ import annotations

import pytest
from changes import all_changes
from fuzzer import NAMES, run
from world import make_world

# How many changes of a program there are to one that is tried here: models have thousands, and each takes 0.4 s.
SPARSE = {"mixtral": 400, "module_tree": 29, "buffers_and_effects": 40}


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
