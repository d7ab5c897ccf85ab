"""``deterministic=True``: torch's deterministic algorithms while a captured call runs, and only then."""

from __future__ import annotations

import pytest
import torch

import moebius
from moebius import capture, stats


@torch.library.custom_op("moebius_test_deterministic::is_on", mutates_args=())
def is_on(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(torch.are_deterministic_algorithms_enabled())


@is_on.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.bool)


def whole(x):
    return is_on(x)


def after_a_break(x):
    first = is_on(x)
    print(end="", flush=True)
    float(x.sum()).hex()
    return first, is_on(x)


def native(x):
    return eval("torch.are_deterministic_algorithms_enabled()", {"torch": torch})


@pytest.fixture(params=[(False, False), (True, False), (True, True)], ids=["off", "on", "warns"])
def outside(request):
    torch.use_deterministic_algorithms(request.param[0], warn_only=request.param[1])
    yield request.param
    torch.use_deterministic_algorithms(False)


def state():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize("step", [whole, after_a_break, native], ids=lambda f: f.__name__)
def test_it_is_on_inside_and_as_before_outside(step, outside):
    captured = capture(step, deterministic=True)
    for _ in range(3):
        found = captured(torch.ones(3))
        assert all(bool(f) for f in (found if isinstance(found, tuple) else (found,)))
        assert state() == outside
    assert stats(captured).recompiles == [] or step is not whole


def test_without_the_option_it_is_off():
    assert not capture(whole)(torch.ones(3))


def test_an_operator_without_one_says_so():
    def step(x, i):
        return x.clone().put_(i, torch.ones(2))

    captured = capture(step, deterministic=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            captured(torch.zeros(4), torch.tensor([1, 1]))
        assert state() == (False, False)
    capture(step)(torch.zeros(4), torch.tensor([1, 1]))


def test_two_runs_are_equal_to_the_bit():
    def step(x, i, source):
        return x.index_put((i,), source, accumulate=True).sum(0)

    torch.manual_seed(0)
    captured = capture(step, deterministic=True)
    given = torch.zeros(7, 64), torch.randint(7, (5000,)), torch.randn(5000, 64)
    first = captured(*given)
    assert all(torch.equal(first, captured(*given)) for _ in range(5))


def test_a_file_keeps_it(tmp_path):
    captured = capture(whole, deterministic=True)
    captured(torch.ones(3))
    captured.export(tmp_path / "step")
    loaded = moebius.load(tmp_path / "step", allow=["moebius_test_deterministic::is_on"])
    assert bool(loaded(torch.ones(3))) and state() == (False, False)


def test_only_true_and_false():
    with pytest.raises(moebius.MoebiusError, match="deterministic='yes': use True or False"):
        capture(whole, deterministic="yes")
