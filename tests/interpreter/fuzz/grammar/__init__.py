"""The generator of programs: one mixin a family of syntax, put together in `Grammar`. A program is text.

Every program ends: loops and functions take from one supply of fuel (`spent()`), values are kept from growing, and
functions only call functions that were defined before them.
"""

from __future__ import annotations

from .program import FAMILIES, Grammar, generate

__all__ = ["FAMILIES", "Grammar", "generate"]
