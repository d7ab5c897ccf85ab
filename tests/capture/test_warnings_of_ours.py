"""A warning of ours that a filter makes an error: the call raises it, once."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from moebius import MoebiusWarning, capture
from moebius.cache.captured import Captured


def gives_up(monkeypatch, log):
    """Each call brings another class, until the limit of captures."""

    @capture
    def step(x, made):
        log.append("ran")
        return made().of(x)

    def call(number):
        return step(torch.ones(2), type("Made", (), {"of": lambda self, x: x + number}))

    return call, 40, "runs natively now"


def fails(monkeypatch, log):
    """An error of ours while capturing."""

    def broken(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(Captured, "capture", broken)

    @capture
    def step(x, number):
        log.append("ran")
        return x + number

    return lambda number: step(torch.ones(2), number), 3, "could not capture .*ZeroDivisionError"


@pytest.mark.faults
@pytest.mark.parametrize("kind", [gives_up, fails], ids=lambda kind: kind.__name__)
def test_as_an_error_it_is_raised_once_as_it_is(kind, monkeypatch):
    log: list[str] = []
    call, calls, text = kind(monkeypatch, log)
    raised = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", MoebiusWarning)
        for number in range(calls):
            before = len(log)
            try:
                assert torch.equal(call(number), torch.ones(2) + number)
            except MoebiusWarning as warning:
                raised.append(warning)
                assert len(log) == before or kind is gives_up  # (that comes after a graph break)
            else:
                assert len(log) == before + 1
    assert len(raised) == 1 and "moebius" in str(raised[0])
    with pytest.raises(MoebiusWarning, match=text):
        raise raised[0]
    assert torch.equal(call(100), torch.ones(2) + 100)


@pytest.mark.faults
@pytest.mark.parametrize("kind", [gives_up, fails], ids=lambda kind: kind.__name__)
def test_as_a_warning_it_has_our_category_and_the_call_goes_on(kind, monkeypatch):
    call, calls, text = kind(monkeypatch, [])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(calls):
            assert torch.equal(call(number), torch.ones(2) + number)
    ours = [each for each in told if issubclass(each.category, MoebiusWarning)]
    assert len(told) == len(ours) and re.search(text, str(ours[-1].message)) and ours[-1].filename == __file__
