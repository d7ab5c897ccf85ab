"""setup.py: every folder becomes a package, and a missing compiler is an error that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def setup(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)


def test_a_missing_compiler_says_what_to_install(tmp_path: Path) -> None:
    run = setup(
        "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path), CC="no-such-compiler -pthread"
    )
    assert run.returncode != 0
    assert "no 'no-such-compiler' on PATH" in run.stderr
    assert "apt install gcc" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_one_sentence(platform: str, tmp_path: Path) -> None:
    words = ["setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    program = "import runpy, sys, setuptools.command.build_ext; "  # (these know no other system's paths here)
    program += f"sys.platform = {platform!r}; sys.argv = {words!r}; runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert f"Linux only so far, not on {platform}" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_free_threaded_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    words = ["setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)]
    pretend = "import runpy, sys, sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1"
    program = f"{pretend}; sys.argv = {words!r}; runpy.run_path('setup.py')"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "does not run on the free-threaded build of CPython yet: use python3" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_free_threaded_python_is_refused_at_import() -> None:
    program = "import sys; sys.abiflags = 't'; import moebius.interpreter"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode != 0
    assert run.stderr.splitlines()[-1].startswith("ImportError: moebius does not run on the free-threaded build")


def test_every_python_file_is_in_a_package(tmp_path: Path) -> None:
    run = setup("build_py", "--build-lib", str(tmp_path))
    assert run.returncode == 0, run.stderr
    for folder, package in {
        "capture": "",
        "interpreter": "interpreter",
        "lowering": "lowering",
        "kernels": "kernels",
    }.items():
        for file in (ROOT / folder).rglob("*.py"):
            assert (tmp_path / "moebius" / package / file.relative_to(ROOT / folder)).is_file(), file
    assert (tmp_path / "moebius" / "py.typed").is_file()
    assert (tmp_path / "moebius" / "report" / "page.css").is_file()
