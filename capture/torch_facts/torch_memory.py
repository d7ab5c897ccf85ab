"""Where this torch keeps a tensor's metadata in memory: found by guards' C code, from tensors that we know."""

from __future__ import annotations

import functools
import os

import torch


def calibrate_tensor_guards() -> str | None:
    """Let the guards' C code find where this torch keeps a tensor's metadata, from tensors that we know.

    None: guards read memory. Otherwise the reason why they read attributes instead (right, and slower).
    """
    from ..hook import calibrate_tensors  # (a step that was loaded from a file imports this file, and needs no hook)

    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    return calibrate_tensors(library, *tensor_samples())


def tensor_samples() -> tuple[list[tuple[torch.Tensor, int, int]], list[tuple[torch.Tensor, int, int]]]:
    """Tensors that differ in everything that guards read, and some alike: each with its address and its keys."""

    def sample(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        return tensor, tensor._cdata, torch._C._dispatch_keys(tensor).raw_repr()

    zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        inference = zeros(5)
    tensors = [
        zeros(2, 3),
        torch.nn.Parameter(zeros(4, 1, 2)),
        zeros(7, 5)[1:, ::2],
        zeros(3, dtype=torch.complex64).conj(),
        torch._neg_view(zeros(3)),
        inference,
        zeros((), dtype=torch.int64),
        zeros(1, 2, 3, 4, 5, 6, 7),
        zeros(2, 2, device="meta"),
    ]
    return [sample(t) for t in tensors], [sample(zeros(3)) for _ in range(4)]
