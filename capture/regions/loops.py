"""Loops over a tensor's rows or over experts, recorded as one node.

``for row in tensor`` where the number of rows depends on values (the experts that were hit) is interpreted for one
symbolic row, and ``for e in range(n)`` over experts for one symbolic e (range_loops.py). The body becomes a graph of
its own; ``continue`` on a condition on values becomes ``skip_iteration``, or where the iteration has set something by
then, the rest of it a branch. A local that an iteration reads and replaces is
*carried*; one that an iteration only sets is a leftover that nobody may read afterwards. What such a node cannot
express (leaving the loop early, changing Python objects) is a graph break. An ``if`` on values is a loop of one
iteration, which that condition skips (branches.py); with ``else`` it is two (two_sides.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moebius.interpreter import ITERATOR_PLACES, STOP, UNSET, Frame, is_kind
from moebius.lowering.experts.stacking import in_set_order
from moebius.lowering.graph import expert_loop, skip_iteration

from ..bytecode.flow import RETURNED, last_copy
from ..bytecode.liveness import accesses, read_by_name
from ..heap.conditional_writes import refuse_place
from ..python.number_sets import ELEMENTS, LISTED, iterated_as
from ..python.parts import Parts
from ..tensors.arrays import ArrayNumber
from ..tensors.counts import INTEGERS
from ..tensors.folding import is_constant
from ..tensors.graphs import GraphScope
from ..tensors.index_lists import IndexList
from ..torch_facts import torch_private
from ..values.numbers import Number
from ..values.rows import TensorRows
from ..values.values import ATOMS, SYMBOLIC, Body, Break, TensorProxy, UndefinedAfterLoop
from . import branch_places, branches, chosen_numbers, range_loops, two_sides
from .active_experts import ActiveExperts, active_iterations, refuse_kept_row, tuples
from .autograd_joins import found_by_iteration, refuse_iterations
from .branches import ASKING, BRANCHES, VALUED, Conditional
from .branches import WATCHED as WATCHED
from .conditional_lists import Lists, maybe_absent
from .loop_regions import ONE, ROWS, LoopRegion, alike, fakes_of, has_attributes, on_values, reorder_placeholders
from .range_loops import RANGE_ITERATOR, RangeRows, first_loads, goes_over_experts, length_of, picks_rows
from .sized_rows import SizedRows
from .two_sides import FirstSide

ITERATION = Body(
    "an expert loop changes Python state",
    "a {} that existed before the iteration is changed inside the loop",
    "collect results in a tensor (index_add_), or iterate over a Python range",
)
COMPARED = (*ATOMS, *SYMBOLIC, Number)  # with a value: which compare in C
LEAVES = frozenset({"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE"})


class Loops:
    """Open loops of one trace, innermost last."""

    def __init__(self, domain: Parts, lists: Lists):
        self.domain, self.lists, self.tensors, self.objects = domain, lists, domain.tensors, domain.objects
        self.writer, self.counter = self.tensors.writer, domain.counter
        self.arithmetic = domain.tensors.numbers
        self.open: list[LoopRegion] = domain.tensors.world.regions
        self.joins = branch_places.Joins(self.open, domain)
        self.decided: dict[tuple[int, int], list[int]] = {}
        self.unrolled: set[tuple[Any, int]] = set()  # loops, branches: no one node could say them
        self.iterators, self.sized = domain.iterators, SizedRows(domain)
        self.ranges: set[tuple[Any, int]] = set()  # those that this attempt records as one node
        self.counts: set[tuple[Any, int]] = set()  # branches that decide between ints, or between yes and no
        self.by_number: set[tuple[Any, int]] = set()  # loops over hits that are taken as an iteration for each expert
        self.not_by_number: set[tuple[Any, int]] = set()  # those that this did not help

    # ------------------------------------------------------------------------------------------------------------------
    # Called by the domain
    # ------------------------------------------------------------------------------------------------------------------

    def rows(self, proxy: Any) -> Any:
        """``iter(tensor)``, or of the list that ``tolist()`` gave of a vector of unknown length."""
        if type(proxy) is IndexList:
            if self.open or not self.tensors.branches:
                proxy.refuse("the items")
            return self.objects.made(TensorRows(proxy.proxy, numbers=True)).begin()
        symbolic = proxy.fake.dim() and is_kind(proxy.fake.shape[0], torch.SymInt)
        found = self.sized.rows(proxy) if symbolic else None
        return self.objects.made(iter(self.tensors.rows(proxy)) if found is None else found)

    def numbers(self, proxy: TensorProxy) -> TensorRows | None:
        """``for e in tensor.tolist():`` of a vector of integers, how many is not known, or ``for e in set(…)`` of them;
        None for any other use."""
        frame = self.domain.frame
        if frame is None or not self.tensors.whole_step or self.open:
            return None
        how = iterated_as(frame)
        if how is None or proxy.fake.dim() != 1 or proxy.fake.dtype not in INTEGERS:
            return None
        if how == LISTED and not is_kind(proxy.fake.shape[0], torch.SymInt):
            return None
        # the list stays as it is, whatever the iterations write
        copied = self.tensors.method(proxy, "clone" if how == LISTED else "unique", (), {})
        if how == ELEMENTS:
            copied = self.tensors.record("call_function", in_set_order, (proxy,), {}, copied.fake.clone())
        return self.objects.made(TensorRows(copied, numbers=True))

    def pairs(self, maker: Any, values: list, kwargs: dict[str, Any]) -> ActiveExperts | None:
        """``enumerate(hits)``, ``zip(hits, counts)``."""
        found = tuples(maker, values, kwargs)
        return self.objects.made(found) if found and self.tensors.whole_step and not self.open else None

    def array_rows(self, proxy: TensorProxy) -> TensorRows:
        """``iter(array)`` of a vector of unknown length. An iteration sees what an earlier one wrote into it."""
        if self.open or self.writer.is_inner:
            raise Break("tensor read as a number", "an array of unknown length", "iterate over the tensor")
        return self.objects.made(TensorRows(proxy, numbers=True, of_array=True)).begin()

    def number(self, rows: TensorRows | ActiveExperts, value: Any) -> Any:
        """A row that is a number: Python's, or numpy's."""
        return self.domain.arrays.number(value, bounded=type(value) is int) if rows.of_array else value

    def next_row(self, rows: TensorRows | RangeRows | ActiveExperts) -> Any:
        """The row of the iteration that begins, or STOP after the recorded iteration."""
        if rows.finished:
            return STOP
        loop = self.open[-1] if self.open else None
        if loop is None or loop.rows is not rows or loop.row is None:
            self.sized.refuse(rows, "outside of a for loop")
        return loop.row_value

    def settle(self, frame: Frame) -> None:
        """Close the branches whose sides meet at the frame's instruction, which then begins outside of them."""
        while self.open and self.open[-1].frame is frame:
            loop = self.open[-1]
            if not is_kind(loop.rows, Conditional):
                return
            frame.pc = last_copy(frame.program, frame.pc)
            if not loop.is_at_end():
                return
            self.end_iteration(loop)

    def observe(self, frame: Frame) -> None:
        """Before each instruction: open a loop, close it, or leave an iteration."""
        loop = self.open[-1] if self.open else None
        if loop is not None and self.domain.machine.depth < loop.depth:
            raise Break("expert loop left early", "an exception inside the loop", "let every iteration run to its end")
        if loop is not None and loop.frame is frame:
            if loop.is_at_end():
                self.end_iteration(loop)
                return
            if frame.pc not in loop.inside or frame.program.instructions[frame.pc].opname in LEAVES:
                raise Break(
                    "expert loop left early",
                    "break, return or yield inside the loop",
                    "let every iteration run to its end",
                )
            if self.skip_on_condition(loop):
                return
        instruction = frame.program.instructions[frame.pc]
        opname = instruction.opname
        if self.open and opname.startswith(("LOAD_FAST", "STORE_FAST_LOAD")):
            for index in (frame.program.localsplus.index(n) for kind, n in accesses(instruction) if kind == "LOAD"):
                self.note_read(frame, index, frame.locals[index])
        if opname in BRANCHES or opname in VALUED:
            self.take_branch(frame)
            return
        if opname in ASKING:
            self.look_at_jump(frame, branches.asks_for_jump(frame.program.instructions, frame.pc))
            return
        if opname != "FOR_ITER":
            return
        kind = type(frame.stack[-ITERATOR_PLACES])
        if kind is RANGE_ITERATOR:
            self.take_range(frame)
        elif kind is TensorRows:
            self.take_hits(frame)
        elif self.open and picks_rows(frame):
            self.refuse_behind_return()
        rows = frame.stack[-ITERATOR_PLACES]
        if type(rows) in ROWS and not rows.finished:
            if kind is ActiveExperts and (frame.code, frame.pc) in self.not_by_number:
                self.sized.refuse(rows, "in a builtin")
            self.refuse_behind_return()
            self.begin(frame, rows)

    def look_at_jump(self, frame: Frame, count: int) -> None:
        """The instruction asks for the truth on which the next one jumps (3.13): where the branch is the graph's, the
        frame goes on behind both; else it stays."""
        if not count:
            return
        place, asked = (list(frame.stack), frame.pc), frame.stack[-count:]
        if not any(map(self.is_of_data, asked)) or not all(self.is_of_data(v) or type(v) in COMPARED for v in asked):
            return
        condition = asked[0]
        if count == 2:
            condition = self.domain.compare(frame.program.instructions[frame.pc].operand, *asked)
        if not on_values(condition) and not self.arithmetic.decides(condition):
            return
        number, jump, before = len(self.open), frame.pc + 1, self.counter.mark()
        self.domain.count(frame)
        frame.stack[-count:], frame.pc = [condition], jump
        try:
            self.observe(frame)
        finally:
            if frame.pc == jump:
                frame.stack[:], frame.pc = place
                self.counter.back_to(before)
        for loop in self.open[number:]:
            if loop.frame is frame and loop.start == jump:
                loop.place = place

    def is_of_data(self, value: Any) -> bool:
        """Whether what a comparison of it gives may be on values; how many items that has is asked of the result."""
        return issubclass(type(value), TensorProxy) or on_values(value) or self.arithmetic.decides(value)

    def take_range(self, frame: Frame) -> None:
        """``for e in range(n)`` over experts goes the way of a loop over rows; any other is left to be unrolled."""
        key = (frame.code, frame.pc)
        if not self.tensors.whole_step or key in self.unrolled:
            return
        iterator = frame.stack[-ITERATOR_PLACES]
        if not self.iterators.is_alone(frame, -ITERATOR_PLACES):
            return
        if (count := length_of(iterator)) and goes_over_experts(frame):
            self.refuse_behind_return()
            if self.open:
                return
            frame.stack[-ITERATOR_PLACES] = self.objects.made(RangeRows(count, key))
            self.ranges.add(key)

    def refuse_behind_return(self) -> None:
        """What is behind ``if …: return`` may be the rest of a model: its experts are to be lowered, so that the graph
        goes on behind the branch, which gets a side exit."""
        if self.open and self.open[0].head == RETURNED:
            detail = "experts run, or do not, as a condition on values says"
            raise Break("data-dependent branch", detail, "return after them")

    def take_hits(self, frame: Frame) -> None:
        """A loop over the experts that were hit whose iteration, recorded once for all of them, broke the graph."""
        key, rows = (frame.code, frame.pc), frame.stack[-ITERATOR_PLACES]
        if self.open or key not in self.by_number or rows.finished:
            return
        iterations = active_iterations(rows)
        if iterations is not None:
            rows.finished = True
            frame.stack[-ITERATOR_PLACES] = self.objects.made(iterations)

    def open_hits(self) -> set[tuple[Any, int]]:
        """The loops over rows of tensors that the trace is in, and those over hits by number."""
        return {(loop.frame.code, loop.start) for loop in self.open if is_kind(loop.rows, TensorRows | ActiveExperts)}

    # ------------------------------------------------------------------------------------------------------------------
    # One recorded iteration
    # ------------------------------------------------------------------------------------------------------------------

    def begin(self, frame: Frame, rows: TensorRows | RangeRows | ActiveExperts | Conditional) -> None:
        """The frame's instruction begins it, with the locals that were found to be carried there."""
        carried = self.decided.get((id(frame.code), frame.pc), [])
        loop = LoopRegion(frame, rows, carried)
        loop.counted = self.counter.mark()
        loop.part = self.counter.body()
        loop.root_step, loop.depth = self.domain.root_steps - 1, self.domain.machine.depth
        tensors, objects = self.tensors, self.objects
        writer, world = tensors.writer, tensors.world
        loop.where = writer.where()
        loop.number = writer.count + 1
        of_call, loop.outer = is_kind(rows, Conditional) and branches.is_of_call(loop.begun_with[-1]), writer.scope
        writer.scope = GraphScope(writer.scope, is_kind(rows, Conditional), of_call)
        objects.open_body(ITERATION)
        loop.since = objects.inside[-1][1]
        loop.row = writer.scope.placeholder("row")
        loop.row.meta.update(loop.stands_at)
        if isinstance(rows, ONE):
            loop.row.meta["val"] = 0
        elif isinstance(rows, TensorRows):
            whole = rows.proxy.fake
            with world.mode:
                fake = whole.new_empty(whole.shape[1:])
            loop.row_value = tensors.wrap(fake, loop.row)
        else:
            loop.row_value = tensors.wrap(world.number_below(rows.count), loop.row)
        if isinstance(rows, TensorRows) and rows.numbers:
            loop.row_value = self.number(rows, self.tensors.method(loop.row_value, "item", (), {}))
        for index in carried:
            value = frame.locals[index]
            node = writer.scope.placeholder(f"carried_{frame.program.localsplus[index]}")
            loop.nodes.append(node)
            with self.tensors.mode:
                fake = found_by_iteration(value.fake)
            node.meta.update(val=fake, **loop.stands_at)
            frame.locals[index] = self.tensors.wrap(fake, node)
            objects.outcomes[frame.locals[index]] = (value,)
        loop.begun = list(frame.locals)
        for index in carried:
            self.note_read(frame, index, loop.before[index])
        self.open.append(loop)
        if isinstance(rows, ActiveExperts):
            self.begin_hit(loop, rows)

    def note_read(self, frame: Frame, index: int, value: Any) -> None:
        """A local of the frame is read: of the loops around it, those that found it so have not set it yet."""
        for loop in self.open:
            if loop.frame is frame and loop.before[index] is value:
                loop.read.add(index)

    def begin_hit(self, loop: LoopRegion, rows: ActiveExperts) -> None:
        """The iteration of one expert: skipped unless it was hit."""
        if not rows.unwritten():
            detail = "an iteration writes into the list of hits"
            raise Break("expert loop changes what it runs over", detail, "copy it first")
        self.skip(rows.is_hit(self.tensors), False)
        row = rows.row(self.tensors)
        loop.row_value = rows.value(self.number(rows, row) if rows.numbers else row, self.tensors)

    def skip_on_condition(self, loop: LoopRegion) -> bool:
        """A branch on values of which one side goes straight to the next iteration: that side becomes
        ``skip_iteration``."""
        frame = loop.frame
        instruction = frame.program.instructions[frame.pc]
        jumps_if = BRANCHES.get(instruction.opname)
        if jumps_if is None or not on_values(frame.stack[-1]):
            return False
        assert instruction.target is not None
        if branches.past_jumps(frame, frame.pc + 1) == loop.head:
            skip_if, stay = not jumps_if, instruction.target
        elif branches.past_jumps(frame, instruction.target) == loop.head:
            skip_if, stay = jumps_if, frame.pc + 1
        else:
            return False  # a branch between two bodies
        if branches.past_jumps(frame, stay) <= frame.pc:
            return False  # the end of a while loop: its iterations are not counted
        if torch_private.switches() != loop.switches:
            return False
        carried = any(frame.locals[i] is not loop.begun[i] for i in loop.carried)
        if two_sides.is_double(loop) or loop.gathered or loop.places or carried:
            return False  # what the iteration has done so far counts: the rest of it is a branch of its own
        self.domain.count(frame)
        loop.skips.append(list(frame.locals))
        self.skip(frame.stack.pop(), skip_if)
        branches.count_jumps(self.counter, frame, frame.pc, skip_if, loop.head, loop.skipped)
        frame.pc = stay
        self.observe(frame)
        return True

    def skip(self, condition: Any, skip_if: bool) -> None:
        """End the iteration here where the truth of the condition is ``skip_if``."""
        condition = condition.value if type(condition) is ArrayNumber else condition
        self.open[-1].goes_on_where(condition, not skip_if)
        if is_kind(condition, torch.SymInt):
            condition = condition != 0
        if not skip_if:
            if is_kind(condition, TensorProxy):
                condition = self.tensors.function(torch.logical_not, (condition,), {})
            elif type(condition) is Number:
                condition = self.writer.call(torch.sym_not, condition)
            else:
                condition = torch.sym_not(condition)
        self.writer.call(skip_iteration, condition)
        self.open[-1].pass_condition()

    def take_branch(self, frame: Frame) -> None:
        """An ``if`` on values becomes a loop of one iteration, or one for each side; others are left to ``truth``."""
        if not range_loops.takes_branches(self.tensors, self.open, frame) or (frame.code, frame.pc) in self.unrolled:
            return
        if self.arithmetic.decides(frame.stack[-1]):
            frame.stack[-1] = self.arithmetic.both_ways(frame.stack[-1])
        if not on_values(frame.stack[-1]):
            return
        rows = branches.branch_at(frame)
        if rows is not None and rows.other is not None:
            if is_constant(frame.stack[-1]):
                return  # known while tracing
            recorded = {loop.head for loop in self.open if loop.frame is frame}  # (no tracing comes to their end)
            is_copied = rows.other.inside.isdisjoint(recorded) and self.iterators.can_be_cloned(frame)
            if branches.goes_on(rows.other) and not is_copied:
                return
        if rows is not None:
            self.domain.count(frame)
            self.prefer_numbers(frame.stack[-1])
            again = two_sides.own_condition(self.tensors, frame.stack[-1]) if rows.other is not None else None
            self.begin(frame, rows)
            self.open[-1].again = again
            self.enter_branch(self.open[-1])
            self.settle(frame)
            self.observe(frame)

    def prefer_numbers(self, condition: Any) -> None:
        """An iteration of a loop over hits that does something else for some experts: as an iteration for each expert,
        where that can be (``trace.traced`` takes it so after this break)."""
        loop = self.open[-1] if len(self.open) == 1 else None
        if loop is None or not is_kind(loop.rows, TensorRows) or loop.row is None:
            return
        if not branches.is_of_row(condition, loop.row):
            return
        key = (loop.frame.code, loop.start)
        if key not in self.by_number | self.not_by_number and active_iterations(loop.rows) is not None:
            raise Break("expert loop branches on its number", "in a loop over hits", "it is traced again")

    def open_branches(self) -> set[tuple[Any, int]]:
        """Those that the trace is in: code and index."""
        return {(loop.frame.code, loop.rows.here) for loop in self.open if is_kind(loop.rows, Conditional)}

    def enter_branch(self, loop: LoopRegion) -> None:
        """From the branch's start into its body."""
        frame, rows = loop.frame, loop.rows
        assert isinstance(rows, Conditional)
        frame.stack[:], frame.pc = [*loop.stack, *[loop.value] * rows.given], loop.entry
        if branches.goes_on(rows):  # native code would go on with the iterators that are there
            self.iterators.clone(frame)
        self.skip(loop.begun_with[-1], rows.skip_if)
        branches.count_empty_sides(self.counter, loop)

    def end_iteration(self, loop: LoopRegion) -> None:
        """The iteration is recorded: write the loop node, and decide what the frame's locals are after the loop."""
        frame, rows, on_stack = loop.frame, loop.rows, two_sides.left_on_stack(loop)
        if torch_private.switches() != loop.switches:
            raise Break("data-dependent branch", "a switch of torch's is thrown in it", "use a with block")
        changed = [
            i
            for i, (a, b) in enumerate(zip(loop.before, frame.locals, strict=True))
            if (a is not b or any(then[i] is not a for then in loop.skips)) and i not in loop.carried
            if loop.head != RETURNED  # where nobody reads them
        ]
        if loop.first is not None:
            changed = [i for i in changed if i not in loop.first.indices()]
        if is_kind(loop.rows, ONE):
            carried = [i for i in changed if alike(loop.before[i], frame.locals[i], rows=True)]
        else:
            carried = [i for i in changed if loop.before[i] is not UNSET and self.reads_first(loop, i)]
        if carried:
            self.record_again(loop, carried)
            return
        side: FirstSide | None = None
        if isinstance(rows, Conditional):
            changed = [i for i in changed if not self.is_same_if_skipped(loop, rows, i)]
            if rows.other is not None:
                side, changed = two_sides.leave_first(loop, changed, on_stack, self.joins), []
            elif loop.first is not None:
                changed = two_sides.leave_second(loop, loop.first, changed, on_stack, self.joins)
            else:
                self.joins.leave_one(loop, None)
                changed = chosen_numbers.others(loop, changed, self.tensors)
        if isinstance(rows, ONE):
            self.refuse_open_locals(loop, changed)
            gives = bool(loop.carried or loop.gathered) or any(not one.number for one in loop.joined)
            branches.refuse_tensors(loop.begun_with[-1], self.writer.scope, gives)
        if is_kind(loop.rows, ActiveExperts):
            refuse_kept_row(loop.row_value, [frame.locals[i] for i in loop.carried])
        if not is_kind(loop.rows, ONE):
            left = [frame.locals[i].fake for i in loop.carried]
            found = [node.meta["val"] for node in loop.nodes]
            refuse_iterations(self.writer.scope, zip(found, left, strict=True))
        body = self.close(loop)
        outcome = self.emit(loop, body)
        first_joined, first_gathered = len(loop.carried), len(loop.carried) + len(loop.joined)
        self.lists.close(loop, outcome[first_gathered:])
        for index in changed:
            if loop.before[index] is UNSET or not is_kind(frame.locals[index], UndefinedAfterLoop):
                frame.locals[index] = UndefinedAfterLoop(frame.program.localsplus[index])
        for index, value in zip(loop.carried, outcome, strict=False):
            frame.locals[index] = value
        two_sides.hand_out(loop, outcome[first_joined:first_gathered], side, self.domain, self.counts)
        if side is not None:
            self.begin_other(loop, side)
        elif is_kind(loop.rows, ActiveExperts) and loop.rows.at + 1 < loop.rows.experts:
            loop.rows.at += 1
            frame.stack[:] = loop.begun_with
            self.begin(frame, loop.rows)
        elif not is_kind(loop.rows, Conditional):
            loop.rows.finished = True

    def begin_other(self, loop: LoopRegion, side: FirstSide) -> None:
        """From the end of the first side into the second."""
        frame, rows = loop.frame, loop.rows
        assert isinstance(rows, Conditional) and rows.other is not None
        for index in range(len(frame.locals)) if loop.head == RETURNED else filter(lambda i: i >= 0, side.indices()):
            frame.locals[index] = loop.before[index]
        frame.stack[:], frame.pc = [*loop.stack, *[loop.value] * rows.below, loop.again], rows.other.entry
        self.begin(frame, rows.other)
        self.open[-1].follow(loop, side)
        self.enter_branch(self.open[-1])

    def is_same_if_skipped(self, loop: LoopRegion, rows: Conditional, index: int) -> bool:
        """Whether a number that the body sets is what it was where the body does not run: ``start += n``, if n."""
        before, after, condition = loop.before[index], loop.frame.locals[index], loop.begun_with[-1]
        a, b, asked = (v.value if type(v) is ArrayNumber else v for v in (before, after, condition))
        numbers = all(type(value) in (int, torch.SymInt) for value in (a, b))
        if not numbers or not is_kind(asked, torch.SymInt | torch.SymBool):
            return False
        if any(then[index] is not after for then in loop.skips):
            return False  # it is set behind another condition
        if not torch_private.equal_where(b, a, asked, rows.skip_if):
            return False
        if ArrayNumber in (kinds := {type(before), type(after)}):
            certain = len(kinds) == 1 and before.certain and after.certain
            loop.frame.locals[index] = self.domain.arrays.number(b, certain)
        return True

    def refuse_open_locals(self, loop: LoopRegion, changed: list[int]) -> None:
        """A local that only one side of a branch sets, to something that a graph cannot hand on, must be done with."""
        frame = loop.frame
        for name, before in ((frame.program.localsplus[index], loop.before[index]) for index in changed):
            if name in read_by_name(frame.program)[loop.head]:
                if is_kind(loop.rows, ActiveExperts) and type(before) in (int, float):
                    detail = f"{name} is a number until an expert was hit, and a tensor from then on"
                    raise Break("expert loop carries a Python value", detail, "begin with a tensor: x.new_zeros(())")
                refuse_place(name)

    def reads_first(self, loop: LoopRegion, index: int) -> bool:
        """Whether an iteration reads what an earlier one left in the local, or may (read from top to bottom)."""
        if index in loop.read:
            return True
        instructions = loop.frame.program.instructions
        body = instructions[loop.start + 1 : instructions[loop.start].target]
        return loop.frame.program.localsplus[index] in first_loads(body)

    def record_again(self, loop: LoopRegion, carried: list[int]) -> None:
        """Some locals turned out to be carried: drop the recorded iteration and record it with placeholders for
        them."""
        frame = loop.frame
        for index in carried:
            before, after = loop.before[index], frame.locals[index]
            name = frame.program.localsplus[index]
            if not is_kind(before, TensorProxy) or not is_kind(after, TensorProxy):
                raise Break(
                    "expert loop carries a Python value",
                    f"{name} changes from iteration to iteration",
                    "carry tensors only, or iterate over a Python range",
                )
            if has_attributes(before) or has_attributes(after):
                raise Break("expert loop carries a tensor with attributes", name, "set them after the loop")
            if is_kind(loop.rows, ONE):  # (both are alike)
                continue
            if before.fake.shape != after.fake.shape or before.fake.dtype != after.fake.dtype:
                raise Break(
                    "expert loop carries a tensor that changes shape",
                    name,
                    "keep shape and dtype the same in each iteration",
                )
        self.open.pop()
        self.objects.inside.pop()
        parent = self.writer.scope.parent
        assert parent is not None
        self.writer.scope = parent
        frame.locals[:] = loop.before
        branch_places.forget(loop, self.objects)
        self.decided[(id(frame.code), loop.start)] = sorted({*loop.carried, *carried})
        self.writer.count = loop.number - 1  # nodes are numbered as if it had been known at once
        frame.stack[:], frame.pc = loop.begun_with, loop.start
        self.begin(frame, loop.rows)
        self.open[-1].follow(loop, loop.first)
        self.open[-1].again, self.open[-1].counted = loop.again, loop.counted
        self.counter.back_to(loop.counted)
        if is_kind(loop.rows, Conditional):
            self.enter_branch(self.open[-1])

    def close(self, loop: LoopRegion) -> fx.GraphModule:
        """Finish the body graph and go back to the scope around it."""
        writer = self.writer
        scope = writer.scope
        loop.nodes += [*two_sides.placeholders(loop, scope), *(scope.placeholder("absent") for _ in loop.gathered)]
        results = [*(one.value for one in loop.given_out()), *(value for _, value in loop.gathered)]
        scope.graph.output(tuple(map(writer.argument, results)))
        body = writer.module()
        assert scope.parent is not None
        loop.lifted = dict(scope.lifted)
        writer.scope = scope.parent
        self.objects.inside.pop()
        self.open.pop()
        return body

    def emit(self, loop: LoopRegion, body: fx.GraphModule) -> list[Any]:
        """The loop node in the outer graph; returns the carried values after the loop, and what it gathered."""
        writer, tensors = self.tensors.writer, self.tensors
        name = f"loop_body_{len(writer.submodules)}"
        writer.submodules[name] = body
        outer: list[fx.Node] = [writer.scope.own(n) for n in loop.lifted]
        body.graph.lint()
        writer.scope.note("carried")
        get_body = writer.scope.graph.get_attr(name)
        get_body.meta.update(val=None, **loop.stands_at)
        rows, outs = loop.rows, loop.given_out()
        source = writer.argument(rows.proxy) if isinstance(rows, TensorRows) else rows.count
        absent = self.lists.absent(loop)
        given = (*(writer.argument(one.initial) for one in outs), *absent)
        node = writer.scope.graph.call_function(expert_loop, (get_body, source, given, tuple(outer)))
        node.meta.update(**loop.stands_at, number=loop.number, body=loop.part[0])
        writer.count += 1
        with tensors.world.mode:
            fakes = fakes_of(loop, outs, tensors.world)
        fakes += tuple(maybe_absent(tensors.world, value.fake) for _, value in loop.gathered)
        node.meta["val"] = fakes
        reorder_placeholders(body, loop)
        found = [tensors.wrap(fake, tensors.writer_item(node, i)) for i, fake in enumerate(fakes)]
        self.objects.outcomes.update(zip(found, (one.ways for one in outs), strict=False))
        return found
