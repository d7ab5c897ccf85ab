"""All rules of the reader: they register themselves as they are imported. What reads a loop takes the Reader from
here."""
from __future__ import annotations

from moebius.lowering.experts import (  # noqa: F401
    rules_computed,
    rules_gates,
    rules_routing,
    rules_rows,
)
from moebius.lowering.experts.reader import Reader

__all__ = ["Reader"]
