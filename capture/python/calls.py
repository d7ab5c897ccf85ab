"""Calls while tracing: who is called, and whether it is interpreted, an operator, run natively, or a graph break."""

from __future__ import annotations

import builtins
import collections
import copyreg
import functools
import itertools
import pickle
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from moebius.interpreter import MEASURING, UNSET, is_kind, opened
from moebius.interpreter.domain.core import type_name
from moebius.lowering.step import draw
from moebius.lowering.step.optimizer_steps import before_step

from ..bytecode import unbound_cells
from ..bytecode.c_callables import definition_of, is_c_callable, maker_of, owner_of
from ..bytecode.hidden_frames import AROUND
from ..guards.sources import Part, Static
from ..heap.lifetimes import OBSERVED
from ..heap.records import CONTAINERS, DICTS
from ..hook import ABSENT, Entry
from ..regions.checkpoints import Checkpoints
from ..regions.conditional_lists import JOINS, ConditionalList
from ..regions.function_transforms import FunctionTransforms
from ..regions.functions import AutogradFunctions
from ..regions.hooks import GradientHooks
from ..regions.inference import InferenceModes
from ..tensors.array_inputs import may_be_array
from ..tensors.arrays import Array, without_arrays
from ..tensors.autograd_calls import AutogradCalls, instead_of
from ..tensors.comparisons import QUESTIONS, asked
from ..tensors.optimizers import count_the_step, is_state_maker, make_state
from ..tensors.plain_calls import are_plain
from ..tensors.random_generators import RandomGenerators
from ..torch_facts import torch_private, torch_scripts
from ..values.numbers import CLOCKS, Number, is_open, numpy_numbers_in
from ..values.opaque_tensor import OpaqueTensor
from ..values.values import (
    ATOMS,
    SYMBOLIC,
    Break,
    SymbolicObject,
    TensorMethod,
    TensorProxy,
    UndefinedAfterLoop,
    type_of,
)
from . import natives, operator_functions
from .bars import Bars
from .builtin_handlers import BuiltinHandlers
from .cached_functions import CachedFunctions
from .callbacks import InTrace, Truth, grouped
from .construction import LAZY, Construction
from .draws import BELOW, Draws
from .filters import Filters, warnings_block
from .messages import Messages
from .methods import Methods
from .namespaces import Namespaces
from .numpy_calls import counted, with_its_type
from .originals import CHECKPOINT, DRAW, IS_COMPILING, IS_DYNAMO_COMPILING, IS_TENSOR, LOADS, PRINT, ROUNDINGS, WARN
from .originals import of_originals as kept
from .overrides import Overrides
from .packages import Packages
from .parts import Parts, holds_proxy, tensors_in
from .process_facts import ProcessFacts
from .quantifiers import quantifiers
from .questions import Questions
from .signatures import Signatures
from .streams import Streams
from .substitutes import (
    ANYWHERE,
    COPY_PROTOCOL,
    SUBSTITUTES,
    HandleNumber,
    backwards,
    copied_tensor,
    is_plain_object,
    next_number,
)
from .switches import Switches
from .telling import TellsInPython
from .tensor_lists import TensorLists


class Calls(Draws, Methods, Construction, BuiltinHandlers, CachedFunctions):
    """Dispatches every call of one trace. ``domain`` gives the operations that builtins stand for."""

    def __init__(self, domain: Parts):
        self.domain, self.attributes, self.heap = domain, domain.attributes, domain.objects.heap
        self.objects, self.looked_at = domain.objects, {}
        self.tensors, self.iterators = domain.tensors, domain.iterators
        self.numbers, self.texts, self.gradients = self.tensors.numbers, self.tensors.texts, self.tensors.gradients
        self.guards = domain.objects.guards
        self.messages, self.bars, overrides = Messages(domain), Bars(domain), Overrides(self)
        self.streams, self.sizes = Streams(domain), domain.sizes
        self.overridden, self.overriding = overrides.answer, overrides.among
        self.inference, self.transforms = InferenceModes(domain), FunctionTransforms(domain, self.call)
        self.builtins: dict[Any, Callable[..., Any]] = {
            isinstance: self.is_instance,
            issubclass: self.is_subclass,
            is_kind: lambda value, kinds: self.is_subclass(self.kind_of(value), kinds),  # (code of ours asks it)
            len: self.length,
            getattr: self.get_attribute,
            setattr: lambda obj, name, value: self.attributes.set(obj, natives.specialised(name), value),
            delattr: lambda obj, name: self.attributes.delete(obj, natives.specialised(name)),
            hasattr: lambda obj, name: self.attributes.has(obj, natives.specialised(name)),
            iter: self.iterate,
            next: self.advance,
            callable: self.is_callable,
            id: self.identity,
            bool: self.boolean,
            dict: lambda *args, **kwargs: self.filled(dict(), args, kwargs),
            set: self.make_set,
            collections.OrderedDict: lambda *args, **kwargs: self.filled(collections.OrderedDict(), args, kwargs),
            collections.defaultdict: self.make_default_dict,
            object: lambda: self.objects.made(object()),
            sum: self.add_up,
            int: self.to_int,
            float: self.to_float,
            **{function: self.to_whole(function) for function in ROUNDINGS},
            str: domain.text_of,
            PRINT: self.streams.print,
            format: self.format,
            repr: domain.repr_of,
            ascii: self.to_ascii,
            sorted: self.sort,
            pickle.dumps: self.pickled,
            max: self.extreme(max),
            min: self.extreme(min),
            **quantifiers(domain),
            super: self.make_super,
            functools.partial: self.make_partial,
            types.MethodType: lambda function, owner: self.objects.made(types.MethodType(function, owner)),
            IS_TENSOR: lambda x: is_kind(x, TensorProxy),
            hash: self.hash_of,
            sys.exception: self.handled_exception,
            sys.exc_info: self.exception_details,
            WARN: self.messages.warn,
            torch_private.InferenceGuard: self.inference.make,
            torch_private.has_torch_function: overrides.are_asked,
            **dict.fromkeys(torch_private.HAVE_TORCH_FUNCTION, lambda *values: overrides.are_asked(values)),
            **Switches(domain).functions,
            **{clock: functools.partial(self.read_number, f"time.{clock.__name__}", clock) for clock in CLOCKS},
            DRAW: functools.partial(self.read_number, "random.random", draw),
        }
        self.gradients.hooks = GradientHooks(self.domain, self.call)
        self.gradients.enter = self.objects.enter
        self.heap.now["looked"] = self.still_looks
        self.substitutes = SUBSTITUTES if self.tensors.whole_step else ANYWHERE
        self.substitutes = self.substitutes | {warnings.catch_warnings: warnings_block}
        self.functions: dict[Any, Callable[..., Any]] = {
            IS_COMPILING: self.is_compiling,
            IS_DYNAMO_COMPILING: self.is_compiling,
            is_plain_object: self.is_plain_object,
            LAZY: self.lazy_property,
            definition_of(torch.autograd.Function.apply): self.apply_function,  # (in C since torch 2.14)
            CHECKPOINT: self.checkpoint,
            LOADS: self.parse_json,
            before_step: self.before_step,
            copied_tensor: self.copy_tensor,
            unbound_cells.is_unset: lambda cell: self.domain.load_cell(cell) is UNSET,
            next_number: lambda hooks: self.objects.made(HandleNumber(next_number(hooks))),
        }
        autograd = AutogradCalls(self.objects, self.tensors.gradients, self.call, domain.plain_contents)
        random, filters = RandomGenerators(self.objects, self.tensors), Filters(self.objects, self.tensors)
        parts = (self.messages, self.inference, self.transforms, Signatures(domain), Packages(domain))
        for part in (*parts, filters, autograd, random, TensorLists(domain)):
            self.functions |= part.functions
        self.functions[BELOW] = self.drawn_below
        self.builtins |= random.makers | self.transforms.answers | Namespaces(domain, self).functions
        self.builtins |= operator_functions.functions_over(domain)
        self.builtins = ProcessFacts(self.guards).functions | kept(self.builtins) | Questions(self.objects).functions
        self.functions = kept(self.functions) | domain.array_calls.functions

    # ------------------------------------------------------------------------------------------------------------------
    # Dispatch
    # ------------------------------------------------------------------------------------------------------------------

    def call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        kind = type(function)
        if is_kind(function, IDENTITY_HASHED) and (substitute := self.substitutes.get(function)) is not None:
            return self.domain.call_function(self.substitute(substitute), args, kwargs)
        if kind is types.FunctionType:
            return self.python_function(function, args, kwargs)
        if kind is types.MethodType:
            return self.call(function.__func__, [function.__self__, *args], kwargs)
        if kind is TensorMethod:
            return self.objects.made(self.tensor_method(function.proxy, function.name, args, kwargs))
        if kind is functools.partial:
            return self.partial(function, args, kwargs)
        if is_kind(function, SymbolicObject):
            return function.call(args, kwargs)
        if is_kind(function, IDENTITY_HASHED) and (stand_in := self.lookup(function)) is not None:
            return stand_in(*args, **kwargs)
        if is_kind(function, type):
            return self.construct(function, args, kwargs)
        if natives.is_tensor_operator(function):
            return self.operator(function, args, kwargs)
        if (compiled := torch_scripts.scripted(function)) is not None:
            return self.operator(self.objects.pinned(compiled, function), args, kwargs)
        if is_c_callable(function):
            if (owner := owner_of(function)) is None:
                return self.native(function, args, kwargs)
            if (stand_in := self.functions.get(maker_of(function))) is not None:
                return stand_in(owner, *args, **kwargs)
            return self.method_of(owner, function.__name__, function, args, kwargs)
        if kind in (types.MethodDescriptorType, types.WrapperDescriptorType):
            return self.unbound(function, args, kwargs)
        if kind is functools._lru_cache_wrapper:
            return self.cached(function, args, kwargs)
        if kind is UndefinedAfterLoop:
            self.attributes.get(function, "__call__")
        if is_kind(function, weakref.ref):
            return self.referent(function)
        return self.instance_call(function, args, kwargs)

    def lookup(self, function: Any) -> Callable[..., Any] | None:
        try:
            return self.builtins.get(function) or natives.REPLACED.get(function)
        except TypeError:
            return None

    def substitute(self, function: Any) -> Any:
        """Our own function that is interpreted in a library function's place: known, and never changed by anybody."""
        return self.objects.enter(function, Static(function.__name__, function))

    def is_compiling(self) -> bool:
        """``torch.compiler.is_compiling()``: what plain Python would get, False, unless that has led to a graph break.

        A library asks it where control flow over tensor values has a twin that a graph holds: then the answer is True,
        for that function alone. What would choose other arithmetic by it, as optimizers do, always gets eager's.
        """
        frame = self.domain.frame
        if frame is None or frame.globals.get("__name__", "").startswith(EAGER_ARITHMETIC):
            return False
        codes = [one.code for one in itertools.islice(opened(frame), 3)]  # (a library's own forms of it stand between)
        asking = [(code.co_filename, code.co_qualname) for code in codes]
        self.domain.asked_compiling.update(asking)
        return not self.domain.compiling_for.isdisjoint(asking)

    def python_function(self, function: types.FunctionType, args: list, kwargs: dict[str, Any]) -> Any:
        stand_in = self.functions.get(function) or natives.REPLACED.get(function)
        if stand_in is not None:
            return stand_in(*args, **kwargs)
        if function.__code__ is SINGLE_DISPATCH:
            return self.dispatched(function, *args, **kwargs)
        given = (*args, *kwargs.values())
        if (
            natives.is_tensor_function(function)
            and any(is_kind(a, TensorProxy) or holds_proxy(a) or self.overriding((a,)) for a in given)
            and not any(natives.is_called_back(a) for a in given)  # a distance, say: the step's own code
        ):
            try:
                with self.tensors.that_may_tell(function):
                    return self.operator(function, args, kwargs)
            except TellsInPython:  # interpreted: its warning is a node, with the line that it is about
                return self.domain.call_function(function, args, kwargs)
        if (function.__module__, function.__name__) == ("pdb", "set_trace"):
            raise Break(*BREAKPOINT)
        if "moebius_disabled" in function.__dict__:
            raise Break(
                "disabled function",
                f"{function.__qualname__} was given to moebius.disable",
                "nothing to do: it runs natively, as asked",
            )
        if (cell := torch_private.under_compile_switch(function, AROUND.compiling)) is not None:
            self.domain.guard_function(function)
            return self.call(self.objects.cell_get(cell, function.__qualname__), args, kwargs)
        if torch_private.kept_out(function):
            hint = "it runs natively; the graph goes on after it"
            raise Break("function that torch keeps out of graphs", function.__qualname__, hint)
        aside = function.__module__ in NEVER_INTERPRETED and function not in torch_private.MARKING
        if aside or function in natives.LOADING:
            place = f"{function.__module__}.{function.__qualname__}"
            raise Break("function outside of the graph", place, instead_of(function))
        if torch_private.makes_transform(function):
            return self.transforms.call_of(function, *args, **kwargs)
        if str(function.__module__).startswith("tqdm.") and self.bars.draws(args):
            return self.bars.call(function, args, kwargs)
        if function.__name__ == torch_private.STATE_MAKER and is_state_maker(function, args):
            make_state(args[0], args[1], self.objects, self.gradients)
        run = functools.partial(self.domain.call_function, function, args, kwargs)
        blocks = self.domain.blocks
        return run() if blocks is None else blocks.call(function, args, kwargs, run)

    def read_number(self, name: str, function: Callable[[], float]) -> Number:
        """``time.time()``, ``random.random()``."""
        self.heap.read("fact", None, name, None)
        return self.numbers.read(name, function)

    def apply_function(self, cls: type, *args: Any) -> Any:
        """``Function.apply``."""
        return AutogradFunctions(self.domain, self.call).apply(cls, *args)

    def checkpoint(self, function: Any, *args: Any, **options: Any) -> Any:
        """``torch.utils.checkpoint.checkpoint``."""
        return Checkpoints(self.domain, self.call, self.messages.say).run(function, args, options)

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """What a mesh has torch call before a step of any optimizer."""
        options = self.domain.options
        count_the_step(optimizer, self.gradients, options is not None and options.mesh is not None)

    def is_plain_object(self, cls: type) -> bool:
        self.attributes.rely_on(cls, *COPY_PROTOCOL)
        self.guards.dict_entry("copyreg", copyreg.dispatch_table, cls, copyreg.dispatch_table.get(cls, ABSENT))
        return is_plain_object(cls)

    def copy_tensor(self, tensor: TensorProxy | OpaqueTensor, before: list[Any]) -> Any:
        """``copy.deepcopy(tensor)``: a clone, where it is all of its memory and shares none with another copy's."""
        if is_kind(tensor, OpaqueTensor):
            tensor.refuse("copy.deepcopy")
        real, fake = tensor.real, tensor.fake
        plain = tensor.cls is torch.Tensor and not fake.requires_grad and not tensor.attributes
        alone = not any(is_kind(one, TensorProxy) and shares_storage(one.fake, fake) for one in before)
        if not plain or not alone or not torch_private.owns_storage(fake) or (real is not None and vars(real)):
            detail = f"copy.deepcopy of {tensor.describe()}, which requires gradients or shares its memory"
            raise Break("tensor copied by copy", detail, "use tensor.detach().clone()")
        return self.tensors.method(tensor, "clone", (), {})

    def operator(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """An operator of torch's, as one node."""
        if (answer := self.overridden(function, tuple(args), kwargs)) is not ABSENT:
            return answer
        if function in QUESTIONS.values():
            read, named = self.operands(args, kwargs)
            if (answer := asked(self.tensors, function, tuple(read), named)) is not None:
                return answer
            raise Break(
                "tensor read as a number", f"torch.{function.__name__} gives Python a value", "keep it in a tensor"
            )
        if args and may_be_array(args[0]) and function in (torch.from_numpy, torch.tensor, torch.as_tensor):
            if (made := self.array_inputs.made_from(function, None, args, kwargs)) is not None:
                return made
        if function is torch.as_tensor and (made := self.as_it_is(args, kwargs)) is not None:
            return made
        if function in (torch.tensor, torch.as_tensor) and any(
            is_kind(a, TensorProxy) or holds_proxy(a) for a in args
        ):
            raise Break(
                "tensor made from tensors' numbers",
                f"torch.{function.__name__} of {tensors_in(args)}",
                "use torch.stack or clone().detach()",
            )
        if args and type(args[0]) is ConditionalList:
            if function in JOINS and not args[0].settled():
                return args[0].joined(args[1:], kwargs)
            args = [args[0].plain(), *args[1:]]
        kwargs = with_its_type(self.domain, function, args, kwargs)
        args, kwargs = self.operands(args, kwargs)
        return self.objects.made(self.tensors.function(function, tuple(args), kwargs))

    def operands(self, args: list, kwargs: dict[str, Any]) -> tuple[list, dict[str, Any]]:
        """The arguments with every container read, under guards: C code may look into them."""
        if are_plain(args, kwargs):
            return args, kwargs
        read, number = self.domain.plain_contents, self.array_inputs.as_number
        found = [without_arrays(number(read(a))) for a in args]
        return found, {k: without_arrays(number(read(v))) for k, v in kwargs.items()}

    def plain_items(self, container: Any) -> Any:
        """The keys or items of a container as an object of our own, None where they are not all plain."""
        kind, record = type(container), self.objects.record_of(container)
        self.heap.read("keys", container, None, None)
        if record is not None and is_kind(container, dict) and record.shadow is None and not record.writes:
            self.objects.refuse_growing(record)
            self.objects.guard_keys(record)
            items: Any = frozenset(container)
        elif kind in CONTAINERS:
            held = self.objects.contents(container)
            items = frozenset(held) if kind in DICTS or kind is set else list(held)
        else:
            items = container if kind in (tuple, frozenset, range) else None
        return items if items is not None and natives.is_plain(items, lambda _: False) else None

    def referent(self, reference: weakref.ref) -> Any:
        """``ref()``: the object, read under guards where the reference was found in its place."""
        self.heap.note("weak reference")
        found = reference()
        if found is not None and self.objects.may_be_gone(found):
            where = f"to a {type(found).__name__}, of which the step may let go"
            raise Break("weak reference", where, "ask before the step changes what holds it", OBSERVED)
        proxy = self.tensors.proxies.get(id(found))
        if proxy is not None and proxy.source is not None and proxy.source.static:
            return proxy  # one that is in its place in each call: the reference's own
        lives_on = self.known(found) or self.gradients.hooks.holds(found)
        if type(reference) is weakref.ref and found is not None and lives_on and type(found) is not TensorProxy:
            return found
        record = self.objects.record_of(reference)
        if record is not None and type(reference).__call__ is weakref.ref.__call__:
            place = Part(f"{record.source.name}()", record.source, "python", type(reference).__call__)
            return self.objects.enter(found, place)
        raise Break("weak reference", f"to a {type(found).__name__}", "keep a reference to the object itself", OBSERVED)

    def partial(self, function: functools.partial, args: list, kwargs: dict[str, Any]) -> Any:
        if self.objects.is_new(function):
            return self.call(function.func, [*function.args, *args], {**function.keywords, **kwargs})
        get = self.attributes.c_value
        inner = get(function, function.func, "func")
        first = get(function, function.args, "args")
        keywords = get(function, function.keywords, "keywords")
        return self.call(inner, [*first, *args], {**self.objects.contents(keywords), **kwargs})

    def captured(self, entry: Entry, args: list, kwargs: dict[str, Any]) -> Any:
        """What ``capture`` returned, called inside of a captured step: part of the same graph, if run the same way."""
        owner = getattr(entry.cold, "__self__", None)
        options = getattr(owner, "options", None)
        if options is None or self.domain.options is None or not options.run_alike(self.domain.options):
            raise Break("captured function", "it was captured with other options", "capture both with the same options")
        inner = owner.function  # type: ignore[union-attr]
        return self.call(self.objects.enter(inner, Static(inner.__qualname__, inner)), args, kwargs)

    def instance_call(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        kind = type(function)
        if kind is Entry:
            return self.captured(function, args, kwargs)
        if args and type(args[0]) is Array and self.array_calls.follows(function):
            return self.domain.arrays.function(function, args, kwargs)
        if (found := self.numpy_call(function, args, kwargs)) is not ABSENT:
            return found
        if is_kind(function, classmethod | staticmethod):
            return self.call(self.attributes.inside(function, function.__func__), args, kwargs)
        if kind is types.GenericAlias and (made := self.made_by_alias(function, args, kwargs)) is not ABSENT:
            return made
        method = self.attributes.on_type(kind, "__call__")
        if method is ABSENT:
            raise TypeError(f"{type_name(type_of(function))!r} object is not callable")
        if is_kind(method, types.WrapperDescriptorType):
            detail = f"a {kind.__module__}.{kind.__qualname__} is called"
            raise Break("call into C", detail, "nothing is known of what it does; it runs natively")
        bound = self.attributes.bind(method, function, kind)
        if is_kind(function, torch.nn.Module) and self.domain.blocks is not None:
            return self.domain.blocks.call(function, args, kwargs, lambda: self.call(bound, args, kwargs))
        return self.call(bound, args, kwargs)

    # ------------------------------------------------------------------------------------------------------------------
    # Natively run functions
    # ------------------------------------------------------------------------------------------------------------------

    def native(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        """A function of C code: from the tables, or a graph break."""
        if (found := counted(self.domain, function, args, kwargs)) is not ABSENT:
            return found
        if function in natives.PURE:
            values = [self.number_operand(function, a) for a in args]
            if function in natives.OF_NUMBERS and any(map(numpy_numbers_in, values)):
                return self.objects.made(self.numbers.apply(function, *values, **kwargs))
            if function in natives.READS_LISTS and (items := self.plain_items(args[0])) is not None:
                values[0] = items
            if any(map(is_open, (*values, *kwargs.values()))):
                if function in natives.OF_NUMBERS:
                    return self.numbers.apply(function, *values, **kwargs)
                if not kwargs and all(is_open(v) or natives.is_plain(v, self.known) for v in values):
                    return self.numbers.look_up(function, *values)
            values = [natives.specialised(v, self.known) for v in values]
            if all(natives.is_operand(v, self.known) for v in (*values, *kwargs.values())):
                try:
                    return self.objects.made(function(*values, **kwargs))
                except torch_private.DATA_DEPENDENT:
                    raise natives.decided_by_data() from None
                except TypeError as error:
                    if any(is_kind(v, SYMBOLIC) for v in (*values, *kwargs.values())):  # not ints to C
                        raise Break("builtin that fails on a symbolic size", str(error), "use plain numbers") from None
                    raise
            raise Break(
                "builtin with arguments it would look into",
                f"{function.__name__}() of {', '.join(type_of(a).__name__ for a in args)}",
                "pass plain values",
            )
        if function in natives.SHALLOW:
            return self.shallow(function, args, kwargs)
        if function in natives.ANY_OBJECT:
            raise Break(
                "objects of the whole process",
                f"gc.{function.__name__} gives capture's own objects, too",
                "the frame runs natively; look at them in a function outside of the step",
                "what it gives is looked at in it",
            )
        if function is builtins.breakpoint:
            raise Break(*BREAKPOINT)
        if function is builtins.__build_class__:
            raise Break("class made in the step", "by a class statement", "define classes outside of the step")
        name = f"{getattr(function, '__module__', None) or 'builtins'}.{getattr(function, '__qualname__', function)}"
        raise Break(
            "call into C",
            f"{name} is not known to be free of effects",
            "it runs natively; call it before or after the step for one graph",
        )

    def shallow(self, function: Any, args: list, kwargs: dict[str, Any]) -> Any:
        values, start = list(args), 0
        if function in natives.CALLBACK_FIRST and values:
            items_own = values[0] is None and function in natives.ASKS_TRUTH[:2]
            values[0] = self.callback(bool if items_own else values[0], function)
            start = 1
        if function is reversed:
            return self.reverse(values, kwargs)
        if function in (enumerate, zip) and (found := self.domain.pairs(function, values, kwargs)) is not None:
            return found
        if function is itertools.groupby:
            values, kwargs = grouped(self, *values, **kwargs), {}
        for name in natives.ITERABLE_KEYWORDS & kwargs.keys():
            kwargs = kwargs | {name: self.domain.native_iter(kwargs[name])}
        if function is itertools.compress:
            values[1:] = [map(self.callback(bool), self.domain.native_iter(v)) for v in values[1:]]
            kwargs = {k: map(self.callback(bool), v) if k == "selectors" else v for k, v in kwargs.items()}
        if function is itertools.chain and any(map(self.is_iterated_late, values)):  # each as its turn comes
            function, values = itertools.chain.from_iterable, [tuple(values)]
        kwargs = {k: self.callback(v) if k in ("func", "key") and v is not None else v for k, v in kwargs.items()}
        if function in COUNTED or function is itertools.product:  # which takes Python's own numbers
            asked = (lambda value: value) if function in NO_INDEX else self.domain.as_count
            own = asked if function is enumerate else lambda value: natives.specialised(asked(value))
            kwargs = {k: v if k == "object" else own(v) for k, v in kwargs.items()}  # (what is repeated is no number)
            values[1:] = map(own, values[1:]) if function in COUNTED else values[1:]
        if function is itertools.accumulate and len(values) > 1 and values[1] is not None:
            values[1] = self.callback(values[1])
        for i, value in enumerate(values[start:], start):
            if i == 1 and function in natives.CALLBACK_SECOND:
                continue
            if type(value) is torch.SymBool:
                values[i] = natives.specialised(value)  # C code there takes Python's own numbers
            if type(value) not in ATOMS or is_kind(value, str | bytes | range | torch.Size):
                if function not in ITEM_ARGUMENTS or (i == start and function not in WITHOUT_ITERABLE):
                    values[i] = self.domain.native_iter(value, in_loop=function in natives.ITERATORS)
                    if function in MEASURING:
                        self.domain.length_hint(value)
        if function == itertools.chain.from_iterable:
            values = [map(self.domain.native_iter, *values)]
        elif function is itertools.starmap and len(values) == 2:
            values[1] = map(self.domain.native_iter, values[1])
        return self.iterators.makes(self.objects.made(function(*values, **kwargs)))

    def reverse(self, values: list, kwargs: dict[str, Any]) -> Any:
        if len(values) != 1 or kwargs:
            return reversed(*values, **kwargs)  # Python's own error
        if (walk := self.walk_back(values[0])) is not None:
            return walk
        contents = self.objects.contents(values[0])
        if type(contents) not in (*CONTAINERS, tuple, torch.Size, str, bytes, range, *natives.VIEWS):
            raise Break("reversed()", f"of a {type_of(values[0]).__name__}", "reverse a list")
        return self.iterators.makes(self.objects.made(reversed(contents)))

    def walk_back(self, value: Any) -> Any:
        """``reversed(value)`` where a class of Python code says what that is, else None."""
        look_up, kind = self.attributes.on_type, type(value)
        if is_kind(value, TensorProxy):
            return self.call(self.attributes.get(value, "__reversed__"), [], {})
        own, get, length = (look_up(kind, name) for name in ("__reversed__", "__getitem__", "__len__"))
        if is_kind(own, types.FunctionType):
            return self.call(own, [value], {})
        in_python = is_kind(get, types.FunctionType) and is_kind(length, types.FunctionType)
        if own is ABSENT and (in_python or self.domain.has_items(value)):
            return self.domain.call_function(self.substitute(backwards), [value], {})
        return None

    def callback(self, function: Any, asked_by: Any = None) -> InTrace:
        """A native callable that runs ``function`` in the trace, for the C code ``asked_by``."""
        return (Truth if asked_by in natives.ASKS_TRUTH else InTrace)(self, function)


def shares_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch_private.storage_of(one) == torch_private.storage_of(other)


SINGLE_DISPATCH = functools.singledispatch(shares_storage).dispatch.__code__
IDENTITY_HASHED = (type, types.BuiltinFunctionType, types.FunctionType)
# where ``is_compiling`` chooses between forms of the same arithmetic that differ in the last bit, or (a transformer
# encoder with padded rows) in what stands at places that do not count; or (a module's call) leaves out a handler
EAGER_ARITHMETIC = (
    "torch.optim", "torch.nn.utils.clip_grad", "torch.utils._foreach_utils", "torch.nn.modules.transformer",
    "torch.nn.modules.module",
)  # fmt: skip
COUNTED = frozenset((  # behind their first argument stand numbers
    itertools.islice, itertools.repeat, itertools.combinations, enumerate, collections.deque,
    itertools.combinations_with_replacement, itertools.permutations,
))  # fmt: skip
NO_INDEX = (itertools.permutations, collections.deque)  # which ask for an int, and for no __index__
ITEM_ARGUMENTS = COUNTED | {itertools.count, functools.reduce}
# They keep what they are given; of the others above the first argument is gone through.
WITHOUT_ITERABLE = frozenset({itertools.repeat, itertools.count})
BREAKPOINT = (
    "breakpoint",
    "the step enters a debugger",
    "take it out when you are done; the whole call runs as Python, so that all locals are there",
    "a debugger is to see all locals",
)
NEVER_INTERPRETED = frozenset(
    f"torch.{name}" for name in ("autograd", "autograd.graph", "_tensor", "serialization", "_dynamo.decorators")
) | {"warnings", "logging"}
