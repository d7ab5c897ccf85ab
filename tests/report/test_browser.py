"""The report's page in a real browser, at the sizes of a phone, a tablet and a desktop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import FOUND, Browser

from moebius import capture, disable, explain
from moebius.lowering.graph import CapturedGraph
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


INKED = """(() => { const c = document.querySelector('.graph canvas');
  const pixels = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let sum = 0; for (let i = 3; i < pixels.length; i += 4) sum += pixels[i] > 0 ? i % 9973 : 0; return sum })()"""


def drawn_after(browser: Browser, before: int) -> int:
    """What is drawn once it is something else, or after ten seconds: a page under load draws late."""
    return browser.value(f"""new Promise((done) => {{ const began = performance.now();
        const look = () => {{ const now = {INKED};
          if (now !== {before} || performance.now() - began > 10000) done(now); else setTimeout(look, 20) }};
        look() }})""")


def open_graph(page: Path, browser: Browser, size: str) -> int:
    browser.open(page, *SIZES[size])
    browser.value("document.querySelector('details.graph').open = true")
    return drawn_after(browser, 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_graph_is_drawn_moved_and_searched(page: Path, browser: Browser, size: str) -> None:
    seen = [open_graph(page, browser, size)]
    assert seen[0] > 0
    browser.value("document.querySelector('.graph canvas').focus()")
    for key in ("ArrowDown", "ArrowRight", "+", "-", "0"):
        browser.press(key)
        seen.append(drawn_after(browser, seen[-1]))
        assert seen[-1] != seen[-2], key
    search = "document.querySelector('.graph .search')"
    browser.value(f"{search}.value = 'softmax'; {search}.dispatchEvent(new Event('input'))")
    assert "found" in browser.value("document.querySelector('.graph .said').textContent")
    assert "test_browser.py:" in browser.value("document.querySelector('.graph .said').textContent")


def test_five_thousand_operators(browser: Browser, tmp_path: Path) -> None:
    """Written in seconds of this process (0.3; the bound is for what grows with the square), under 2 MB, laid out and
    drawn in two."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2500):
            x = x * 2 + 1
        return x

    gm = torch.fx.symbolic_trace(chain)
    graph = CapturedGraph(gm, __file__, 1, name="chain")
    for node in gm.graph.nodes:
        node.meta["stack"] = ((__file__, 1, "chain"),)
    began = time.process_time()
    path = Report(graphs=[graph], name="chain", file=__file__, line=1).to_html(tmp_path / "chain.html")
    assert time.process_time() - began < 20 and path.stat().st_size < 2_000_000
    browser.open(path, *SIZES["desktop"])
    began = browser.value("performance.now()")
    browser.value("document.querySelector('details.graph').open = true")
    assert drawn_after(browser, 0) > 0
    assert browser.value("performance.now()") - began < 2000
    phases = "[...document.querySelectorAll('[data-phase]')].map((one) => parseInt(one.textContent))"
    assert sum(browser.value(phases)) == 5000


def test_it_fetches_nothing(page: Path, browser: Browser) -> None:
    browser.open(page, *SIZES["desktop"])
    assert browser.value("performance.getEntriesByType('resource').length") == 0


def turned(x: torch.Tensor, mode: str, k: int) -> torch.Tensor:
    return x * k if mode == "a" else x + k


def test_the_calls_that_were_captured_again_are_drawn(browser: Browser, tmp_path: Path) -> None:
    captured, x = capture(turned), torch.ones(3)
    for mode, k in (("a", 1), ("a", 1), ("b", 1), ("b", 1), ("b", 1)):
        captured(x, mode, k)
    page = explain(captured)(x.double(), "b", 1).to_html(tmp_path / "again.html")
    for dark, (width, height) in enumerate(SIZES.values()):
        browser.open(page, width, height, bool(dark % 2))
        assert browser.value("document.documentElement.scrollWidth") <= width
        marks = "[...document.querySelectorAll('.timeline .track i')]"
        assert browser.value(f"{marks}.map((mark) => mark.title.split(':')[0])") == ["call 1", "call 3", "call 6"]
        first, third, sixth = browser.value(f"{marks}.map((mark) => mark.getBoundingClientRect().left)")
        assert abs((third - first) * 5 - (sixth - first) * 2) < 8 and sixth - first > width / 3
        assert browser.value(f"{marks}.every((mark) => mark.tabIndex === 0 && mark.getAttribute('aria-label'))")
        rows = "[...document.querySelectorAll('.timeline .mono')].map((name) => name.textContent)"
        assert browser.value(rows) == ["captured first", "mode", "x"]
        assert browser.value("document.querySelector('.verdict').textContent").count("x was float32[3]") == 1


class TrainerOfAVeryLongName:
    def training_step_that_is_longer(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_long_name_fits_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    step = capture(TrainerOfAVeryLongName().training_step_that_is_longer)
    page = explain(step)(torch.ones(3)).to_html(tmp_path / "long.html")
    browser.open(page, 390, 844)
    assert browser.value("document.documentElement.scrollWidth") <= 390
