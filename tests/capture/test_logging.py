"""Log lines that are on: nodes between the operators where Python's own handlers write them, else graph breaks."""

from __future__ import annotations

import io
import logging
import logging.handlers

import pytest
import torch

from moebius import capture, explain, stats
from moebius.python import messages

LOG = logging.getLogger("moebius.tests.logging")
CHILD = logging.getLogger("moebius.tests.logging.child")
FORMAT = "%(name)s %(levelname)s %(filename)s:%(lineno)d %(funcName)s: %(message)s"


class Collected(logging.StreamHandler):
    """A handler of the user's own: it could do anything."""


@pytest.fixture
def stream():
    """What the loggers write to; both are as before afterwards."""
    for logger in (LOG, CHILD):
        logger.handlers[:], logger.filters[:], logger.propagate = [], [], logger is CHILD
        logger.setLevel(logging.INFO)
    found = io.StringIO()
    handler = logging.StreamHandler(found)
    handler.setFormatter(logging.Formatter(FORMAT))
    LOG.addHandler(handler)
    yield found
    LOG.handlers[:], CHILD.handlers[:] = [], []


def without_pytests():
    """pytest puts handlers of its own in, after the fixtures."""
    LOG.handlers[:] = [handler for handler in LOG.handlers if type(handler) is logging.StreamHandler]
    CHILD.handlers[:] = []


def said(stream, function, *args):
    stream.seek(0)
    stream.truncate()
    result = function(*args)
    return result, stream.getvalue()


def lines(x, n):
    CHILD.info("size %d of %s", len(x), "all")
    y = x * 2
    CHILD.debug("not this one %s", y)
    print("between")
    LOG.warning(f"sum {y.sum().item():.3f}")
    CHILD.log(logging.ERROR, "mean %s, %s", y.mean(), n)
    LOG.info("100%")
    return y + n


def check(function, stream, *args):
    want, text = said(stream, function, *args)
    captured = capture(function)
    for _ in range(3):
        found, now = said(stream, captured, *args)
        assert torch.equal(found, want) and now == text and text
    return captured


def test_lines_stand_between_the_operators_of_one_graph(stream, capsys):
    without_pytests()
    captured = check(lines, stream, torch.ones(3), 1)
    assert stats(captured).graphs == 1 and not stats(captured).breaks
    assert capsys.readouterr().out == "between\n" * 4
    assert not explain(lines)(torch.ones(3), 1).breaks


def test_what_was_said_before_an_error(stream):
    def step(x, i):
        LOG.info("begin")
        y = x[i]
        LOG.info("end %d", len(x))
        return y * 2

    without_pytests()
    captured = check(step, stream, torch.ones(3), torch.tensor(1))
    assert not stats(captured).breaks
    for function in (step, captured):
        stream.truncate(0)
        with pytest.raises(IndexError):
            function(torch.ones(3), torch.tensor(7))
        assert "begin" in stream.getvalue() and "end" not in stream.getvalue()


def test_a_level_that_changes_and_a_handler_that_comes(stream):
    without_pytests()
    captured = check(lines, stream, torch.ones(3), 1)
    for change in (
        lambda: LOG.setLevel(logging.ERROR),
        lambda: CHILD.setLevel(logging.DEBUG),
        lambda: LOG.addHandler(Collected(stream)),
        lambda: LOG.handlers[0].addFilter(lambda record: "sum" not in record.getMessage()),
        lambda: LOG.handlers[0].setFormatter(logging.Formatter("%(message)s")),
        lambda: LOG.handlers.clear(),
    ):
        change()
        want = said(stream, lines, torch.ones(3), 1)[1]
        assert said(stream, captured, torch.ones(3), 1)[1] == want


class Formatter(logging.Formatter):
    """Looks at what the step has done so far."""

    def format(self, record):
        return f"{record.getMessage()} {DONE}"


DONE: list[int] = []


def use(what):
    if what == "handler":
        LOG.handlers[0].__class__ = Collected
    elif what == "formatter":
        LOG.handlers[0].setFormatter(Formatter())
    elif what == "filter":
        LOG.addFilter(lambda record: not DONE or DONE[-1] > 1)
    elif what == "method":
        LOG.handlers[0].emit = lambda record: LOG.handlers[0].stream.write(f"{record.getMessage()} {DONE}\n")
    elif what == "stream":
        LOG.handlers[0].stream = Shouting(LOG.handlers[0].stream)
    elif what == "memory":
        LOG.handlers[:] = [logging.handlers.MemoryHandler(1, target=LOG.handlers[0])]


class Shouting:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        self.stream.write(f"{text}{DONE}")

    def flush(self):
        pass


@pytest.mark.parametrize("what", ["handler", "formatter", "filter", "method", "stream", "memory"])
def test_code_of_the_users_that_a_line_would_run_is_a_graph_break(stream, what):
    def step(x):
        DONE.clear()
        DONE.append(1)
        y = x * 2
        LOG.info("one")
        DONE.append(2)
        LOG.info("two")
        return y + len(DONE)

    without_pytests()
    use(what)
    captured = check(step, stream, torch.ones(2))
    assert stats(captured).breaks and all(b.hint for b in explain(step)(torch.ones(2)).breaks)


class Shown:
    def __str__(self):
        DONE.append(3)
        return f"shown {len(DONE)}"


@pytest.mark.parametrize(
    "line",
    [
        lambda x: LOG.info("object %s", Shown()),
        lambda x: LOG.info("%(a)s", {"a": 1}),
        lambda x: LOG.info("extra", extra={"a": 1}),
        lambda x: LOG.info("deeper", stacklevel=2),
        lambda x: LOG.info(Shown()),
    ],
    ids=["object", "dict", "extra", "stacklevel", "no text"],
)
def test_lines_that_are_graph_breaks(stream, line):
    def step(x):
        line(x)
        return x * 2

    without_pytests()
    DONE.clear()
    want = said(stream, step, torch.ones(2))
    captured = capture(step)
    for _ in range(2):
        DONE.clear()
        found = said(stream, captured, torch.ones(2))
        assert found[1] == want[1] and torch.equal(found[0], want[0])
    assert stats(captured).breaks


def other(value, one, two):
    return two if value == one else one


def turn_disabled():
    LOG.disabled = not LOG.disabled


def turn_level():
    LOG.level = other(LOG.level, logging.INFO, logging.ERROR)
    CHILD._cache.clear()


def turn_propagate():
    CHILD.propagate = not CHILD.propagate


def turn_handler_level():
    LOG.handlers[0].level = other(LOG.handlers[0].level, logging.NOTSET, logging.ERROR)


def turn_text():
    style = LOG.handlers[0].formatter._style
    style._fmt = other(style._fmt, FORMAT, "%(message)s")


def turn_terminator():
    LOG.handlers[0].terminator = other(LOG.handlers[0].terminator, "\n", ";")


def turn_class():
    logging.StreamHandler.terminator = other(logging.StreamHandler.terminator, "\n", ";")


def add_handler():
    CHILD.handlers.append(LOG.handlers[0])


def turn_filters():
    CHILD.filters.clear() if CHILD.filters else CHILD.filters.append(lambda record: False)


def turn_cache():
    CHILD._cache[logging.INFO] = not CHILD._cache[logging.INFO]


CHANGES = [
    turn_disabled, turn_level, turn_propagate, turn_handler_level, turn_text, turn_terminator, turn_class, add_handler,
    turn_filters, turn_cache,
]  # fmt: skip


def changed_by(change, stream, captures):
    """What is logged by four calls of a step that changes between two lines how lines are logged."""
    without_pytests()
    LOG.disabled, LOG.level, CHILD.level, CHILD.propagate, CHILD.filters[:] = False, logging.INFO, 0, True, []
    LOG.manager._clear_cache()
    logging.StreamHandler.terminator = "\n"
    vars(LOG.handlers[0]).pop("terminator", None)
    LOG.handlers[0].formatter, LOG.handlers[0].level = logging.Formatter(FORMAT), logging.NOTSET

    def step(x):
        CHILD.info("before")
        LOG.warning("before")
        change()
        CHILD.info("after")
        LOG.warning("after")
        return x + 1

    run = capture(step) if captures else step
    try:
        return [said(stream, run, torch.ones(2))[1] for _ in range(4)]
    finally:
        logging.StreamHandler.terminator, CHILD.level = "\n", logging.INFO


@pytest.mark.parametrize("change", CHANGES)
def test_the_step_changes_how_lines_are_logged(stream, change):
    plain = changed_by(change, stream, captures=False)
    assert changed_by(change, stream, captures=True) == plain
    assert len(set(plain)) > 1 or "after" not in plain[0]


def test_to_look_for_that_is_needed(stream, monkeypatch):
    monkeypatch.setattr(messages, "read_by_logging", lambda logger: [])
    for change in (turn_disabled, turn_terminator, add_handler):
        assert changed_by(change, stream, captures=True) != changed_by(change, stream, captures=False)
