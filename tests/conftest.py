"""Shared by all tests: thread limits, seeds, markers. Small on purpose; what one folder needs lives in that folder."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

# Before torch is imported anywhere: a thread for each core that a worker of pytest-xdist has, two where there is none.
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["COLUMNS"] = "110"  # how wide a printed report is: whoever runs the tests, and pytest-xdist, may say another

import pytest
from seeds import seed_of_the_code, some


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    if config.option.whole:
        os.environ["MOEBIUS_WHOLE"] = "1"  # read by seeds.examples
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seed_of_the_code())
    config.addinivalue_line("markers", "distributed: starts several processes")
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    config.addinivalue_line("markers", "faults: puts faults into capture, whose reports may say that they are one")
    config.addinivalue_line("markers", "share(n): of many cases, n run, other ones for other code; --whole runs all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of the tests of which a share runs otherwise")


def share_of(config: pytest.Config, node: pytest.Item | pytest.Function) -> int | None:
    """How many cases of this test run; None: all, which who names tests, or words of their names, gets too."""
    named = config.option.keyword or any("::" in argument for argument in config.args)
    marker = None if config.option.whole or named else node.get_closest_marker("share")
    return None if marker is None else marker.args[0]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Of a test marked with share(n), n cases: chosen before pytest makes items of them, of which there are 50,000."""
    yield
    count, cases = share_of(metafunc.config, metafunc.definition), metafunc._calls
    if count is not None and cases:
        chosen = {id(case) for case in some(cases, max(count, 1), metafunc.definition.nodeid)}
        cases[:] = [case for case in cases if id(case) in chosen]  # (of none at all pytest makes a test without values)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if share_of(config, item) == 0]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if share_of(config, item) != 0]


def pytest_collection_finish() -> None:
    """From now on no collection of garbage looks through torch and the tests themselves: hundreds of thousands of
    objects, for which each gc.collect() in a test waited."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor through what a file leaves behind."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_itemcollected(item: pytest.Item) -> None:
    """The workers of pytest-xdist have to find the same names, and a person the test that failed yesterday."""
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"the name of a test holds an address: {item.nodeid}; give parametrize ids=")


@pytest.fixture
def seed() -> int:
    """Seeds torch's generator; returns the seed."""
    import torch

    torch.manual_seed(0)
    return 0


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed of this code: {seed_of_the_code()} (MOEBIUS_SEED=... gives another)"


PRIVATE = re.compile(r"\b[su]\d+\b|\bunhinted\b|\b(Eq|Ne|Mod|FloorDiv)\(|\baten\.|FakeTensor")  # names of torch
MISSING = re.compile(r"missing \d+ required [\w -]+: ('\w+'(, and |, | and )?)+")  # Python names the function's own
SAID: list[str] = []  # of graph breaks, since a test began
FAULTS: list[str] = []  # what else said that moebius has a bug: warnings, and regions of experts that are not lowered


@pytest.fixture(autouse=True)
def breaks_are_told_in_words(request: pytest.FixtureRequest) -> Iterator[None]:
    """No graph break of any test says what a user cannot know, and nothing says that moebius has a bug."""
    if (records := sys.modules.get("moebius.report.records")) is not None:
        kind, warning = records.GraphBreak, sys.modules["moebius.errors"].MoebiusWarning
        if not hasattr(kind.__init__, "noted"):
            kind.__init__, kind.did_not_come = (
                with_note(method, lambda made: SAID.append(f"{made.detail} | {made.hint}"))
                for method in (kind.__init__, kind.did_not_come)
            )
            warning.__init__ = with_note(warning.__init__, lambda made: FAULTS.append(str(made)))
            logger = logging.getLogger("moebius.defects")
            logger.setLevel(logging.DEBUG)
            logger.addHandler(NotingHandler())
    SAID.clear()
    FAULTS.clear()
    yield
    assert not [said for said in SAID if PRIVATE.search(MISSING.sub("", said))]
    if request.node.get_closest_marker("faults") is None:
        assert not [said for said in SAID if "please report" in said.partition(" | ")[2]]
        assert not [said for said in FAULTS if "please report" in said]


def with_note(function: Callable[..., None], note: Callable[[Any], None]) -> Callable[..., None]:
    """A method, after which what its object says is noted."""

    def noted(item: Any, *args: Any, **kwargs: Any) -> None:
        function(item, *args, **kwargs)
        note(item)

    noted.noted = True  # type: ignore[attr-defined]
    return noted


class NotingHandler(logging.Handler):
    """Of what lowering logs of its own errors."""

    def emit(self, record: logging.LogRecord) -> None:
        trace = "".join(traceback.format_exception(*record.exc_info)[-3:]) if record.exc_info else ""
        FAULTS.append(f"please report: {record.getMessage()} {trace}")
