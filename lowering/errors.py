"""What lowering raises. Nothing of capture is imported here, so these stand beside MoebiusError."""

from __future__ import annotations

import logging

DEFECT = "defect of moebius, please report it"
LOGGER = logging.getLogger("moebius.defects")


def defect(error: Exception) -> str:
    """Of an error of ours that costs speed alone: what the report says. Its traceback is logged, at DEBUG."""
    LOGGER.debug("%s", error, exc_info=error)
    return f"{DEFECT}: {type(error).__name__}: {error}"


class LoweringError(RuntimeError):
    """A graph cannot be made ready to run as asked. The text says what was asked for and what to do."""


class UnknownBackendError(LoweringError, ValueError):
    """``backend=`` names nothing that could run a graph. The text lists the choices."""


class ContractError(LoweringError):
    """A pass did not keep its promise: a defect of moebius. The text names the pass, the promise and the node."""


class WholeStepRefusedError(LoweringError):
    """A step cannot be one graph for a backend. The text says why; capture leaves backward outside then."""
