"""Which form of the operator runs: chosen where the tensors are concrete, so that one traced graph serves every
device."""
from __future__ import annotations

from types import ModuleType

from torch import Tensor

from moebius.kernels import cpu, reference
from moebius.kernels.errors import BackendUnavailableError


def find_form(backend: str, x: Tensor) -> ModuleType:
    """The module whose ``forward`` and ``backward`` run. "auto": Triton on a GPU (float64: reference), cpu on a CPU.
    Its ``PACKS``: whether it packs H itself with save="fp8"; the others take and return H as it is.

    Raises BackendUnavailableError where the asked-for form cannot run on x.
    """
    if backend == "auto":
        if x.device.type == "cpu":
            return cpu
        backend = "triton" if x.device.type == "cuda" and x.dtype.itemsize < 8 else "reference"
    if backend == "reference":
        return reference
    if backend == "cpu":
        if x.device.type != "cpu":
            raise BackendUnavailableError(f"backend='cpu' with tensors on {x.device}; use 'auto'")
        return cpu
    if x.dtype.itemsize == 8:
        raise BackendUnavailableError("backend='triton' does not take float64; use backend='reference'")
    try:
        from moebius.kernels import triton_form
    except ImportError as error:
        raise BackendUnavailableError(f"backend='triton' needs the triton package: {error}") from error
    if x.device.type != "cuda" and not triton_form.INTERPRETED:
        raise BackendUnavailableError(
            f"backend='triton' with tensors on {x.device}: it needs a GPU, or Triton's interpreter "
            "(TRITON_INTERPRET=1 in the environment before Python starts)")
    return triton_form
