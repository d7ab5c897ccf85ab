"""The machine: runs frames, routes exceptions, keeps the stack of frames and of handled exceptions."""
from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import CellType, CodeType, FunctionType, TracebackType
from typing import Any

from . import opcodes  # noqa: F401  (registers the handlers)
from .binding import bind_arguments
from .checks import CHECKS, check_step
from .decode import PROGRAMS, check_tables, decode
from .domain import Domain
from .domain.calls import NATIVE_CALLABLES
from .errors import INTERNAL, UNROUTED, InterpreterError
from .forms import form_of
from .frame import Frame
from .modules import import_interpreted
from .natives import DICT_GET, Native, call_afresh, call_inside, is_a, is_opaque, write_unraisable
from .order import LAST_FIRST
from .program import Program
from .registry import HANDLERS, OPERANDS
from .room import ROOM
from .sentinels import NULL, UNSET, sentinel
from .shown import Shown
from .tables import ITERATOR_PLACES
from .thrown import closes_unrun, rethrow, runs_async, take_thrown
from .tracebacks import (
    GET_TRACEBACK,
    SET_CONTEXT,
    SET_TRACEBACK,
    add_entry,
    chain_context,
    converted_by_shell,
    empty,
    entries_of,
    strip,
    thrown_into_fresh,
    with_variables,
    without_first,
)
from .tracing import trace_of

check_tables()

BUILTINS_OF = attrgetter("__builtins__")  # typeshed does not know the attribute; and no Python call on the hot path


class Machine(Shown):
    """Runs frames over a domain. One thread at a time."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        domain.machine = self
        self.native = Native(self.take)
        if domain.interprets_callbacks:
            domain.native = self.native
        self.thread = get_ident()
        self.frame: Frame | None = None  # the innermost frame that runs
        self.exc_item: list[Any] = [None, None]  # [handled exception, the item outside the running generator]
        self.entries = 0  # of that traceback, since the exception was raised or last left a handler
        self.depth = 0
        self.depth_limit = ROOM.before if ROOM.running else sys.getrecursionlimit()
        self.limit_changed = False
        self.checks = CHECKS.on
        self.slow = self.checks  # each instruction is looked at: by the checks, or by the program's trace function
        self.tracer: Any = None  # what the program gave to sys.settrace
        self.in_trace = False  # it runs at the moment, and is not traced itself

    @property
    def propagating(self) -> BaseException | None:
        """The exception that left a frame last, until it is handled or C code swallows it."""
        return self.native.propagating

    @propagating.setter
    def propagating(self, exc: BaseException | None) -> None:
        self.native.propagating = exc

    @property
    def clean(self) -> TracebackType | None:
        """The propagating exception's traceback, the machine's own entries taken out."""
        return self.native.clean

    @clean.setter
    def clean(self, trace: TracebackType | None) -> None:
        self.native.clean = trace

    # --- entering frames

    def bind(self, function: FunctionType, args: list[Any], kwargs: dict[str, Any]) -> Frame:
        """The frame of a call. Raises the TypeErrors of CPython's argument binding."""
        code = function.__code__
        program = PROGRAMS.get(id(code)) or self.learn(function)
        if program.simple_call and not kwargs and len(args) == program.n_args:
            locals_ = args + program.tail
        else:
            locals_ = bind_arguments(program, function, args, kwargs, self.native) + program.tail
        return Frame(
            program,
            code,
            locals_,
            function.__globals__,
            BUILTINS_OF(function),
            self.domain,
            function,
            None if program.optimized else function.__globals__,
            function.__closure__ or (),
        )

    def learn(self, function: FunctionType) -> Program:
        program = decode(function.__code__)
        program.opaque = is_opaque(function.__globals__)
        return program

    def run(self, frame: Frame, thrown: list[BaseException] | None = None) -> Any:
        """Run the frame from its pc until it returns or yields; the value is also in frame.value."""
        outer = self.frame
        if self.depth >= self.depth_limit:
            raise RecursionError("maximum recursion depth exceeded")
        self.depth += 1
        frame.back = outer
        self.frame = frame
        item = self.exc_item
        handled = item[0]
        try:
            if self.domain.observes or self.slow:
                value = self.run_observed(frame, thrown)
                if frame.exc_item is None and not self.domain.keeps_frames:
                    self.drop_locals(frame)
                return value
            steps = frame.program.steps
            stack = frame.stack
            pc = frame.pc
            while True:
                try:
                    if thrown:
                        rethrow(thrown)
                    while True:
                        handler, operand = steps[pc]
                        frame.pc = pc
                        jump = handler(frame, stack, operand)
                        if jump is None:
                            pc += 1
                        elif jump >= 0:
                            pc = jump
                        else:
                            if frame.exc_item is None:
                                self.drop_locals(frame)
                            elif handler is MAKES_GENERATOR:  # it must not hold itself
                                value, frame.value = frame.value, None
                                return value
                            return frame.value
                except BaseException as error:
                    if not self.route(frame, error):
                        raise
                    pc = frame.pc
        except UNROUTED:  # the frame is abandoned: none of its handlers will restore what was being handled
            self.exc_item = item
            item[0] = handled
            raise
        finally:
            self.frame = outer
            self.depth -= 1

    def run_observed(self, frame: Frame, thrown: list[BaseException] | None) -> Any:
        """The same loop where each instruction is looked at; a domain that observes may move the frame."""
        observe = self.domain.observe
        trace = trace_of(self, frame)
        while True:
            try:
                if thrown:
                    rethrow(thrown)
                while True:
                    observe(frame)
                    if trace is not None:
                        trace.before()
                    pc = frame.pc
                    handler, operand = frame.program.steps[pc]
                    height = len(frame.stack)
                    jump = handler(frame, frame.stack, operand)
                    if self.checks:
                        check_step(frame, height, jump)
                    if jump is None:
                        frame.pc = pc + 1
                    elif jump >= 0:
                        frame.pc = jump
                    else:
                        break
                if trace is not None:
                    trace.left(frame.value)
                if handler is MAKES_GENERATOR:  # as in `run`
                    value, frame.value = frame.value, None
                    return value
                return frame.value
            except BaseException as error:
                pc, again = frame.pc, frame.reraise
                caught = self.route(frame, error)
                if trace is not None and not is_a(error, UNROUTED):
                    if again is None:
                        trace.raised(error, pc)
                    if not caught:
                        trace.left(None)
                if not caught:
                    raise

    def resume(self, frame: Frame, value: Any) -> Any:
        """Continue a suspended generator frame with a sent value, to its next yield (frame.suspended) or return."""
        frame.stack.append(value)
        del value  # the program alone decides how long it lives
        frame.pc += 1
        return self.reenter(frame, None)

    def throw(self, frame: Frame, error: BaseException) -> Any:
        """Continue a suspended generator frame by raising at its yield, or in what it delegates to."""
        closing = is_a(error, GeneratorExit) and frame.thrown_args is None and not runs_async(frame)
        if closing:  # close() raised it where it was called
            SET_CONTEXT(error, None)
            chain_context(error, self.handled())
        thrown = [error]  # a list, emptied as it is used: a traceback through here must not lead back to its exception
        del error
        if self.domain.keeps_frames and frame.shell is not None and frame.shell() is None:
            raise thrown.pop()  # it dies, maybe not where it would natively: it stays suspended, the rest is not run
        if sys.exception() is None:
            return self.throw_now(frame, thrown, closing)
        return call_afresh(self.throw_now, frame, thrown, closing)  # it dies as the machine handles an exception

    def throw_now(self, frame: Frame, thrown: list[BaseException], closing: bool) -> Any:
        receiver = self.delegate(frame)
        if closing and receiver is UNSET and closes_unrun(frame):
            if frame.native is not None and EMPTIES_CLOSED:
                empty(frame.native, frame)
                frame.native = None
            self.drop_locals(frame)
            frame.stack.clear()
            raise thrown.pop()
        if receiver is not UNSET:
            frame.back = outer = self.frame
            self.frame = frame  # it is on the stack of what it delegates to
            try:
                outcome = self.throw_into(frame, receiver, thrown)
            finally:
                self.frame = outer
                frame.back = None
            if not thrown:
                return outcome
            if POPS_DELEGATE and outcome is RETURNED and is_a(thrown[0], StopIteration):
                value = thrown[0].value
                self.swallow(thrown.pop())
                return self.leave_delegation(frame, value)
        del receiver  # it dies as the frame lets go of it
        try:
            return self.reenter(frame, thrown)
        except GeneratorExit:
            if closing:  # close() swallows it, perhaps where no Native sees that
                self.propagating = self.clean = None
            raise

    def reenter(self, frame: Frame, thrown: list[BaseException] | None) -> Any:
        frame.suspended = False
        own = frame.exc_item
        assert own is not None
        if frame.native is not None:  # its variables may die, or change: they are the frame's alone again
            empty(frame.native, frame)
        if thrown:
            frame.stack.append(None)  # what `throw` sends; the handler's stack depth counts it
            chain_context(thrown[0], own[0])  # with what the generator itself handles, nothing else
            self.propagating = thrown[0]
        own[1] = outer = self.exc_item
        self.exc_item = own
        try:
            value = self.run(frame, thrown)
            if not frame.suspended and not self.domain.keeps_frames:
                self.drop_locals(frame)
            elif frame.native is not None:
                self.show_suspended(frame)
            return value
        finally:
            self.exc_item = outer
            own[1] = None
            frame.back = None

    def delegate(self, frame: Frame) -> Any:
        """What a suspended frame is delegating to (`yield from`, await), or UNSET."""
        if not frame.suspended:
            return UNSET
        following = frame.program.instructions[frame.pc + 1]
        if following.opname == "RESUME" and (following.arg or 0) & 3 >= 2:
            return frame.stack[-ITERATOR_PLACES]
        return UNSET

    def throw_into(self, frame: Frame, receiver: Any, thrown: list[BaseException]) -> Any:
        """Objects/genobject.c _gen_throw for a delegating generator.

        Leaves `thrown` empty and returns what the delegate yielded, or leaves in `thrown` what to raise in the frame;
        RETURNED then says that the delegate raised it itself.
        """
        closing = is_a(thrown[0], GeneratorExit)
        try:
            if closing:
                closer = self.find_close(receiver)
                if closer is not UNSET:
                    self.domain.call(closer, [], {})
                return UNSET
            thrower = self.domain.get_attr_or(receiver, "throw", UNSET)
            if thrower is UNSET:
                return UNSET
            frame.value = self.domain.call(thrower, take_thrown(frame, thrown), {})
            thrown.clear()
            return frame.value
        except BaseException as raised:
            if is_a(raised, UNROUTED):
                raise
            if converted_by_shell(raised):
                self.entries = 0
            if TRACEBACK_APART and frame.exc_item is not None and frame.exc_item[0] is not None:
                SET_TRACEBACK(raised, without_first(strip(GET_TRACEBACK(raised), self.clean), self.entries))
            thrown[:] = [raised]
        return UNSET if closing else RETURNED

    def find_close(self, receiver: Any) -> Any:
        """Objects/genobject.c gen_close_iter: what looking `close` up raises is reported, and goes no further."""
        try:
            return self.domain.get_attr_or(receiver, "close", UNSET)
        except BaseException as error:
            if is_a(error, UNROUTED):
                raise
            self.native(write_unraisable, self.swallow(error), receiver)
        return UNSET

    def leave_delegation(self, frame: Frame, value: Any) -> Any:
        """3.11: the delegate has returned; go on after the SEND loop with its value."""
        frame.stack.pop()
        instructions = frame.program.instructions
        index = frame.pc
        while instructions[index].opname != "SEND":
            index -= 1
        target = instructions[index].target
        assert target is not None
        frame.stack.append(value)
        frame.pc = target
        return self.reenter(frame, None)

    # --- exceptions

    def handled(self) -> BaseException | None:
        """The exception that is being handled (what sys.exception() gives)."""
        item: list[Any] | None = self.exc_item
        while item is not None:
            if item[0] is not None:
                return item[0]
            item = item[1]
        return None

    def route(self, frame: Frame, exc: BaseException) -> bool:
        """`unwind`, whose own failure must not pass for the program's exception."""
        try:
            return self.unwind(frame, exc)
        except Exception as error:
            if type(error) in INTERNAL:
                self.fail(frame, f"routing {type(exc).__name__} failed: {type(error).__name__}: {error}", error)
            raise

    def unwind(self, frame: Frame, exc: BaseException) -> bool:
        """Give the exception its context and traceback and move the frame to its handler. False: it has none."""
        if is_a(exc, UNROUTED):
            if is_a(exc, InterpreterError):
                exc.locate(frame)
            return False
        if exc is not self.propagating and type(exc) in INTERNAL and raised_by_handler(exc):
            self.fail(frame, f"the machine failed: {type(exc).__name__}: {exc}", exc)
        again, frame.reraise = frame.reraise, None
        if exc is not self.propagating:
            self.entries = 0
        if exc is not self.propagating and again is None:
            if not converted_by_shell(exc) and not thrown_into_fresh(GET_TRACEBACK(exc), self.clean):
                chain_context(exc, self.handled())
        trace = strip(GET_TRACEBACK(exc), self.clean)
        region = frame.program.handlers[frame.pc]
        if again is None and frame.pc >= frame.program.begins:
            trace = add_entry(frame, trace, region is None)
            self.entries += 1
        elif region is None and again is not None:
            frame.pc = again
            if trace is not None:
                trace = with_variables(frame, trace)
        SET_TRACEBACK(exc, trace)
        stack = frame.stack
        if region is None:
            self.propagating, self.clean = exc, trace
            if not self.domain.keeps_frames:
                drop_operands(frame, 0)
                stack.clear()
                self.drop_locals(frame)  # the traceback has them
            return False
        if self.domain.observes:
            self.domain.meets_handler(exc)
        self.propagating = self.clean = None
        target, depth, push_lasti = region
        if len(stack) < depth:
            self.fail(frame, f"the exception's handler keeps {depth} values of {len(stack)}", exc)
        drop_operands(frame, depth)
        del stack[depth:]
        if push_lasti:
            stack.append(frame.pc if again is None else again)
        stack.append(exc)
        frame.pc = target
        return True

    def fail(self, frame: Frame, reason: str, cause: BaseException) -> None:
        error = InterpreterError(reason)
        error.locate(frame)
        raise error from cause

    def swallow(self, exc: BaseException) -> BaseException:
        """An operation's own implementation caught `exc`: it no longer propagates."""
        if self.propagating is exc:
            if TRACEBACK_APART:  # C code catches an exception without storing its traceback in it
                SET_TRACEBACK(exc, without_first(self.clean, self.entries))
            else:
                SET_TRACEBACK(exc, self.clean)
            self.propagating = self.clean = None
        return exc

    # --- code that is not a function call

    def run_code(
        self, code: CodeType, globals_: dict[str, Any], names: Any, closure: tuple[CellType, ...] = ()
    ) -> Any:
        """Run a module, class or exec body in the given namespaces."""
        program = decode(code)
        frame = Frame(
            program,
            code,
            [UNSET] * len(program.localsplus),
            globals_,
            builtins_of(globals_),
            self.domain,
            None,
            names,
            closure,
        )
        return self.run(frame)

    def run_class_body(self, body: FunctionType, namespace: Any) -> Any:
        frame = self.bind(body, [], {})
        frame.names = namespace
        return self.run(frame)

    def import_interpreted(self, name: str, globals_: Any, locals_: Any, fromlist: Any, level: int) -> Any:
        return import_interpreted(self, name, globals_, locals_, fromlist, level)

    def interpreted_form(self, callee: Any) -> Callable[..., Any] | None:
        """The interpreted implementation of a C callable that would run Python code or look at frames, or None."""
        return form_of(callee)

    # --- the border to native code

    def enter(self, callee: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call from native code. Makes room on the native stack for the machine's own frames."""
        ROOM.take(self.depth_limit)
        try:
            return call_inside(self.native, self.domain.call, callee, args, kwargs)
        finally:
            self.propagating = self.clean = None  # no cycle through the traceback of what leaves
            ROOM.give_back(self.depth_limit if self.limit_changed else None)
            if self.tracer is not None:
                sys.settrace(self.tracer)  # from here on natively

    def take(self, function: FunctionType, code: CodeType, args: list[Any], names: Any) -> Any:
        """Run what C code called: reentry.c hands over a function's bound arguments, or a body and its namespace."""
        program = decode(code)
        frame = Frame(
            program,
            code,
            args + program.tail,
            function.__globals__,
            BUILTINS_OF(function),
            self.domain,
            function,
            names,
            function.__closure__ or (),
        )
        propagating, clean = self.propagating, self.clean
        try:
            value = self.run(frame)
            self.propagating, self.clean = propagating, clean
            return value
        except UNROUTED as error:
            self.native.failed = error  # the C code in between must not swallow it
            raise

    def called_back(self, function: Any) -> Any:
        """What C code gets that calls `function` only beneath a Native: there, its frames come to `take`."""
        return function if self.domain.interprets_callbacks else self.callback(function)

    def callback(self, function: Any) -> Any:
        """A native callable that interprets `function`, for C code that calls back."""
        if type(function) in NATIVE_CALLABLES and self.interpreted_form(function) is None:
            return function

        def callback(*args: Any, **kwargs: Any) -> Any:
            domain = self.domain
            if domain.interprets_callbacks and (self.frame is None or self.thread != get_ident()):
                return Machine(Domain()).enter(function, list(args), kwargs)
            return domain.call(function, list(args), kwargs)

        callback.interprets = function  # type: ignore[attr-defined]
        return callback

    def set_depth_limit(self, limit: int) -> None:
        """The interpreted program's sys.setrecursionlimit."""
        if not is_a(limit, int) or limit < 1:
            sys.setrecursionlimit(limit)  # raises
        if self.depth >= limit:
            raise RecursionError(
                f"cannot set the recursion limit to {limit} at the recursion depth {self.depth}: the limit is too low"
            )
        ROOM.make(limit)
        self.depth_limit = limit
        self.limit_changed = True


Machine.entry_code = Machine.enter.__code__
RETURNED = sentinel("RETURNED")
MAKES_GENERATOR = HANDLERS["RETURN_GENERATOR"]
EMPTIES_CLOSED = sys.version_info < (3, 14)  # closed with nothing of it run, it takes its frame object's variables
POPS_DELEGATE = sys.version_info < (3, 12)
# 3.11 keeps the traceback of what propagates beside the exception, and stores it there when a handler catches it. What
# is thrown into a frame that handles an exception (_PyErr_ChainStackItem) goes back to what was stored.
TRACEBACK_APART = sys.version_info < (3, 12)


def raised_by_handler(exc: BaseException) -> bool:
    """Whether an opcode handler's own code raised it: the innermost frame of the traceback is a handler's."""
    entries = [*entries_of(GET_TRACEBACK(exc))]
    return bool(entries) and entries[-1].tb_frame.f_globals.get("__name__", "").startswith(HANDLER_MODULES)


HANDLER_MODULES = f"{__package__}.opcodes."


def drop_operands(frame: Frame, depth: int) -> None:
    """Those of the instruction that raised die, down to the stack's height `depth`, before the rest of the stack."""
    if LAST_FIRST:
        return  # it drops them itself
    handler, operand = frame.program.steps[frame.pc]
    counted = OPERANDS.get(handler)
    if counted is not None:
        stack = frame.stack
        for index in range(max(depth, len(stack) - counted(operand)), len(stack)):
            stack[index] = NULL


def builtins_of(globals_: Mapping[str, Any]) -> Any:
    found = DICT_GET(globals_, "__builtins__", UNSET)  # type: ignore[call-overload]
    if found is UNSET:
        import builtins

        return builtins.__dict__
    return found.__dict__ if hasattr(found, "__dict__") and not is_a(found, dict) else found
