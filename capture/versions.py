"""Which Python and which torch moebius was made for, and what it says on any other."""

from __future__ import annotations

from .errors import UnsupportedVersionError

PYTHONS = ((3, 11), (3, 12), (3, 13))
OLDEST_TORCH = (2, 11)


def check_versions(python: tuple[int, ...], torch: str, disabled: bool) -> None:
    """UnsupportedVersionError where capture cannot work; silent with capture switched off: all runs natively then."""
    if disabled:
        return
    if tuple(python[:2]) not in PYTHONS:
        raise UnsupportedVersionError(
            f"moebius runs on Python 3.11, 3.12 and 3.13; this is {'.'.join(map(str, python[:3]))}. Use one of those, "
            "or set MOEBIUS_DISABLE=1 to run your functions natively."
        )
    number = tuple(int(part) for part in torch.split("+")[0].split(".")[:2])
    if number < OLDEST_TORCH:
        raise UnsupportedVersionError(
            f"moebius needs torch 2.11 or later; this is {torch}. Upgrade torch, or set MOEBIUS_DISABLE=1 to run your "
            "functions natively."
        )
