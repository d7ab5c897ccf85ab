"""setup.py: every folder becomes a package, and a missing compiler is an error that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from moebius.versions import PYTHONS, dotted

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


def headers_of(python: str | Path) -> Path | None:
    """The folder of a Python's headers, if there are any."""
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"]
    try:
        folder = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None
    return folder if (folder / "Python.h").exists() else None


@pytest.mark.parametrize("python", [*map(dotted, PYTHONS)])
def test_the_c_sources_fit_the_headers_of_each_python(python: str) -> None:
    """Of those that are at hand: a change is made and tested on one, and its users install on another."""
    beside = Path(sys.base_prefix).parent.glob(f"*/bin/python{python}")  # where versions stand side by side
    found = [headers for each in (f"python{python}", *beside) if (headers := headers_of(each))]
    if not found:
        pytest.skip("not at hand")
    folders = [ROOT / folder for folder in ("capture/hook", "interpreter/native", "kernels/native")]
    sources = [path for folder in folders for path in folder.glob("*.c")]
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()
    words = ["-fsyntax-only", "-std=c11", "-I", found[0], "-I", ROOT / "capture" / "hook", *sources]
    run = subprocess.run([*compiler, *words], capture_output=True, text=True)
    assert run.returncode == 0 and len(sources) > 20, run.stderr


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
