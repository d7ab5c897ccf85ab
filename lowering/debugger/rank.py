"""The debugger in a rank: Python's ``pdb``, whose terminal is at the other end of a socket.

A process whose environment names a folder (``MOEBIUS_DEBUGGER``) starts it where it imports moebius. All that is
captured runs as Python in such a job, from the first call to the last and on all ranks: never in one form on one rank
and in another on the next, whichever of them stops. A rank that stands waits in its own thread. Another thread of it
answers meanwhile, and each second gives the process groups that there are a timeout that no collective reaches: a rank
may wait for others that stand, for as long as they do.
"""
from __future__ import annotations

import _thread
import atexit
import contextlib
import multiprocessing
import os
import pdb
import queue
import signal
import sys
import threading
import time
import traceback
import types
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from moebius.lowering.debugger import values
from moebius.lowering.debugger.wire import Link, address, parse_place, private_folder, read_job
from moebius.lowering.distribution.alive import condition
from moebius.lowering.distribution.torch_private import never_time_out

TICK = 1.0  # seconds between two looks at groups and at the terminal's process
PAUSE = signal.SIGTRAP  # (nobody else's, and only within the process)
PASSED_OVER = {"torch", "moebius", *sys.stdlib_module_names}  # whose lines no step stops at: it is the program's turn


def is_passed_over(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in PASSED_OVER


def users(frame: types.FrameType | None) -> types.FrameType | None:
    """The innermost frame of the program's own."""
    while frame is not None and is_passed_over(frame.f_globals.get("__name__")):
        frame = frame.f_back
    return frame


def down_to_the_program(tb: types.TracebackType) -> types.TracebackType:
    """A traceback without what is passed over at its end."""
    entries = []
    at: types.TracebackType | None = tb
    while at is not None:
        entries.append(at)
        at = at.tb_next
    while len(entries) > 1 and is_passed_over(entries[-1].tb_frame.f_globals.get("__name__")):
        entries.pop()
    made = None
    for entry in reversed(entries):
        made = types.TracebackType(made, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return made or tb


def place_of(frame: types.FrameType | None) -> dict[str, Any]:
    if frame is None:
        return {"file": "", "line": 0, "function": "?"}
    return {"file": frame.f_code.co_filename, "line": frame.f_lineno, "function": frame.f_code.co_name}


class Station:
    """What pdb reads its commands from and writes to. Without a terminal what it writes is kept for the next one."""

    def __init__(self) -> None:
        self.commands: queue.Queue[str] = queue.Queue()
        self.link: Link | None = None
        self.kept: list[str] = []
        self.stands: dict[str, Any] | None = None  # where, while it waits for a command
        self.where: dict[str, Any] = {}
        self.lock = threading.RLock()

    def write(self, text: str) -> int:
        with self.lock:
            if self.link is None:
                self.kept.append(text)
            else:
                self.link.send(text=text)
        return len(text)

    def flush(self) -> None:
        pass

    def readline(self) -> str:
        with self.lock:
            self.stands = self.where
            if self.link is not None:
                self.link.send(stands=self.where)
        line = self.commands.get()
        self.stands = None
        return line + "\n"

    def connect(self, link: Link, hello: dict[str, Any]) -> None:
        """A terminal is there: it is told what it has missed."""
        with self.lock:
            link.send(**hello)
            for text in self.kept:
                link.send(text=text)
            if self.stands is not None:
                link.send(stands=self.stands)
            self.kept, self.link = [], link


class Debugger(pdb.Pdb):
    """pdb in one rank. begins: its first stop only switches it on."""

    def __init__(self, station: Station, rank: int):
        ends: Any = station
        super().__init__(stdin=ends, stdout=ends, nosigint=True, readrc=False, skip=("torch",))
        self.prompt, self.station, self.rank, self.begins = "", station, rank, False

    def switch_on(self, frame: types.FrameType | None) -> None:
        """From here on breakpoints are looked for."""
        self.begins = True
        self.set_trace(frame)
        self.begins = True  # (a signal in between has had its own first stop)

    def is_skipped_module(self, module_name: str | None) -> bool:
        return is_passed_over(module_name)

    def stop_here(self, frame: types.FrameType) -> bool:
        if self.begins:
            self.begins = False
            self.set_continue()
        return super().stop_here(frame)

    def interaction(self, frame: types.FrameType | None, *args: Any) -> None:
        at = frame
        for tb in args if frame is None else ():
            while tb is not None:
                at, tb = tb.tb_frame, tb.tb_next
        self.station.where = place_of(at)
        super().interaction(frame, *args)

    def add(self, text: str) -> str:
        """A breakpoint at "FILE:LINE, CONDITION". Returns what to say of it: nothing, if it is in order."""
        file, line, when = parse_place(text)
        self.clear_break(self.canonic(file), line)  # (it may be there, with another condition)
        return self.set_break(self.canonic(file), line, cond=when) or ""

    def remove(self, text: str) -> str:
        file, line, _ = parse_place(text)
        return self.clear_break(self.canonic(file), line) or ""

    def do_locals(self, arg: str) -> None:
        """locals: the frame's variables; of a tensor its shape, and what of it is on this rank."""
        self.message(values.listing(self.curframe_locals))

    def do_full(self, arg: str) -> None:
        """full EXPRESSION: a tensor that lives on the ranks, as a whole. On all ranks at once."""
        with self.told():
            self.message(repr(values.whole(self._getval(arg))))

    def do_expert(self, arg: str) -> None:
        """expert E EXPRESSION: row E of a tensor, on the rank that has it."""
        number, _, expression = arg.partition(" ")
        with self.told():
            self.message(values.expert(self._getval(expression), int(number), self.rank))

    def do_here(self, arg: str) -> None:
        """here: the frame that is looked at, and its line."""
        self.print_stack_entry(self.stack[self.curindex])

    @contextlib.contextmanager
    def told(self) -> Any:
        """What fails is told, as pdb does; it has done so where it evaluated an expression."""
        try:
            yield
        except Exception as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                self.error(traceback.format_exception_only(error)[-1].strip())


class Rank:
    """This process, as a terminal reaches it."""

    def __init__(self, folder: Path, rank: int, ranks: int):
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.station = Station()
        self.debugger = Debugger(self.station, rank)
        self.main = threading.main_thread().ident or 0
        self.pauses = False  # whether a signal is to stop it, or to switch breakpoints on
        self.listener = Listener(address(folder, rank), "AF_UNIX", backlog=4)
        for place in read_job(folder)["at"]:
            if refused := self.debugger.add(place):
                sys.stderr.write(f"moebius: no breakpoint at {place}: {refused}\n")

    def start(self) -> None:
        """In the main thread, before the program begins."""
        sys.breakpointhook = self.breakpoint
        sys.excepthook = self.failed
        signal.signal(PAUSE, self.signalled)
        os.register_at_fork(after_in_child=self.leave)
        atexit.register(sys.settrace, None)
        for work in (self.serve, self.watch):
            threading.Thread(target=work, name="moebius: debugger", daemon=True).start()
        if self.debugger.breaks:
            self.debugger.switch_on(users(sys._getframe()))

    def breakpoint(self, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != self.main:
            return
        frame = users(sys._getframe(1))
        if self.station.link is None and frame is not None and not read_job(self.folder)["terminal"]:
            sys.stderr.write(f"moebius: rank {self.rank} stands at {frame.f_code.co_filename}:{frame.f_lineno}: "
                             f"moebius debug --attach {self.folder}\n")
        self.debugger.set_trace(frame)

    def signalled(self, number: int, frame: types.FrameType | None) -> None:
        sys.settrace(None)  # (it would see what follows here, and take it for the program)
        if self.pauses:
            self.pauses = False
            self.debugger.set_trace(users(frame))
        else:
            self.debugger.switch_on(users(frame))

    def failed(self, kind: type[BaseException], error: BaseException, tb: types.TracebackType | None) -> None:
        """An exception that nobody handles: a terminal can look at where it was raised."""
        sys.settrace(None)  # (the program is over)
        traceback.print_exception(kind, error, tb, file=sys.__stderr__)  # (torch holds back what goes to stderr here)
        if self.station.link is not None and tb is not None and issubclass(kind, Exception):
            self.station.write(f"rank {self.rank} ends with {kind.__name__}: {error}\n")
            self.debugger.reset()
            self.debugger.interaction(None, down_to_the_program(tb))

    def leave(self) -> None:
        """In a child of this process, which no terminal reaches."""
        sys.settrace(None)
        sys.breakpointhook, sys.excepthook = sys.__breakpointhook__, sys.__excepthook__
        self.debugger.clear_all_breaks()

    # ---- its other threads ----

    def serve(self) -> None:
        """One terminal after another."""
        hello = {"rank": self.rank, "ranks": self.ranks, "pid": os.getpid()}
        while True:
            link = Link(self.listener.accept())
            self.station.connect(link, hello)
            for message in link:
                self.answer(link, message)
            self.station.link = None

    def answer(self, link: Link, message: dict[str, Any]) -> None:
        match message:
            case {"do": command}:
                self.station.commands.put(command)
            case {"where": _}:
                link.send(where=self.station.stands or place_of(users(sys._current_frames().get(self.main))))
            case {"pause": _} if self.station.stands is None:
                self.pauses = True
                _thread.interrupt_main(PAUSE)
            case {"at": place}:
                link.send(done=self.debugger.add(place))
                if self.station.stands is None:
                    _thread.interrupt_main(PAUSE)
            case {"clear": place}:
                link.send(done=self.debugger.remove(place))
            case {"detach": _}:
                self.debugger.clear_all_breaks()
                if self.station.stands is None:
                    _thread.interrupt_main(PAUSE)
                else:
                    self.station.commands.put("c")
            case {"quit": _}:
                self.end()

    def watch(self) -> None:
        """Ends with the terminal that started the job, however that ends."""
        while True:
            never_time_out()
            if (terminal := read_job(self.folder)["terminal"]) and condition(terminal):
                self.end()
            time.sleep(TICK)

    def end(self) -> None:
        """At once, as if all were done: whoever started the ranks has nothing to say of it."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def start(folder: str) -> None:
    """In a process of a job that is debugged. None of its children is: neither a data loader's worker nor a program
    that it starts."""
    if multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread():
        return
    path, rank = private_folder(folder), int(os.environ.get("RANK", "0"))
    with contextlib.suppress(OSError):  # a rank that was started again finds the socket of the one before
        try:
            Client(address(path, rank), "AF_UNIX").close()
            return
        except ConnectionRefusedError:
            os.unlink(address(path, rank))
    os.environ["MOEBIUS_DISABLE"] = "1"  # (read where capture is first imported, which is later)
    Rank(path, rank, int(os.environ.get("WORLD_SIZE", "1"))).start()
