"""Right loops are lowered and equal to eager in every gradient; wrong ones are refused, or equal."""

import dataclasses

import hypothesis
import pytest
from expert_loops import lowered, same
from hypothesis import strategies
from loop_family import CHOICES, DEFECTS, Spec, build, inputs_for, valid

from moebius.lowering.errors import DEFECT
from moebius.lowering.experts.rows_written import KERNEL

specs = strategies.builds(Spec, **{name: strategies.sampled_from(values) for name, values in CHOICES.items()}).filter(
    valid
)
SETTINGS = hypothesis.settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)


def check(spec, seed=0):
    """The region of a loop, after seeing that its lowering equals eager."""
    function, inputs = build(spec), inputs_for(spec, seed)
    made = lowered(function, inputs)
    (region,) = made.regions
    assert region.lowered == (region.refusal is None)
    assert region.lowered or DEFECT not in region.refusal
    assert same(function, made.fn, inputs), (
        f"{spec} was {'lowered' if region.lowered else 'not lowered'} and differs from eager"
    )
    return region


@SETTINGS
@hypothesis.given(specs, strategies.integers(0, 1000))
def test_right_loops_are_lowered(spec, seed):
    region = check(spec, seed)
    assert region.lowered, f"{spec}: {region.refusal}"


@pytest.mark.share(16)
@pytest.mark.parametrize("field,value", [(name, value) for name, values in CHOICES.items() for value in values])
def test_each_way_of_writing_is_lowered(field, value):
    base = Spec(select="eq") if value == "unique" else Spec()
    region = check(dataclasses.replace(base, **{field: value}))
    assert region.lowered, region.refusal


@SETTINGS
@hypothesis.given(specs, strategies.sampled_from(DEFECTS), strategies.integers(0, 1000))
def test_wrong_loops_are_refused_or_equal(spec, defect, seed):
    check(dataclasses.replace(spec, defect=defect), seed)


def test_a_scale_by_another_slots_weight_is_a_scale():
    """weights[token, 0] is one number a token: unusual, and understood."""
    assert check(Spec(defect="weight of slot 0")).lowered


def test_one_expert_too_few_is_a_layer_of_fewer():
    """What goes to the last expert goes nowhere, there and here."""
    region = check(Spec(defect="one expert too few", source="range"))
    assert region.lowered and region.num_experts == 3


def test_part_of_the_input_axis_is_a_projection():
    region = check(Spec(defect="part of the input axis", source="hits"))
    assert region.lowered and region.kernel == KERNEL


UNDERSTOOD = ("weight of slot 0", "one expert too few", "part of the input axis")


@pytest.mark.parametrize("defect", [d for d in DEFECTS if d not in UNDERSTOOD])
def test_each_defect(defect):
    select = "eq" if defect == "index changed before the loop" else "mask"
    region = check(Spec(defect=defect, source="hits", select=select))
    assert not region.lowered
    assert region.refusal.endswith(")") and "loop_family.py:" in region.refusal
