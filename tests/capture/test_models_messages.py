"""What models say (warnings, logging, print) and the contexts around it: the same lines in the same places."""

# ruff: noqa: B007, B018, B028, B904, B905, E731, E741, E742, F841, UP031, UP042 (the programs are as users write them)

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import warnings

import plain_python
import pytest
import torch
from torch import nn

LOG = logging.getLogger("moebius.tests.models")
LOG.setLevel(logging.INFO)
LOG.propagate = False


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.out = []

    def emit(self, record):
        self.out.append((record.levelname, record.getMessage(), record.funcName, record.lineno))


def warn_once():
    def step(x):
        warnings.warn("same text")
        warnings.warn(f"size {len(x)}", FutureWarning, stacklevel=1)
        for i in range(2):
            warnings.warn("loop", DeprecationWarning)
        return x * 2

    return step, []


def warn_stack():
    def helper(x):
        warnings.warn("helper", UserWarning, stacklevel=2)
        return x + 1

    def step(x):
        y = helper(x)
        return helper(y) * 2

    return step, []


def warn_filters():
    def step(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("hidden")
            y = x * 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                warnings.warn("raised")
            except UserWarning as e:
                y = y + len(str(e))
        warnings.warn("seen")
        return y

    return step, []


def print_between():
    def step(x):
        print("before", len(x))
        warnings.warn("w")
        print("mid")
        y = x * 2
        print(f"{y.shape} {y.sum().item():.3f}", end="!\n", flush=True)
        print(y[0, 0].item(), file=sys.stderr)
        print("a", "b", sep="-")
        return y

    return step, []


LOG = logging.getLogger("cold")
LOG.setLevel(logging.INFO)
LOG.propagate = False


def logs():
    h = Kept()
    LOG.handlers[:] = [h]

    def step(x):
        LOG.debug("no %d", 1)
        LOG.info("size %d", len(x))
        LOG.warning(f"val {x.shape}")
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("expensive %s", x.sum().item())
        try:
            raise ValueError("q")
        except ValueError:
            LOG.exception("oops")
        LOG.log(logging.ERROR, "tensor %s", x.sum().item() > 0)
        return x * 2

    return step, [h]


def log_once():
    h = Kept()
    LOG.handlers[:] = [h]

    @functools.lru_cache(None)
    def warning_once(msg):
        LOG.warning(msg)

    def step(x):
        warning_once("only once")
        warning_once("only once")
        return x * 2

    return step, [h]


def checks():
    def step(x):
        torch._check(x.shape[0] > 1, lambda: "small")
        torch._check(len(x) < 100)
        assert x.dim() == 2, f"dims {x.dim()}"
        n = x.sum().item()
        return x * 2

    return step, []


def check_item():
    def step(x):
        n = int(x.sum().item())
        torch._check_is_size(n)
        torch._check(n < 50)
        return x * n, torch.zeros(n + 1)

    return step, []


def check_fails():
    def step(x):
        try:
            torch._check(x.shape[0] > 10, lambda: f"small {x.shape[0]}")
        except RuntimeError as e:
            return x * 2, str(e)
        return x

    return step, []


def exit_stack():
    log = []

    @contextlib.contextmanager
    def named(n):
        log.append("+" + n)
        try:
            yield n
        finally:
            log.append("-" + n)

    def step(x):
        with contextlib.ExitStack() as s:
            a = s.enter_context(named("a"))
            s.push(lambda *e: log.append("pushed"))
            s.callback(log.append, "cb")
            for n in "bc":
                s.enter_context(named(n))
            y = x * len(a)
            keep = s.pop_all()
        keep.close()
        return y * 2

    return step, [log]


def ctx_mgr():
    log = []

    @contextlib.contextmanager
    def named(n):
        log.append("+" + n)
        try:
            yield n
        except KeyError as e:
            log.append(repr(e))
        finally:
            log.append("-" + n)

    @named("deco")
    def f(x):
        return x * 3

    class CD(contextlib.ContextDecorator):
        def __enter__(self):
            log.append("in")
            return self

        def __exit__(self, *e):
            log.append("out")
            return False

    @CD()
    def g(x):
        return x + 1

    def step(x):
        with named("k"):
            raise KeyError("z")
        with contextlib.suppress(ValueError, KeyError):
            with named("v"):
                raise ValueError
        with contextlib.nullcontext(4) as n:
            y = x * n
        with contextlib.closing(C()) as c:
            y = y + c.n
        return g(f(y))

    class C:
        n = 2

        def close(self):
            log.append("closed")

    return step, [log]


def redirect():
    buf = []

    def step(x):
        b = io.StringIO()
        with contextlib.redirect_stdout(b):
            print("inside", len(x))
            y = x * 2
        print("outside", repr(b.getvalue()))
        return y, b.getvalue()

    return step, []


def recfun():
    def step(x):
        with torch.profiler.record_function("a") as r:
            y = x * 2
        with torch.autograd.profiler.record_function("b"):
            y = y + 1
        with (
            torch.autograd.set_detect_anomaly(False),
            torch.autograd.graph.save_on_cpu() if False else contextlib.nullcontext(),
        ):
            y = y * 2
        return y

    return step, []


def inference_mode():
    def step(x):
        with torch.inference_mode():
            y = x * 2
            z = y.is_inference()
        with torch.inference_mode(False):
            w = x * 3

        @torch.inference_mode()
        def f(a):
            return a + 1

        @torch.no_grad()
        def g(a):
            return a + 1

        return y, z, w, f(x), g(x), torch.is_inference_mode_enabled()

    return step, []


def grad_modes():
    def step(x):
        with torch.no_grad():
            a = x * 2
            with torch.enable_grad():
                b = x * 3
        with torch.set_grad_enabled(len(x) > 3):
            c = x * 4
        torch.set_grad_enabled(False)
        d = x * 5
        torch.set_grad_enabled(True)
        return a, b, c, d, a.requires_grad, b.requires_grad

    return step, []


def autocasts():
    m = nn.Linear(4, 4)

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
            with torch.autocast("cpu", enabled=False):
                z = m(x)

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def f(a):
            return a @ a.T

        return y.float() + z, y.dtype, f(x).dtype, torch.get_autocast_dtype("cpu")

    return step, [m]


CASES = [
    warn_once,
    warn_stack,
    warn_filters,
    print_between,
    logs,
    log_once,
    checks,
    check_item,
    check_fails,
    exit_stack,
    ctx_mgr,
    redirect,
    recfun,
    inference_mode,
    grad_modes,
    autocasts,
]
UNBROKEN = {"autocasts", "checks", "log_once"}


@pytest.mark.share(10)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_three_calls_are_plain_pythons(recipe, backend):
    found = plain_python.compare(recipe, backend)
    assert recipe.__name__ not in UNBROKEN or not found.breaks
