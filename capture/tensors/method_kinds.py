"""Methods, attributes and functions of tensors of which the operator's fake cannot tell all, by what it lacks."""

from __future__ import annotations

import torch

# Methods whose answer is numbers in the tensor, or that reach outside the graph.
READS_VALUES = frozenset(
    ("item", "tolist", "numpy", "data_ptr", "__bool__", "__int__", "__float__", "__index__", "__array__", "__dlpack__",
     "is_nonzero", "equal", "allclose")
)  # fmt: skip
# What no fake knows and no guard looks at: autograd's records, what it is a view of, where it lies, how it is shown.
RECORDS = frozenset(
    ("_backward_hooks", "_base", "_cdata", "_grad", "_grad_fn", "_is_view", "_version", "const_data_ptr", "grad_dtype",
     "grad_fn", "is_inference", "is_shared", "output_nr", "retains_grad", "storage_type",
     "__dir__", "__format__", "__repr__", "__sizeof__")
)  # fmt: skip
OUTSIDE = frozenset(
    ("register_post_accumulate_grad_hook", "is_set_to", "apply_", "map_", "map2_", "storage", "untyped_storage", "set_",
     "resize_", "share_memory_", "pin_memory", "cpu_", "__deepcopy__", "__setstate__", "as_subclass")
)  # fmt: skip
# What changes in place what is known of a tensor: not where the data decides whether it runs.
OTHER_KIND = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_as_", "as_strided_", "detach_"}
)
# Operators that take the numbers in tensors and make as many of them.
MADE_OF_BOUNDS = frozenset(
    {torch.arange, torch.nn.functional.one_hot, torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn}
)
# Functions that make a tensor of Python's numbers, whose values decide nothing else. (``new`` of sizes is new_empty.)
MADE_OF_NUMBERS = frozenset(
    {torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.Tensor.new_tensor, torch.Tensor.new}
)
# Attributes that are views or tensors of their own; every other plain attribute is read off the fake.
TENSOR_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})
