"""Chains: each operator has torch's bits, versions count as torch counts, and what C cannot take is left untouched."""

from __future__ import annotations

import pytest
import torch

from moebius.kernels import chains
from moebius.kernels.chains import KINDS, MOST_NUMBERS, NUMBERS, OPERATORS, STEP, Chain, Step
from moebius.kernels.native import panel_work

ADAM = Chain(
    (
        Step("mul_number", 0, (0,), 0), Step("lerp", 2, (2, 1), 1), Step("mul_number", 3, (3,), 2),
        Step("addcmul", 3, (3, 1, 1), 3), Step("sqrt", 4, (3,)), Step("div_number", 4, (4,), 4),
        Step("add_number", 4, (4,), 5), Step("addcdiv", 0, (0, 2, 4), 6),
    ), 4, 7,
)  # fmt: skip
RATES = [0.99999, 0.1, 0.999, 0.001, 0.03, 1e-8, -0.01]


def by_torch(p, g, m, v, rates):
    p.mul_(rates[0])
    m.lerp_(g, rates[1])
    v.mul_(rates[2]).addcmul_(g, g, value=rates[3])
    p.addcdiv_(m, (v.sqrt() / rates[4]).add_(rates[5]), value=rates[6])


def state(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    p, g, m, v = (torch.randn(size, generator=generator) for _ in range(4))
    return [p, g, m, v.abs()]


def test_c_has_each_operator_of_this_torch():
    assert [name for name in OPERATORS if chains.way_of(name) is None] == []


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("size", [1, 7, 16, 1000, 1025, 5003, 70001])
def test_an_operator_has_torchs_bits(operator, size):
    generator = torch.Generator().manual_seed(size)
    a, b, c = (torch.randn(size, generator=generator) for _ in range(3))
    for number in (0.3, -1.7, 0.5):
        out = torch.empty(size)
        with torch.no_grad():
            assert Chain((Step(operator, 0, (1, 2, 3), 0),), 4, 1).run([out, a, b, c], [number])
        expected = OPERATORS[operator](a, b, c, number)
        assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("size", [1, 31, 4096, 33000, 100003])
def test_a_chain_has_torchs_bits_and_versions(size):
    ours, plain = state(size), state(size)
    with torch.no_grad():
        for _ in range(3):
            assert ADAM.run(ours, RATES)
            by_torch(*plain, RATES)
    assert all(map(torch.equal, ours, plain))
    assert [t._version for t in ours] == [t._version for t in plain]


def test_the_same_tensor_twice():
    a, b = torch.randn(3000), torch.randn(3000)
    expected = b.clone().add_(a, alpha=0.3).mul_(a)
    with torch.no_grad():
        chain = Chain((Step("add", 0, (0, 1), 0), Step("mul", 0, (0, 2))), 3, 1)
        assert chain.run([b, a, a], [0.3]) and torch.equal(b, expected)


class Own(torch.Tensor):
    """Whoever makes it sees what is done to it."""


BASE = torch.zeros(2000)
REFUSED = {
    "not contiguous": [torch.zeros(100, 2)[:, 0], torch.zeros(100)],
    "another dtype": [torch.zeros(100), torch.zeros(100, dtype=torch.float64)],
    "another size": [torch.zeros(100), torch.zeros(1)],
    "a part in common": [BASE[:1500], BASE[500:]],
    "of a class of its own": [torch.zeros(100).as_subclass(Own), torch.zeros(100)],
    "negative": [torch.zeros(100), torch.zeros(100, dtype=torch.complex64).conj().imag.clone()._neg_view()],
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_c_does_not_read_is_left_alone(why):
    tensors = REFUSED[why]
    versions = [t._version for t in tensors]
    with torch.no_grad():
        assert not Chain((Step("add_number", 0, (0,), 0), Step("add", 0, (0, 1), 0)), 2, 1).run(tensors, [1.0])
    assert [t._version for t in tensors] == versions and not tensors[0].any()


def test_nothing_is_done_under_autograd_or_with_other_numbers():
    chain, a = Chain((Step("add_number", 0, (0,), 0),), 1, 1), torch.zeros(100)
    assert not chain.run([a], [1.0])
    with torch.no_grad():
        assert not any(chain.run([a], [n]) for n in (True, 2**60, torch.tensor(1.0), 1j))
        with torch.inference_mode():
            assert not chain.run([torch.zeros(100)], [1.0])
        assert not a.any() and chain.run([a], [3]) and (a == 3).all()


def test_c_checks_what_a_step_names():
    a = torch.zeros(10)
    wrong = (len(NUMBERS), 0, 0, 0, 0, 0, 0), (0, 5, 0, 0, 0, 0, 0), (0, 0, -1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 2, 0)
    for step in wrong:
        with pytest.raises(IndexError):
            panel_work.rows.chain(STEP.pack(*step), 1, (a,), (1.0,), KINDS, 1)
    for tensors, given, kinds in ((0, (a,), KINDS), (2, (a,), KINDS), (13, (a,) * 13, KINDS), (1, (a,), KINDS[1:])):
        with pytest.raises(IndexError):
            panel_work.rows.chain(STEP.pack(*(0,) * 7), tensors, given, (1.0,), kinds, 1)
    assert not panel_work.rows.chain(STEP.pack(*(0,) * 7), 1, (a,), (None,), KINDS, 1)  # a number that is not given
    assert not a.any()


def test_as_many_numbers_as_there_is_room_for():
    a, steps = torch.zeros(10), tuple(Step("add_number", 0, (0,), place) for place in range(MOST_NUMBERS + 1))
    with torch.no_grad():
        assert Chain(steps[:-1], 1, MOST_NUMBERS).run((a, 2.0), (None, *range(1, MOST_NUMBERS)))
        assert (a == 2 + sum(range(MOST_NUMBERS))).all()
        assert not Chain(steps, 1, MOST_NUMBERS + 1).run([a], [1.0] * (MOST_NUMBERS + 1))
