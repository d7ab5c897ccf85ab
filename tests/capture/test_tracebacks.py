"""An exception that leaves a captured call has the traceback of plain Python: the user's frames, and no others."""

import contextlib
import io
import logging
import traceback

import pytest
import torch
import torch.utils.checkpoint

from moebius import capture

ERRORS = {
    "raise": "raise ValueError('boom')",
    "operator": "x @ torch.ones(7, 3)",
    "C": "int('x')",
    "attribute": "x.nothing",
    "index": "x[torch.tensor([9])]",
    "chained": "\n        try: {}['a']\n        except KeyError as error: raise ValueError('b') from error",
    "again": "\n        try: int('x')\n        except ValueError: print(end=''); raise",
    "stop": "next(iter([]))",
}
PLACES = {
    "here": "{}",
    "callee": "\n    def callee(x):\n        {}\n    callee(x)",
    "native callee": "\n    def callee(x):\n        print(end='')\n        {}\n    callee(x)",
    "called in C": "\n    def callee(x):\n        {}\n    list(map(callee, [x]))",
    "method": "\n    class Own:\n        def __add__(self, x):\n            {}\n    Own() + x",
    "with": "\n    with contextlib.suppress(ZeroDivisionError):\n        {}",
    "finally": "\n    try:\n        {}\n    finally:\n        print(end='')",
    "generator": "\n    def made():\n        yield 1\n        {}\n    [*made()]",
}
BEFORE = {"graph": "x = x * 2", "break": "x = x * 2; print(end='')", "nothing": "pass"}
ALL = [(error, place, before) for error in ERRORS for place in PLACES for before in BEFORE]
ALL = [one for one in ALL if one[:2] != ("stop", "called in C")]  # (map ends there)
# An operator that fails while the graph runs is raised where the frames that Python itself entered stand: not in one
# that C has called, of which nothing is kept.
IN_THE_GRAPH = [("index", "called in C"), ("index", "generator")]


def made(error, place, before):
    lines = PLACES[place].split("{}")
    inner = ERRORS[error]
    if inner.startswith("\n"):  # as deep as the place is
        deep = len(lines[0].rpartition("\n")[2]) or 4
        inner = inner.strip("\n ").replace("\n        ", "\n" + " " * deep)
    first = lines[0] or "\n    "
    text = f"def step(x):\n    {BEFORE[before]}{first}{inner}{lines[1]}"
    names = {"torch": torch, "contextlib": contextlib}
    exec(compile(text + "\n    return x\n", f"<{error}, {place}, {before}>", "exec"), names)
    return names["step"]


def left_with(function):
    try:
        function(torch.ones(2))
    except Exception as error:
        found = []
        while error is not None:
            found.append((type(error), [(f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__)[1:]]))
            error = error.__cause__ or error.__context__
        return found
    raise AssertionError("nothing was raised")


@pytest.mark.share(30)
@pytest.mark.parametrize(("error", "place", "before"), ALL, ids=["-".join(one) for one in ALL])
def test_the_frames_are_plain_pythons(error, place, before):
    step = made(error, place, before)
    want, captured = left_with(step), capture(step, backend="eager")
    if (error, place) in IN_THE_GRAPH:
        want = [(kind, frames[:-1]) for kind, frames in want]
    for _ in range(3):
        assert left_with(captured) == want


def test_a_handler_within_the_call_sees_no_others_either():
    def step(x, go_through):
        y = x * 2
        try:
            print(end="")
            go_through(failing, [y])
        except ValueError as error:
            return [f.filename for f in traceback.extract_tb(error.__traceback__)]
        return None

    def failing(x):
        print(end="")
        raise ValueError

    for go_through in (lambda function, items: list(map(function, items)), lambda function, items: function(*items)):
        captured = capture(step, backend="eager")
        for _ in range(3):
            assert captured(torch.ones(2), go_through) == [__file__] * len(step(torch.ones(2), go_through))


# What becomes of an error that the step itself handles: ``{}`` raises it, ``seen`` and ``keep`` look at it.
HANDLED = {
    "kept": "\n    try:\n        {}\n    except Exception as e: kept.append(e)",
    "returned": "\n    try:\n        {}\n    except Exception as e: return e",
    "looked at": "\n    try:\n        {}\n    except Exception as e:\n        at = e.__traceback__\n"
    "        while at is not None: kept.append(at.tb_lineno); at = at.tb_next",
    "formatted": "\n    try:\n        {}\n    except Exception: kept.append(traceback.format_exc())",
    "logged": "\n    try:\n        {}\n    except Exception: logging.getLogger('tb').exception('no')",
    "behind a break": "\n    try:\n        {}\n    except Exception as e: print(end=''); kept.append(e)",
    "seen on its way": "\n    try:\n        try:\n            {}\n        finally: print(end='')\n"
    "    except Exception as e: kept.append(e)",
    "raised again": "\n    try:\n        try:\n            {}\n        except Exception: raise\n"
    "    except Exception as e: kept.append(e)",
    "raised by its name": "\n    try:\n        try:\n            {}\n        except Exception as e: raise e\n"
    "    except Exception as e: kept.append(e)",
    "a reason": "\n    try:\n        try:\n            {}\n        except Exception as e: raise KeyError from e\n"
    "    except Exception as e: kept.append(e)",
    "given to a context": "\n    with looking(kept):\n        {}",
    "raised later": "\n    try:\n        {}\n    except Exception as e: held = e\n    print(end='')\n    raise held",
}
ERRORS_HANDLED = ("raise ValueError('boom')", "int('x')", "{}['a']", "(lambda n: [1][n])(3)")
PLACES_HANDLED = {
    "here": "{}",
    "callee": "def callee(x):\n{0}    if x is None: pass\n{0}    {1}\n{0}callee(x)",
    "deep": "def inner(x):\n{0}    {1}\n{0}def outer(x): return inner(x)\n{0}outer(x)",
    "generator": "def made():\n{0}    yield 1\n{0}    {1}\n{0}[*made()]",
}


@pytest.mark.share(16)
@pytest.mark.parametrize("place", PLACES_HANDLED)
@pytest.mark.parametrize("error", ERRORS_HANDLED)
@pytest.mark.parametrize("handled", HANDLED)
def test_an_error_that_the_step_handles_has_them_too(handled, error, place):
    lines = HANDLED[handled].split("{}")
    inner = PLACES_HANDLED[place].replace("{0}", lines[0].rpartition("\n")[2]).replace("{1}", error)
    inner = error if inner == "{}" else inner
    source = f"def step(x, kept):\n    x = x * 2{lines[0]}{inner}{lines[1]}\n    return x\n"

    @contextlib.contextmanager
    def looking(kept):
        try:
            yield
        except Exception as e:
            kept.append(e)

    names = {"torch": torch, "traceback": traceback, "logging": logging, "looking": looking}
    exec(compile(source, f"<{handled}, {error}, {place}>", "exec"), names)

    def text_of(found):
        if isinstance(found, BaseException):
            places = [(f.name, f.lineno, f.colno) for f in traceback.extract_tb(found.__traceback__)]
            while places and places[0][0] in ("seen", "<module>"):
                places.pop(0)
            return type(found), str(found), places, text_of(found.__cause__), text_of(found.__context__)
        return found if isinstance(found, str | int) else None

    def seen(step):
        told, kept = io.StringIO(), []
        handler = logging.StreamHandler(told)
        logging.getLogger("tb").addHandler(handler)
        try:
            found = [text_of(step(torch.ones(2), kept)) for _ in range(3)]
        except Exception as e:
            found = text_of(e)
        finally:
            logging.getLogger("tb").removeHandler(handler)
        return found, [text_of(k) for k in kept], told.getvalue()

    assert seen(capture(names["step"], backend="eager")) == seen(names["step"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_no_frame_of_ours_stands_in_what_a_checkpoint_raises(reentrant: bool) -> None:
    def body(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x * (3 - k))

    def step(x: torch.Tensor, k: torch.Tensor) -> None:
        torch.utils.checkpoint.checkpoint(body, x.requires_grad_(), k, use_reentrant=reentrant).sum().backward()

    captured, known = capture(step), []
    captured(torch.eye(3), torch.tensor(2.0))
    for call in (step, captured):
        with pytest.raises(torch.linalg.LinAlgError) as raised:
            call(torch.eye(3), torch.tensor(9.0))
        frames = [frame.f_code for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
        known.append([(code.co_filename, code.co_name) for code in frames if code is not body.__code__])
    assert known[0] == known[1]
