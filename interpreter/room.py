"""Python's recursion limit, raised while machines run."""
from __future__ import annotations

import sys
from _thread import RLock

NATIVE_FRAMES_PER_CALL = 16  # native Python frames that one interpreted call takes, at most, and some room


class Room:
    """The limit, with room for the machines' own frames: one setting for all threads."""

    def __init__(self) -> None:
        self.running = 0
        self.before = 0
        self.lock = RLock()

    def make(self, depth: int) -> None:
        needed = depth * NATIVE_FRAMES_PER_CALL + 500
        if sys.getrecursionlimit() < needed:
            sys.setrecursionlimit(needed)

    def take(self, depth: int) -> None:
        with self.lock:
            if self.running == 0:
                self.before = sys.getrecursionlimit()
            self.running += 1
            self.make(depth)

    def give_back(self, wanted: int | None) -> None:
        """`wanted`: the limit that the program set itself."""
        with self.lock:
            self.running -= 1
            if wanted is not None:
                self.before = wanted
            if self.running == 0:
                sys.setrecursionlimit(self.before)


ROOM = Room()
