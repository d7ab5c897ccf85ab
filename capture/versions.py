"""Which Python and which torch moebius is tested on, and what it says on any other."""

from __future__ import annotations

from .errors import UnsupportedVersionError

__version__ = "0.1.0"  # of moebius
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14), (3, 15))
# Tested by `make torches`, each with the Triton that it goes with (other pairs are tested by neither project). A new
# one is added here, and to pyproject.toml's bound, when that command's table says of it what it says of the others.
# (docs/versions.md has what was seen.)
TORCHES = {(2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9)}
# The releases that it ran on. Another patch of one of these is tried before the first capture, as a new minor is.
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
# What a Triton needs beside it: the interpreter of 3.6 fails with later numpy.
BESIDE_TRITON = {(3, 6): "numpy<2.4"}
OLDEST_TORCH, NEWEST_TORCH = min(TORCHES), max(TORCHES)


def numbers(text: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = text.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def is_tested(torch: str) -> bool:
    """Whether this is a release of torch that the tests were run on."""
    return torch.split("+")[0] in RELEASES


def works_on() -> str:
    """A sentence: which torch to use, and how to get it."""
    after = (NEWEST_TORCH[0], NEWEST_TORCH[1] + 1)
    return (
        f"moebius works on torch {dotted(OLDEST_TORCH)} to {dotted(NEWEST_TORCH)}: "
        f'pip install "torch>={dotted(OLDEST_TORCH)},<{dotted(after)}"'
    )


def lacks(names: list[str], torch: str) -> str:
    """What to say where torch has not all private names that moebius uses."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"torch {torch} has no {shown}, which moebius uses. {works_on()}"


def check_versions(python: tuple[int, ...], torch: str, disabled: bool) -> None:
    """UnsupportedVersionError where capture cannot work; silent with capture switched off: all runs natively then."""
    if disabled:
        return
    if tuple(python[:2]) not in PYTHONS:
        raise UnsupportedVersionError(
            f"moebius runs on Python {dotted(PYTHONS[0])} to {dotted(PYTHONS[-1])}; this is "
            f"{'.'.join(map(str, python[:3]))}. Use one of those, "
            "or set MOEBIUS_DISABLE=1 to run your functions natively."
        )
    if numbers(torch) < OLDEST_TORCH:
        raise UnsupportedVersionError(
            f"moebius needs torch 2.11 or later; this is {torch}. Upgrade torch, or set MOEBIUS_DISABLE=1 to run your "
            "functions natively."
        )
