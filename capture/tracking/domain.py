"""The tracking domain: the machine's operations on traced values.

A subclass of the interpreter's concrete domain. Where all operands are atoms or new objects, the plain meaning holds;
tensors become nodes, objects that existed before are read and written under guards, and everything else is a graph
break with its reason.
"""
from __future__ import annotations

import builtins
import collections
import sys
import types
from typing import Any

import torch
from moebius.interpreter import NULL, STOP, UNSET, Domain, Frame

from ..hook import ABSENT
from ..sources import Static
from . import natives
from .attributes import Attributes
from .calls import Calls
from .loops import Loops, TensorRows
from .objects import CONTAINERS, DICTS, LISTS, SETS, Objects, Record
from .tensors import TensorOperations
from .values import ATOMS, SYMBOLIC, Break, LoopLeftover, TensorMethod, TensorProxy, type_of

from moebius.interpreter.domain.operators import OPERATIONS as OPERATORS  # noqa: E402
SIMPLE = frozenset({int, float, str, bool, bytes, type(None)})


class TrackingDomain(Domain):
    """One trace's domain."""

    observes = True
    row_type = TensorRows

    def __init__(self, objects: Objects, tensors: TensorOperations):
        super().__init__()
        self.objects, self.tensors = objects, tensors
        self.attributes = Attributes(objects, tensors, self.call)
        self.calls = Calls(self)
        self.loops = Loops(self)
        self.root: Frame | None = None
        self.root_steps = 0
        self.stop_at: int | None = None
        self.instructions = 0
        self.visited: set[tuple[int, int]] = set()
        self.guarded_functions: set[types.FunctionType] = set()
        self.root_stack: list[Any] = []
        self.root_pc = 0
        self.marks = (0, 0)

    # ------------------------------------------------------------------------------------------------------------------
    # The machine's steps
    # ------------------------------------------------------------------------------------------------------------------

    def observe(self, frame: Frame) -> None:
        self.instructions += 1
        if frame is self.root:
            if self.root_steps == self.stop_at:
                raise StopHere
            self.root_steps += 1
            self.root_stack = frame.stack.copy()
            self.root_pc = frame.pc
            self.marks = (self.objects.writes, self.tensors.writer.count)
        self.loops.observe(frame)

    # ------------------------------------------------------------------------------------------------------------------
    # Names
    # ------------------------------------------------------------------------------------------------------------------

    def load_global(self, frame: Frame, name: str) -> Any:
        record = self.globals_record(frame.globals)
        value = self.objects.dict_get(record, name)
        if value is ABSENT:
            value = self.objects.dict_get(self.globals_record(frame.builtins, "builtins"), name)
            if value is ABSENT:
                raise NameError(f"name {name!r} is not defined", name=name)
        return value

    def globals_record(self, namespace: Any, name: str = "") -> Record:
        record = self.objects.records.get(id(namespace))
        if record is None:
            label = name or f"G({namespace.get('__name__', '?')})"
            record = self.objects.records[id(namespace)] = Record(namespace, Static(label, namespace))
        return record

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        self.objects.dict_set(self.globals_record(frame.globals), name, value)

    def delete_global(self, frame: Frame, name: str) -> None:
        if not self.objects.dict_delete(self.globals_record(frame.globals), name):
            raise NameError(f"name {name!r} is not defined", name=name)

    def make_cell(self, value: Any) -> Any:
        return self.objects.made(super().make_cell(value))

    def load_cell(self, cell: Any) -> Any:
        value = self.objects.cell_get(cell, "cell")
        return UNSET if value is ABSENT else value

    def store_cell(self, cell: Any, value: Any) -> None:
        self.objects.cell_set(cell, "cell", value)

    def delete_cell(self, cell: Any) -> None:
        self.objects.cell_set(cell, "cell", ABSENT)

    def import_name(self, frame: Frame, name: str, fromlist: Any, level: Any) -> Any:
        importer = self.objects.dict_get(self.globals_record(frame.builtins, "builtins"), "__import__")
        if importer is not builtins.__import__:
            raise Break("import", "builtins.__import__ was replaced", "import outside of the step")
        namespace = {k: frame.globals.get(k) for k in ("__package__", "__spec__", "__name__", "__path__") if k in frame.globals}
        module = importer(name, namespace, None, fromlist, level)  # loading a module early is its only effect
        return self.objects.enter(module, Static(module.__name__, module))

    def import_from(self, module: Any, name: str) -> Any:
        try:
            return self.get_attr(module, name)
        except AttributeError:
            full = f"{module.__name__}.{name}"
            if full in sys.modules:
                return self.objects.enter(sys.modules[full], Static(full, sys.modules[full]))
            raise ImportError(f"cannot import name {name!r} from {module.__name__!r} ({getattr(module, '__file__', 'unknown location')})", name=module.__name__) from None

    def import_star(self, frame: Frame, module: Any) -> None:
        raise Break("import *", module.__name__, "import outside of the step")

    # ------------------------------------------------------------------------------------------------------------------
    # Operators
    # ------------------------------------------------------------------------------------------------------------------

    def unary(self, op: str, value: Any) -> Any:
        if op == "not":
            return not self.truth(value)
        kind = type(value)
        if kind in SIMPLE or kind in SYMBOLIC or kind is TensorProxy:
            if kind is TensorProxy:
                return self.tensors.function({"-": _operator.neg, "+": _operator.pos, "~": _operator.invert}[op], (value,), {})
            return super().unary(op, value)
        self.refuse_alien(value)
        self.guard_operators(value, ("__neg__", "__pos__", "__invert__"))
        return self.objects.made(super().unary(op, value))

    def binary(self, op: str, left: Any, right: Any) -> Any:
        left_kind, right_kind = type(left), type(right)
        if left_kind in SIMPLE and right_kind in SIMPLE:
            return OPERATORS[op](left, right)
        if left_kind is TensorProxy or right_kind is TensorProxy:
            return self.tensor_binary(op, left, right)
        if left_kind in SYMBOLIC or right_kind in SYMBOLIC:
            if (left_kind in SIMPLE or left_kind in SYMBOLIC) and (right_kind in SIMPLE or right_kind in SYMBOLIC):
                return OPERATORS[op](left, right)
            if op not in ("+", "*", "+=", "*="):
                raise Break("arithmetic on a symbolic size", f"{left_kind.__name__} {op} {right_kind.__name__}", "use plain numbers with sizes")
        self.refuse_alien(left)
        self.refuse_alien(right)
        for value in (left, right):
            self.guard_operators(value, (f"__{n}{s}__" for s in (DUNDERS[op.removesuffix("=")],) for n in ("", "r", "i")))
        if op.endswith("="):
            if type(left) in CONTAINERS:
                return self.container_in_place(op, left, right)
        if op in ("%", "%=") and isinstance(left, str):
            return self.percent(left, right)
        left_value, right_value = self.operand(left), self.operand(right)
        return self.objects.made(super().binary(op.removesuffix("=") if type(left) in CONTAINERS else op, left_value, right_value))

    def tensor_binary(self, op: str, left: Any, right: Any) -> Any:
        for value in (left, right):
            if type(value) not in SIMPLE and type(value) not in SYMBOLIC and type(value) not in (TensorProxy, complex, list, tuple):
                if not isinstance(value, TensorProxy):
                    raise Break("operator between a tensor and an object", f"tensor {op} {type(value).__name__}", "convert the object to a tensor or a number first")
        if type(left) in (list, tuple) or type(right) in (list, tuple):
            raise Break("operator between a tensor and a sequence", op, "make a tensor of the sequence first")
        in_place = op.endswith("=") and isinstance(left, TensorProxy)
        return self.tensors.function(OPERATORS[op if in_place else op.removesuffix("=")], (left, right), {})

    def container_in_place(self, op: str, left: Any, right: Any) -> Any:
        method = {"+=": "__iadd__", "|=": "__ior__", "&=": "intersection_update", "-=": "difference_update"}.get(op)
        if method is None:
            raise Break("in-place operator on a container", f"{type(left).__name__} {op}", "write it as an assignment")
        if op == "+=":
            self.calls.container_method(left, list if type(left) is list else type(left), "extend", [right], {})
        elif op == "|=":
            self.calls.container_method(left, type(left), "update", [right], {})
        else:
            self.calls.container_method(left, type(left), method, [right], {})
        return left

    def percent(self, text: str, values: Any) -> str:
        values = natives.specialised(values)
        if not natives.is_plain(values, self.calls.known):
            raise Break("text of values that are not plain", "str % ...", "format plain values")
        return text % values

    def operand(self, value: Any) -> Any:
        """A container as the real one that stands for it."""
        return self.objects.contents(value) if type(value) in CONTAINERS else value

    def compare(self, op: str, left: Any, right: Any) -> Any:
        left_kind, right_kind = type(left), type(right)
        if left_kind in SIMPLE and right_kind in SIMPLE:
            return COMPARISONS[op](left, right)
        if left_kind is TensorProxy or right_kind is TensorProxy:
            return self.tensor_compare(op, left, right)
        if left_kind in SYMBOLIC or right_kind in SYMBOLIC or (left_kind in ATOMS and right_kind in ATOMS):
            return COMPARISONS[op](left, right)
        if isinstance(left, type) and isinstance(right, type) and op in ("==", "!="):
            return (left is right) is (op == "==")
        self.refuse_alien(left)
        self.refuse_alien(right)
        if op in ("==", "!=") and (left_kind in ATOMS or right_kind in ATOMS) and self.identity_compared(left) and self.identity_compared(right):
            return op == "!="
        for value in (left, right):
            self.guard_operators(value, ("__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__"))
        if left_kind in (tuple, list) and right_kind is left_kind:
            return self.compare_sequences(op, self.operand(left), self.operand(right))
        a, b = self.operand(left), self.operand(right)
        if any(k in CONTAINERS or k in natives.VIEWS for k in (type(a), type(b))):
            if not (natives.is_plain(a, self.calls.known) and natives.is_plain(b, self.calls.known)):
                if type(a) is not type(b) and op in ("==", "!="):
                    return op == "!="
                raise Break("comparison of containers", f"{left_kind.__name__} {op} {right_kind.__name__} with items that are not plain", "compare plain values")
        return super().compare(op, a, b)

    def identity_compared(self, value: Any) -> bool:
        """Whether ``==`` on the value is identity or the plain meaning of an atom."""
        return type(value) in ATOMS or type(value).__eq__ is object.__eq__

    def compare_sequences(self, op: str, left: Any, right: Any) -> Any:
        if op not in ("==", "!="):
            if natives.is_plain(left, self.calls.known) and natives.is_plain(right, self.calls.known):
                return COMPARISONS[op](left, right)
            raise Break("ordering of sequences", "with items that are not plain", "compare plain values")
        equal = len(left) == len(right) and all(
            self.is_same(a, b) or self.truth(self.compare("==", a, b)) for a, b in zip(left, right, strict=True)
        )
        return equal is (op == "==")

    def tensor_compare(self, op: str, left: Any, right: Any) -> Any:
        for value in (left, right):
            if not isinstance(value, TensorProxy) and type(value) not in SIMPLE and type(value) not in SYMBOLIC:
                if op in ("==", "!="):
                    return op == "!="
                raise Break("comparison between a tensor and an object", f"tensor {op} {type(value).__name__}", "convert the object first")
        return self.tensors.function(COMPARISONS[op], (left, right), {})

    def contains(self, item: Any, container: Any) -> Any:
        kind = type(container)
        if kind is TensorProxy:
            raise Break("tensor read as a number", "membership in a tensor", "use (t == x).any()")
        self.refuse_alien(container)
        record = self.objects.record_of(container)
        method = self.attributes.on_type(kind, "__contains__") if kind not in ATOMS and not isinstance(container, natives.VIEWS) else ABSENT
        if isinstance(method, types.FunctionType):
            return self.truth(self.call(method, [container, item], {}))
        base = next((b for b in kind.__mro__ if b in natives.CONTAINER_METHODS), None)
        if base in DICTS:
            if record is not None:
                return self.objects.dict_get(record, item) is not ABSENT
            return dict.__contains__(container, self.objects.real_key(item))
        if base in SETS or base is frozenset or isinstance(container, type({}.keys())):
            return self.objects.real_key(item) in self.objects.contents(container)
        if kind in (str, bytes, range):
            return item in container
        if base is not None or kind is torch.Size or isinstance(container, natives.VIEWS):
            return any(self.is_same(x, item) or self.truth(self.compare("==", x, item)) for x in self.objects.contents(container))
        if method is ABSENT and not hasattr(kind, "__contains__"):
            return any(self.is_same(x, item) or self.truth(self.compare("==", x, item)) for x in self.get_iter(container))
        if isinstance(container, type) and issubclass(type(container), __import__("enum").EnumMeta):
            return item in container
        raise Break("membership in a C object", kind.__name__, "test it outside of the step")

    def is_same(self, left: Any, right: Any) -> bool:
        if isinstance(left, types.MethodType) and isinstance(right, types.MethodType):
            return left is right
        if isinstance(left, LoopLeftover) or isinstance(right, LoopLeftover):
            self.refuse_alien(left if isinstance(left, LoopLeftover) else right)
        return left is right

    def is_none(self, value: Any) -> bool:
        if isinstance(value, LoopLeftover):
            self.refuse_alien(value)
        return value is None

    def truth(self, value: Any) -> bool:
        kind = type(value)
        if kind in SIMPLE:
            return bool(value)
        if kind is TensorProxy:
            if value.fake.dim() and isinstance(n := value.fake.numel(), int) and n > 1:
                raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
            raise Break(
                "data-dependent branch",
                f"Python branches on a tensor {value.describe()}",
                "use torch.where, or move the branch out of the captured step",
            )
        if kind in SYMBOLIC:
            return self.tensors.symbolic_truth(value)
        if kind in ATOMS or isinstance(value, (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, types.MethodType, *natives.VIEWS)):
            return bool(value)
        self.refuse_alien(value)
        if isinstance(method := self.attributes.on_type(kind, "__bool__"), types.FunctionType):
            result = self.call(method, [value], {})
            return self.truth(result)
        if method is not ABSENT:
            raise Break("truth of a C object", kind.__name__, "test it outside of the step")
        length = self.attributes.on_type(kind, "__len__")
        if length is ABSENT:
            return True
        return self.truth(self.compare("!=", self.calls.length(value), 0))

    def refuse_alien(self, value: Any) -> None:
        if isinstance(value, LoopLeftover | TensorMethod | TensorRows):
            if isinstance(value, LoopLeftover):
                self.attributes.get(value, "value")
            raise Break("tensor machinery used as a value", type_of(value).__name__, "call it, or iterate over it")

    def guard_operators(self, value: Any, names: Any) -> None:
        kind = type(value)
        if kind.__flags__ & (1 << 9):
            for name in names:
                self.attributes.on_type(kind, name)

    # ------------------------------------------------------------------------------------------------------------------
    # Attributes and items
    # ------------------------------------------------------------------------------------------------------------------

    def get_attr(self, obj: Any, name: str) -> Any:
        return self.attributes.get(obj, name)

    def load_method(self, obj: Any, name: str) -> tuple[Any, Any]:
        method = self.attributes.get(obj, name)
        if type(method) is types.MethodType and self.objects.is_new(method):
            return method.__func__, method.__self__
        return method, NULL

    def load_super_attr(self, frame: Frame, callee: Any, cls: Any, obj: Any, name: str, two_arguments: bool) -> Any:
        if callee is not super:
            return self.get_attr(self.call(callee, [cls, obj] if two_arguments else [], {}), name)
        return self.get_attr(self.calls.make_super(cls, obj), name)

    def super_arguments(self) -> tuple[Any, Any]:
        """``__class__`` and the first argument of the running function, for ``super()``."""
        frame = self.machine.frame
        names = frame.program.localsplus
        if "__class__" not in names or not frame.code.co_argcount:
            raise RuntimeError("super(): no arguments")
        cls = self.load_cell(frame.locals[names.index("__class__")])
        first = frame.locals[0]
        return cls, self.load_cell(first) if isinstance(first, types.CellType) else first

    def set_attr(self, obj: Any, name: str, value: Any) -> None:
        self.attributes.set(obj, name, value)

    def del_attr(self, obj: Any, name: str) -> None:
        self.attributes.delete(obj, name)

    def get_item(self, obj: Any, key: Any) -> Any:
        kind = type(obj)
        if kind is TensorProxy:
            return self.tensors.get_item(obj, self.plain_contents(key))
        if kind in (str, bytes, range, torch.Size) or kind is tuple:
            return self.sequence_item(obj, key)
        self.refuse_alien(obj)
        if isinstance(obj, type):
            return self.class_subscript(obj, key)
        method = self.attributes.on_type(kind, "__getitem__")
        if isinstance(method, types.FunctionType):
            return self.call(method, [obj, key], {})
        base = next((b for b in kind.__mro__ if b in natives.CONTAINER_METHODS), None)
        if base in DICTS:
            return self.dict_item(obj, kind, key)
        if base in LISTS or base is tuple:
            return self.sequence_item(self.objects.contents(obj) if base in LISTS else obj, key)
        if method is ABSENT:
            raise TypeError(f"{kind.__name__!r} object is not subscriptable")
        raise Break("item of a C object", kind.__name__, "read it outside of the step")

    def sequence_item(self, sequence: Any, key: Any) -> Any:
        if isinstance(key, slice):
            key = slice(*(natives.specialised(p) for p in (key.start, key.stop, key.step)))
        key = natives.specialised(key)
        if isinstance(key, TensorProxy):
            raise Break("tensor read as a number", "a tensor indexes a Python sequence", "stack the sequence and index the tensor")
        if not isinstance(key, int | slice):
            method = self.attributes.on_type(type(key), "__index__") if type(key) not in ATOMS else ABSENT
            if isinstance(method, types.FunctionType):
                key = self.call(method, [key], {})
        found = sequence[key]
        return self.objects.made(found) if isinstance(key, slice) else found

    def dict_item(self, obj: Any, kind: type, key: Any) -> Any:
        record = self.objects.record_of(obj)
        found = self.objects.dict_get(record, key) if record is not None else dict.get(obj, self.objects.real_key(key), ABSENT)
        if found is not ABSENT:
            return found
        missing = self.attributes.on_type(kind, "__missing__")
        if isinstance(missing, types.FunctionType):
            return self.call(missing, [obj, key], {})
        if kind is collections.defaultdict:
            factory = obj.default_factory
            if factory is not None:
                value = self.call(factory, [], {})
                self.set_item(obj, key, value)
                return value
        raise KeyError(key)

    def class_subscript(self, cls: type, key: Any) -> Any:
        method = self.attributes.on_type(type(cls), "__getitem__")
        if isinstance(method, types.FunctionType):
            return self.call(method, [cls, key], {})
        return self.objects.made(cls[key])  # type: ignore[index]

    def set_item(self, obj: Any, key: Any, value: Any) -> None:
        kind = type(obj)
        if kind is TensorProxy:
            self.tensors.set_item(obj, self.plain_contents(key), value)
            return
        method = self.attributes.on_type(kind, "__setitem__")
        if isinstance(method, types.FunctionType):
            self.call(method, [obj, key, value], {})
            return
        base = next((b for b in kind.__mro__ if b in CONTAINERS), None)
        if base is None:
            if method is ABSENT:
                raise TypeError(f"{kind.__name__!r} object does not support item assignment")
            raise Break("item of a C object is set", kind.__name__, "set it outside of the step")
        record = self.objects.record_of(obj)
        if base in DICTS and record is not None:
            self.objects.dict_set(record, key, value)
            return
        self.objects.touch(obj)
        target = self.objects.contents(obj)
        if base in DICTS:
            base.__setitem__(target, self.objects.real_key(key), value)
        else:
            if isinstance(key, slice):
                value = self.calls.drain(value)
            base.__setitem__(target, key, value)

    def del_item(self, obj: Any, key: Any) -> None:
        kind = type(obj)
        method = self.attributes.on_type(kind, "__delitem__")
        if isinstance(method, types.FunctionType):
            self.call(method, [obj, key], {})
            return
        base = next((b for b in kind.__mro__ if b in CONTAINERS), None)
        if base is None:
            raise Break("item of a C object is deleted", kind.__name__, "delete it outside of the step")
        record = self.objects.record_of(obj)
        if base in DICTS and record is not None:
            if not self.objects.dict_delete(record, key):
                raise KeyError(key)
            return
        self.objects.touch(obj)
        base.__delitem__(self.objects.contents(obj), key)

    def make_slice(self, *parts: Any) -> Any:
        return slice(*parts)

    def plain_contents(self, value: Any) -> Any:
        """Known containers in an argument replaced by what stands for them, so that C code may read them."""
        kind = type(value)
        if kind in CONTAINERS:
            value = self.objects.contents(value)
            if kind in DICTS:
                return {k: self.plain_contents(v) for k, v in value.items()} if any(type(v) in CONTAINERS or type(v) is tuple for v in value.values()) else value
            return kind(self.plain_contents(v) for v in value) if any(type(v) in CONTAINERS or type(v) is tuple for v in value) else value
        if kind is tuple and any(type(v) in CONTAINERS or type(v) is tuple for v in value):
            return tuple(self.plain_contents(v) for v in value)
        return value

    # ------------------------------------------------------------------------------------------------------------------
    # Iteration
    # ------------------------------------------------------------------------------------------------------------------

    def get_iter(self, value: Any) -> Any:
        kind = type(value)
        if kind is TensorProxy:
            return self.loops.rows(value)
        if kind is TensorRows:
            return value
        self.refuse_alien(value)
        if kind in (tuple, str, bytes, range, frozenset) or kind in natives.VIEWS or kind is torch.Size:
            return self.objects.made(iter(value))
        if isinstance(value, natives.ITERATORS):
            if not self.objects.is_new(value):
                raise Break("iterator from outside", f"a {kind.__name__} that existed before the step is advanced", "iterate over the container itself")
            return value
        method = self.attributes.on_type(kind, "__iter__")
        if isinstance(method, types.FunctionType):
            return self.call(method, [value], {})
        if any(b in CONTAINERS or b is tuple for b in kind.__mro__):
            base = next(b for b in kind.__mro__ if b in CONTAINERS or b is tuple)
            return self.objects.made(base.__iter__(self.objects.contents(value) if base in CONTAINERS else value))
        if isinstance(value, type) and isinstance(method := self.attributes.on_type(type(value), "__iter__"), types.FunctionType):
            return self.call(method, [value], {})
        if method is ABSENT and self.attributes.on_type(kind, "__getitem__") is ABSENT:
            raise TypeError(f"{kind.__name__!r} object is not iterable")
        raise Break("iteration over a C object", kind.__name__, "iterate over a list of it")

    def next_item(self, iterator: Any) -> Any:
        if type(iterator) is TensorRows:
            return self.loops.next_row(iterator)
        if not isinstance(iterator, natives.ITERATORS):
            method = self.attributes.on_type(type(iterator), "__next__")
            if isinstance(method, types.FunctionType):
                try:
                    return self.call(method, [iterator], {})
                except StopIteration:
                    return STOP
            raise Break("iterator in C", type(iterator).__name__, "iterate over a list of it")
        if not self.objects.is_new(iterator):
            raise Break("iterator from outside", f"a {type(iterator).__name__} that existed before the step is advanced", "iterate over the container itself")
        if self.objects.depth:
            self.objects.touch(iterator)
        value = next(iterator, STOP)
        return value if value is STOP else self.objects.made(value)

    def unpack(self, value: Any, count: int) -> list[Any]:
        if isinstance(value, TensorProxy):
            value = self.tensors.rows_for_unpacking(value, count)
        elif type(value) in LISTS:
            value = self.objects.contents(value)
        return super().unpack(value, count)

    # ------------------------------------------------------------------------------------------------------------------
    # Displays
    # ------------------------------------------------------------------------------------------------------------------

    def build_list(self, items: list[Any]) -> Any:
        return self.objects.made(items)

    def build_tuple(self, items: list[Any]) -> Any:
        return self.objects.made(tuple(items))

    def build_set(self, items: list[Any]) -> Any:
        return self.objects.made({self.objects.real_key(x) for x in items})

    def build_map(self, pairs: list[tuple[Any, Any]]) -> Any:
        return self.objects.made({self.objects.real_key(k): v for k, v in pairs})

    def build_string(self, parts: list[str]) -> Any:
        return "".join(parts)

    # The containers that displays and comprehensions fill are new, except after a graph break in the middle of one.

    def list_append(self, target: Any, value: Any) -> None:
        self.calls.container_method(target, list, "append", [value], {})

    def list_extend(self, target: Any, values: Any) -> None:
        self.calls.container_method(target, list, "extend", [values], {})

    def list_to_tuple(self, values: Any) -> Any:
        return self.objects.made(tuple(self.objects.contents(values)))

    def set_add(self, target: Any, value: Any) -> None:
        self.calls.container_method(target, set, "add", [value], {})

    def set_update(self, target: Any, values: Any) -> None:
        self.calls.container_method(target, set, "update", [self.calls.drain(values)], {})

    def map_add(self, target: Any, key: Any, value: Any) -> None:
        self.set_item(target, key, value)

    def dict_update(self, target: Any, other: Any) -> None:
        if not hasattr(type(other), "keys"):
            raise TypeError(f"'{type(other).__name__}' object is not a mapping")
        self.calls.container_method(target, dict, "update", [other], {})

    def dict_merge(self, target: Any, other: Any, function: Any) -> None:
        if self.objects.record_of(target) is not None:
            raise Break("keyword arguments built across a graph break", "f(**a, **b)", "build the keyword arguments before the call")
        super().dict_merge(target, self.mapping(other), function)

    def mapping(self, other: Any) -> Any:
        return dict(self.calls.mapping_or_items(other, dict)) if hasattr(type(other), "keys") else other

    def format_value(self, value: Any, conversion: str, spec: Any) -> Any:
        value = natives.specialised(value)
        if natives.is_plain(value, self.calls.known):
            return super().format_value(value, conversion, spec)
        if conversion or spec:
            raise Break("text of a value that is not plain", f"a {type_of(value).__name__} is formatted", "format it after the step")
        return self.text_of(value)

    def convert_value(self, value: Any, conversion: str) -> Any:
        value = natives.specialised(value)
        if not natives.is_plain(value, self.calls.known):
            raise Break("text of a value that is not plain", f"a {type_of(value).__name__} is formatted", "format it after the step")
        return super().convert_value(value, conversion)

    def text_of(self, value: Any = "", *encoding: Any) -> Any:
        """``str(value)``."""
        value = natives.specialised(value)
        if natives.is_plain(value, self.calls.known) or isinstance(value, BaseException):
            return str(value, *encoding)
        if not isinstance(value, TensorProxy | LoopLeftover | TensorMethod):
            method = self.attributes.on_type(type(value), "__str__")
            if isinstance(method, types.FunctionType):
                return self.call(method, [value], {})
            if method is object.__str__:
                return self.repr_of(value)
        raise Break("text of a value that is not plain", f"str() of a {type_of(value).__name__}", "print it after the step")

    def repr_of(self, value: Any) -> str:
        """``repr(value)``."""
        value = natives.specialised(value)
        if natives.is_plain(value, self.calls.known):
            return repr(value)
        method = self.attributes.on_type(type(value), "__repr__") if not isinstance(value, TensorProxy) else ABSENT
        if isinstance(method, types.FunctionType):
            return self.call(method, [value], {})
        raise Break("text of a value that is not plain", f"repr() of a {type_of(value).__name__}", "print it after the step")

    # ------------------------------------------------------------------------------------------------------------------
    # Calls, functions, classes
    # ------------------------------------------------------------------------------------------------------------------

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return self.calls.call(callee, args, kwargs)

    def call_spread(self, callee: Any, args: Any, kwargs: Any) -> Any:
        positional = list(args) if type(args) is tuple else self.calls.drain(args)
        keywords = dict(self.mapping(kwargs)) if kwargs else {}
        return self.call(callee, positional, keywords)

    def call_function(self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.guard_function(function)
        return super().call_function(function, args, kwargs)

    def guard_function(self, function: types.FunctionType) -> None:
        """A function that existed before: its code and defaults are facts, and the defaults become known objects."""
        if self.objects.is_new(function) or function in self.guarded_functions:
            return
        self.guarded_functions.add(function)
        record = self.objects.records.get(id(function))
        name = record.source.name if record is not None else function.__qualname__
        code, defaults, keyword_defaults = function.__code__, function.__defaults__, function.__kwdefaults__
        items = tuple((keyword_defaults or {}).items())

        def unchanged() -> bool:
            now = function.__kwdefaults__
            return (
                function.__code__ is code and function.__defaults__ is defaults and now is keyword_defaults
                and (now is None or all(now.get(k, ABSENT) is v for k, v in items))
            )  # fmt: skip

        self.objects.guards.holds(name, "code and defaults unchanged", unchanged)
        if function.__closure__:
            for cell, free in zip(function.__closure__, function.__code__.co_freevars, strict=True):
                if id(cell) not in self.objects.records and not self.objects.is_new(cell):
                    self.objects.records[id(cell)] = Record(cell, Static(f"closure {name}.{free}", cell))
        for label, value in (*enumerate(defaults or ()), *items):
            if isinstance(value, torch.Tensor):
                raise Break("tensor as a default argument", f"{name}", "make it a buffer, or pass it")
            self.objects.enter(value, Static(f"{name}.default[{label!r}]", value))

    def make_function(self, frame: Frame, code: Any, defaults: Any, kwdefaults: Any, annotations: Any, closure: Any) -> Any:
        return self.objects.made(super().make_function(frame, code, defaults, kwdefaults, annotations, closure))

    def build_class(self, *args: Any, **kwargs: Any) -> Any:
        raise Break("class made in the step", "a class statement runs inside the captured code", "define classes outside of the step")

    def make_generator(self, frame: Frame) -> Any:
        return self.objects.made(super().make_generator(frame))

    def before_with(self, manager: Any) -> tuple[Any, Any]:
        """``__enter__`` and ``__exit__`` of a context manager, looked up on its type."""
        kind = type(manager)
        enter, leave = self.attributes.on_type(kind, "__enter__"), self.attributes.on_type(kind, "__exit__")
        if enter is ABSENT or leave is ABSENT:
            return super().before_with(manager)
        bound_leave = self.attributes.bind(leave, manager, kind)
        return bound_leave, self.call(self.attributes.bind(enter, manager, kind), [], {})


class StopHere(Break):
    """Raised before the root frame's instruction at which an earlier attempt found that it must break."""

    def __init__(self) -> None:
        super().__init__("stop", "", "")


import operator as _operator  # noqa: E402

COMPARISONS = {"<": _operator.lt, "<=": _operator.le, "==": _operator.eq, "!=": _operator.ne, ">": _operator.gt, ">=": _operator.ge}
DUNDERS = {
    "+": "add", "&": "and", "//": "floordiv", "<<": "lshift", "@": "matmul", "*": "mul", "%": "mod", "|": "or", "**": "pow", ">>": "rshift",
    "-": "sub", "/": "truediv", "^": "xor",
}  # fmt: skip
