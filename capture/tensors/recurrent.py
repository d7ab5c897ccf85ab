"""Recurrent layers on fakes whose sizes vary: torch's own fakes go from step to step, so that the length of the
sequences becomes that of today (torch 2.11 to 2.15), or fail where only the running step knows it.

What a fake stands for here takes all steps at once: the same operators on the weights, which give results and gradients
their shapes and strides. The graph holds torch's operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..torch_facts import torch_private
from ..values.values import TensorProxy

OPERATORS = frozenset({torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.lstm})
DTYPES = (torch.float32, torch.float64)


def has_open_sizes(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether it is one of these on a CPU, and a size of what it is given is not known while tracing."""
    if function not in OPERATORS or len(args) != 9 or kwargs or torch.is_autocast_enabled("cpu"):
        return False
    at = 1 if is_kind(args[3], list | tuple) else 0  # packed: behind the rows stands how many there are at each step
    states, weights, has_biases, layers = args[1 + at : 5 + at]
    states = states if is_kind(states, list | tuple) else (states,)
    proxies = (args[0], *states, *weights)
    if not all(is_kind(p, TensorProxy) and p.fake.device.type == "cpu" and p.fake.dtype in DTYPES for p in proxies):
        return False
    plain = len(weights) == layers * (2 if args[7 + at] else 1) * (4 if has_biases else 2)  # (no projection)
    return plain and any(map(torch_private.is_symbolic, (*args[0].fake.shape, *states[0].fake.shape)))


def like_recurrent(rows: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """What the layers give for sequences, or for packed ones: the rows, and the last states."""
    packed = is_kind(args[2], list | tuple)
    if packed:
        _, states, weights, has_biases, layers, _, _, two_ways = args
        batch_first = False
    else:
        states, weights, has_biases, layers, _, _, two_ways, batch_first = args
    every: Sequence[torch.Tensor] = states if is_kind(states, list | tuple) else (states,)
    before = every[0].unbind(0) if len(every) == 1 else (every[0] + every[1]).unbind(0)
    ways, each = 2 if two_ways else 1, 4 if has_biases else 2
    width = every[0].shape[-1]
    last = []
    rows = rows.transpose(0, 1) if batch_first else rows
    for layer in range(layers):
        found = []
        for way in range(ways):
            number = layer * ways + way
            of_rows, of_states, *biases = weights[number * each : (number + 1) * each]
            within = torch.nn.functional.linear(rows, of_rows, *biases[:1])[..., :width]
            again = torch.nn.functional.linear(before[number], of_states, *biases[1:])[..., :width]
            found.append((within + again.sum(0)).tanh())
            last.append((again + found[-1].flatten(0, -2).sum(0)).tanh())
        rows = torch.cat(found, -1) if two_ways else found[0].clone(memory_format=torch.contiguous_format)
    final = torch.stack(last, 0)
    return (rows.transpose(0, 1) if batch_first else rows, *(final.clone() for _ in every))
