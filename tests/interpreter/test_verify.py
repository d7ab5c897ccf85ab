"""Code objects that no compiler makes are refused before they run, and nothing that is made of bytes crashes."""
from __future__ import annotations

import dis
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest
from seeds import seed_of_the_code

from moebius.interpreter import Domain, InterpreterError, Machine, Signal, decode, interpret


def sample(a, b=2, *rest, key=None, **named):
    total = 0
    for i in range(a):
        try:
            total += i if i % 2 else -i
            if i > 5:
                raise ValueError(i)
        except ValueError as error:
            total += len(error.args)
        finally:
            total += b
    with Quiet():
        values = [x * 2 for x in rest]
        table = {"a": total, **named, "s": f"{total!r:>5}"}
    match table:
        case {"a": int() as found}:
            values.append(found)
    return values, table, (lambda: total + (key or 0))()


def numbers(n):
    got = []
    for i in range(n):
        got.append((yield i))
    yield from got
    return sum(map(int, got))


class Quiet:
    def __enter__(self):
        return self

    def __exit__(self, *triple):
        return False


def caches(name: str) -> int:
    if sys.version_info >= (3, 13):
        return dis._inline_cache_entries.get(name, 0)
    return dis._inline_cache_entries[dis.opmap[name]]


def assemble(*instructions: tuple[str, int], stack: int = 8, like=None, table: bytes = b"") -> types.CodeType:
    """A code object of the given instructions, each with the caches that it needs."""
    filled = bytearray()
    for name, arg in instructions:
        filled += bytes((dis.opmap[name], arg))
        filled += bytes((dis.opmap["CACHE"], 0)) * caches(name)
    code = (like or (lambda a=1: a)).__code__
    return code.replace(co_code=bytes(filled), co_stacksize=stack, co_exceptiontable=table)


def free(cell=1):
    return lambda: cell


NO_OPCODE = next(op for op in range(255, 0, -1) if op not in dis._all_opmap.values())  # type: ignore[attr-defined]
RETURN_VALUE = dis.opmap["RETURN_VALUE"]
HOSTILE = {
    "jump past the end": (assemble(("RESUME", 0), ("JUMP_FORWARD", 40)), "no instruction begins"),
    "jump into a cache": (
        assemble(("LOAD_FAST", 0), ("JUMP_FORWARD", 2), ("LOAD_FAST", 0), ("BINARY_OP", 0), ("RETURN_VALUE", 0)),
        "no instruction begins",
    ),
    "jump behind an EXTENDED_ARG": (
        assemble(("JUMP_FORWARD", 1), ("EXTENDED_ARG", 0), ("LOAD_FAST", 0), ("RETURN_VALUE", 0)),
        "no instruction begins",
    ),
    "underflow": (assemble(("BINARY_OP", 0), ("RETURN_VALUE", 0)), "reads 2 values, the stack holds 0"),
    "underflow by one": (assemble(("LOAD_FAST", 0), ("BINARY_OP", 0), ("RETURN_VALUE", 0)), "reads 2 .* holds 1"),
    "overflow": (assemble(*[("LOAD_FAST", 0)] * 4, ("RETURN_VALUE", 0), stack=3), "beyond the 3"),
    "endless growth": (
        assemble(("LOAD_FAST", 0), ("JUMP_BACKWARD", 2 + caches("JUMP_BACKWARD")), ("RETURN_VALUE", 0)),
        "with 0 and with 1 values",
    ),
    "constant": (assemble(("LOAD_CONST", 77), ("RETURN_VALUE", 0)), "refers to nothing"),
    "name": (assemble(("LOAD_NAME", 77), ("RETURN_VALUE", 0)), "refers to nothing"),
    "negative": (
        assemble(*[("EXTENDED_ARG", 255)] * 3, ("LOAD_CONST", 255), ("RETURN_VALUE", 0)),
        "no compiler emits that argument",
    ),
    "local": (assemble(("LOAD_FAST", 9), ("RETURN_VALUE", 0)), "there are 1 local"),
    "cell": (assemble(("LOAD_DEREF", 0), ("RETURN_VALUE", 0)), "no cell"),
    "free variables": (
        assemble(("COPY_FREE_VARS", 2), ("LOAD_FAST", 0), ("RETURN_VALUE", 0), like=free()),
        "1 free variables",
    ),
    "the end": (assemble(("LOAD_FAST", 0), ("POP_TOP", 0)), "past the end"),
    "nothing": (assemble(), "no instructions"),
    "COPY 0": (assemble(("LOAD_FAST", 0), ("COPY", 0), ("RETURN_VALUE", 0)), "no compiler emits"),
    "an operator": (
        assemble(("LOAD_FAST", 0), ("LOAD_FAST", 0), ("BINARY_OP", 99), ("RETURN_VALUE", 0)),
        "refers to nothing",
    ),
    "a yield outside of a generator": (assemble(("LOAD_FAST", 0), ("YIELD_VALUE", 0), ("RETURN_VALUE", 0)), "flagged"),
    "a generator without its beginning": (
        numbers.__code__.replace(co_code=bytes((dis.opmap["NOP"], 0)) + numbers.__code__.co_code[2:]),
        "RETURN_GENERATOR",
    ),
    "a number that no instruction has": (
        assemble(("LOAD_FAST", 0), ("RETURN_VALUE", 0)).replace(co_code=bytes((NO_OPCODE, 0, RETURN_VALUE, 0))),
        "knows no such instruction",
    ),
    "a handler beyond the end": (
        assemble(("LOAD_FAST", 0), ("RETURN_VALUE", 0), table=bytes((0x80, 1, 60, 0))),
        "exception table",
    ),
    "a handler deeper than the stack": (
        assemble(("LOAD_FAST", 0), ("RETURN_VALUE", 0), ("RERAISE", 0), table=bytes((0x80, 2, 2, 6))),
        "keeps 3 values",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_is_refused_before_it_runs(name):
    code, reason = HOSTILE[name]
    ran = []

    def program():
        ran.append(1)
        function = types.FunctionType(code, {}, "hostile", (1,), (types.CellType(1),) * len(code.co_freevars))
        return function()

    with pytest.raises(InterpreterError, match=reason) as caught:
        interpret(program)()
    assert ran == [1]
    assert caught.value.line is not None and caught.value.function is not None
    with pytest.raises(InterpreterError, match=reason):
        decode(code)  # the refusal is not forgotten


def test_what_it_refuses_is_not_the_examples_themselves():
    assert interpret(types.FunctionType(assemble(("LOAD_FAST", 0), ("RETURN_VALUE", 0)), {}))(5) == 5
    assert interpret(sample)(8, 3, 4, key=5, x=6) == sample(8, 3, 4, key=5, x=6)


def test_a_code_object_is_verified_once(monkeypatch):
    calls = []
    module = sys.modules[decode.__module__]
    original = module.verify
    monkeypatch.setattr(module, "verify", lambda program: calls.append(program.code) or original(program))

    def function():
        return 1

    interpreted = interpret(function)
    assert [interpreted() for _ in range(3)] == [1, 1, 1]
    assert calls.count(function.__code__) == 1


def test_the_standard_library_is_sound():
    """What a compiler made is never refused."""
    folder = Path(os.__file__).parent
    names = ["argparse", "ast", "asyncio/base_events", "collections/__init__", "contextlib", "dataclasses", "enum"]
    names += ["functools", "inspect", "pickle", "typing", "statistics", "tarfile", "asyncio/streams", "difflib"]
    count = 0
    for name in names:
        pending = [compile((folder / f"{name}.py").read_text(), name, "exec")]
        while pending:
            code = pending.pop()
            decode(code)
            count += 1
            pending += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    assert count > 1500


# The constructor of 3.12 and 3.13 looks up, in tables that a new code object does not have, what these stand for.
UNBUILDABLE = [op for name, op in dis.opmap.items() if name.startswith("INSTRUMENTED_") or name == "ENTER_EXECUTOR"]


class OutOfSteps(Signal):
    pass


class Bounded(Domain):
    """Ends what loops, and does no arithmetic that could take long."""

    observes = True

    def __init__(self):
        self.steps = 0

    def observe(self, frame):
        self.steps += 1
        if self.steps > 3000:
            raise OutOfSteps

    def binary(self, op, left, right):
        if op.rstrip("=") in ("**", "<<", "*"):
            return left
        return super().binary(op, left, right)


def mutated(code: types.CodeType, chance: random.Random) -> types.CodeType:
    """The code object with a few bytes changed, in its instructions, exception table, constants, names or sizes."""
    filled, table = bytearray(code.co_code), bytearray(code.co_exceptiontable)
    changes = {}
    for _ in range(chance.randint(1, 3)):
        kind = chance.random()
        if kind < 0.75:
            place = chance.randrange(len(filled))
            if place % 2 or chance.random() < 0.3:
                filled[place] = chance.choice([chance.randrange(256), chance.randrange(8), filled[place] ^ 1])
            else:
                filled[place] = chance.choice(list(dis.opmap.values())) & 255
        elif kind < 0.9 and table:
            table[chance.randrange(len(table))] = chance.randrange(256)
        elif kind < 0.94:
            changes["co_consts"] = code.co_consts[: chance.randrange(len(code.co_consts) + 1)]
        elif kind < 0.97:
            changes["co_names"] = code.co_names[: chance.randrange(len(code.co_names) + 1)]
        else:
            changes["co_stacksize"] = chance.randrange(4)
    if any(op in filled[::2] for op in UNBUILDABLE):
        raise ValueError("CPython's own constructor may crash")
    filled += bytes((dis.opmap["NOP"], 0)) * 16  # room for a last instruction's caches, else the constructor may crash
    return code.replace(co_code=bytes(filled), co_exceptiontable=bytes(table), **changes)


def run_mutants(seed: int, count: int) -> dict[str, int]:
    """Outcomes of mutants, by kind."""
    chance = random.Random(seed)
    outcomes = {"refused": 0, "raised": 0, "returned": 0, "stopped": 0, "failed": 0}
    codes = [sample.__code__, numbers.__code__, free.__code__]
    space = {"__builtins__": {"range": range, "len": len, "sum": sum, "map": map, "int": int, "ValueError": ValueError}}
    space["Quiet"] = Quiet
    for _ in range(count):
        original = chance.choice(codes)
        try:
            code = mutated(original, chance)
        except ValueError:
            continue
        arguments = [3, 4][: code.co_argcount] + [5] * bool(code.co_flags & 4)
        machine = Machine(Bounded())
        abandoned = True
        try:
            result = machine.enter(types.FunctionType(code, space), arguments, {})
            if isinstance(result, types.GeneratorType):
                machine.enter(lambda made=result: [made.send(None), made.send(1), made.close()], [], {})
        except InterpreterError as error:
            assert error.reason and error.line is not None, error
            outcomes["refused" if "broken code object" in error.reason else "failed"] += 1
        except OutOfSteps:
            outcomes["stopped"] += 1
        except BaseException:
            outcomes["raised"] += 1
            abandoned = False
        else:
            outcomes["returned"] += 1
            abandoned = False
        assert machine.frame is None and machine.depth == 0
        assert machine.exc_item == [None, None] or not abandoned
    return outcomes


@pytest.mark.parametrize("seed", [1, seed_of_the_code()])
def test_mutated_code_never_crashes(seed):
    """In a process of its own: a crash is its exit status."""
    command = f"import test_verify; print(test_verify.run_mutants({seed}, 1500))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    prelude = "import conftest; " if sys.version_info >= (3, 12) else ""
    done = subprocess.run(
        [sys.executable, "-c", prelude + command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, (seed, done.stderr[-3000:])
    outcomes = eval(done.stdout.splitlines()[-1])  # a mutant may print
    assert outcomes["refused"] > 500 and outcomes["returned"] > 50 and outcomes["raised"] > 20, (seed, outcomes)
