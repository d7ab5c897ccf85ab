"""The machine's own interface: programs, frames, observation, signals, errors; nothing runs natively unseen."""
from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from moebius.interpreter import (
    NULL,
    UNSET,
    Domain,
    InterpreterError,
    Machine,
    Signal,
    decode,
    interpret,
)
from moebius.interpreter.decode import PROGRAMS, check_tables, emitted_opcodes
from moebius.interpreter.registry import HANDLERS
from moebius.interpreter.shells import USER_CODES
from moebius.interpreter.tables import TABLE


def risky(a: int, *rest: int, k: int = 3) -> Any:
    try:
        return a // rest[0] + k
    except ZeroDivisionError:
        return "zero"


def test_every_opcode_of_this_python_has_a_handler() -> None:
    assert len(emitted_opcodes()) > 100
    for name in emitted_opcodes():
        assert all(handler in HANDLERS for handler in TABLE[name].handlers()), name


def test_a_missing_handler_is_an_import_error_naming_the_opcode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(HANDLERS, "BINARY_OP")
    with pytest.raises(ImportError, match="no handler for BINARY_OP"):
        check_tables()


def test_programs_are_decoded_once_and_know_their_handlers() -> None:
    program = decode(risky.__code__)
    assert decode(risky.__code__) is program
    assert program.localsplus == ("a", "k", "rest")
    division = next(i for i in program.instructions if i.opname == "BINARY_OP" and i.operand == "//")
    guard = program.handler_at(division.index)
    assert guard is not None and program.instructions[guard[0]].opname == "PUSH_EXC_INFO"
    assert program.handler_at(0) is None
    assert all(i.target is None or 0 <= i.target < len(program.instructions) for i in program.instructions)
    assert division.line == risky.__code__.co_firstlineno + 2


def test_bind_places_arguments_and_raises_what_a_call_raises() -> None:
    machine = Machine(Domain())
    frame = machine.bind(risky, [1, 2, 3], {"k": 5})
    assert frame.locals == [1, 5, (2, 3)] and frame.pc == 0 and frame.stack == []
    assert machine.run(frame) == 5
    for args, kwargs in (([], {}), ([1], {"zz": 2}), ([1], {"a": 2})):
        with pytest.raises(TypeError) as native:
            risky(*args, **kwargs)
        with pytest.raises(TypeError) as bound:
            machine.bind(risky, args, kwargs)
        assert bound.value.args == native.value.args


class Watch(Domain):
    observes = True

    def __init__(self) -> None:
        self.seen: list[str] = []

    def observe(self, frame: Any) -> None:
        self.seen.append(frame.instruction.opname)


def test_observe_sees_each_instruction_before_it_runs() -> None:
    domain = Watch()
    machine = Machine(domain)
    assert machine.enter(risky, [1, 0], {}) == "zero"
    names = {i.opname for i in decode(risky.__code__).instructions}
    assert set(domain.seen) <= names
    assert domain.seen[domain.seen.index("PUSH_EXC_INFO") - 1] == "BINARY_OP"


def test_observe_may_move_the_frame() -> None:
    class Skip(Watch):
        def observe(self, frame: Any) -> None:
            if frame.instruction.opname == "BINARY_OP":
                frame.stack[-2:] = ["instead"]
                frame.pc += 1

    def add(a: int, b: int) -> Any:
        return a + b

    assert Machine(Skip()).enter(add, [1, 2], {}) == "instead"


def test_a_signal_passes_every_handler_and_leaves_the_machine_usable() -> None:
    class Break(Signal):
        pass

    ran: list[str] = []

    class Breaking(Domain):
        def binary(self, op: str, left: Any, right: Any) -> Any:
            if op == "@":
                raise Break
            return super().binary(op, left, right)

    def inner() -> Any:
        try:
            raise KeyError
        except KeyError:
            return 1 @ 2  # type: ignore[operator]

    def outer() -> Any:
        try:
            return inner()
        except BaseException:
            ran.append("except")
        finally:
            ran.append("finally")

    machine = Machine(Breaking())
    with pytest.raises(Break):
        machine.enter(outer, [], {})
    assert ran == [] and machine.frame is None and machine.depth == 0 and machine.handled() is None
    assert machine.enter(risky, [6, 3], {}) == 5


def test_interpreter_errors_say_where_and_pass_user_handlers() -> None:
    def traces() -> None:
        try:
            sys.setprofile(print)
        except Exception:
            pass

    with pytest.raises(InterpreterError) as caught:
        interpret(traces)()
    error = caught.value
    assert error.file == __file__ and error.line == traces.__code__.co_firstlineno + 2
    assert error.instruction is not None and "CALL" in error.instruction
    assert error.stack[-1][2].endswith("traces") and "sys.setprofile" in str(error)
    assert sys.getprofile() is not print


def test_a_generator_frame_can_be_driven_by_hand() -> None:
    def count(n: int) -> Any:
        got = yield n
        return got

    class ByHand(Domain):
        def make_generator(self, frame: Any) -> Any:
            frame.exc_item = [None, None]
            return frame

    machine = Machine(ByHand())
    frame = machine.enter(count, [4], {})
    assert machine.resume(frame, None) == 4 and frame.suspended
    assert machine.resume(frame, "sent") == "sent" and not frame.suspended


def test_the_debug_switch_finds_a_wrong_stack_effect(same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(frame: Any, stack: list[Any], operand: Any) -> None:
        pass

    monkeypatch.setitem(HANDLERS, "POP_TOP", forgets)
    monkeypatch.setattr(sys.modules["moebius.interpreter.decode"], "PROGRAMS", {})  # programs hold their handlers
    with pytest.raises(InterpreterError, match="stack effect 0, expected -1"):
        same("def main(log):\n    log.append(1)\n")


def test_the_comparison_finds_a_planted_fault(same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "def main(log):\n    return [10 - n for n in range(3)]\n"
    same(program)
    monkeypatch.setattr(Domain, "binary", lambda self, op, left, right: right - left)
    with pytest.raises(AssertionError):
        same(program)


def test_sentinels_name_themselves() -> None:
    assert repr(UNSET) == "UNSET" and repr(NULL) == "NULL"


PROGRAM = """
import dataclasses, contextlib
@dataclasses.dataclass(order=True)
class P:
    n: int
    @property
    def twice(self): return self.n * 2
    def __add__(self, other): return P(self.n + other.n)
    def __iter__(self): yield from range(self.n)
    def __len__(self): return self.n
    def __getattr__(self, name): return name
@contextlib.contextmanager
def held(log):
    log.append('in')
    try: yield 1
    finally: log.append('out')
def fails(): raise KeyError
def main(log):
    with held(log): log.append((P(3) + P(4)).twice)
    try: fails()
    except KeyError as e: log.append(e)
    return sorted(P(3), key=lambda n: -n), [len(P(2)), P(1).other], P(1) < P(2), list(map(lambda n: n + 1, P(3)))
"""


def test_no_python_code_of_the_program_runs_natively(drive: Any) -> None:
    entered: list[Any] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        while event == "call" and not (module := frame.f_globals.get("__name__", "")).startswith("moebius.interpreter"):
            if module == "dis" or module.startswith("hypothesis") or frame.f_back is None:
                return  # the decoder's own use of dis; hypothesis watches the garbage collector
            frame = frame.f_back
            if frame.f_globals.get("__name__", "").startswith("moebius.interpreter"):
                entered.append(code)

    log: list[Any] = []
    run = interpret(drive)
    code = compile(PROGRAM, "<program>", "exec", dont_inherit=True)
    gc.collect()
    gc.disable()  # what other tests left is not this program's
    sys.setprofile(profile)
    try:
        result = run(code, log)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert result == ([2, 1, 0], [2, "other"], True, [1, 2, 3])
    assert log[:3] == ["in", 14, "out"] and isinstance(log[3], KeyError)
    # a traceback's frame is a native generator that never runs; on 3.11 its end shows as a call
    stubs = {id(stub) for program in PROGRAMS.values() for stub in (program.stubs or {}).values()}
    own = [made for made in entered if id(made) not in stubs and made.co_filename != "<binder>"]
    listed = {"ABCMeta.__subclasscheck__", "AbstractContextManager.__subclasshook__"}  # in natives.py
    assert {made.co_qualname for made in own} <= listed


def test_decoded_programs_die_with_their_code_objects() -> None:
    def main() -> Any:
        names: dict[str, Any] = {}
        exec("def f(): return 1\ndef g(): yield 2\n", names)
        return names["f"](), list(names["g"]())

    assert interpret(main)() == (1, [2])
    gc.collect()
    known = len(PROGRAMS), len(USER_CODES)
    for _ in range(5):
        assert interpret(main)() == (1, [2])
    gc.collect()
    assert len(PROGRAMS) <= known[0] and len(USER_CODES) <= known[1]  # (what other tests left may die meanwhile)
