"""``inspect.signature`` of functions, methods, classes and callable objects: answered, under guards of what it reads.

The original (Lib/inspect.py ``_signature_from_callable``) asks C code for much of it. Its answer never changes, so
it is a constant of the step, for as long as the function's code, defaults and ``__wrapped__`` are what they were.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from moebius.interpreter import is_kind

from ..guards.sources import Static
from ..hook import ABSENT
from ..values.values import Break, TensorProxy
from .parts import Parts

HINT = "ask for it before the step, and pass the names that it takes"


class Signatures:
    """Those that one trace asks for."""

    def __init__(self, domain: Parts):
        self.domain, self.objects, self.attributes = domain, domain.objects, domain.attributes
        self.functions: dict[Any, Callable[..., Any]] = {inspect.signature: self.signature}

    def signature(self, obj: Any, **options: Any) -> Any:
        """``inspect.signature(obj)``."""
        if options:
            raise Break("inspect.signature", f"with {', '.join(options)}", HINT)
        function = self.function_of(obj)
        while True:
            if type(function) is not types.FunctionType:
                raise Break("inspect.signature", f"of a {type(function).__name__}", HINT)
            self.domain.guard_function(function)
            self.objects.note("signature")
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            of_tensors = any(issubclass(type(v), TensorProxy | torch.Tensor) for v in defaults)
            if self.attributes.has(function, "__signature__") or of_tensors:
                raise Break("inspect.signature", f"of {function.__qualname__}, which has one of its own", HINT)
            if not self.attributes.has(function, "__wrapped__"):
                break
            function = self.attributes.get(function, "__wrapped__")
        made = inspect.signature(obj)
        name = f"signature of {function.__qualname__}"
        parameters = dict(made.parameters)
        self.objects.enter(parameters, Static(f"{name}.parameters", parameters))
        self.objects.behind[id(made.parameters)] = parameters
        return self.objects.enter(made, Static(name, made))

    def function_of(self, obj: Any) -> Any:
        """The function that is called when ``obj`` is."""
        if type(obj) is types.FunctionType:
            return obj
        if type(obj) is types.MethodType:
            return obj.__func__
        look_up = self.attributes.on_type
        if is_kind(obj, type):
            ways = look_up(type(obj), "__call__"), look_up(obj, "__new__"), look_up(obj, "__signature__")
            if ways != (type.__call__, object.__new__, ABSENT):
                raise Break("inspect.signature", f"of {obj.__qualname__}, which is made in its own way", HINT)
            return look_up(obj, "__init__")
        if not self.objects.is_known(obj) or self.attributes.has(obj, "__signature__"):
            raise Break("inspect.signature", f"of a {type(obj).__name__}", HINT)
        return look_up(type(obj), "__call__")
