"""Warnings' filters, switches of torch, progress bars: captured, or a graph break whose hint says what to do.

Six calls of each beside plain Python (``tests/support/tables.py``).
"""

# ruff: noqa: B006, B007, B008, B018, B023, B028, B904, B905, E731, E741, E742, F841 (as users write)

from __future__ import annotations

import contextlib
import functools
import io
import warnings

import plain_python
import pytest
import torch
import torch.nn.functional as F
from tables import hold, net
from torch import nn

from moebius.heap.varying import VaryingPlaces


def cw_ignore():
    m = net()

    def step(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("x")
            y = m(x)
        return y

    return step, [m]


def cw_category():
    m = net()

    def step(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=UserWarning)
            y = m(x)
            warnings.warn("a", UserWarning)
            warnings.warn("b", RuntimeWarning)
        warnings.warn("after")
        return y

    return step, [m]


def cw_filter():
    def step(x):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*skip.*")
            y = x * 2
            warnings.warn("please skip this")
            warnings.warn("not this")
        return y

    return step, []


def cw_deco():
    def quiet(fn):
        @functools.wraps(fn)
        def g(*a, **k):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return fn(*a, **k)

        return g

    @quiet
    def f(x):
        warnings.warn("hi")
        return x.sin()

    def step(x):
        return f(x) + f(x * 2)

    return step, []


def cw_args311():
    def step(x):
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            warnings.warn("f", FutureWarning)
            y = x * 2
        return y

    return step, []


def cw_exc():
    def step(x):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.warn("boom")
        except UserWarning as e:
            return x * 2, str(e)

    return step, []


def cw_torch_op():
    m = net()

    def step(x):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)
            y = torch.meshgrid(x[0].detach(), x[1].detach())[0]
            z = F.tanh(x)
            z2 = torch.nn.functional.l1_loss(x, x[:1])
        return y, z, z2

    return step, [m]


def cw_op_fails():
    st = []

    def step(x):
        st.append(1)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                y = torch.embedding(x.detach(), torch.tensor([len(st)]))
                warnings.warn("in")
        except IndexError:
            warnings.warn("caught")
            return x * 2
        warnings.warn("after")
        return x + y

    return step, [st]


def cw_op_fails_out():
    st = []

    def step(x):
        st.append(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = torch.embedding(x.detach(), torch.tensor([len(st)]))
        warnings.warn("after")
        return x + y

    return step, [st]


def cw_nested():
    def step(x):
        with warnings.catch_warnings(action="ignore"):
            with warnings.catch_warnings():
                warnings.resetwarnings()
                warnings.simplefilter("always")
                warnings.warn("shown")
            warnings.warn("hidden")
            y = x * 2
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="bo.m")
                try:
                    warnings.warn("boom")
                except UserWarning as e:
                    y = y + len(str(e))
        warnings.warn("last")
        return y

    return step, []


def cw_branch():
    n = [0]

    def step(x):
        n[0] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if x.sum() > 4.5:
                n[0] += 10
                warnings.warn("big")
                return x * 3
            warnings.warn("small")
        warnings.warn("end")
        return x * 2

    return step, [n]


def cw_module():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                warnings.warn("m")
                return self.l(x)

    m = nn.Sequential(M(), M(), M())

    def step(x):
        m(x).sum().backward()
        warnings.warn("end")
        return m[0].l.weight.grad.clone()

    return step, [m]


def sdpa():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def step(x):
        q = x.reshape(1, 1, -1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            z = F.scaled_dot_product_attention(q, q, q)
        return y + z, torch.backends.cuda.flash_sdp_enabled()

    return step, []


def sdpa_legacy():
    def step(x):
        q = x.reshape(1, 1, -1, 4)
        with (
            torch.backends.cuda.sdp_kernel(enable_flash=False, enable_math=True, enable_mem_efficient=False)
            if hasattr(torch.backends.cuda, "sdp_kernel")
            else contextlib.nullcontext()
        ):
            y = F.scaled_dot_product_attention(q, q, q)
        return y

    return step, []


def sdpa_switch():
    def step(x):
        old = torch.backends.cuda.math_sdp_enabled()
        torch.backends.cuda.enable_math_sdp(True)
        q = x.reshape(1, 1, -1, 4)
        y = F.scaled_dot_product_attention(q, q, q)
        torch.backends.cuda.enable_math_sdp(old)
        return y

    return step, []


def sdpa_priority():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def step(x):
        q = x.reshape(1, 1, -1, 4)
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
            y = F.scaled_dot_product_attention(q, q, q)
            with sdpa_kernel(backends=SDPBackend.FLASH_ATTENTION):
                y = y + F.scaled_dot_product_attention(q, q, q)
        return y

    return step, []


def sdpa_deco():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class A(nn.Module):
        def __init__(self):
            super().__init__()
            self.backend = SDPBackend.MATH
            self.l = nn.Linear(4, 4)

        def forward(self, x):
            q = self.l(x).reshape(1, 1, -1, 4)
            with sdpa_kernel(self.backend):
                return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    m = nn.Sequential(A(), A())

    @sdpa_kernel(SDPBackend.MATH)
    def f(x):
        return m(x.reshape(-1, 4))

    def step(x):
        try:
            with sdpa_kernel(SDPBackend.MATH):
                print("in", torch.backends.cuda.flash_sdp_enabled())
                if x.shape[0] == 4:
                    raise KeyError("k")
        except KeyError:
            pass
        return f(x).sum(), torch.backends.cuda.flash_sdp_enabled()

    return step, [m]


def sdpa_wrong():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def step(x):
        q = x.reshape(1, 1, -1, 4)
        i = torch.tensor([x.shape[0] - 1, 3])
        try:
            with sdpa_kernel(SDPBackend.MATH):
                y = F.scaled_dot_product_attention(q, q, q)
                z = torch.embedding(x.detach(), i)
        except IndexError:
            return q * 2, torch.backends.cuda.flash_sdp_enabled()
        return y.sum() + z.sum(), torch.backends.cuda.flash_sdp_enabled()

    return step, []


def anomaly():
    m = net()

    def step(x):
        with torch.autograd.detect_anomaly():
            m(x).sum().backward()
        return m[0].weight.grad.clone()

    return step, [m]


def anomaly_set():
    m = net()

    def step(x):
        with torch.autograd.set_detect_anomaly(True):
            l = m(x).sum()
            l.backward()
        return l.detach(), torch.is_anomaly_enabled()

    return step, [m]


def anomaly_flag():
    def step(x, debug=False):
        with torch.autograd.set_detect_anomaly(debug):
            y = x * 2
        torch.autograd.set_detect_anomaly(False)
        return y

    return step, []


def cw_raise():
    n = [0]

    def step(x):
        n[0] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("m")
            if n[0] % 2:
                raise ValueError("v")
        warnings.warn("end")
        return x * 2

    return step, [n]


def cw_record():
    def step(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            y = x * 2
            warnings.warn("recorded")
        return y, len(w), str(w[0].message)

    return step, []


def cw_record_inside():
    """Read while the block is open, and warned again."""

    def step(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            warnings.warn("one")
            n = len(w)
            y = x * 2
            warnings.warn("two")
            first = [str(one.message) for one in w]
        warnings.warn("after")
        return y, n, first, len(w), isinstance(w, list), w is None

    return step, []


def cw_record_unread():
    kept = []

    def step(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            y = x * 2
            warnings.warn(f"{x.shape[0]} rows")
        kept.append(w)
        return y

    return step, [plain_python.Reader(lambda: [[(str(m.message), m.category, m.lineno) for m in w] for w in kept])]


def cw_record_op_fails():
    def step(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            warnings.warn("one")
            try:
                y = torch.ones(3)[(x.detach() * 0).long() + x.shape[0] - 1]
            except IndexError:
                y = x
            warnings.warn("two")
        return y, [str(one.message) for one in w]

    return step, []


def cw_record_around():
    """The block is around the step, whose list it reads."""
    kept = []

    def inner(x):
        warnings.warn("inner")
        return x * 2, len(kept[-1])

    def step(x):
        return inner(x)

    def run(x):
        with warnings.catch_warnings(record=True) as w:
            warnings.simplefilter("always")
            kept.append(w)
            return step(x)

    return run, []


def cw_break():
    def step(x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("one")
            b = x.data_ptr() > 0
            warnings.warn("two")
            y = x * 2
        warnings.warn("three")
        return y

    return step, []


def sdpa_break_in():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def step(x):
        q = x.reshape(1, 1, -1, 4)
        with sdpa_kernel(SDPBackend.MATH):
            y = F.scaled_dot_product_attention(q, q, q)
            s = y.data_ptr() > 0
            z = F.scaled_dot_product_attention(y, q, q)
        return z, s, torch.backends.cuda.flash_sdp_enabled()

    return step, []


def anomaly_break_in():
    m = net()

    def step(x):
        with torch.autograd.detect_anomaly():
            y = m(x).sum()
            p = y.data_ptr() > 0
            y.backward()
        return m[0].weight.grad.clone(), torch.is_anomaly_enabled()

    return step, [m]


def tqdm_loop():
    from tqdm import tqdm

    m = net()

    def step(x):
        t = 0
        for row in tqdm(range(3), disable=True):
            t = t + m(x).sum() * row
        return t

    return step, [m]


def tqdm_shown():
    from tqdm import tqdm

    m = net()

    def step(x):
        t = 0
        for row in tqdm([x, x * 2], file=io.StringIO()):
            t = t + m(row).sum()
        return t

    return step, [m]


def tqdm_desc():
    from tqdm import tqdm

    m = net()

    def step(x):
        bar = tqdm([1, 2, 3], desc="a", leave=False, file=io.StringIO())
        t = 0
        for k in bar:
            l = m(x).sum() * k
            bar.set_postfix(loss=l.item())
            t = t + l
        return t

    return step, [m]


def tqdm_outer():
    from tqdm import tqdm

    m = net()
    bar = tqdm(total=10, file=io.StringIO())

    def step(x):
        y = m(x).sum()
        bar.update(1)
        bar.set_description(f"loss {y.item():.2f}")
        return y, bar.n

    return step, [m]


def tqdm_trange():
    from tqdm.auto import trange

    def step(x):
        for i in trange(3, disable=None, file=io.StringIO()):
            x = x * 2
        return x

    return step, []


def tqdm_outer_disabled():
    from tqdm import tqdm

    m = net()
    bar = tqdm(total=10, disable=True)

    def step(x):
        y = m(x).sum()
        bar.update(1)
        bar.set_postfix(loss=1)
        for row in tqdm(range(2), disable=True):
            y = y * 2
        return y, bar.n

    return step, [m]


TABLE = {
    cw_ignore: None,
    cw_category: None,
    cw_filter: None,
    cw_deco: None,
    cw_args311: None,
    cw_exc: None,
    cw_torch_op: None,
    cw_op_fails: None,  # (the length of a list that grows is a number of the graph)
    cw_op_fails_out: None,
    cw_nested: None,
    cw_branch: None,
    cw_module: None,
    sdpa: None,
    sdpa_legacy: None,
    sdpa_switch: None,
    sdpa_priority: None,
    sdpa_deco: None,
    sdpa_wrong: None,
    anomaly: None,
    anomaly_set: None,
    anomaly_flag: None,
    cw_raise: ("exception", "natively"),
    cw_record: ("warnings that were recorded", "after the step"),
    cw_record_inside: ("warnings that were recorded", "after the step"),
    cw_record_unread: None,
    cw_record_op_fails: ("warnings that were recorded", "after the step"),
    cw_record_around: ("warnings that were recorded", "after the step"),
    cw_break: ("tensor read as a number", "keep them in tensors"),
    sdpa_break_in: ("tensor read as a number", "keep them in tensors"),
    anomaly_break_in: ("tensor read as a number", "keep them in tensors"),
    tqdm_loop: ("progress bar", "around the step"),
    tqdm_shown: ("progress bar", "around the step"),
    tqdm_desc: ("progress bar", "around the step"),
    tqdm_outer: ("progress bar", "after it"),
    tqdm_trange: ("progress bar", "around the step"),
    tqdm_outer_disabled: ("progress bar", "around the step"),
}


@pytest.mark.share(8)
@pytest.mark.parametrize("recipe", TABLE, ids=lambda r: r.__name__)
def test_captured_or_a_break_that_says_what_to_do(recipe):
    hold(recipe, TABLE[recipe])


def test_a_list_that_records_is_not_what_it_was_when_the_step_began(monkeypatch):
    """(In cw_record_inside the text of a recorded message is a graph break before that.)"""
    monkeypatch.setattr(VaryingPlaces, "refuse_recorder", lambda self, record: None)
    with pytest.raises(AssertionError, match="call "):
        plain_python.compare(cw_record_around)
