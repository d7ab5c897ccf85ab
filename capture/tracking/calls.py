"""Calls while tracing: who is called, and whether it is interpreted, recorded as an operator, run natively, or a break."""
from __future__ import annotations

import collections
import contextvars
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import torch_private
from ..hook import ABSENT
from ..sources import Static, part
from . import natives
from .objects import CONTAINERS, DICTS, LISTS, SETS
from .values import ATOMS, SYMBOLIC, Break, LoopLeftover, TensorMethod, TensorProxy, type_of

if TYPE_CHECKING:
    from .domain import TrackingDomain


class ContextToken:
    """What ``ContextVar.set`` gives while tracing."""

    def __init__(self, variable: contextvars.ContextVar, before: Any):
        self.variable, self.before = variable, before


class Calls:
    """Dispatches every call of one trace. ``domain`` gives the operations that builtins stand for."""

    def __init__(self, domain: TrackingDomain):
        self.domain = domain
        self.objects = domain.objects
        self.tensors = domain.tensors
        self.builtins: dict[Any, Callable[..., Any]] = {
            isinstance: self.is_instance, issubclass: self.is_subclass, len: self.length, getattr: self.get_attribute, setattr: self.set_attribute,
            delattr: self.delete_attribute, hasattr: self.has_attribute, iter: self.iterate, next: self.advance, callable: self.is_callable,
            vars: self.variables, id: self.identity, bool: self.boolean, dict: self.make_dict, set: self.make_set, collections.OrderedDict: self.make_ordered,
            collections.defaultdict: self.make_default_dict, object: lambda: self.objects.made(object()), sum: self.add_up, int: self.to_int, float: self.to_float,
            str: self.to_text, repr: self.to_repr, sorted: self.sort, max: self.extreme(max), min: self.extreme(min), any: self.any_of, all: self.all_of,
            super: self.make_super, functools.partial: self.make_partial, torch.is_tensor: lambda x: isinstance(x, TensorProxy), hash: self.hash_of,
        }  # fmt: skip
        o = __import__("operator")
        self.builtins |= {
            o.getitem: self.domain.get_item, o.setitem: self.domain.set_item, o.delitem: self.domain.del_item, o.contains: lambda c, x: self.domain.contains(x, c),
            o.is_: self.domain.is_same, o.is_not: lambda a, b: not self.domain.is_same(a, b), o.truth: self.domain.truth, o.not_: lambda x: not self.domain.truth(x),
            o.eq: lambda a, b: self.domain.compare("==", a, b), o.ne: lambda a, b: self.domain.compare("!=", a, b), o.iadd: lambda a, b: self.domain.binary("+=", a, b),
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------------------------
    # Dispatch
    # ------------------------------------------------------------------------------------------------------------------

    def call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        kind = type(function)
        if kind is types.FunctionType:
            return self.python_function(function, args, kwargs)
        if kind is types.MethodType:
            inner = function.__func__
            return self.call(inner, [function.__self__, *args], kwargs)
        if kind is TensorMethod:
            return self.tensors.method(function.proxy, function.name, tuple(args), kwargs)
        if kind is functools.partial:
            return self.partial(function, args, kwargs)
        if function in IDENTITY_HASHED and (stand_in := self.lookup(function)) is not None:
            return stand_in(*args, **kwargs)
        if isinstance(function, type):
            return self.construct(function, args, kwargs)
        if natives.is_tensor_operator(function):
            return self.operator(function, args, kwargs)
        if kind in (types.BuiltinFunctionType, types.MethodWrapperType):
            owner = None if function in natives.PURE or function in torch_private.STATE_WRITERS else natives.owner_of(function)
            if owner is not None:
                return self.method_of(owner, function.__name__, function, args, kwargs)
            return self.native(function, args, kwargs)
        if kind in (types.MethodDescriptorType, types.WrapperDescriptorType):
            return self.unbound(function, args, kwargs)
        if kind is functools._lru_cache_wrapper:
            return self.cached(function, args, kwargs)
        if kind is LoopLeftover:
            self.domain.attributes.get(function, "__call__")
        return self.instance_call(function, args, kwargs)

    def lookup(self, function: Any) -> Callable[..., Any] | None:
        try:
            return self.builtins.get(function) or natives.REPLACED.get(function)
        except TypeError:
            return None

    def python_function(self, function: types.FunctionType, args: list, kwargs: dict[str, Any]) -> Any:
        stand_in = natives.REPLACED.get(function)
        if stand_in is not None:
            return stand_in(*args, **kwargs)
        if natives.is_tensor_function(function) and any(isinstance(a, TensorProxy) or holds_proxy(a) for a in (*args, *kwargs.values())):
            return self.operator(function, args, kwargs)
        if "moebius_disabled" in function.__dict__:
            raise Break("disabled function", f"{function.__qualname__} was given to moebius.disable", "nothing to do: it runs natively, as asked")
        if function.__module__ in NEVER_INTERPRETED:
            raise Break("function outside of the graph", f"{function.__module__}.{function.__qualname__}", "it runs natively; nothing to do")
        return self.domain.call_function(function, args, kwargs)

    def operator(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """An operator of torch's, as one node."""
        if function in (torch.equal, torch.allclose, torch.is_nonzero):
            raise Break("tensor read as a number", f"torch.{function.__name__} gives Python a value", "keep it in a tensor")
        if function is torch.is_grad_enabled:
            return torch.is_grad_enabled()
        if function in (torch.tensor, torch.as_tensor) and any(isinstance(a, TensorProxy) or holds_proxy(a) for a in args):
            raise Break("tensor made from tensors' numbers", f"torch.{function.__name__} of tensors", "use torch.stack or clone().detach()")
        args = [self.domain.plain_contents(a) for a in args]
        kwargs = {k: self.domain.plain_contents(v) for k, v in kwargs.items()}
        return self.objects.made(self.tensors.function(function, tuple(args), kwargs))

    def partial(self, function: functools.partial, args: list, kwargs: dict[str, Any]) -> Any:
        if self.objects.is_new(function):
            return self.call(function.func, [*function.args, *args], {**function.keywords, **kwargs})
        get = self.domain.attributes.c_value
        inner = get(function, function.func, "func")
        first = get(function, function.args, "args")
        keywords = get(function, function.keywords, "keywords")
        return self.call(inner, [*first, *args], {**self.objects.contents(keywords), **kwargs})

    def cached(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``functools.lru_cache``: a cached pure function of plain arguments gives what the function gives."""
        if not all(natives.is_plain(a, self.known) for a in (*args, *kwargs.values())):
            raise Break("cached function", f"{function.__qualname__} is called with arguments that are not plain", "call it outside of the step")
        inner = function.__wrapped__
        return self.call(self.objects.enter(inner, Static(inner.__qualname__, inner)), args, kwargs)

    def instance_call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        kind = type(function)
        if isinstance(function, classmethod | staticmethod):
            return self.call(self.domain.attributes.inside(function, function.__func__), args, kwargs)
        method = self.domain.attributes.on_type(kind, "__call__")
        if method is ABSENT:
            raise TypeError(f"{kind.__name__!r} object is not callable")
        if isinstance(method, types.WrapperDescriptorType):
            raise Break("call into C", f"a {kind.__module__}.{kind.__qualname__} is called", "nothing is known of what it does; it runs natively")
        return self.call(self.domain.attributes.bind(method, function, kind), args, kwargs)

    # ------------------------------------------------------------------------------------------------------------------
    # Natively run functions
    # ------------------------------------------------------------------------------------------------------------------

    def known(self, value: Any) -> bool:
        return id(value) in self.objects.records

    def native(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """A function of C code: from the tables, or a graph break."""
        if function in torch_private.STATE_WRITERS:
            return self.state_writer(function, args, kwargs)
        if function in natives.PURE:
            values = [self.domain.plain_contents(a) for a in args]
            if getattr(function, "__module__", "") != "_operator":
                values = [natives.specialised(v) for v in values]
            if all(natives.is_operand(v, self.known) for v in (*values, *kwargs.values())):
                return self.objects.made(function(*values, **kwargs))
            if getattr(function, "__module__", "") == "_operator" and len(args) == 2 and function.__name__ in OPERATOR_SIGNS:
                return self.domain.binary(OPERATOR_SIGNS[function.__name__], *args)
            raise Break(
                "builtin with arguments it would look into", f"{function.__name__}() of {', '.join(type_of(a).__name__ for a in args)}", "pass plain values"
            )
        if function in natives.SHALLOW:
            return self.shallow(function, args, kwargs)
        name = f"{getattr(function, '__module__', None) or 'builtins'}.{getattr(function, '__qualname__', function)}"
        raise Break("call into C", f"{name} is not known to be free of effects", "it runs natively; keep it at the step's ends for one graph")

    def state_writer(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """A switch of torch's: thrown now for the fakes, and kept as a node."""
        result = function(*args, **kwargs)
        self.tensors.writer.node("call_function", function, tuple(args), kwargs).meta["val"] = None
        self.tensors.state_changed = True
        return result

    def shallow(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        values = list(args)
        start = 0
        if function in natives.CALLBACK_FIRST and values:
            values[0] = self.callback(values[0]) if values[0] is not None else (self.domain.truth if function is filter else None)
            start = 1
        for i in range(start, len(values)):
            value = values[i]
            if type(value) not in ATOMS or isinstance(value, str | bytes | range | torch.Size):
                if function is reversed:
                    values[i] = self.objects.contents(value)
                    if type(values[i]) not in (*CONTAINERS, tuple, str, range, *natives.VIEWS):
                        raise Break("reversed()", f"of a {type_of(value).__name__}", "reverse a list")
                elif function not in ITEM_ARGUMENTS or i == 0:
                    values[i] = self.domain.get_iter(value)
                    if isinstance(values[i], self.domain.row_type):
                        raise Break("iterating over a tensor of unknown length", f"{function.__name__}(tensor)", "iterate over it with a for loop")
        if function is functools.reduce and len(values) == 3:
            values[2] = args[2]
        return self.objects.made(function(*values, **kwargs))

    def callback(self, function: Any) -> Callable[..., Any]:
        """A native callable that runs ``function`` in the trace."""
        return lambda *args, **kwargs: self.call(function, list(args), kwargs)

    # ------------------------------------------------------------------------------------------------------------------
    # Methods of builtin types
    # ------------------------------------------------------------------------------------------------------------------

    def unbound(self, descriptor: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``str.upper(x)``, ``object.__setattr__(obj, ...)``: a method descriptor with its object as first argument."""
        if not args:
            raise TypeError(f"unbound method {descriptor.__qualname__}() needs an argument")
        owner, rest = args[0], args[1:]
        if isinstance(owner, TensorProxy):
            return self.tensors.method(owner, descriptor.__name__, tuple(rest), kwargs)
        return self.method_of(owner, descriptor.__name__, descriptor.__get__(owner) if not is_alien(owner) else descriptor, rest, kwargs)

    def method_of(self, owner: Any, name: str, bound: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """A builtin method with the object that it belongs to."""
        kind = type(owner)
        if isinstance(owner, contextvars.ContextVar):
            return self.context_variable(owner, name, args)
        if name in OBJECT_METHODS and is_object_method(bound, kind):
            return getattr(self, OBJECT_METHODS[name])(owner, *args, **kwargs)
        if isinstance(owner, types.GeneratorType) and self.objects.is_new(owner):
            return bound(*args, **kwargs)
        if isinstance(owner, type):
            return self.class_method(owner, name, bound, args, kwargs)
        if kind in ATOMS:
            return self.atom_method(owner, name, bound, args, kwargs)
        base = next((b for b in kind.__mro__ if b in natives.CONTAINER_METHODS), None)
        if base is not None:
            return self.container_method(owner, base, name, args, kwargs)
        if kind in natives.VIEWS and name in ("__len__", "__iter__", "__contains__", "isdisjoint"):
            return bound(*args)
        if isinstance(owner, natives.ITERATORS) and name in ("__iter__", "__next__"):
            return owner if name == "__iter__" else self.objects.made(next(owner))
        if isinstance(owner, types.MethodType | types.FunctionType) and name == "__get__":
            return self.domain.attributes.bind(owner, args[0], type(args[0])) if args[0] is not None else owner
        if isinstance(owner, BaseException) and name in ("with_traceback", "add_note") and self.objects.is_new(owner):
            return bound(*args, **kwargs)
        if isinstance(owner, __import__("re").Pattern) and all(natives.is_plain(a, self.known) for a in args):
            return self.objects.made(bound(*args, **kwargs))
        if isinstance(owner, __import__("re").Match):
            return bound(*args, **kwargs)
        raise Break("method in C", f"{kind.__module__}.{kind.__qualname__}.{name} is not known to be free of effects", "it runs natively")

    def atom_method(self, owner: Any, name: str, bound: Any, args: list, kwargs: dict[str, Any]) -> Any:
        if isinstance(owner, torch.Generator):
            raise Break("random generator", f"torch.Generator.{name}", "seed outside of the step")
        values = [natives.specialised(self.domain.plain_contents(a)) for a in args]
        if name == "join" and args:
            values = [list(self.drain(args[0]))]
        if name == "format":
            values = [self.domain.text_of(v) if not natives.is_plain(v, self.known) else v for v in values]
            kwargs = {k: self.domain.text_of(v) if not natives.is_plain(v, self.known) else v for k, v in kwargs.items()}
        if not all(natives.is_plain(v, self.known) for v in (*values, *kwargs.values())):
            raise Break("method of a plain value", f"{type(owner).__name__}.{name} with arguments that are not plain", "pass plain values")
        return self.objects.made(bound(*values, **kwargs))

    def container_method(self, owner: Any, base: type, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        """A method of list, dict, set, tuple, deque or of a class derived from one, on the object or its shadow."""
        table = natives.CONTAINER_METHODS[base]
        if name not in table:
            if name == "__init__":
                return self.init_container(owner, base, args, kwargs)
            if name in ("__eq__", "__ne__"):
                return self.domain.compare("==" if name == "__eq__" else "!=", owner, args[0])
            raise Break("method in C", f"{base.__name__}.{name}", "it runs natively")
        if name in natives.CHANGING:
            self.objects.touch(owner)
        record = self.objects.record_of(owner)
        if record is not None and base in DICTS:
            if (done := self.single_key(record, name, args)) is not ABSENT:
                return done
        if record is not None and name in ("append", "extend") and record.shadow is None and base is list:
            record.appends.extend(args if name == "append" else self.drain(args[0]))
            return None
        target = self.objects.contents(owner)
        if base in SETS and name == "update":
            args = [[self.objects.real_key(v) for v in self.drain(a)] for a in args]
        if base in DICTS or base in SETS:
            if name in KEYED and args:
                args = [self.objects.real_key(args[0]), *args[1:]]
        elif not table[name]:
            return self.compared_method(target, name, args, kwargs)
        if name in ITERABLE_ARGUMENT and args:
            args = [self.mapping_or_items(args[0], base), *args[1:]]
        if name == "__getitem__" and base in LISTS or base is tuple and name == "__getitem__":
            return self.domain.get_item(owner, args[0])
        if base is collections.defaultdict and name == "__getitem__":
            return self.domain.get_item(owner, args[0])
        method = getattr(base, name)
        return self.objects.made(method(target, *args, **kwargs))

    def single_key(self, record: Any, name: str, args: list) -> Any:
        """Dict methods that concern one key need not read the whole dict. ABSENT: not such a method."""
        if name == "get":
            found = self.objects.dict_get(record, args[0])
            return (args[1] if len(args) > 1 else None) if found is ABSENT else found
        if name == "__contains__":
            return self.objects.dict_get(record, args[0]) is not ABSENT
        if name == "__getitem__" and not isinstance(record.obj, collections.defaultdict):
            found = self.objects.dict_get(record, args[0])
            if found is ABSENT:
                raise KeyError(args[0])
            return found
        if name == "__setitem__":
            self.objects.dict_set(record, *args)
            return None
        if name == "pop" or name == "__delitem__":
            found = self.objects.dict_get(record, args[0])
            if found is ABSENT:
                if name == "pop" and len(args) > 1:
                    return args[1]
                raise KeyError(args[0])
            self.objects.dict_delete(record, args[0])
            return found if name == "pop" else None
        if name == "setdefault":
            found = self.objects.dict_get(record, args[0])
            if found is ABSENT:
                found = args[1] if len(args) > 1 else None
                self.objects.dict_set(record, args[0], found)
            return found
        return ABSENT

    def compared_method(self, target: Any, name: str, args: list, kwargs: dict[str, Any]) -> Any:
        if name == "sort":
            target[:] = self.sort(target, **kwargs)
            return None
        for i, item in enumerate(target):
            if self.domain.is_same(item, args[0]) or self.domain.truth(self.domain.compare("==", item, args[0])):
                if name == "index" and len(args) == 1:
                    return i
                if name == "remove":
                    del target[i]
                    return None
        if name == "count":
            return sum(1 for item in target if self.domain.is_same(item, args[0]) or self.domain.truth(self.domain.compare("==", item, args[0])))
        raise ValueError(f"{args[0]!r} is not in list" if name == "index" else "list.remove(x): x not in list")

    def mapping_or_items(self, value: Any, base: type) -> Any:
        """The argument of ``update``/``extend``: a native mapping or iterator."""
        if base in DICTS:
            if any(b in DICTS for b in type(value).__mro__):
                return self.objects.contents(value)
            if self.domain.attributes.has(value, "keys"):
                keys = self.drain(self.call(self.domain.attributes.get(value, "keys"), [], {}))
                return {k: self.domain.get_item(value, k) for k in keys}
            return [tuple(self.drain(pair)) for pair in self.drain(value)]
        return self.domain.get_iter(value)

    def drain(self, value: Any) -> list:
        """All items of an iterable."""
        iterator = self.domain.get_iter(value)
        if isinstance(iterator, self.domain.row_type):
            raise Break("iterating over a tensor of unknown length", "in a builtin", "iterate over it with a for loop")
        return list(iterator)

    def class_method(self, cls: type, name: str, bound: Any, args: list, kwargs: dict[str, Any]) -> Any:
        if name == "__new__":
            if not args:
                raise TypeError("__new__(): not enough arguments")
            return self.allocate(args[0], bound, args[1:], kwargs)
        if name == "fromkeys" and cls in DICTS:
            return self.objects.made(cls.fromkeys(self.drain(args[0]), *args[1:]))
        if name in ("__subclasses__", "mro", "__prepare__"):
            return self.objects.made(bound(*args, **kwargs))
        if name == "from_iterable":
            return self.shallow(bound, args, kwargs)
        if name == "__call__":
            return self.construct(cls, args, kwargs)
        if name in ("maketrans", "fromhex", "from_bytes"):
            return bound(*args, **kwargs)
        if name in ("__instancecheck__", "__subclasscheck__"):
            return self.is_instance(args[0], cls) if name == "__instancecheck__" else issubclass(args[0], cls)
        raise Break("class method in C", f"{cls.__qualname__}.{name}", "it runs natively")

    def context_variable(self, variable: contextvars.ContextVar, name: str, args: list) -> Any:
        if name == "get":
            value = self.objects.context_get(variable)
            if value is not ABSENT:
                return value
            if args:
                return args[0]
            default = variable.get(ABSENT) if ABSENT is not ABSENT else ABSENT
            if default is ABSENT:
                try:
                    default = contextvars.Context().run(variable.get)
                except LookupError:
                    raise LookupError(variable) from None
            return self.objects.enter(default, Static(f"ContextVar({variable.name!r}) default", default))
        if name == "set":
            return self.objects.made(ContextToken(variable, self.objects.context_set(variable, args[0])))
        if name == "reset" and isinstance(args[0], ContextToken):
            self.objects.context_set(variable, args[0].before)
            return None
        raise Break("context variable", f"ContextVar.{name}", "set context variables outside of the step")

    # ------------------------------------------------------------------------------------------------------------------
    # Making objects
    # ------------------------------------------------------------------------------------------------------------------

    def construct(self, cls: type, args: list, kwargs: dict[str, Any]) -> Any:
        """``cls(*args, **kwargs)``."""
        if cls is type and len(args) == 1:
            return self.kind_of(args[0])
        if cls in natives.PLAIN_TYPES:
            values = [self.domain.plain_contents(a) for a in args]
            if cls in (frozenset, torch.Size) and values:
                values = [list(self.drain(values[0]))]
            if cls is torch.Size and all(type(v) in (int, torch.SymInt) for value in values for v in value):
                return torch.Size(*values)
            if cls is not slice:
                values = [natives.specialised(v) for v in values]
            if not all(natives.is_plain(v, self.known) for v in (*values, *kwargs.values())):
                if cls in (slice,):
                    return slice(*values)
                raise Break("plain value from other values", f"{cls.__name__}() of {', '.join(type_of(a).__name__ for a in args)}", "pass plain values")
            return self.objects.made(cls(*values, **kwargs))
        if cls in natives.SHALLOW:
            return self.shallow(cls, args, kwargs)
        if issubclass(cls, torch.Tensor):
            if cls is torch.nn.Parameter or cls is torch.nn.Buffer:
                raise Break("parameter made in the step", cls.__name__, "make parameters before the step")
            raise Break("tensor constructor", f"{cls.__name__}(...)", "use torch.tensor")
        if issubclass(cls, torch.autograd.Function | torch.nn.Module) and issubclass(cls, torch.autograd.Function):
            raise Break("autograd.Function instance", cls.__name__, "call .apply")
        meta_call = self.domain.attributes.on_type(type(cls), "__call__")
        if isinstance(meta_call, types.FunctionType):
            return self.call(meta_call, [cls, *args], kwargs)
        return self.type_call(cls, args, kwargs)

    def type_call(self, cls: type, args: list, kwargs: dict[str, Any]) -> Any:
        """``type.__call__(cls, ...)``: ``__new__``, then ``__init__`` if an instance of the class came back."""
        maker = self.domain.attributes.on_type(cls, "__new__")
        if isinstance(maker, staticmethod):
            maker = self.domain.attributes.inside(maker, maker.__func__)
        if isinstance(maker, types.FunctionType):
            made = self.call(maker, [cls, *args], kwargs)
        else:
            made = self.allocate(cls, maker, args, kwargs)
        if not issubclass(type_of(made), cls):
            return made
        init = self.domain.attributes.on_type(type(made), "__init__")
        if isinstance(init, types.FunctionType):
            self.call(init, [made, *args], kwargs)
        elif any(b in CONTAINERS for b in cls.__mro__):
            base = next(b for b in cls.__mro__ if b in CONTAINERS)
            self.init_container(made, base, args, kwargs)
        return made

    def allocate(self, cls: type, maker: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """``__new__`` of a class whose allocation is C's."""
        if cls.__init_subclass__ and cls.__flags__ & (1 << 20):  # Py_TPFLAGS_IS_ABSTRACT
            raise TypeError(f"Can't instantiate abstract class {cls.__name__}")
        base = next((b for b in cls.__mro__ if b in ALLOCATED), None)
        if issubclass(cls, BaseException):
            values = [self.domain.plain_contents(a) for a in args]
            return self.objects.made(cls.__new__(cls, *values))
        if base is None or not owned_by(cls, base):
            raise Break("object made in C", f"{cls.__module__}.{cls.__qualname__}", "it is made natively; make it outside of the step")
        if base is tuple:
            return self.objects.made(tuple.__new__(cls, self.drain(args[0]) if args else ()))
        if base in (int, str, float):
            return self.objects.made(base.__new__(cls, *args, **kwargs))
        if base is object:
            return self.objects.made(object.__new__(cls))
        return self.objects.made(base.__new__(cls))

    def init_container(self, owner: Any, base: type, args: list, kwargs: dict[str, Any]) -> None:
        if not self.objects.is_new(owner):
            raise Break("container initialised again", type(owner).__name__, "make a new one")
        self.objects.touch(owner)
        if base is collections.defaultdict and args:
            owner.default_factory = args[0]
            args = args[1:]
        if base in DICTS:
            if args:
                base.update(owner, self.mapping_or_items(args[0], base))
            base.update(owner, **kwargs)
        elif args:
            target = getattr(base, "update", None) or base.extend
            target(owner, self.drain(args[0]))

    def make_dict(self, *args: Any, **kwargs: Any) -> dict:
        made = dict(self.mapping_or_items(args[0], dict)) if args else {}
        made.update(kwargs)
        return self.objects.made(made)

    def make_ordered(self, *args: Any, **kwargs: Any) -> Any:
        return self.objects.made(collections.OrderedDict(self.make_dict(*args, **kwargs)))

    def make_default_dict(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] not in (None, list, dict, set, int, float, str, tuple):
            raise Break("defaultdict with its own factory", "the factory would run natively", "use setdefault, or a builtin factory")
        return self.objects.made(collections.defaultdict(args[0] if args else None, self.make_dict(*args[1:], **kwargs)))

    def make_set(self, *args: Any) -> set:
        return self.objects.made({self.objects.real_key(k) for k in (self.drain(args[0]) if args else ())})

    def make_partial(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return self.objects.made(functools.partial(function if callable(function) else self.callback(function), *args, **kwargs))

    def make_super(self, *args: Any) -> Any:
        if not args:
            args = self.domain.super_arguments()
        if len(args) == 2 and isinstance(args[1], TensorProxy):
            raise Break("super() of a tensor", "methods of tensor subclasses", "use plain tensors")
        return self.objects.made(super(*args))

    # ------------------------------------------------------------------------------------------------------------------
    # Builtins that are operations of the domain
    # ------------------------------------------------------------------------------------------------------------------

    def kind_of(self, value: Any) -> type:
        kind = type_of(value)
        self.domain.attributes.type_guard(value)
        return kind

    def is_instance(self, value: Any, classes: Any) -> bool:
        self.kind_of(value)
        if isinstance(classes, tuple):
            return any(self.is_instance(value, c) for c in classes)
        check = getattr(type(classes), "__instancecheck__", None)
        if isinstance(value, TensorProxy):
            if isinstance(classes, types.UnionType):
                return any(self.is_instance(value, c) for c in classes.__args__)
            return isinstance(value.real, classes) if isinstance(value.real, torch.Tensor) else issubclass(value.cls, classes)
        if isinstance(value, SYMBOLIC):
            return issubclass(type_of(value), classes)
        if isinstance(value, TensorMethod | LoopLeftover):
            return False
        if isinstance(check, types.FunctionType) and type(classes).__module__ not in TRUSTED_METACLASSES:
            return self.domain.truth(self.call(check, [classes, value], {}))
        return isinstance(value, classes)

    def is_subclass(self, cls: Any, classes: Any) -> bool:
        return issubclass(cls, classes)

    def length(self, value: Any) -> Any:
        if isinstance(value, TensorProxy):
            if value.fake.dim() == 0:
                raise TypeError("len() of a 0-d tensor")
            return value.fake.shape[0]
        kind = type(value)
        if kind in ATOMS or isinstance(value, natives.VIEWS) or kind in (tuple, frozenset):
            return len(value)
        method = self.domain.attributes.on_type(kind, "__len__")
        if isinstance(method, types.FunctionType):
            return self.call(method, [value], {})
        if method is ABSENT:
            raise TypeError(f"object of type {kind.__name__!r} has no len()")
        base = next((b for b in kind.__mro__ if b in natives.CONTAINER_METHODS), None)
        if base is None:
            raise Break("len() in C", kind.__name__, "it runs natively")
        return base.__len__(self.objects.contents(value))

    def get_attribute(self, obj: Any, name: str, *default: Any) -> Any:
        if not default:
            return self.domain.attributes.get(obj, name)
        try:
            return self.domain.attributes.get(obj, name)
        except AttributeError:
            return default[0]

    def set_attribute(self, obj: Any, name: str, value: Any) -> None:
        self.domain.attributes.set(obj, name, value)

    def delete_attribute(self, obj: Any, name: str) -> None:
        self.domain.attributes.delete(obj, name)

    def has_attribute(self, obj: Any, name: str) -> bool:
        return self.domain.attributes.has(obj, name)

    def iterate(self, value: Any, *sentinel: Any) -> Any:
        if sentinel:
            return self.objects.made(iter(self.callback(value), *sentinel))
        return self.domain.get_iter(value)

    def advance(self, iterator: Any, *default: Any) -> Any:
        try:
            value = self.call(self.domain.attributes.get(iterator, "__next__"), [], {})
        except StopIteration:
            if default:
                return default[0]
            raise
        return value

    def is_callable(self, value: Any) -> bool:
        return not isinstance(value, (TensorProxy, *SYMBOLIC)) and callable(value)

    def variables(self, obj: Any) -> Any:
        return self.domain.attributes.get(obj, "__dict__")

    def identity(self, value: Any) -> int:
        record = self.objects.record_of(value)
        if record is not None and record.source.static:
            return id(value)
        raise Break("id()", f"the identity of a {type_of(value).__name__} differs from call to call", "use the object as a key instead")

    def hash_of(self, value: Any) -> int:
        if natives.is_plain(value, self.known) and not isinstance(value, str | bytes):
            return hash(value)
        return self.identity(value) if type(value).__hash__ is object.__hash__ else hash(self.objects.real_key(value))

    def boolean(self, *value: Any) -> Any:
        if not value:
            return False
        if isinstance(value[0], torch.SymBool | torch.SymInt):
            return bool(value[0])
        return self.domain.truth(value[0])

    def any_of(self, values: Any) -> bool:
        return any(self.domain.truth(v) for v in self.domain.get_iter(values))

    def all_of(self, values: Any) -> bool:
        return all(self.domain.truth(v) for v in self.domain.get_iter(values))

    def add_up(self, values: Any, start: Any = 0) -> Any:
        total = start
        for value in self.drain(values):
            total = self.domain.binary("+", total, value)
        return total

    def extreme(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, key: Any = None, **kwargs: Any) -> Any:
            values = self.drain(args[0]) if len(args) == 1 else list(args)
            keys = [self.call(key, [v], {}) for v in values] if key is not None else values
            if not all(natives.is_plain(k, self.known) or isinstance(k, torch.SymInt) for k in keys):
                raise Break(f"{function.__name__}() of values that are not plain", ", ".join(type_of(k).__name__ for k in keys[:4]), "use torch.maximum/minimum for tensors")
            if any(isinstance(k, torch.SymInt) for k in keys) and key is None and "default" not in kwargs:
                return functools.reduce(torch.sym_max if function is max else torch.sym_min, keys)
            if not values:
                return function(values, **kwargs)
            chosen = function(range(len(keys)), key=keys.__getitem__)
            return values[chosen]

        return run

    def sort(self, values: Any, *, key: Any = None, reverse: Any = False) -> list:
        items = self.drain(values)
        keys = [self.call(key, [v], {}) for v in items] if key is not None else items
        keys = [natives.specialised(k) for k in keys]
        if not all(natives.is_plain(k, self.known) for k in keys):
            raise Break("sorting values that are not plain", ", ".join(type_of(k).__name__ for k in keys[:4]), "sort plain keys")
        order = sorted(range(len(items)), key=keys.__getitem__, reverse=bool(reverse))
        return self.objects.made([items[i] for i in order])

    def to_int(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.SymInt):
            return args[0]
        if args and isinstance(args[0], TensorProxy):
            raise Break("tensor read as a number", f"int() of a tensor {args[0].describe()}", "keep it in a tensor")
        if args and not natives.is_plain(args[0], self.known):
            return self.by_method(args[0], ("__int__", "__index__"), "int")
        return int(*args, **kwargs)

    def to_float(self, *args: Any) -> Any:
        if args and isinstance(args[0], TensorProxy):
            raise Break("tensor read as a number", f"float() of a tensor {args[0].describe()}", "keep it in a tensor")
        if args and not natives.is_plain(args[0], self.known):
            return self.by_method(args[0], ("__float__", "__index__"), "float")
        return torch.sym_float(args[0]) if args and isinstance(args[0], SYMBOLIC) else float(*args)

    def by_method(self, value: Any, names: tuple[str, ...], what: str) -> Any:
        for name in names:
            method = self.domain.attributes.on_type(type(value), name)
            if isinstance(method, types.FunctionType):
                return self.call(method, [value], {})
        raise Break(f"{what}() in C", type(value).__name__, "convert it outside of the step")

    def to_text(self, *args: Any, **kwargs: Any) -> Any:
        return self.domain.text_of(*args, **kwargs)

    def to_repr(self, value: Any) -> str:
        return self.domain.repr_of(value)

    # object's own methods, reached through super() or by name
    def object_setattr(self, owner: Any, name: str, value: Any) -> None:
        self.domain.attributes.set_generic(owner, name, value)

    def object_getattribute(self, owner: Any, name: str) -> Any:
        return self.domain.attributes.generic(owner, name) if not isinstance(owner, types.ModuleType | type) else self.domain.attributes.get(owner, name)

    def object_delattr(self, owner: Any, name: str) -> None:
        self.domain.attributes.delete_generic(owner, name)

    def object_init(self, owner: Any, *args: Any, **kwargs: Any) -> None:
        base = next((b for b in type(owner).__mro__ if b in CONTAINERS), None)
        if base is not None:
            self.init_container(owner, base, list(args), kwargs)
        elif isinstance(owner, BaseException):
            owner.args = tuple(self.domain.plain_contents(a) for a in args)

    def object_reduce(self, owner: Any, *_: Any) -> Any:
        raise Break("pickling in the step", type_of(owner).__name__, "copy or pickle outside of the step")

    def object_eq(self, owner: Any, other: Any) -> Any:
        return True if self.domain.is_same(owner, other) else NotImplemented

    def object_ne(self, owner: Any, other: Any) -> Any:
        return False if self.domain.is_same(owner, other) else NotImplemented

    def object_init_subclass(self, owner: Any, **kwargs: Any) -> None:
        """``object.__init_subclass__`` does nothing."""


OBJECT_METHODS = {
    "__setattr__": "object_setattr", "__getattribute__": "object_getattribute", "__delattr__": "object_delattr", "__init__": "object_init",
    "__reduce__": "object_reduce", "__reduce_ex__": "object_reduce", "__eq__": "object_eq", "__ne__": "object_ne", "__hash__": "identity",
    "__init_subclass__": "object_init_subclass",
}  # fmt: skip
IDENTITY_HASHED = type("AnyHashable", (), {"__contains__": lambda self, f: isinstance(f, type | types.BuiltinFunctionType | types.FunctionType)})()
OPERATOR_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "matmul": "@", "and_": "&", "or_": "|", "xor": "^",
    "lshift": "<<", "rshift": ">>",
}  # fmt: skip
ALLOCATED = (object, dict, collections.OrderedDict, collections.defaultdict, list, set, tuple, int, str, float)
KEYED = frozenset({"get", "pop", "setdefault", "__getitem__", "__setitem__", "__delitem__", "__contains__", "add", "discard", "remove", "move_to_end"})
ITERABLE_ARGUMENT = frozenset({"update", "extend", "extendleft", "__iadd__", "__ior__", "union", "intersection", "difference", "issubset", "issuperset", "isdisjoint", "symmetric_difference", "difference_update", "intersection_update"})
ITEM_ARGUMENTS = frozenset({__import__("itertools").islice, __import__("itertools").repeat, __import__("itertools").count, functools.reduce, enumerate, collections.deque})
TRUSTED_METACLASSES = frozenset({"abc", "typing", "enum", "torch.nn.parameter", "torch", "_py_abc"})
NEVER_INTERPRETED = frozenset({"torch.autograd", "torch.autograd.graph", "torch._tensor", "warnings", "logging", "torch._dynamo.decorators"})


def holds_proxy(value: Any) -> bool:
    """Whether a tuple, list or dict argument holds tensors."""
    if isinstance(value, tuple | list):
        return any(isinstance(v, TensorProxy) or holds_proxy(v) for v in value)
    return isinstance(value, dict) and any(isinstance(v, TensorProxy) for v in value.values())


def is_alien(value: Any) -> bool:
    return isinstance(value, (*SYMBOLIC, TensorMethod, LoopLeftover))


def is_object_method(bound: Any, kind: type) -> bool:
    """Whether a slot wrapper is the one of ``object`` (or of a builtin container, for ``__init__``)."""
    owner = getattr(bound, "__objclass__", None) or getattr(getattr(kind, bound.__name__, None), "__objclass__", None)
    qualname = getattr(bound, "__qualname__", "")
    return owner is object or qualname.startswith("object.") or bound.__name__ in ("__init__", "__init_subclass__")


def owned_by(cls: type, base: type) -> bool:
    """Whether ``base`` is the last class of C code before ``object`` in the layout of ``cls``."""
    solid = [b for b in cls.__mro__ if not b.__flags__ & (1 << 9)]  # not a heap type
    return all(b in ALLOCATED or b in (object, __import__("typing").Generic) for b in solid)
