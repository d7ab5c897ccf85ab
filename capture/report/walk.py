"""Walks through a recorded capture on the terminal, forwards and backwards: ``moebius explain --step SCRIPT``.

The commands are pdb's where pdb has one; an ``r`` before it goes the other way.
"""

from __future__ import annotations

import cmd
import inspect
import linecache
import os
from collections.abc import Callable
from typing import IO

from ..guards.sources import as_written
from ..trace.recording import Moment, Recording
from .records import LIBRARIES
from .words import plural

AROUND = 5  # lines of source on each side


class Walk(cmd.Cmd):
    """One terminal, some recordings. Each command's help is its docstring."""

    prompt = "(capture) "
    def __init__(self, recordings: list[Recording], stdin: IO[str] | None = None, stdout: IO[str] | None = None):
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None
        if stdin is not None:
            self.prompt = ""
        self.recordings, self.breakpoints = recordings, set[tuple[str, int]]()
        self.open(next((number for number, one in enumerate(recordings) if one.differs is not None), 0))

    def open(self, number: int) -> None:
        """Go to the beginning of a capture, or to what ``verify=`` found in it."""
        self.number, self.recording = number, self.recordings[number]
        differs = self.recording.differs
        # the moment of the capture, and the one of its stack that is looked at
        self.at = self.shown = 0 if differs is None else self.recording.of_operator(differs[0])

    def say(self, text: str) -> None:
        print(text, file=self.stdout)

    def preloop(self) -> None:
        count = len(self.recordings)
        self.say(f"{plural(count, 'capture')} (`captures` lists them, `help` the commands)")
        self.here()

    # ------------------------------------------------------------------------------------------------------------------
    # Where it is
    # ------------------------------------------------------------------------------------------------------------------

    @property
    def moment(self) -> Moment | None:
        moments = self.recording.moments
        return moments[self.shown] if moments else None

    def here(self) -> None:
        """Say where the walk is, and what the line before it added."""
        moments, moment = self.recording.moments, self.moment
        if moment is None:
            self.say(f"{self.recording.function}: no line was captured; {self.recording.outcome}")
            return
        source = linecache.getline(moment.file, moment.line).strip()
        counts = f"{plural(moment.guards, 'guard')}, {plural(moment.operators, 'operator')} so far"
        self.say(f"[{self.at + 1} of {len(moments)}] {place(moment)}: {counts}\n    {source}")
        if self.at == len(moments) - 1:
            then = " that was written down" if self.recording.is_cut else f"; then {self.recording.outcome}"
            self.say("the last line" + then)
        if (differs := self.recording.differs) is not None and self.recording.of_operator(differs[0]) == self.at:
            self.say(differs[1])

    def go(self, step: int, stops: Callable[[int], bool]) -> None:
        """To the next moment in a direction that stops the walk, or to the end."""
        last, at = len(self.recording.moments) - 1, self.at
        if not 0 <= at + step <= last:
            further = f"; `capture {self.number + 2}` is the next" if self.number + 1 < len(self.recordings) else ""
            self.say(f"this is the end of capture {self.number + 1}{further}" if step > 0 else "this is the beginning")
            return
        at += step
        while 0 < at < last and not stops(at):
            at += step
        self.at = self.shown = at
        self.here()

    def is_breakpoint(self, at: int) -> bool:
        return any(self.is_at(at, *wanted) for wanted in self.breakpoints)

    def is_at(self, at: int, file: str, line: int) -> bool:
        moment = self.recording.moments[at]
        return moment.line == line and moment.file.endswith(file)

    def not_deeper(self) -> Callable[[int], bool]:
        depth = self.recording.depth(self.at) if self.recording.moments else 0
        return lambda at: self.recording.depth(at) <= depth or self.is_breakpoint(at)

    # ------------------------------------------------------------------------------------------------------------------
    # Commands
    # ------------------------------------------------------------------------------------------------------------------

    def do_step(self, arg: str) -> None:
        """s(tep) [N]: one line on, or N; into calls."""
        target = self.at + (int(arg) if arg.isdigit() else 1)
        self.go(1, lambda at: at >= target)

    def do_rs(self, arg: str) -> None:
        """rs [N]: one line back, or N."""
        target = self.at - (int(arg) if arg.isdigit() else 1)
        self.go(-1, lambda at: at <= target)

    def do_next(self, arg: str) -> None:
        """n(ext): to the next line of this function, or of its caller."""
        self.go(1, self.not_deeper())

    def do_rn(self, arg: str) -> None:
        """rn: to the line before in this function, or in its caller."""
        self.go(-1, self.not_deeper())

    def do_continue(self, arg: str) -> None:
        """c(ontinue): to the next breakpoint, or to the end of the capture."""
        self.go(1, self.is_breakpoint)

    def do_rc(self, arg: str) -> None:
        """rc: back to the breakpoint before, or to the beginning of the capture."""
        self.go(-1, self.is_breakpoint)

    def do_break(self, arg: str) -> None:
        """b(reak) [FILE:]LINE: stop at a line; without an argument, list the breakpoints."""
        file, _, line = arg.rpartition(":")
        if not arg:
            self.say("\n".join(f"{file}:{line}" for file, line in sorted(self.breakpoints)) or "no breakpoints")
        elif not line.isdigit():
            self.say(f"break needs FILE:LINE or LINE, and got {arg!r}")
        else:
            file = file or (self.moment.file if self.moment is not None else "")
            self.breakpoints.add((file, int(line)))
            met = any(self.is_at(at, file, int(line)) for at in range(len(self.recording.moments)))
            self.say(f"stops at {file}:{line}" + ("" if met else ", which this capture does not come to"))

    def do_clear(self, arg: str) -> None:
        """clear: forget all breakpoints."""
        self.breakpoints.clear()

    def do_where(self, arg: str) -> None:
        """w(here): the stack, the captured function first."""
        for at in self.stack():
            mark = ">" if at == self.shown else " "
            self.say(f"{mark} {place(self.recording.moments[at])}")

    def do_up(self, arg: str) -> None:
        """u(p): look at the caller."""
        self.look(-1)

    def do_down(self, arg: str) -> None:
        """d(own): look at what is called."""
        self.look(1)

    def do_list(self, arg: str) -> None:
        """l(ist): the source around the line."""
        if (moment := self.moment) is None:
            return
        for line in range(max(1, moment.line - AROUND), moment.line + AROUND + 1):
            if text := linecache.getline(moment.file, line):
                self.say(f"{'->' if line == moment.line else '  '} {line:5}  {text.rstrip()}")

    def do_locals(self, arg: str) -> None:
        """locals: the frame's variables, as the capture knows them."""
        if (moment := self.moment) is not None:
            self.say("\n".join(f"{name} = {text}" for name, text in moment.values.items()) or "no variables yet")

    def do_p(self, arg: str) -> None:
        """p NAME: one variable."""
        values = self.moment.values if self.moment is not None else {}
        self.say(values.get(arg, f"there is no variable {arg!r} here; there are: {', '.join(values) or 'none'}"))

    def do_guards(self, arg: str) -> None:
        """g(uards): what the capture relies on by now, with the lines that needed it. A namespace is one guard: it
        shows all entries that the capture reads in it."""
        self.tell_guards(0, self.moment.guards if self.moment is not None else 0)

    def do_graph(self, arg: str) -> None:
        """graph: the operators by now."""
        self.tell_operators(0, self.moment.operators if self.moment is not None else 0)

    def do_new(self, arg: str) -> None:
        """new: the guards and operators that this line adds, with what it calls."""
        moments, depth = self.recording.moments, self.recording.depth
        if not moments:
            return
        here = depth(self.at)
        after = next((moments[at] for at in range(self.at + 1, len(moments)) if depth(at) <= here), None)
        self.tell_guards(moments[self.at].guards, len(self.recording.guards) if after is None else after.guards)
        self.tell_operators(moments[self.at].operators, None if after is None else after.operators)

    def do_captures(self, arg: str) -> None:
        """captures: all that were recorded."""
        for number, one in enumerate(self.recordings):
            mark = ">" if number == self.number else " "
            name = f"{one.function} ({os.path.basename(one.file)}:{one.line})"
            differs = "" if one.differs is None else "; differs from plain Python"
            self.say(f"{mark} {number + 1}  {name}: {len(one.moments)} lines; {one.outcome}{differs}")

    def do_capture(self, arg: str) -> None:
        """capture N: go to the beginning of capture N, or to the first operator that ``verify=`` found to differ."""
        if not arg.isdigit() or not 1 <= int(arg) <= len(self.recordings):
            self.say(f"capture needs a number from 1 to {len(self.recordings)}")
            return
        self.open(int(arg) - 1)
        self.here()

    def do_help(self, arg: str) -> None:
        """h(elp) [COMMAND]: what the commands do."""
        named = {name[3:]: inspect.getdoc(getattr(self, name)) or "" for name in self.get_names() if name[:3] == "do_"}
        if arg and arg not in named:
            self.default(arg)
        else:
            del named["EOF"]
            self.say("\n".join(dict.fromkeys([named[arg]] if arg else named.values())))

    def do_quit(self, arg: str) -> bool:
        """q(uit): leave."""
        return True

    do_s, do_n, do_c, do_b, do_w, do_u, do_d = do_step, do_next, do_continue, do_break, do_where, do_up, do_down
    do_l, do_g, do_q, do_h, do_EOF = do_list, do_guards, do_quit, do_help, do_quit

    # ------------------------------------------------------------------------------------------------------------------
    # What they share
    # ------------------------------------------------------------------------------------------------------------------

    def stack(self) -> list[int]:
        """The moments of the open frames, the captured function's first."""
        found: list[int] = []
        moments = self.recording.moments
        at: int | None = self.at if moments else None
        while at is not None:
            found.insert(0, at)
            at = moments[at].parent
        return found

    def look(self, step: int) -> None:
        stack = self.stack()
        index = stack.index(self.shown) + step if stack else -1
        if not 0 <= index < len(stack):
            self.say("there is no caller in the capture" if step < 0 else "nothing is called here")
            return
        self.shown = stack[index]
        self.do_where("")

    def tell_guards(self, first: int, last: int) -> None:
        guards = [fact.record for fact in self.recording.guards[first:last]]
        own = [guard for guard in guards if guard.owner != LIBRARIES]
        for guard in own:
            text = as_written(f"{guard.source}: {guard.check}")
            self.say(f"{text}  ({os.path.basename(guard.file)}:{guard.line})")
        folded = f", {len(guards) - len(own)} of them of {LIBRARIES}" if len(own) < len(guards) else ""
        self.say(f"{plural(len(guards), 'guard')}{folded}")

    def tell_operators(self, first: int, last: int | None) -> None:
        found = [t for n, t in self.recording.operators if n > first and (last is None or n <= last)]
        self.say("\n".join([*found, plural(len(found), "operator")]))

    def emptyline(self) -> bool:
        """Nothing, where cmd would repeat the last command."""
        return False

    def default(self, line: str) -> None:
        self.say(f"no command {line.split()[0]!r}; `help` lists them")


def place(moment: Moment) -> str:
    return f"{os.path.basename(moment.file)}:{moment.line} in {moment.function}"
