"""A fixture for pytest: ``assert_captured(fn)(*args)`` fails where a call of ``fn`` is not one graph for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def checked(function: Any, **options: Any) -> Callable[..., Any]:
    """Calls the function, captured, twice, and returns the second result. An AssertionError, with the report, says of a
    graph break, a call that ran natively, a second capture, or an expert loop that stays a loop."""
    from moebius import capture, explain
    from moebius.api import captured_of

    captured = function if captured_of(function) is not None else capture(function, **options)

    def call(*args: Any, **kwargs: Any) -> Any:
        explain(captured)(*args, **kwargs)
        report = explain(captured)(*args, **kwargs)
        faults = [f"[{b.code}] graph break at {b.file}:{b.line}: {b.reason}: {b.detail}" for b in report.breaks]
        faults += [
            f"expert loop at {region.file}:{region.line} stays a loop: {region.refusal}"
            for region in report.expert_regions
            if not region.lowered
        ]
        if report.status != "hit":
            faults.append(f"the second call with the same arguments was no hit but {report.status}")
        if faults:
            raise AssertionError("\n".join([report.verdict, *faults, "", str(report)]))
        return report.result

    return call


@pytest.fixture
def assert_captured() -> Callable[..., Callable[..., Any]]:
    """``assert_captured(fn)(*args)``: the result of a call without a break, a recapture or a refusal."""
    return checked
