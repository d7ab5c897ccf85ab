"""The tracking domain: the machine's operations on traced values.

A subclass of the interpreter's concrete domain. Where all operands are atoms or new objects, the plain meaning holds;
tensors become nodes, objects that existed before are read and written under guards, and everything else is a graph
break with its reason.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from moebius.interpreter import UNSET, Frame, Signal, is_kind

from ..bytecode.counting import Counter
from ..codegen.continuation_code import is_own
from ..guards.sources import Part, Static
from ..heap.heap import OWN, WHOLE
from ..heap.lifetimes import named
from ..heap.objects import Objects
from ..heap.records import Record, may_be_asked_for
from ..heap.walks import Walks
from ..hook import ABSENT
from ..hook.signals import WAITING, stop_for_signals
from ..options import Options
from ..regions.conditional_lists import Lists
from ..regions.loop_regions import ROWS, times
from ..regions.loops import ITERATION, WATCHED, Loops
from ..regions.module_reuse import ModuleReuse
from ..tensors.array_calls import ArrayCalls
from ..tensors.array_inputs import ArrayInputs
from ..tensors.arrays import Arrays
from ..tensors.bounds import Bounds
from ..tensors.tensors import TensorOperations
from ..torch_facts import torch_private
from ..values import tracebacks
from ..values.numbers import Number
from ..values.values import Break, SymbolicObject, decided_by_data, proxies_in
from .attributes import Attributes
from .calls import Calls
from .caught import raised_in_c, tells_of_tracing
from .construction import Making
from .containers import Containers
from .few_sizes import FewSizes
from .lookups import Lookups
from .loop_iterators import LoopIterators
from .operators import Operators
from .tails import TAILED, Tails


class TrackingDomain(Operators, Containers):
    """One trace's domain."""

    observes = True
    keeps_frames = True
    interprets_callbacks = False  # what may call back is decided call by call, in natives and operators
    row_types = ROWS
    calls: Calls
    lists: Lists
    loops: Loops

    def __init__(self, objects: Objects, tensors: TensorOperations):
        super().__init__()
        self.objects, self.tensors, self.writer = objects, tensors, tensors.writer
        self.heap, self.guards = objects.heap, objects.guards
        self.numbers, self.texts = tensors.numbers, tensors.texts
        self.counter = Counter()  # of the instructions that a report counts
        self.attributes = Attributes(objects, tensors, self.call)
        self.arrays, self.walks = Arrays(self), Walks(objects)
        self.array_inputs = ArrayInputs(objects, tensors, self.arrays)
        self.array_calls = ArrayCalls(self.arrays, self.array_inputs)
        self.iterators, self.sizes = LoopIterators(self), FewSizes(self)
        objects.few_sizes = self.sizes.constant
        self.calls = Calls(self)
        self.attributes.ask = Lookups(self).ask
        self.lists = Lists(self)
        self.bounds = Bounds(self)
        self.tails = Tails(self)
        self.loops = Loops(self, self.lists)
        # (a foreign backend takes each size symbol once)
        self.blocks = ModuleReuse(self) if tensors.whole_step else None
        self.iterations: Any = None  # ``iteration_reuse.IterationReuse``, where blocks are written again
        if self.blocks is not None:
            tensors.gradients.switched = self.blocks.forget
        self.root: Frame | None = None
        self.root_steps = 0
        self.stop_at: int | None = None
        self.handles_errors: Callable[[], bool] = lambda: False  # whether a handler of the user's would see one now
        self.asked_compiling: set[tuple[str, str]] = set()  # file and name of functions that asked ``is_compiling()``
        self.compiling_for: frozenset[tuple[str, str]] = frozenset()  # those of them that get True
        self.options: Options | None = None  # what the callable being traced was captured with
        self.instructions = 0
        self.guarded_functions: set[types.FunctionType] = set()
        self.entered_defaults: dict[int, Any] = {}  # by id of a default argument: what stands for it
        self.default_reads: dict[types.FunctionType, list[Any]] = {}
        self.root_stack: list[Any] = []
        self.root_pc = 0
        self.root_handled: BaseException | None = None
        self.traceback_before: types.TracebackType | None = None  # of what was raised last, before it was
        # by id: at which of the root's steps, and where, and its traceback before
        self.raised: dict[int, tuple[BaseException, int, int, types.TracebackType | None]] = {}
        self.stacks: dict[Frame, tuple[list[Any], int]] = {}  # as each frame's instruction found it, and its place
        self.switches: dict[Frame, dict[str, Any]] | None = None  # of torch's, as each frame's instruction found them
        self.marks = (0, 0)
        self.making: dict[Frame | None, Making | None] = {}  # by the frame whose instruction calls the class
        self.generators: list[Frame] = []  # of the generators that the step made

    # ------------------------------------------------------------------------------------------------------------------
    # The machine's steps
    # ------------------------------------------------------------------------------------------------------------------

    def observe(self, frame: Frame) -> None:
        self.instructions += 1
        if WAITING.arrived:
            stop_for_signals()
        if self.loops.open:
            self.loops.settle(frame)
        if frame is self.root:
            self.counter.keep()
            if self.root_steps == self.stop_at:
                self.root_handled = self.machine.exc_item[0]
                raise StopHere
            handler = frame.program.handler_at(self.root_pc)
            if handler is not None and handler[0] == frame.pc:  # (nothing falls into a handler: the last step raised)
                seen = frame.stack[-1], self.root_steps - 1, self.root_pc, self.traceback_before
                self.raised.setdefault(id(frame.stack[-1]), seen)
            self.root_steps += 1
            self.root_stack = frame.stack.copy()
            self.root_pc = frame.pc
            self.root_handled = self.machine.exc_item[0]
            self.marks = (self.objects.writes, self.writer.count)
        elif (iterations := self.iterations) is not None and (loops := iterations.frames.get(frame)) is not None:
            iterations.before(frame, loops)  # (it may go on elsewhere in the frame)
        self.stacks[frame] = (frame.stack.copy(), frame.pc)
        if self.switches is not None:
            self.switches[frame] = torch_private.switches()
        instruction, codes = frame.program.instructions[frame.pc], self.counter.codes
        if self.loops.open or instruction.opname in WATCHED:
            if instruction.opname == "FOR_ITER" and self.iterations is not None and frame is not self.root:
                self.iterations.watch(frame)
            self.loops.observe(frame)  # (it may go on elsewhere in the frame)
            self.count(frame)
        elif (known := codes.get(id(frame.code))) is None or known.users:  # (most are a library's)
            self.counter.step(frame.code, instruction.offset)

    def count(self, frame: Frame) -> None:
        """The frame's instruction runs, as often as the loops that are recorded around it."""
        self.counter.step(frame.code, frame.program.instructions[frame.pc].offset, *times(self.loops.open))

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
        if (record := self.objects.record_of(namespace)) is not None and record.source.static:
            return record
        self.objects.namespaces.add(id(namespace))
        return self.objects.found(namespace, Static(name or f"G({namespace.get('__name__', 'exec')})", namespace))

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        self.objects.dict_set(self.globals_record(frame.globals), name, value)

    def delete_global(self, frame: Frame, name: str) -> None:
        if not self.objects.dict_delete(self.globals_record(frame.globals), name):
            raise NameError(f"name {name!r} is not defined", name=name)

    # Code that is no function's, made one by ``types.FunctionType``, has its globals for names.

    def load_name(self, frame: Frame, name: str) -> Any:
        return self.load_global(frame, name) if self.has_globals(frame) else super().load_name(frame, name)

    def store_name(self, frame: Frame, name: str, value: Any) -> None:
        (self.store_global if self.has_globals(frame) else super().store_name)(frame, name, value)

    def delete_name(self, frame: Frame, name: str) -> None:
        (self.delete_global if self.has_globals(frame) else super().delete_name)(frame, name)

    def has_globals(self, frame: Frame) -> bool:
        return frame.names is frame.globals and self.globals_record(frame.globals) is not None

    def make_cell(self, value: Any) -> Any:
        return self.objects.made(super().make_cell(value))

    def load_cell(self, cell: Any) -> Any:
        value = self.objects.cell_get(cell, "cell")
        return UNSET if value is ABSENT else value

    def is_users(self, name: str) -> bool:
        return not is_own(name)

    def store_cell(self, cell: Any, value: Any) -> None:
        self.objects.cell_set(cell, "cell", value)

    def delete_cell(self, cell: Any) -> None:
        self.objects.cell_set(cell, "cell", ABSENT)

    def import_name(self, frame: Frame, name: str, fromlist: Any, level: Any) -> Any:
        importer = self.objects.dict_get(self.globals_record(frame.builtins, "builtins"), "__import__")
        if importer is not builtins.__import__:
            raise Break("import", "builtins.__import__ was replaced", "import outside of the step")
        namespace: dict[str, Any] = {
            k: frame.globals.get(k) for k in ("__package__", "__spec__", "__name__", "__path__") if k in frame.globals
        }
        absolute = name
        if level:
            with contextlib.suppress(ImportError):  # the importer below says what is wrong
                absolute = importlib.util.resolve_name("." * level + name, package_of(namespace))
        loaded = self.globals_record(sys.modules, "sys.modules")
        try:
            module = importer(name, namespace, None, fromlist, level)  # loading a module early is its only effect
        finally:
            found = self.objects.dict_get(loaded, absolute)
        if not fromlist and level == 0:
            found = self.objects.dict_get(loaded, absolute.partition(".")[0])
        if found is not module and (fromlist or level == 0):
            raise Break("import", f"sys.modules has another {absolute}", "import outside of the step")
        return self.objects.enter(module, Static(module.__name__, module))

    def import_from(self, module: Any, name: str) -> Any:
        if (found := self.get_attr_or(module, name, ABSENT)) is not ABSENT:
            return found
        full = f"{module.__name__}.{name}"
        found = self.objects.dict_get(self.globals_record(sys.modules, "sys.modules"), full)
        if found is not ABSENT:
            return found
        return super().import_from(module, name)  # raises what Python does

    def import_star(self, frame: Frame, module: Any) -> None:
        raise Break("import *", module.__name__, "import outside of the step")

    # ------------------------------------------------------------------------------------------------------------------
    # Exceptions
    # ------------------------------------------------------------------------------------------------------------------

    def meets_handler(self, exc: BaseException) -> None:
        refuse_own(exc)
        if is_kind(exc, torch_private.DATA_DEPENDENT):
            raise decided_by_data()
        self.refuse_of_tracing(exc)
        # (code of ours reads an attribute for itself: what the step asks for is asked by its name)
        if type(exc) is AttributeError and own_instruction(exc) in ("LOAD_ATTR", "LOAD_METHOD"):
            raise Break("interpreter", f"an error of capture's own: {exc}", "it runs natively; please report this")
        if not self.objects.is_known(exc) and raised_in_c(exc, self.objects.is_known):
            self.objects.made(exc)
            self.objects.made(exc.args)
        tracebacks.leave_out_ours(exc)

    def refuse_of_tracing(self, exc: BaseException) -> None:
        """A graph break where C code has refused what stands for a number: it takes the number itself."""
        if type(exc) is TypeError and not self.objects.is_known(exc) and tells_of_tracing(exc):
            raise Break("C code that needs a plain number", str(exc), "it runs natively")

    def sees_raised(self, exc: BaseException, again: bool) -> None:
        """It leaves a frame; again: it has left one before, and met no handler since."""
        if not again:
            self.traceback_before = tracebacks.GET_TRACEBACK(exc)

    def taken_back(self, error: BaseException) -> tuple[BaseException, int, int, types.TracebackType | None] | None:
        """Where the root raised it, where a handler has seen it since. The exception has its traceback of before."""
        raised = self.raised.get(id(error))
        tracebacks.SET_TRACEBACK(error, self.traceback_before if raised is None else raised[3])
        tracebacks.leave_out_ours(error)
        return raised

    def as_exception(self, value: Any) -> BaseException | None:
        self.refuse_raising(value)
        return super().as_exception(value)

    def reraise(self, frame: Frame, exc: BaseException, pc: int | None = None) -> None:
        self.refuse_raising(exc)
        frame.reraise = frame.pc if pc is None else pc
        raise exc  # here, where refuse_own sees that it is on purpose

    def refuse_raising(self, exc: Any) -> None:
        """Raising changes an exception's own traceback and context, which is an effect on one from outside."""
        if is_kind(exc, BaseException) and self.objects.record_of(exc) is not None:
            raise Break("exception from outside is raised", type(exc).__name__, "raise a new one")

    def caught(self, kind: Any) -> tuple[Any, ...]:
        classes = super().caught(kind)
        for cls in classes:
            if is_kind(cls, SymbolicObject):
                cls.refuse("what a handler catches")
        return classes

    def prep_reraise_star(self, original: BaseException, raised: Any) -> Any:
        left = super().prep_reraise_star(original, self.objects.contents(raised))
        return left if left is None or self.objects.is_known(left) else self.objects.made(left)

    # ------------------------------------------------------------------------------------------------------------------
    # What case patterns ask
    # ------------------------------------------------------------------------------------------------------------------

    def is_instance(self, value: Any, cls: Any) -> bool:
        return self.calls.is_instance(value, cls)

    def class_of(self, value: Any) -> type:
        return self.calls.kind_of(value)

    def length(self, value: Any) -> Any:
        return self.calls.length(value)

    # ------------------------------------------------------------------------------------------------------------------
    # Calls, functions, classes
    # ------------------------------------------------------------------------------------------------------------------

    def call(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        ends = len(args) == 1 and not kwargs and type(args[0]) in TAILED
        found = self.tails.call(callee, args[0]) if ends else ABSENT
        return self.calls.call(callee, args, kwargs) if found is ABSENT else found

    def call_spread(self, callee: Any, args: Any, kwargs: Any) -> Any:
        if type(args) is tuple:
            positional = list(args)
        else:
            self.attributes.rely_on(type(args), "__iter__", "__getitem__")
            self.require_iterable(callee, args)
            positional = self.calls.listed(args, tuple)
        keywords = dict(self.mapping(kwargs)) if kwargs else {}
        return self.call(callee, positional, keywords)

    def call_function(self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if function is Number.refuse:  # which stands for the methods of a number that Python would ask
            return function(*args)
        self.guard_function(function)
        self.heap.events += self.default_reads.get(function, ())
        frame = self.bind(function, args, kwargs)
        if frame.code.co_flags & inspect.CO_VARKEYWORDS:
            self.objects.made(frame.locals[frame.program.n_bound - 1])
        return self.machine.run(frame)

    def bind(self, function: types.FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Frame:
        """The frame of a call; tensors among the defaults, and tuples of them, are the trace's own in it."""
        frame = self.machine.bind(function, args, kwargs)
        if self.entered_defaults:
            for i, value in enumerate(frame.locals[: frame.program.n_bound]):
                if id(value) in self.entered_defaults:
                    frame.locals[i] = self.entered_defaults[id(value)]
        return frame

    def guard_function(self, function: types.FunctionType) -> None:
        """A function that existed before: its code and defaults are facts, and the defaults become known objects."""
        if self.objects.is_new(function):
            return
        defaults, keyword_defaults = function.__defaults__, function.__kwdefaults__
        if self.heap.listening:
            self.heap.read("function", function, None, function.__code__)
        held = self.objects.record_of(keyword_defaults) if keyword_defaults else None
        if keyword_defaults:
            self.heap.read("defaults", keyword_defaults, None, False)
        if held is not None and held.changed:
            raise Break("defaults that the step changed", function.__qualname__, "pass the argument")
        if function in self.guarded_functions:
            return
        self.guarded_functions.add(function)
        record = self.objects.record_of(function)
        source = Static(function.__qualname__, function) if record is None else record.source
        name = source.name
        items = tuple((keyword_defaults or {}).items())
        if source.static:
            self.guards.function(name, function)
        if function.__closure__:
            for cell, free in zip(function.__closure__, function.__code__.co_freevars, strict=True):
                if not self.objects.is_new(cell):
                    of_cell = f"closure {name}.{free}"
                    self.objects.found(cell, Static(of_cell, cell) if source.static else of_cell)
        for label, value in (*enumerate(defaults or ()), *items):
            place = Part(f"{name}.default[{label!r}]", source, "python", functools.partial(default_of, label))
            if issubclass(type(value), torch.Tensor) or (type(value) is tuple and not source.static):
                entered = self.entered_defaults[id(value)] = self.objects.enter(value, place)
            else:
                entered = self.objects.enter(value, place if named(value) else Static(place.name, value))
                if proxies_in((entered,)):
                    self.entered_defaults[id(value)] = entered
            if may_be_asked_for(entered):
                self.default_reads.setdefault(function, []).append(("default", function, label, entered))

    def make_function(
        self, frame: Frame, code: Any, defaults: Any, kwdefaults: Any, annotations: Any, closure: Any
    ) -> Any:
        return self.objects.made(super().make_function(frame, code, defaults, kwdefaults, annotations, closure))

    def make_generator(self, frame: Frame) -> Any:
        if frame.code.co_flags & inspect.CO_COROUTINE:  # (one that is made and dropped warns that nobody awaited it)
            stop = Break("coroutine", frame.code.co_qualname, "await it outside of the step; what it calls is captured")
            stop.places, stop.frame = stop.places and stop.places[:-1], frame.back  # the line that makes it
            raise stop
        self.generators.append(frame)
        return self.objects.made(super().make_generator(frame))

    def goes_on(self, frame: Frame) -> None:
        """Where the frame of a generator stands is state as any: whoever advances it changes it."""
        generator = None if frame.shell is None else frame.shell()
        if generator is None:
            return
        heap, inside = self.objects.heap, self.objects.inside
        heap.read(OWN, generator, None, None)
        # (a loop over experts in a generator goes on in it from iteration to iteration)
        if inside and inside[-1][0] is ITERATION:
            heap.write(generator, WHOLE, heap.age(generator))
        else:
            self.objects.touch(generator)

    def before_with(self, manager: Any) -> tuple[Any, Any]:
        """``__enter__`` and ``__exit__`` of a context manager, looked up on its type."""
        kind = type(manager)
        enter, leave = self.attributes.on_type(kind, "__enter__"), self.attributes.on_type(kind, "__exit__")
        if enter is ABSENT or leave is ABSENT:
            return super().before_with(manager)
        bound_leave = self.attributes.bind(leave, manager, kind)
        return bound_leave, self.call(self.attributes.bind(enter, manager, kind), [], {})

    def load_special(self, manager: Any, name: str) -> Any:
        """3.14 asks for the two one by one."""
        kind = type(manager)
        method = self.attributes.on_type(kind, name)
        return super().load_special(manager, name) if method is ABSENT else self.attributes.bind(method, manager, kind)

    def build_interpolation(self, value: Any, expression: str, conversion: str | None, spec: Any) -> Any:
        raise Break("template string", f"{{{expression}}}", "build it outside of the step")


class OwnError(Signal):
    """An error of capture's own code, which the user's handlers must not take for one of theirs."""


def package_of(namespace: dict[str, Any]) -> str | None:
    """The package that a relative import begins at (``importlib._bootstrap._calc___package__``)."""
    package = namespace.get("__package__")
    if package is None and namespace.get("__spec__") is not None:
        return namespace["__spec__"].parent
    if package is None:
        package = namespace.get("__name__", "")
        return package if "__path__" in namespace else package.rpartition(".")[0]
    return package


def refuse_own(error: BaseException) -> None:
    """Raise OwnError if the exception comes from a fault in capture rather than from the user's program.

    Python's own checks that only a fault in a file of ours can trip: a name that is not there, an attribute that an
    object of ours lacks, a failed assertion of ours.
    """
    if not (instruction := own_instruction(error)):
        return
    raised_on_purpose = instruction in ("RAISE_VARARGS", "RERAISE")
    own_object = type(getattr(error, "obj", None)).__module__.startswith("moebius.")
    if (
        is_kind(error, AssertionError | NotImplementedError)
        or (not raised_on_purpose and is_kind(error, NameError))
        or own_object
    ):
        raise OwnError(f"{type(error).__name__}: {error}") from error


def own_instruction(error: BaseException) -> str:
    """The instruction of a file of ours at which the error was raised; "" if it was raised in another file."""
    *_, place = None, *tracebacks.entries_of(error.__traceback__)
    if place is None or not tracebacks.module_of(place).startswith("moebius."):
        return ""
    return dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]]


class StopHere(Break):
    """Raised before the root frame's instruction at which an earlier attempt found that it must break."""

    def __init__(self) -> None:
        super().__init__("stop", "", "")


def default_of(label: Any, function: Any) -> Any:
    """A function's default, by its place from the left or by its keyword."""
    return (function.__defaults__ if is_kind(label, int) else function.__kwdefaults__)[label]
