"""``torch.autograd.backward`` and ``torch.autograd.grad`` as a step calls them: their arguments, read under guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moebius.interpreter import is_kind

from ..heap.objects import Objects
from ..python.originals import BACKWARD, GRAD
from ..values.values import Break, TensorProxy
from .gradients import Gradients

PACKED = "it runs natively; torch.utils.checkpoint, with a context_fn that says what is kept, stays in the graph"
ON_EACH = "it runs natively; a hook on each tensor, or reading .grad after backward(), stays in the graph"
# What to write in place of what a graph cannot hold; by the class or function.
INSTEAD = {
    "saved_tensors_hooks": PACKED,
    "save_on_cpu": PACKED,
    "register_multi_grad_hook": ON_EACH,
    "_MultiHandle": ON_EACH,
}


def instead_of(function: Any) -> str:
    """The hint for a function that is not interpreted."""
    return INSTEAD.get(function.__qualname__.split(".")[0], "it runs natively; nothing to do")


class AutogradCalls:
    """What stands in for the two functions in one trace."""

    def __init__(
        self, objects: Objects, gradients: Gradients, call: Callable[..., Any], contents: Callable[[Any], Any]
    ):
        self.objects, self.gradients, self.call, self.contents = objects, gradients, call, contents
        self.functions: dict[Any, Callable[..., Any]] = {
            BACKWARD: self.backward,
            GRAD: self.derive,
        }

    def backward(self, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, **options: Any) -> None:
        """``torch.autograd.backward``."""
        outputs = self.tensors_of(tensors)
        known = options.keys() <= {"create_graph", "inputs"}
        if not known or not all(is_kind(output, TensorProxy) for output in outputs):
            raise Break("torch.autograd.backward", "of something that is no tensor", "the error is raised natively")
        self.gradients.backward(outputs, self.contents(grad_tensors), retain_graph, **options)

    def derive(
        self, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None,
        create_graph: Any = False, only_inputs: Any = True, allow_unused: Any = None, is_grads_batched: Any = False,
        materialize_grads: Any = False,
    ) -> Any:  # fmt: skip
        """``torch.autograd.grad``."""
        options = {"retain_graph": retain_graph, "create_graph": create_graph or None, "allow_unused": allow_unused}
        options |= {"is_grads_batched": is_grads_batched or None, "materialize_grads": materialize_grads or None}
        if only_inputs is not True:
            raise Break("torch.autograd.grad", "with only_inputs=False", "the warning is given natively")
        tensors, given = self.tensors_of(outputs), self.contents(grad_outputs)
        return self.objects.made(self.gradients.derive(tensors, self.tensors_of(inputs), given, options))

    def tensors_of(self, value: Any) -> list[Any]:
        """One tensor, or what ``tuple()`` makes of several."""
        if is_kind(value, TensorProxy):
            return [value]
        try:
            return list(self.call(tuple, [value], {}))
        except TypeError:
            raise Break(
                "torch.autograd.grad", "of something that is no tensor", "the error is raised natively"
            ) from None
