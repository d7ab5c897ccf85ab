"""From the repository to a user's machine: an sdist, a wheel of it, an empty environment, and no compiler there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a copy, built extensions included: setuptools gathers an sdist in a folder of the checkout, and so may
    another worker of the tests at the same time."""
    folder = tmp_path_factory.mktemp("sdist")
    aside = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "out", "*.egg-info", "moebius-*")
    shutil.copytree(ROOT, folder / "checkout", ignore=aside)
    command = "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder / "made"
    run(sys.executable, *command, cwd=folder / "checkout")
    (archive,) = (folder / "made").iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """What pip makes of the sdist, from any folder, with no index at hand."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-index"]
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", sdist.parent / "wheels", sdist, cwd=sdist.parent)
    (made,) = (sdist.parent / "wheels").iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """An environment's folder of programs: there, moebius is the wheel. torch and the others are those of the tests,
    on the path (a `.pth` file leads to a folder, and not to what other such files in it add)."""
    folder = wheel.parent.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_sdist_holds_all_that_is_tracked(sdist: Path) -> None:
    with tarfile.open(sdist) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    kinds = (".py", ".c", ".h", ".md", ".css", ".js", ".html", ".toml", ".txt", ".json", "Makefile")
    lacking = [name for name in tracked if name.endswith(kinds) and not name.startswith(".") and name not in names]
    assert lacking == [] and not any(os.path.splitext(name)[1] in (".so", ".pyc") for name in names)


def test_the_wheel_holds_one_package_and_its_extensions(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"moebius"}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = {f"moebius/{name}{suffix}" for name in ("hook/native", "interpreter/native/reentry", "kernels/native/rows")}
    assert {name for name in names if name.endswith(".so")} == built
    assert not any(name.endswith((".c", ".h")) for name in names) and "moebius/py.typed" in names


def test_what_is_installed_needs_no_compiler(installed: Path, tmp_path: Path) -> None:
    doctor = run(installed / "moebius", "doctor", cwd=tmp_path, PATH="")
    assert "moebius can run here" in doctor and re.search(r"C\+\+ compiler +none", doctor)
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)[:1]
    where = "import moebius; print(moebius.__file__)\n"
    (tmp_path / "first.py").write_text(code + where)
    printed = run(installed / "python", "first.py", cwd=tmp_path, PATH="")
    assert "1 graph · 0 graph breaks" in printed and "1 of 1 expert region lowered" in printed
    assert Path(printed.splitlines()[-1]).is_relative_to(installed.parent)


def test_its_dependencies_are_those_that_are_installed(installed: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", installed / "python"]
    assert "No broken requirements" in run(*pip, "check")
