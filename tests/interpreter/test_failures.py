"""What fails in the machine itself is an InterpreterError that says where, and leaves nothing half-finished behind."""
from __future__ import annotations

import sys
import types

import pytest

from moebius.interpreter import Domain, InterpreterError, Machine, Program, interpret, natives

HANDLERS = sys.modules[f"{Program.__module__.rpartition('.')[0]}.registry"].HANDLERS
LOG: list[str] = []


class Guard:
    def __enter__(self):
        LOG.append("enter")

    def __exit__(self, *triple):
        LOG.append("exit")
        return True


def inner(x):
    try:
        with Guard():
            return -x  # the instruction that fails
    except Exception:
        LOG.append("caught")
    finally:
        LOG.append("finally")


def outer(x):
    try:
        raise KeyError(x)
    except KeyError:
        return [inner(x)]


def plant(monkeypatch, domain, name, fault):
    """Makes the handler of an instruction faulty in code that is decoded from now on."""
    original = HANDLERS[name]

    def faulty(frame, stack, operand):
        fault(frame, stack)
        return original(frame, stack, operand)

    # as if it stood in the opcodes room
    faulty = type(faulty)(
        faulty.__code__, {**faulty.__globals__, "__name__": original.__module__}, name, None, faulty.__closure__
    )
    monkeypatch.setitem(HANDLERS, name, faulty)


FAULTS = {
    "reads below the stack": lambda frame, stack: stack[len(stack) + 3],
    "reads what is not there": lambda frame, stack: frame.no_such_attribute,
    "takes the wrong type": lambda frame, stack: stack + 1,
    "divides by zero": lambda frame, stack: 1 // 0,
}


def fresh(function):
    """The function with a code object of its own, which has not been decoded."""
    return type(function)(function.__code__.replace(), function.__globals__, function.__name__)


def faults_of(name):
    """The fault, raised in the handler's own frame."""
    body = FAULTS[name]
    module = HANDLERS["UNARY_NEGATIVE"].__module__
    return type(body)(body.__code__, {"__name__": module}, name)


def check_clean(machine: Machine) -> None:
    assert machine.frame is None and machine.depth == 0
    assert machine.exc_item == [None, None] and machine.propagating is None
    assert machine.native.failed is None and not natives.reentry.is_on()


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("observed", [False, True])
def test_a_faulty_handler(name, observed, monkeypatch):
    limit = sys.getrecursionlimit()
    LOG.clear()

    class Observed(Domain):
        observes = observed

    machine = Machine(Observed())
    plant(monkeypatch, machine.domain, "UNARY_NEGATIVE", faults_of(name))
    monkeypatch.setitem(globals(), "inner", fresh(inner))
    with pytest.raises(InterpreterError) as caught:
        machine.enter(fresh(outer), [4], {})
    error = caught.value
    assert LOG == ["enter"]  # none of the program's handlers ran for it
    assert error.instruction is not None and "UNARY_NEGATIVE" in error.instruction
    assert error.function == "inner" and error.line == inner.__code__.co_firstlineno + 3
    assert [place[2] for place in error.stack] == ["outer", "inner"]
    assert error.stack[0][1] == outer.__code__.co_firstlineno + 4
    assert error.operands[-1] == "int"
    assert error.__cause__ is not None and type(error.__cause__).__name__ in error.reason
    assert f"{__file__}:{error.line}" in str(error)
    check_clean(machine)
    assert sys.getrecursionlimit() == limit
    monkeypatch.undo()
    assert machine.enter(fresh(outer), [4], {}) == [-4]  # and it goes on working
    check_clean(machine)


def test_the_programs_own_errors_of_those_kinds_are_the_programs():
    def program():
        found = []
        faults = [lambda: [][1], lambda: None + 1, lambda: 1 // 0, lambda: {}[1], lambda: (1).x]
        for fails in [*faults, lambda: no_such_name]:  # noqa: F821
            try:
                fails()
            except Exception as error:
                found.append(type(error).__name__)
        return found

    assert interpret(program)() == program()


def test_a_fault_in_a_generator_finishes_it(monkeypatch):
    machine = Machine(Domain())
    plant(monkeypatch, machine.domain, "UNARY_NEGATIVE", faults_of("takes the wrong type"))

    def numbers():
        try:
            yield 1
            yield -LOG
        finally:
            LOG.append("finally")

    LOG.clear()
    made = machine.enter(numbers, [], {})
    assert next(made) == 1
    with pytest.raises(InterpreterError) as caught:
        next(made)
    assert caught.value.function.endswith("numbers")
    assert list(made) == [] and made.gi_frame is None
    assert LOG == []
    check_clean(machine)


def test_a_fault_in_a_callback_passes_c_code(monkeypatch):
    machine = Machine(Domain())
    plant(monkeypatch, machine.domain, "UNARY_NEGATIVE", faults_of("takes the wrong type"))

    class Quiet:
        def __del__(self):
            LOG.append(-1 if LOG else -len(LOG))

    def program():
        made = [Quiet()]
        made.clear()  # CPython only prints what a __del__ raises
        LOG.append("went on")

    LOG.clear()
    with pytest.raises(InterpreterError, match="the machine failed"):
        machine.enter(program, [], {})
    assert LOG == []
    check_clean(machine)


def test_a_fault_in_routing_an_exception(monkeypatch):
    machine = Machine(Domain())

    def program():
        try:
            raise KeyError
        except KeyError:
            return "caught"

    module = sys.modules[Machine.__module__]
    monkeypatch.setattr(module, "add_entry", lambda *args: [][0])
    with pytest.raises(InterpreterError, match="routing"):
        machine.enter(program, [], {})
    check_clean(machine)
    monkeypatch.undo()
    assert machine.enter(program, [], {}) == "caught"


def test_a_signal_leaves_nothing_behind(monkeypatch):
    from moebius.interpreter import Signal

    class Stop(Signal):
        pass

    class Stopping(Domain):
        def unary(self, op, value):
            raise Stop

    machine = Machine(Stopping())
    LOG.clear()
    with pytest.raises(Stop):
        machine.enter(outer, [4], {})
    assert LOG == ["enter"]
    check_clean(machine)


def test_the_frame_of_a_handler_that_was_left_can_be_looked_at():
    """By who holds the traceback: the frame object has the cells from outside at once, the variables never."""
    from moebius.interpreter import Signal

    class Stop(Signal):
        pass

    class Stopping(Domain):
        def unary(self, op, value):
            raise Stop

    kept: list[types.TracebackType | None] = []

    def program_over(word):
        def program(number):
            try:
                raise ValueError(word)
            except ValueError as error:
                kept.append(error.__traceback__)
                return -number

        return program

    with pytest.raises(Stop):
        Machine(Stopping()).enter(program_over("outside"), [4], {})
    assert kept[0] is not None
    assert kept[0].tb_frame.f_locals["word"] == "outside"
