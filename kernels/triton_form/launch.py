"""How a kernel is launched, and how the same host code tells what it would launch when there is no GPU."""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

ALIGNMENT = 16  # bytes, of a descriptor's base and strides


@dataclass(frozen=True)
class Config:
    """Tile shape and resources of one kernel. block_m x block_n is a program's output tile, block_k its step.

    waves: persistent programs a multiprocessor; 0: one program a tile.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    waves: int = 0


@dataclass(frozen=True)
class Problem:
    """What a configuration is chosen for: a kernel (configs.py) and its sizes. rows: slots an expert in the mean,
    rounded down to a power of two."""

    kernel: str
    dtype: str
    format: str
    rows: int
    inner: int
    outer: int

    def __str__(self) -> str:
        return "/".join(str(getattr(self, each.name)) for each in fields(self))


@dataclass
class Launch:
    """One kernel call. Everything goes by name; the first argument is the tensor that the kernel reads rows of.

    flops: multiply-adds counted twice, for kernels that multiply matrices; 0 for the others. problem: what its
    configuration was chosen for.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    warps: int
    stages: int
    flops: int = 0
    label: str = field(default="")
    problem: Problem | None = None

    @property
    def tensor_cores(self) -> bool:
        """Whether it is to run on tensor cores: it multiplies matrices, and not in exact float32."""
        if self.constants.get("FORMAT", "none") != "none":
            return True
        return self.flops > 0 and not (self.dtype == torch.float32 and self.constants["PRECISION"] == "ieee")

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor whose rows it reads."""
        first = next(iter(self.arguments.values()))
        return first.base.dtype if isinstance(first, TensorDescriptor) else first.dtype

    def run(self) -> None:
        """Run it. enable_fp_fusion is given since its default differs between Triton versions."""
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages,
                               enable_fp_fusion=True)


timer: ContextVar[Callable[[Launch], None] | None] = ContextVar("timer", default=None)
recorder: ContextVar[list[Launch] | None] = ContextVar("recorder", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches inside are collected and not run, so that the host code can be walked with tensors on the meta
    device."""
    launches: list[Launch] = []
    token = recorder.set(launches)
    try:
        yield launches
    finally:
        recorder.reset(token)


@contextmanager
def timing(run: Callable[[Launch], None]) -> Iterator[None]:
    """Launches inside are run by ``run``."""
    token = timer.set(run)
    try:
        yield
    finally:
        timer.reset(token)


def submit(launch: Launch) -> None:
    """Run the launch, or collect it. An empty grid is nothing to do."""
    if math.prod(launch.grid) == 0:
        return
    launches, timed = recorder.get(), timer.get()
    if timed is not None:
        timed(launch)
    elif launches is None:
        launch.run()
    else:
        launches.append(launch)


def fit_block(size: int, block: int, least: int = 16) -> int:
    """The block for an axis of this size: a power of two, at least tl.dot's 16, at most the configured block."""
    return max(least, min(block, triton.next_power_of_2(size)))


def can_describe(tensor: Tensor) -> bool:
    """Whether a tensor descriptor (TMA) can address the tensor: unit last stride, base and strides on 16 bytes."""
    if tensor.numel() == 0 or tensor.stride(-1) != 1 or tensor.data_ptr() % ALIGNMENT:
        return False
    return all(stride > 0 and stride * tensor.itemsize % ALIGNMENT == 0 for stride in tensor.stride()[:-1])


def describe(tensor: Tensor, block: list[int]) -> TensorDescriptor | None:
    """A descriptor over the tensor with this block shape, or None where there can be none."""
    return TensorDescriptor.from_tensor(tensor, block) if can_describe(tensor) else None


def dot_precision(dtype: torch.dtype) -> str:
    """float32 GEMMs follow torch's switch for matmuls: exact unless TF32 is allowed."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
