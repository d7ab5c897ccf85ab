"""Tables of users' steps: which are captured whole, and which break, for what reason and with what remedy.

A table says for each recipe (``plain_python``) None, where there is no graph break, else the break's reason and words
of its hint.
"""

from __future__ import annotations

import plain_python
from torch import nn

ROWS = (3, 3, 3, 4, 4, 5)  # of the six calls' tensors

Expected = tuple[str, str] | None


def net() -> nn.Sequential:
    """What the recipes train."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def hold(recipe: plain_python.Recipe, expected: Expected) -> None:
    """Assert that six calls are plain Python's, with the graph breaks that the table says."""
    breaks = plain_python.breaks_of(recipe, ROWS)
    if expected is None:
        assert not breaks, breaks
    else:
        reason, words = expected
        assert any(b.reason == reason and words in b.hint for b in breaks), breaks
