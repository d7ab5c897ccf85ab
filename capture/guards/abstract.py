"""What abstract classes said no to: anybody may register a class with one later (``abc.ABCMeta.register``)."""

from __future__ import annotations

import abc
import weakref


class NoSubclasses:
    """A guard: pairs of classes of which the first was no subclass of the second. A yes is never taken back, so that it
    needs none. It is asked again only after something was registered anywhere in the process."""

    def __init__(self) -> None:
        self.asked: dict[tuple[weakref.ref[type], weakref.ref[type]], None] = {}
        self.token = abc.get_cache_token()

    def add(self, kind: type, abstract: type) -> None:
        self.asked[weakref.ref(kind), weakref.ref(abstract)] = None

    def __call__(self) -> bool:
        token = abc.get_cache_token()
        if token != self.token:
            for kind, abstract in self.asked:
                of, base = kind(), abstract()
                if of is not None and base is not None and issubclass(of, base):
                    return False
            self.token = token
        return True
