"""The report's page in a real browser, at the sizes of a phone, a tablet and a desktop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import FOUND, Browser

from moebius import capture, disable, explain
from moebius.report import Report

pytestmark = pytest.mark.skipif(FOUND is None, reason="no Chromium on this machine")
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
# Elements that stick out of the window, but for those inside of what scrolls by itself.
STICKS_OUT = """[...document.querySelectorAll('body *')].filter((e) => {
  for (let p = e.parentElement; p; p = p.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX) && p !== document.body) return false;
  return e.getBoundingClientRect().right > innerWidth + 1;
}).map((e) => e.outerHTML.slice(0, 80))"""


@disable
def native(*values: Any) -> int:
    return len(values)


def step(x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    native("a long line " * 12, x.shape, router.shape, gate_up.shape, down.shape, "another", "and another", "and one")
    weight, chosen = (x @ router.T).softmax(-1).topk(2)
    mask = torch.nn.functional.one_hot(chosen, len(router)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for expert in range(len(router)):
        slot, token = torch.where(mask[expert])
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up
        out.index_add_(0, token, h @ down[expert].T * weight[token, slot, None])
    return out


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = [(16, 8), (4, 8), (4, 12, 8), (4, 8, 6)]
    found: Report = explain(capture(step))(*(torch.randn(shape, requires_grad=True) for shape in shapes))
    assert found.breaks and found.lowered
    return found.to_html(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits(page: Path, browser: Browser, size: str, dark: bool, tmp_path: Path) -> None:
    width, height = SIZES[size]
    browser.open(page, width, height, dark)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    browser.value("document.querySelectorAll('details').forEach((e) => { e.open = true })")
    assert browser.value(STICKS_OUT) == []
    ink, ground = (
        browser.value(f"getComputedStyle(document.body).{name}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)")
        for name in ("color", "backgroundColor")
    )
    assert (ink > ground) == dark and abs(ink - ground) > 400  # of 765: it can be read
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_the_break_and_its_line_are_on_the_first_screen(page: Path, browser: Browser) -> None:
    browser.open(page, *SIZES["desktop"])
    top = browser.value("document.querySelector('.excerpt u').getBoundingClientRect().top")
    assert 0 < top < SIZES["desktop"][1]
    assert "native(" in browser.value("document.querySelector('.excerpt u').textContent")


def test_the_keyboard_reaches_all_that_a_mouse_does(page: Path, browser: Browser) -> None:
    browser.open(page, *SIZES["desktop"])
    before = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.value("document.getElementById('theme').focus()")
    browser.press("Enter")
    assert browser.value("getComputedStyle(document.body).backgroundColor") != before
    browser.value("document.querySelector('details.guards summary').focus()")
    browser.press("Enter")
    browser.value("new Promise((done) => setTimeout(done, 50))")
    many = browser.value("document.querySelectorAll('.guards .rows tr').length")
    assert many > 3
    search = "document.querySelector('.guards .search')"
    browser.value(f"{search}.value = 'router'; {search}.dispatchEvent(new Event('input'))")
    assert 0 < browser.value("document.querySelectorAll('.guards .rows tr').length") < many
    titles = "[...document.querySelectorAll('table.sortable th')]"
    assert browser.value(f"{titles}.every((title) => title.tabIndex === 0)")


def test_it_fetches_nothing(page: Path, browser: Browser) -> None:
    browser.open(page, *SIZES["desktop"])
    assert browser.value("performance.getEntriesByType('resource').length") == 0
