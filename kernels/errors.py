"""What the operators raise on bad input. Nothing of moebius is imported here, so these stand beside MoebiusError."""
from __future__ import annotations


class ExpertsInputError(ValueError):
    """A shape, device, option or layout that the experts operator cannot take. The text names the argument and what
    to do."""


class ExpertsTypeError(ExpertsInputError, TypeError):
    """An argument of the wrong type or dtype. The text names the argument and what to do."""


class BackendUnavailableError(ExpertsInputError):
    """The asked-for form of the operator cannot run on this machine or on these tensors."""
