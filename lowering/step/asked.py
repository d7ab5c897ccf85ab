"""What a body that backward runs asks before it: whether the state that it was made of is still what it was."""

from __future__ import annotations

from torch import fx

ASKED = "asked"  # in the body's ``meta``: what raises where it is not


def ask_before(body: fx.GraphModule) -> None:
    if (ask := body.meta.get(ASKED)) is not None:
        ask()
