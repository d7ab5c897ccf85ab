"""A small slice of `make semantics`: some of CPython's modules through the interpreter, and the comparison itself."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run as semantics  # noqa: E402

sys.path.pop(0)
SLICE = ("test_with", "test_raise", "test_scope", "test_bool", "test_augassign", "test_call", "test_class")


@pytest.mark.parametrize("name", SLICE)
def test_what_passes_natively_passes_interpreted(name: str) -> None:
    part = semantics.measure(name, 120)
    assert part["native"] > 2
    reasons = semantics.known_reasons()
    unexplained = {
        test: found
        for test, found in part["different"].items()
        if semantics.reason_for(name, test, semantics.VERSION, reasons) is None
    }
    assert unexplained == {}


CRASHING = """
import faulthandler, unittest
class T(unittest.TestCase):
    def test_a(self): pass
    def test_b(self):
        if INTERPRETED(): faulthandler._sigsegv()
    def test_c(self):
        if INTERPRETED(): self.fail("differs")
    def test_d(self): sorted([2, 1], key=lambda n: -n)
    def test_e(self): self.fail("natively too")
    def test_f(self):
        for n in range(2):
            with self.subTest(n=n): self.assertFalse(n and INTERPRETED())
def INTERPRETED():
    import sys
    return "moebius.interpreter" in sys.modules
"""


def test_a_crash_is_one_tests_failure_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = (semantics.HERE / "worker.py").read_text()
    planted = worker.replace('importlib.import_module(f"test.{name}")', "planted()")
    assert planted != worker
    source = (
        "def planted():\n    module = type(sys)('planted')\n    sys.modules['planted'] = module\n"
        f"    exec({CRASHING!r}, module.__dict__)\n    return module\n\n\n"
    )
    planted = planted.replace('if __name__ == "__main__":', source + 'if __name__ == "__main__":')
    planted = planted.replace("Path(__file__).resolve().parents[1]", f"{str(semantics.HERE.parent)!r}")
    (tmp_path / "worker.py").write_text(planted)
    monkeypatch.setattr(semantics, "HERE", tmp_path)
    part: dict[str, Any] = semantics.measure("planted", 60)
    assert part["native"] == 5
    outcomes = {test.rpartition(".")[2]: found[0] for test, found in part["different"].items()}
    assert outcomes == {"test_b": "crashed", "test_c": "failed", "test_f": "failed"}


def test_below_the_goal_or_without_a_reason_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    good = {"python": "3.11.0", "version": "3.11", "modules": {"test_x": {"native": 1000, "different": {}}}}
    assert semantics.verdict(good) == 0
    odd = {"native": 1000, "different": {"T.test_y": ["failed", ""]}}
    assert semantics.verdict({**good, "modules": {"test_x": odd}}) == 1
    assert "no reason given: test_x.T.test_y" in capsys.readouterr().out
    assert "- finalizers (__del__): " in semantics.document([good])
    assert "| ? | 1 |" in semantics.document([good])  # figures whose commit is not known
    assert "**not explained yet**" in semantics.document([{**good, "modules": {"test_x": odd}}])
    assert semantics.verdict({**good, "modules": {"test_x": {"native": 0, "different": {}}}}) == 1
