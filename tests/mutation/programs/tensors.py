"""Tensors as arguments: sizes, strides and dtypes decide, inputs are changed in place, two may be one."""

import torch

WEIGHT = torch.arange(6.0).reshape(3, 2)


def f(x, y, items, named, *, mask=None):
    total = x * 2
    if x.shape[0] > 2:
        total = total + x.sum()
    if x.is_contiguous():
        total = total + 1
    if x.requires_grad:
        total = total * 3
    if y.dtype is torch.float32:
        total = total + y.mean()
    total = total @ WEIGHT[: x.shape[1]].sum(1, keepdim=True) if x.shape[1] <= 3 else total
    y.add_(1) if not y.requires_grad else None
    for item in items:
        total = total + item.mean() * items[0].mean()
    total = total + named["a"].sum() + (0 if named["b"].grad is None else named["b"].grad.sum())
    total = total * WEIGHT.shape[0] + (1 if torch.is_grad_enabled() else 2)
    if x is y:
        total = total * 5
    return total if mask is None else total.masked_fill(mask, 0.0)


def make():
    b = torch.randn(2, requires_grad=True)
    return (
        f,
        [torch.randn(4, 3), torch.randn(4, 3), [torch.randn(2), torch.randn(2)], {"a": torch.randn(2), "b": b}],
        {"mask": torch.tensor([[True], [False], [True], [False]])},
    )
