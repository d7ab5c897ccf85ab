"""torch's own samples under capture: each operator and module that torch's tests know, on the arguments that they take.

    python tests/suites/torchs_samples.py [--only TEXT] [--every N] [--offset K] [--backend eager]

A captured step runs an operator (as a function, a method, in place) or a module on a sample and differentiates the
result. Each sample runs twice, so that the second call is a hit, and samples of other sizes follow each other, so that
sizes become symbolic. Results, gradients, buffers and errors must be plain Python's to the bit. It runs in a process of
its own: torch's test utilities change switches of the process when they are imported.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import moebius
from moebius import capture

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)
SAMPLES = 5  # of an operator, in each dtype
# Memory that nobody has written is another one each time. torch's wrapper for tests compiles with CUDA's compiler.
NOT_COMPARED = ("empty", "jiterator")


def difference(a: Any, b: Any) -> str:
    """How two results differ; "" if they do not."""
    if type(a) is not type(b):
        return f"{type(a).__name__} and {type(b).__name__}"
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{len(a)} and {len(b)} items"
        return next((found for pair in zip(a, b, strict=True) if (found := difference(*pair))), "")
    if not isinstance(a, torch.Tensor):
        return ""
    said = [(t.dtype, t.shape, t.layout, t.requires_grad, t.is_conj(), t.is_neg()) for t in (a, b)]
    if said[0] != said[1]:
        return f"{said[0]} and {said[1]}"
    if a.layout is not torch.strided:
        return difference(a.detach().to_dense(), b.detach().to_dense())
    if a.stride() != b.stride():
        return f"strides {a.stride()} and {b.stride()}"
    x, y = (t.detach().resolve_conj().resolve_neg() for t in (a, b))
    same = torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) if x.is_floating_point() or x.is_complex() else None
    return "" if (torch.equal(x, y) if same is None else same) else "other values"


def copied(value: Any) -> Any:
    """Leaves of their own with the same values and strides."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def differentiated(result: Any) -> Any:
    """The result, after a backward pass from all of it."""
    total: Any = 0
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            total = total + (leaf.abs() if leaf.is_complex() else leaf).double().sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    return result


def outcome(step: Any, args: tuple, seed: int) -> list[Any]:
    """What a call gives, raises, and leaves in what it was given."""
    torch.manual_seed(seed)
    try:
        result, error = step(*args), ""
    except Exception as found:
        result, error = None, f"{type(found).__name__}: {found}"
    given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    return [result, error, given, [leaf.grad for leaf in given], torch.get_rng_state()]


def told(plain: list[Any], captured: list[Any]) -> str:
    if plain[1] != captured[1]:
        return f"{plain[1][:150] or 'no error'} and {captured[1][:150] or 'no error'}"
    return difference(plain, captured)


def operators() -> Any:
    """(name, step, samples) of each operator and form; a step takes a sample's arguments and names."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        forms = {"": info.get_op(), " as a method": info.get_method(), " in place": info.get_inplace()}
        for form, function in forms.items():
            if function is not None and not any(word in name for word in NOT_COMPARED):
                yield name + form, info, function


def run_operator(info: Any, function: Any, in_place: bool, backend: str) -> list[str]:
    found = []
    for dtype in DTYPES:
        if dtype not in info.supported_dtypes("cpu"):
            continue
        differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        samples = list(info.sample_inputs("cpu", dtype, requires_grad=differentiable))
        samples = samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]

        def step(first: Any, args: Any, kwargs: Any) -> Any:
            first = first * 1 if in_place and isinstance(first, torch.Tensor) else first
            return differentiated(function(first, *args, **kwargs))

        captured = capture(step, backend=backend)
        for number, sample in enumerate(samples):
            given = sample.input, tuple(sample.args), sample.kwargs
            for again in range(2):
                plain = outcome(step, tree_map(copied, given), number + again)
                if difference_found := told(plain, outcome(captured, tree_map(copied, given), number + again)):
                    found.append(f"{dtype}, sample {number}: {difference_found}")
    return found


def run_module(info: Any, backend: str) -> list[str]:
    found = []

    def step(module: Any, args: Any, kwargs: Any) -> Any:
        return differentiated(module(*args, **kwargs))

    for training in (True, False):
        inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
        for number, sample in enumerate(inputs[:: max(1, len(inputs) // SAMPLES)]):
            if sample.forward_input is None:
                continue
            torch.manual_seed(number)
            made = sample.constructor_input
            module = info.module_cls(*made.args, **made.kwargs).train(training)
            twin, captured = copy.deepcopy(module), capture(step, backend=backend)
            for again in range(2):
                given = tuple(sample.forward_input.args), sample.forward_input.kwargs
                plain = outcome(step, (module, *tree_map(copied, given)), again)
                if difference_found := told(plain, outcome(captured, (twin, *tree_map(copied, given)), again)):
                    found.append(f"training={training}, sample {number}: {difference_found}")
            states = [[*m.state_dict().values(), *(p.grad for p in m.parameters())] for m in (module, twin)]
            if difference_found := difference(*states):
                found.append(f"training={training}, sample {number}: state: {difference_found}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators and modules whose name has this text")
    parser.add_argument("--every", type=int, default=1, help="one in so many")
    parser.add_argument("--offset", type=int, default=0, help="which of them")
    parser.add_argument("--backend", default="eager")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from torch.testing._internal.common_modules import module_db

    jobs: list[tuple[str, Any]] = [
        (name, lambda info=info, function=function, name=name: run_operator(
            info, function, name.endswith("in place"), options.backend))
        for name, info, function in operators()
    ]  # fmt: skip
    jobs += [(info.name, lambda info=info: run_module(info, options.backend)) for info in module_db]
    ran = differing = 0
    for number, (name, job) in enumerate(jobs):
        if options.only not in name or number % options.every != options.offset % options.every:
            continue
        found = job()
        moebius.reset()
        ran, differing = ran + 1, differing + bool(found)
        for line in found[:3]:
            print(f"{name}: {line}", flush=True)
    print(f"{ran} operators and modules, {differing} differ")
    return differing > 0 or not ran


if __name__ == "__main__":
    sys.exit(main())
