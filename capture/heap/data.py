"""``tensor.data = …``: how steps that update weights by hand write ``p.data -= lr * p.grad``."""

from __future__ import annotations

from moebius.lowering.step import set_data

from ..tensors.tensors import TensorOperations
from ..torch_facts import torch_private
from ..values.values import Break, TensorProxy


def assign_data(tensors: TensorOperations, tensor: TensorProxy, data: TensorProxy) -> None:
    """Nothing where the tensor has that data already (``p.data -= …`` sets what it changed in place), else a node.

    torch copies the other's storage, sizes and strides into the tensor, whose autograd records and version stay
    (VariableHooks::set_data, torch/csrc/autograd/variable.cpp).
    """
    tensors.offsets.ask((tensor, data), tensors.writer.is_inner)
    tensors.layouts.changed(tensor)
    if tensor is data or is_same_data(tensor, data):
        return
    fake, other = tensor.fake, data.fake
    alike = fake.dtype == other.dtype and fake.device == other.device and fake.shape == other.shape
    if not alike or not tensors.runs_once or other.is_inference():
        reason = "of another dtype, device or size" if tensors.runs_once else "in a body that runs apart"
        hint = "tensor.data.copy_(…) writes the numbers in place, and keeps the step in one graph"
        raise Break("data of a tensor is set", f"{tensor.describe()}.data = … {reason}", hint)
    tensors.gradients.heap.write(tensor, "data")
    with tensors.world.mode:
        fake.data = other
    tensors.has_other_data(tensor)
    tensors.writer.call(set_data, tensor, data)


def is_same_data(tensor: TensorProxy, data: TensorProxy) -> bool:
    """Whether the two are the same place in the same storage, looked at in the same way."""
    a, b = tensor.fake, data.fake
    return (
        torch_private.storage_of(a) == torch_private.storage_of(b)
        and (a.dtype, a.is_conj(), a.is_neg(), a.is_inference()) == (b.dtype, b.is_conj(), b.is_neg(), b.is_inference())
        and a.shape == b.shape
        and a.stride() == b.stride()
        and bool(a.storage_offset() == b.storage_offset())
    )
