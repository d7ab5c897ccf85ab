"""Operators that may fail on a call's data, and frames that could not go on as native code where they do.

When an operator fails in the graph, the frames that it is in go on as native code (``failures``). That cannot be done
for a frame that C code called: a property, a ``__getitem__``, a generator that ``list()`` goes through. A handler in
one of these would not run, so the operator is a graph break there. So are numbers of numpy's, which the graph has up to
2**53: with a larger one, the instruction that asks for it is run again as Python.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx

from moebius.interpreter import ITERATOR_PLACES, NULL, Frame, is_kind, opened
from moebius.lowering import computes
from moebius.lowering.graph import expert_loop
from moebius.lowering.step import asks_plain_python, require_equal
from moebius.lowering.step.gathered import end_of

from ..bytecode.liveness import accesses, read_by_name
from ..bytecode.stack_layout import EXIT_PARTS
from ..heap.varying import IN_EACH_TURN
from ..python.domain import TrackingDomain, refuse_own
from ..python.substitutes import Range
from ..python.tails import TAILED
from ..regions.loops import LoopRegion
from ..tensors.array_calls import is_followed
from ..tensors.arrays import Array, ArrayMethod, ArrayNumber, ArrayRows
from ..tensors.failing import may_raise_on_data
from ..tensors.graphs import GraphScope
from ..torch_facts import torch_private, torch_sizes
from ..values.number_methods import NumberMethod
from ..values.numbers import Number
from ..values.values import ATOMS, Break, TensorMethod, TensorProxy, decided_by_data
from .attempt import Attempt
from .frame_snapshots import FrameSnapshot, connected

SWITCHING = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.autocast)
LEAVING_NOTHING = (*SWITCHING, contextlib.nullcontext, Range)
MAX_TURNS = 1000  # in which such an operator is met in a try-block: the loop may go on until the operator fails


def reads_iterations(loop: LoopRegion) -> bool:
    """Whether the handler around a loop, or what follows it, reads what iterations have set."""
    frame = loop.frame
    handler = frame.program.handler_at(loop.start)
    body = [frame.program.instructions[i] for i in loop.inside]
    stored = {name for i in body for kind, name in accesses(i) if kind == "STORE"}
    return handler is not None and not stored.isdisjoint(read_by_name(frame.program)[handler[0]])


def refuse_lost_handler(trace: Attempt, target: Any, args: tuple) -> None:
    """A graph break where the operator may fail on real data, and a handler of the user's would not see that, or what
    is written before it on its side of a branch would be lost."""
    trace.domain.loops.joins.refuse_failing(target, args)
    is_number = asks_plain_python(target)
    if not is_number and not may_raise_on_data(target, args):
        return
    frames = list(opened(trace.machine.frame))[::-1]
    if not frames or not (is_number or any(map(is_in_handler, frames))):
        return
    place = frames[-1].code, frames[-1].pc
    trace.tried[place] += 1
    name = getattr(target, "__name__", target)
    if trace.tried[place] > MAX_TURNS:
        detail = f"{name} was tried {MAX_TURNS} times, and goes well on any tensor of these sizes"
        raise Break("loop that an error may end", detail, "it runs natively; ask for the size first", IN_EACH_TURN)
    loops = [loop for loop in trace.domain.loops.open[:1] if loop.frame in frames]
    if loops:  # what fails in a loop over experts goes on from before the loop
        within = frames.index(loops[0].frame) + 1
        own, program = loops[0].frame, loops[0].frame.program
        tries = program.handler_at(own.pc) != program.handler_at(loops[0].start) and is_in_handler(own)
        if tries or any(map(is_in_handler, frames[within:])) or (is_in_handler(own) and reads_iterations(loops[0])):
            detail = f"{name} may fail in an iteration, which handles that"
            raise Break("expert loop with a handler in it", detail, "let the iteration ask for what may fail")
        del frames[within:]
    stacks = trace.domain.stacks
    stopped = [FrameSnapshot(frame, *stacks[frame], making=trace.domain.making.get(frame)) for frame in frames]
    lost = frames[len(connected(stopped, generators=True)) :]
    if is_number and (lost or not (can_run_again(trace.writer.scope) if loops else can_ask_again(stopped[-1]))):
        if target is require_equal:
            raise asks_of_sizes(*map(torch_private.expression, args[:2]))
        raise Break(
            "number of numpy's",
            f"{frames[-1].code.co_qualname} asks for them below C code, or together with something else",
            "read them before, with tolist() of the tensor",
        )
    found = next(filter(is_in_handler, lost), None)
    if found is not None:
        raise Break(
            "operator that may fail, in a try-block of what C code called",
            f"{name} in {found.code.co_qualname}",
            "it runs natively, and a handler sees its error; a function that is called by its name may have one",
        )


def asks_of_sizes(one: Any, other: Any) -> Break:
    """The graph break at an operator that runs with two sizes that are equal, and with others."""
    relation = sympy.Eq(one, other, evaluate=False)
    asked = torch_sizes.of_symbols(relation, relation.free_symbols)
    hint = "select rows with torch.where or a mask, so that their number is known; or compare the sizes before"
    return Break("data-dependent operator", f"it asks whether {asked}", hint)


def can_run_again(scope: GraphScope) -> bool:
    """Whether nothing that is seen was done on the side of a branch, and on those that it stands in."""
    if scope.parent is None:
        return True
    nodes = [node for node in scope.graph.nodes if node.op.startswith("call_")]
    unseen = all(asks_plain_python(n.target) or n.target is end_of or is_unseen(n) for n in nodes)
    return scope.of_call and unseen and can_run_again(scope.parent)


def is_unseen(node: fx.Node) -> bool:
    """Whether it does nothing but compute. (What a branch in it does, is not looked at.)"""
    return node.target is not expert_loop and computes(node)


def can_ask_again(place: FrameSnapshot) -> bool:
    """Whether the frame's instruction does nothing before it asks an array for its numbers, or a tensor for its sizes:
    it can run once more."""
    name, stack = place.frame.program.instructions[place.pc].opname, place.stack
    if name in ("GET_ITER", "UNPACK_SEQUENCE"):
        return is_a(stack[-1], Array)
    if name == "FOR_ITER":
        return is_a(stack[-ITERATOR_PLACES], ArrayRows)
    if name.startswith(("BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE")):
        return is_a(stack[-3 if "SLICE" in name else -2], Array, TensorProxy)
    numbers = (Number, Array, np.ndarray, torch.SymInt, torch.SymFloat, TensorProxy, *ATOMS)
    if name in ("BINARY_OP", "COMPARE_OP"):
        return all(is_a(value, *numbers) for value in stack[-2:])
    if name.startswith("UNARY_"):
        return is_a(stack[-1], *numbers)
    position = place.callee_position()
    if position is None:
        return False
    plain = (ArrayNumber, TensorProxy, tuple, dict, slice, type, np.dtype, torch.nn.ModuleList, *TAILED, *numbers)
    callee = stack[position]
    known = is_a(callee, ArrayMethod, NumberMethod, TensorMethod, type, types.BuiltinFunctionType)
    known = known or is_followed(callee) or is_of_torch(callee)
    return known and all(value is NULL or is_a(value, *plain) for value in stack[position + 1 :])


def is_of_torch(callee: Any) -> bool:
    """Whether it is a function of torch's; the trace went into none that it stands before, and so has it as a node."""
    return is_a(callee, types.FunctionType) and str(callee.__module__).partition(".")[0] == "torch"


def is_a(value: Any, *kinds: type) -> bool:
    """``isinstance``, without asking the user's object for its class."""
    return issubclass(type(value), kinds)


def is_in_handler(frame: Frame) -> bool:
    """Whether a try- or with-block of the frame's would do something when an error is raised now."""
    instructions, handler = frame.program.instructions, frame.program.handler_at(frame.pc)
    while handler is not None:
        target, depth, _ = handler
        if instructions[target].opname == "PUSH_EXC_INFO":
            leaves_block = instructions[target + 1].opname == "WITH_EXCEPT_START"
            if not (leaves_nothing(frame.stack[depth - EXIT_PARTS]) if leaves_block else passes_on(frame)):
                return True
        handler = frame.program.handler_at(target)
    return False


def leaves_nothing(leave: Any) -> bool:
    """Whether the ``__exit__`` of a context does nothing but put back switches of torch's, which is done anyhow."""
    return type(getattr(leave, "__self__", None)) in LEAVING_NOTHING


def passes_on(frame: Frame) -> bool:
    """Whether a handler of torch's own does nothing but put back switches, or call hooks of which there are none."""
    if frame.code is torch_private.SWITCHED_GRADIENTS:
        return True
    if frame.code is not torch_private.MODULE_CALL:
        return False
    domain = frame.domain
    module = domain.load_cell(frame.locals[frame.program.localsplus.index("self")])
    if type(module).__getattribute__ is not object.__getattribute__:
        return False
    of_all, of_one = torch_private.CALLED_ON_ERRORS
    return not domain.truth(domain.load_global(frame, of_all)) and not domain.truth(domain.get_attr(module, of_one))


def raised(domain: TrackingDomain, error: BaseException) -> Break:
    """The graph break where the step raises, or where capture cannot tell whether it does."""
    refuse_own(error)
    try:
        domain.refuse_of_tracing(error)
    except Break as stop:
        return stop
    words = f"the step raises {words_of(error)}"[:300]
    raises = Break("exception", words, "the exception is raised natively")
    return decided_by_data() if is_kind(error, torch_private.DATA_DEPENDENT) else raises


def words_of(error: BaseException) -> str:
    """The error's type and text, if it has one that is known while tracing."""
    try:
        return f"{type(error).__name__}: {error}"
    except (Break, Exception):  # a text that the graph makes, or a __str__ of the user's that fails
        return type(error).__name__
