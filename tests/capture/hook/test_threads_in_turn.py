"""Threads that switch the frame hook on and off in any order: it is installed while one is hooked, and no longer."""

import queue
import threading

from hypothesis import example, given, settings
from hypothesis import strategies as st

from moebius.hook import call_hooked, call_unhooked, evaluator, is_hooked

CALLS = {"on": call_hooked, "off": call_unhooked}


class Worker:
    """A thread that goes one call deeper ("on", "off") or one call up, as it is told."""

    def __init__(self):
        self.orders, self.states, self.hooked = queue.Queue(), queue.Queue(), [False]
        self.thread = threading.Thread(target=self.level, daemon=True)
        self.thread.start()
        assert self.states.get(timeout=60) is False

    def level(self):
        self.states.put(is_hooked())
        while (order := self.orders.get(timeout=60)) != "up":
            CALLS[order](self.level)
            self.states.put(is_hooked())

    def tell(self, order):
        self.orders.put(order)
        if order == "up":
            self.hooked.pop()
        else:
            self.hooked.append(order == "on")
        assert self.states.get(timeout=60) == self.hooked[-1]

    def end(self):
        while len(self.hooked) > 1:
            self.tell("up")
        self.orders.put("up")
        self.thread.join(60)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["on", "off", "up"])), max_size=20))
@example([(0, "on"), (1, "on"), (0, "off"), (1, "off"), (0, "up"), (0, "up"), (1, "up"), (1, "up")])
def test_any_order(iterations):
    workers = [Worker() for _ in range(3)]
    for number, order in iterations:
        if order != "up" or len(workers[number].hooked) > 1:
            workers[number].tell(order)
            assert evaluator() == ("moebius" if any(worker.hooked[-1] for worker in workers) else "default")
    for worker in workers:
        worker.end()
    assert evaluator() == "default"
