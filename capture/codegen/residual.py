"""Residual code: what runs on a warm call in place of the user's bytecode.

One Python function per captured segment: load the graph's inputs from their sources, call the graph, build the objects
that the frame made and that outlive it, replay the effects, and return either the frame's result or the state that the
native part after a graph break continues from. It is written as Python source, so that it reads the same on each
supported version; only the parts that must jump into the middle of the user's code are bytecode (``resume``).
"""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import itertools
import keyword
import random
import re
import types
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from moebius.interpreter import NULL, UNSET, is_kind
from moebius.interpreter.shells import frame_of

from ..bytecode import c_callables
from ..bytecode.hidden_frames import residual_file
from ..guards.sources import Source, Static
from ..heap.iterator_states import give_state, state_of
from ..heap.objects import Objects
from ..heap.records import (
    CONTAINERS,
    DICTS,
    FACTORY,
    FILLED_BY_C,
    HEAP_TYPE,
    LISTS,
    SETS,
    derived_from,
    made_by_c,
    members,
    raw_dict,
    raw_items,
    slot_of,
)
from ..heap.walks import advance
from ..hook import ABSENT, copy_set
from ..python import natives
from ..python.callbacks import InTrace
from ..python.containers import Pulled
from ..python.methods import ContextToken
from ..python.substitutes import HandleNumber, next_number
from ..regions.loops import ActiveExperts, RangeRows, TensorRows
from ..torch_facts import torch_private
from ..values import tracebacks
from ..values.numbers import Number
from ..values.residual_program import (
    Attribute,
    Build,
    Call,
    Expression,
    Literal,
    Load,
    Output,
    Program,
    Return,
    Statement,
    Write,
    indented,
    method,
    tuple_of,
)
from ..values.values import (
    ATOMS,
    IDENTITIES,
    SYMBOLIC,
    CannotRebuild,
    SymbolicObject,
    TensorMethod,
    TensorProxy,
    UndefinedAfterLoop,
)
from .context_tokens import Tokens
from .effect_replay import is_ordered
from .ranges import profiled
from .rebuild_functions import function_value, generator_value, random_value

LONG_RUN = 8  # constants in a row that are cheaper to pass as one tuple
# What residual code may need of builtins, so that a program that replaces one does not change it under our feet.
BUILTINS = {f.__name__: f for f in (dict, list, tuple, super, set, slice, iter, next)} | {"Ellipsis": ...}
LITERALS = frozenset({type(None), bool, int, str, bytes, type(Ellipsis)})


FIXED_TYPE = 1 << 7 | 1 << 8  # Py_TPFLAGS_DISALLOW_INSTANTIATION, Py_TPFLAGS_IMMUTABLETYPE: of C's alone


def is_made_by_c(cls: type) -> bool:
    return not cls.__flags__ & HEAP_TYPE or bool(cls.__flags__ & FIXED_TYPE)


def is_constant(value: Any) -> bool:
    """Whether a value may be the same object in each call: nothing in it can change, or is the graph's."""
    kind = type(value)
    if kind is tuple or kind is frozenset:
        return all(map(is_constant, value))
    if kind is torch.Size:
        return not any(is_kind(size, SYMBOLIC) for size in value)
    return kind in ATOMS and kind not in SYMBOLIC or issubclass(kind, type)


class Emitter:
    """Writes one residual function. ``outputs`` collects the graph values that it needs."""

    def __init__(self, objects: Objects, n_positional: int, kwnames: tuple[str, ...]):
        self.objects, self.heap = objects, objects.heap
        self.tuples, self.tensors_met, self.behind = objects.tuples, objects.tensors_met, objects.behind
        self.parameters = [*(f"m_arg{i}" for i in range(n_positional)), *(f"m_key_{k}" for k in kwnames)]
        self.n_positional, self.kwnames = n_positional, kwnames
        self.constants: dict[str, Any] = {
            "m_raw_dict": raw_dict,
            "m_copy_set": copy_set,
            "m_types": types,
            "m_torch": torch,
            "m_cell": types.CellType,
            "m_any_error": BaseException,
        }
        self.constant_names: dict[int, str] = {}
        self.loads: list[Statement] = []
        self.loaded: dict[Source, str] = {}
        self.lines: list[Statement] = []
        self.states: list[Statement] = []  # where iterators stand, set when all effects are done
        self.built: dict[int, Expression] = {}
        self.begun: set[int] = set()  # by id: objects that ``new_object`` makes for the sake of a part
        self.outputs: list[Any] = []
        self.output_names: dict[int, Expression] = {}
        self.alive: list[Any] = []
        self.tokens = Tokens()

    # ------------------------------------------------------------------------------------------------------------------
    # Names
    # ------------------------------------------------------------------------------------------------------------------

    def constant(self, value: Any) -> str:
        """The name under which an object is reachable from the function."""
        name = self.constant_names.get(id(value))
        if name is None:
            name = self.constant_names[id(value)] = f"m_const{len(self.constant_names)}"
            self.constants[name] = value
        return name

    def call(self, function: Any, *values: Any) -> Call:
        """The call of an object with traced values."""
        return Call(self.constant(function), self.values(values).items)

    def fresh(self) -> str:
        return f"m_v{len(self.built)}_{len(self.lines)}"

    # ------------------------------------------------------------------------------------------------------------------
    # Sources
    # ------------------------------------------------------------------------------------------------------------------

    def load(self, source: Source) -> str:
        """The name that holds the object of a source. Loads come first: before the graph runs, before effects."""
        if source in self.loaded:
            return self.loaded[source]
        if is_kind(source, Static):
            name = self.load(source.via) if source.via is not None else self.constant(source.obj)
            self.loaded[source] = name
            return name
        operation, parents, *operands = source.slot()
        if operation == "arg":
            self.loaded[source] = self.parameters[operands[0]]
            return self.loaded[source]
        owners, operand = tuple(map(self.load, parents)), operands[0] if operands else None
        if operation == "python":
            given: Expression = Call(self.constant(operand), owners)
        else:
            given = Load(operation, owners[0], self.literal(operand))
        name = self.loaded[source] = f"m_in{len(self.loads)}"
        self.loads.append(Write(name, given))
        return name

    def literal(self, value: Any) -> Expression:
        large = type(value) is int and value.bit_length() > 64  # (of very large ones Python refuses the digits)
        return Literal(value) if type(value) in LITERALS and not large else self.constant(value)

    # ------------------------------------------------------------------------------------------------------------------
    # Values
    # ------------------------------------------------------------------------------------------------------------------

    def value(self, value: Any) -> Expression:
        """What gives a traced value: usually a name."""
        kind = type(value)
        if issubclass(kind, Number) and value.node is None:
            return self.literal(value.numbers.constant(value))
        if kind is TensorProxy or issubclass(kind, Number) or kind in SYMBOLIC:
            return self.graph_value(value)
        if kind in LITERALS:
            return self.literal(value)
        if value is NULL or value is UNSET:
            return self.constant(value)
        if kind is torch.Size and any(type(v) in SYMBOLIC for v in value):
            return method("m_torch", "Size", self.values(value))
        if kind in ATOMS:
            return self.constant(value)
        if id(value) in self.built:
            return self.built[id(value)]
        record = self.objects.record_of(value)
        if record is not None:
            return self.load(record.source)
        if issubclass(kind, tuple):
            met = self.tuples.get(id(value))
            if met is None or met.entered is not value:  # (a constant, which a place holds only today)
                return self.tuple_value(value)
            return self.load(met.places[0])
        if issubclass(kind, torch.Tensor) and (proxy := self.tensors_met.get(id(value))) is not None:
            return self.graph_value(proxy)  # a tensor as the key of a dict
        if id(value) not in self.objects.new and not issubclass(kind, SymbolicObject):  # (these are of the trace alone)
            if issubclass(kind, (*IDENTITIES, frozenset, slice)):
                return self.slice_value(value) if issubclass(kind, slice) else self.constant(value)
            raise CannotRebuild(f"a {kind.__name__} of unknown origin")
        return self.new_object(value)

    def values(self, values: Iterable[Any]) -> Build:
        """A tuple of them."""
        return tuple_of(map(self.value, values))

    def graph_value(self, value: Any) -> Expression:
        """A tensor or a symbolic size: an input as it came in, or an output of the graph."""
        if is_kind(value, TensorProxy | Number) and value.source is not None:
            return self.load(value.source)
        name = self.output_names.get(id(value))
        if name is None:
            name = self.output_names[id(value)] = Output(len(self.outputs))
            self.outputs.append(value)
            self.alive.append(value)
        return name

    def tuple_value(self, value: tuple) -> Expression:
        if type(value) is tuple and is_constant(value):
            return self.constant(value)
        items = self.values(raw_items(value))
        if type(value) is tuple:
            return self.assign(value, items)
        if hasattr(type(value), "n_sequence_fields"):  # Objects/structseq.c: torch.return_types and kin have their own
            return self.assign(value, Call(self.constant(type(value)), (items,)))
        return self.assign(value, method("tuple", "__new__", self.constant(type(value)), items))

    def slice_value(self, value: slice) -> Expression:
        return Call("slice", self.values((value.start, value.stop, value.step)).items)

    def has_exceptions(self) -> bool:
        """Whether exceptions are made again, or are there as they are."""
        return any(is_kind(value, BaseException) for value in (*self.alive, *self.constants.values()))

    def assign(self, value: Any, expression: Expression) -> Expression:
        """The name of a value that the expression makes. One without a shell (a function, a tuple, a method) that is
        reached again from its own parts was made there, and that one is it: a function whose cell holds itself."""
        if (made := self.built.get(id(value))) is not None:
            return made
        name = self.fresh()
        self.built[id(value)] = name
        self.alive.append(value)  # ids stand for values: none may be freed and its id given to another
        self.lines.append(Write(name, expression))
        return name

    def set_variable(self, variable: contextvars.ContextVar, value: Any) -> None:
        self.tokens.set(self, variable, value)

    def new_object(self, value: Any) -> Expression:
        """An object made while tracing. Shells are assigned before their parts are built, so that cycles close. What an
        object has made for itself, as its instance dict, comes with that object, whoever asks for it first."""
        owner = self.heap.owner_of(value)
        if owner is not value and id(owner) not in self.begun:
            self.begun.add(id(owner))
            self.value(owner)
            if (made := self.built.get(id(value))) is not None:
                return made
        kind = type(value)
        if kind is set and is_ordered(value):
            return self.assign(value, Call("m_copy_set", (self.constant(copy_set(value)),)))
        if kind in (list, set, collections.deque):
            if kind is collections.deque:
                name = self.assign(value, Call(self.constant(kind), (Build("tuple"), Literal(value.maxlen))))
            else:
                name = self.assign(value, Build("list") if kind is list else Call("set"))
            if value:
                self.lines.append(method(name, "update" if kind is set else "extend", self.values(value)))
            return name
        if kind in DICTS:
            factory = (self.value(value.default_factory),) if kind is collections.defaultdict else ()
            name = self.assign(value, Call(self.constant(kind), factory))
            self.fill_dict(name, "dict" if kind is dict else self.constant(kind), value)
            if kind is collections.OrderedDict:  # has attributes, too: state_dict()'s _metadata
                self.fill_namespace(name, value)
            return name
        if kind is types.CellType:
            name = self.assign(value, Call("m_cell"))
            contents = self.objects.cell_get(value, "cell")
            if contents is not ABSENT:
                self.lines.append(Write(Attribute(name, "cell_contents"), self.value(contents)))
            return name
        if kind is types.FunctionType:
            return function_value(self, value)
        if kind is types.MethodType:
            parts = self.values((value.__func__, value.__self__))
            return self.assign(value, method("m_types", "MethodType", *parts.items))
        if kind is RangeRows:
            return self.assign(value, Call("iter", (self.call(range, value.count),)))
        if kind is TensorRows:
            rows = self.value(value.proxy)
            if value.of_array or value.numbers:
                rows = method(rows, "numpy" if value.of_array else "tolist")
            return self.assign(value, Call("iter", (rows,)))
        if kind is ActiveExperts:  # that no loop has begun
            return self.assign(value, self.call(*value.made))
        if kind is TensorMethod:
            return self.assign(value, Attribute(self.value(value.proxy), value.name))
        if is_kind(value, SymbolicObject):
            return self.assign(value, value.expression(self))
        if kind is functools.partial:
            name = self.assign(value, self.call(kind, value.func, *value.args))
            self.fill_own(Attribute(name, "keywords"), value.keywords)
            self.fill_namespace(name, value)
            return name
        if kind is super:
            return self.assign(value, Call("super", self.values((value.__thisclass__, value.__self__)).items))
        if c_callables.owner_of(value) is not None:
            owner = self.value(value.__self__)
            if (maker := c_callables.hidden_maker(value)) is not None:
                return self.assign(value, Call(self.constant(c_callables.bound), (self.constant(maker), owner)))
            return self.assign(value, Attribute(owner, value.__name__))
        if kind is slice:
            return self.slice_value(value)
        if kind is random.Random:
            return random_value(self, value)
        if kind is torch.Generator:
            return self.graph_value(value)
        if kind is HandleNumber:
            return self.assign(value, self.call(next_number, None))
        if kind is types.MappingProxyType and (shown := self.behind.get(id(value))) is not None:
            return self.assign(value, method("m_types", "MappingProxyType", self.value(shown)))
        if kind is weakref.ref:
            if self.objects.record_of(value()) is None:  # (a tensor's hooks, too, are a dict of the trace's own)
                raise CannotRebuild("a weak reference to an object that the step made is alive")
            return self.assign(value, self.call(kind, value()))
        if kind is re.Match:  # it cannot change, and what it was made of is guarded
            return self.constant(value)
        if kind in REDUCIBLE:
            return self.iterator_value(value)
        if kind is types.GeneratorType and (frame := frame_of(value)) is not None:
            return generator_value(self, value, frame)
        if kind in natives.VIEWS:
            return self.view_value(value)
        if is_kind(value, InTrace):
            return self.value(value.function)
        if kind is Pulled:
            return self.value(value.iterator)
        if is_kind(value, types.GeneratorType | UndefinedAfterLoop):
            raise CannotRebuild(f"a {kind.__name__} is alive across a graph break")
        if is_kind(value, ContextToken):
            return self.tokens.token(self, value, self.objects.records[id(value.variable)].writes[None])
        return self.instance_value(value)

    def fill_dict(self, name: Expression, base: str, items: Any) -> None:
        for key, item in items.items():
            self.lines.append(method(base, "__setitem__", name, self.value(key), self.value(item)))

    def fill_own(self, place: Expression, items: dict) -> None:
        """A dict that its owner has made."""
        if items or self.objects.is_new(items):
            self.fill_dict(self.assign(items, place), "dict", items)

    def fill_namespace(self, name: Expression, value: Any) -> None:
        """The instance dict of a new object."""
        namespace = raw_dict(value)
        if namespace is value:  # ``self.__dict__ = self``
            self.lines.append(Call(self.constant(object.__setattr__), (name, Literal("__dict__"), name)))
        elif namespace is not None:
            self.fill_own(Call("m_raw_dict", (name,)), namespace)

    def iterator_value(self, iterator: Any) -> Expression:
        """Native iterators say themselves how they are made again (``__reduce__``, Objects/iterobject.c and kin)."""
        try:
            reduced = state_of(iterator)
        except RuntimeError as error:  # a dict or a set that has changed since
            raise CannotRebuild(f"a {type(iterator).__name__} over a changed container is alive") from error
        if type(iterator) in WALKS and (text := self.walk(iterator)) is not None:
            return self.assign(iterator, text)
        maker, arguments = reduced[0], reduced[1]
        state = reduced[2] if len(reduced) > 2 else None
        if arguments and type(arguments[0]) is collections.deque:  # it would see the effects as changes under it
            self.refuse_changed(iterator, arguments[0])
        if type(state) is int and type(arguments[0]) is list and state > len(arguments[0]) - (maker is reversed):
            raise CannotRebuild(f"a {type(iterator).__name__} beyond the end of a list that became shorter is alive")
        # (a chain's state: the iterator over what is chained, and the open one)
        for a in (*arguments, *(state if type(iterator) is itertools.chain and state else ())):
            if type(a) in CONTAINERS or type(a) in REDUCIBLE or is_kind(a, InTrace | Pulled):
                if id(a) not in self.objects.records:
                    self.objects.made(a)
        name = self.assign(iterator, self.call(maker, *arguments))
        if state is not None:  # a list's iterator takes no place behind the list's end, which effects may move
            self.states.append(Call(self.constant(give_state), (name, self.value(state))))
        return name

    def walk(self, iterator: Any) -> Expression | None:
        """An iterator of a dict or a set says that it is one of a list, which would not see that its owner grows. None:
        the list will do, since nothing else has the owner, or it is at its end; or a set that the frame made of what
        hashes by its address, which is made again in another order."""
        owner = next((o for o in gc.get_referents(iterator) if is_kind(o, dict | set)), None)
        if owner is None or not self.objects.is_known(owner):
            return None
        if is_kind(owner, set) and self.objects.record_of(owner) is None and not is_ordered(owner):
            return None
        self.refuse_changed(iterator, owner)
        taken = Literal(len(owner) - iterator.__length_hint__())
        again, begin = self.constant(walk_again), self.constant(WALKS[type(iterator)])
        return Call(again, (begin, self.value(owner), taken))

    def refuse_changed(self, iterator: Any, owner: Any) -> None:
        if any(record.shadow is owner for record in self.objects.changed_records()):
            raise CannotRebuild(f"a {type(iterator).__name__} over a changed container is alive")

    def view_value(self, view: Any) -> Expression:
        """``d.items()`` of the dict that the view is of (its ``mapping`` is a proxy that does not give it)."""
        (owner,) = gc.get_referents(view)
        kind: Any = next(base for base in type(owner).__mro__ if base in DICTS and base is not collections.defaultdict)
        shows = next(m for m in (kind.keys, kind.values, kind.items) if type(m(kind())) is type(view))
        return self.assign(view, self.call(shows, owner))

    def has_origin(self, value: Any) -> bool:
        """Whether there is an expression for a value that nobody may ask for."""
        return self.objects.is_known(value) or type(value) in ATOMS or is_kind(value, IDENTITIES)

    def instance_value(self, value: Any) -> Expression:
        """An instance of a user's class: allocated without ``__init__``, then filled with what it holds."""
        cls = type(value)
        base = derived_from(cls, (*FILLED_BY_C, tuple)) or object
        if base is BaseException:
            args, made = self.values(value.args).items, made_by_c(cls)
            maker = self.constant(made)
            name = self.assign(value, method(maker, "__new__", self.constant(cls), *args))
            if made.__init__ is not BaseException.__init__:  # StopIteration.value, SystemExit.code, …
                self.lines.append(method(maker, "__init__", name, *args))
            parts: dict[str, Any] = {"args": tuple(value.args)}
            if is_kind(value, AttributeError | NameError | ImportError) and value.name is not None:
                parts["name"] = value.name
            if is_kind(value, AttributeError) and self.has_origin(value.obj):
                parts["obj"] = value.obj
            if is_kind(value, ImportError) and value.path is not None:
                parts["path"] = value.path
            parts |= {n: reason for n in ("__context__", "__cause__") if (reason := getattr(value, n)) is not None}
            if value.__suppress_context__ or value.__cause__ is not None:
                parts["__suppress_context__"] = value.__suppress_context__
            held = {part: self.value(what) for part, what in parts.items()}
            if (trace := tracebacks.kept(value)) is not None:
                held["__traceback__"] = self.constant(trace)
            for part, what in held.items():  # (an assignment would run a __setattr__ of the class)
                self.lines.append(Call(self.constant(BaseException.__setattr__), (name, Literal(part), what)))
        else:
            if any(map(is_made_by_c, cls.__mro__[: cls.__mro__.index(base)])):
                raise CannotRebuild(f"a {cls.__name__}, which C code makes, is alive across a graph break")
            name = self.assign(value, method(self.constant(base), "__new__", self.constant(cls)))
            if base is collections.deque:
                self.lines.append(method(self.constant(base), "__init__", name, Build("tuple"), Literal(value.maxlen)))
            if base is collections.defaultdict:
                factory = FACTORY.__get__(value)
                self.lines.append(method(self.constant(FACTORY), "__set__", name, self.value(factory)))
        if base in DICTS:
            self.fill_dict(name, self.constant(base), dict(dict.items(value)))
        elif base in LISTS:
            for item in base.__iter__(value):
                self.lines.append(method(self.constant(base), "append", name, self.value(item)))
        elif base in SETS:
            raise CannotRebuild(f"a {cls.__name__} is alive across a graph break")
        self.fill_namespace(name, value)
        for slot in slots_of(cls):
            if (held := slot_of(slot, value)) is not ABSENT:
                self.lines.append(method(self.constant(slot), "__set__", name, self.value(held)))
        return name

    # ------------------------------------------------------------------------------------------------------------------
    # The function
    # ------------------------------------------------------------------------------------------------------------------

    def packed(self, inputs: list[str]) -> list[str]:
        """Arguments as written in a call: runs of constants (a model's parameters) are one tuple, spread."""
        texts: list[str] = []
        for constant, run in itertools.groupby(inputs, self.constants.__contains__):
            names = list(run)
            if not constant or len(names) < LONG_RUN:
                texts += names
            else:
                texts.append(f"*{self.constant(tuple(self.constants[n] for n in names))}")
        return texts

    def function(
        self, name: str, graph: Any, inputs: list[str], result: Expression, on_failure: Any = None, label: str = ""
    ) -> types.FunctionType:
        """Assemble: loads, the graph call, objects and effects, the result.

        result: or what is run in its place. label: of the graph, for profilers.
        on_failure: called with a list of what the graph raised, which it empties, and the call's and the graph's
        arguments; gives a list of one callable, which goes on from there.
        """
        positional = self.parameters[: self.n_positional]
        header = [*positional, "/"] if positional else []
        header += ["*", *map(safe_keyword, self.kwnames)] if self.kwnames else []
        rest = [*self.lines, *self.states, Return(result)]
        body: list[Any] = [f"m_key_{k} = {k}" for k in self.kwnames]
        body += self.loads
        if graph is not None:
            self.constants["m_graph"] = graph
            body.append(f"m_out = m_graph({', '.join(self.packed(inputs))})")
        if graph is not None and on_failure is not None:
            given = f"({''.join(f'{p}, ' for p in positional)})"
            named = f"{{{', '.join(f'{k!r}: m_key_{k}' for k in self.kwnames)}}}"
            handler = f"{self.constant(on_failure)}(m_failed, {given}, {named}, ({''.join(f'{i}, ' for i in inputs)}))"
            call = body.pop()
            body += ["try:", f"    {call}", "except m_any_error as m_error:", "    m_failed = [m_error]", "else:"]
            body += indented(rest)
            # Outside the handler: the exception is for the user's frames, and must not be the context of theirs.
            body.append(f"return {handler}.pop()()")
        else:
            body += rest
        if not name.isidentifier() or keyword.iskeyword(name):  # "<lambda>", "<genexpr>", what a __name__ was set to
            name = "segment"
        source = "\n".join([f"def {name}({', '.join(header)}):", *indented(body), ""])
        namespace: dict[str, Any] = {"__builtins__": BUILTINS, **self.constants}
        text = source if not label else profiled(source, graph, label, namespace)
        exec(compile(text, residual_file(name), "exec"), namespace)
        function = namespace.pop(name)
        function.__code__ = function.__code__.replace(co_filename=residual_file(name))
        function.residual_source, function.residual_program = source, Program(self.parameters, self.loads, inputs, rest)
        torch_private.skip_code(function.__code__)
        return function


REDUCIBLE = frozenset(
    t for t in natives.ITERATORS if is_kind(t, type) and t is not types.GeneratorType and t not in (map, filter)
)


def begun(walk: Any, view: Any, owner: Any) -> Any:
    return walk(view(owner))


# How iterators of dicts and sets begin.
WALKS: dict[type, Any] = {type(iter(set())): set.__iter__} | {
    type(walk(view({}))): functools.partial(begun, walk, view)
    for walk in (iter, reversed) for view in (dict.keys, dict.values, dict.items)
}  # fmt: skip


def walk_again(begin: Any, owner: Any, count: int) -> Any:
    """An iterator of the owner's that has given so many."""
    iterator = begin(owner)
    advance(iterator, count)
    return iterator


def safe_keyword(name: str) -> str:
    """Keyword arguments keep their names in the residual function's signature."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("m_"):
        raise CannotRebuild(f"a keyword argument is called {name!r}")
    return name


def slots_of(cls: type) -> list[types.MemberDescriptorType]:
    """The slots that the classes of an instance define. (By name, the user's ``__getattr__`` would be asked.)"""
    return [member for member in members(cls) if member.__objclass__.__flags__ & HEAP_TYPE]
