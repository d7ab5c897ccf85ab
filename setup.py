"""Builds one import package, ``moebius``, out of the repository's top-level folders, and the frame hook in C.

Needs setuptools and a C compiler, nothing else: no package index, no libtorch.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
PACKAGE_DIR = {
    "moebius": "capture",
    "moebius.interpreter": "interpreter",
    "moebius.lowering": "lowering",
    "moebius.kernels": "kernels",
}
HOOK = "capture/hook"
REENTRY = "interpreter/native"
ROWS = "kernels/native"
DL = ["dl"] if sys.platform == "linux" else []  # dlsym is in libc since glibc 2.34


def find_packages() -> list[str]:
    """Every folder below the mapped ones that holds Python files, as a dotted package name."""
    packages = []
    for package, folder in PACKAGE_DIR.items():
        packages.append(package)
        for sub in sorted(path for path in (HERE / folder).rglob("*") if path.is_dir()):
            if sub.name != "__pycache__" and any(sub.glob("*.py")):
                packages.append(".".join([package, *sub.relative_to(HERE / folder).parts]))
    return packages


def find_extensions() -> list[Extension]:
    """The hook, the interpreter's re-entry, the CPU kernels' row work. setuptools wants paths relative to this file."""

    def files(folder: str, pattern: str) -> list[str]:
        return sorted(str(path.relative_to(HERE)) for path in (HERE / folder).glob(pattern))

    sources, headers = files(HOOK, "*.c"), files(HOOK, "*.h")
    if not sources:
        print(f"moebius: no C sources in {HOOK}: building without the frame hook", file=sys.stderr)
        return []
    flags = ["-O3", "-std=c11", "-fvisibility=hidden"]
    return [
        Extension("moebius.hook.native", sources, depends=headers, extra_compile_args=flags),
        Extension(
            "moebius.interpreter.native.reentry",
            files(REENTRY, "*.c"),
            include_dirs=[HOOK],
            depends=[*headers, *files(REENTRY, "*.h")],
            extra_compile_args=flags,
        ),
        # Without errno and traps a loop over an activation becomes vector code; NaN and inf keep their meaning.
        Extension(
            "moebius.kernels.native.rows", files(ROWS, "*.c"), depends=files(ROWS, "*.h"),
            extra_compile_args=[*flags, "-fno-math-errno", "-fno-trapping-math"], libraries=DL,
        ),
    ]


class BuildHook(build_ext):
    """build_ext that says what to install when the compiler or CPython's headers are missing."""

    def run(self) -> None:
        if self.extensions:
            self.require_linux()
            self.require_the_lock()
            self.require_compiler()
        super().run()

    def require_linux(self) -> None:
        """The C code was built and tested nowhere else."""
        if not sys.platform.startswith("linux"):
            where = f"not on {sys.platform}: use WSL 2 or a container"
            raise SystemExit(f"\nerror: moebius runs on Linux only so far, {where}.\n")

    def require_the_lock(self) -> None:
        """The C code holds CPython's global lock where it reads and writes frames, dicts and its own tables."""
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise SystemExit(
                f"\nerror: moebius does not run on the free-threaded build of CPython yet: "
                f"use python{version} in place of python{version}t.\n"
            )

    def require_compiler(self) -> None:
        command = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if shutil.which(command) is None:
            what = f"a C compiler, and there is no {command!r} on PATH"
        elif not header.exists():
            what = f"CPython's headers, and {header} is not there"
        else:
            return
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SystemExit(
            f"\nerror: building moebius' frame hook needs {what}.\n"
            f"  Debian, Ubuntu: apt install gcc python{version}-dev\n"
            f"  Fedora, RHEL:   dnf install gcc python{version}-devel\n"
            f"  conda:          conda install gcc_linux-64\n"
            f"  Another compiler: set CC to its command.\n"
        )


setup(
    packages=find_packages(),
    package_dir=PACKAGE_DIR,
    package_data={"moebius": ["py.typed"], "moebius.report": ["*.css", "*.js", "*.html"]},
    exclude_package_data={"": ["*.c", "*.h"]},  # these are the sdist's (MANIFEST.in)
    ext_modules=find_extensions(),
    cmdclass={"build_ext": BuildHook},
)
