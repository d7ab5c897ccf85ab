"""What distribution raises. Nothing of capture is imported here, so these stand beside MoebiusError."""
from __future__ import annotations


class DistributionError(RuntimeError):
    """Ranks, a mesh, a plan or a parameter do not fit expert parallelism. The text says which, and what to do.
    raised_by_all_of: the name of a group of ranks whose others raise it, too; empty where that is not known."""

    raised_by_all_of = ""


class PlacementError(DistributionError):
    """A parameter cannot move to the ranks now, because something still refers to it. Nothing was moved."""


class RanksDisagreeError(DistributionError):
    """The ranks have come to different places, or one has failed, is stopped or gone. Raised on every other rank."""
