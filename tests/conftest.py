"""Shared by all tests: thread limits, seeds, markers. Small on purpose; what one folder needs lives in that folder."""

from __future__ import annotations

import os

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
    config.addinivalue_line("markers", "share(n): of many cases, n run, other ones for other code; --whole runs all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all cases of the tests of which a share runs otherwise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked with share(n), n cases. Who names tests, or words of their names, gets all of these."""
    if config.option.whole or config.option.keyword or any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("share") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for name, found in cases.items():
        marker = found[0].get_closest_marker("share")
        assert marker is not None
        left_out |= set(found) - set(some(found, marker.args[0], name))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


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
