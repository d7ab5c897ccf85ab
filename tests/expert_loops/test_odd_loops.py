"""Loops over range(E) that look like experts' loops and do something else besides: the same bits as plain Python."""

from __future__ import annotations

import pytest
import torch

from moebius import capture

E = 4
LOOPS = {}


def odd(function):
    LOOPS[function.__name__] = function
    return function


@odd
def left_early(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok])
        if e == 2:
            break
    return out


@odd
def with_an_else(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok])
    else:
        out = out + 1
    return out


@odd
def returning_inside(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        if tok.numel() > 100:
            return out
        out.index_add_(0, tok, x[tok])
    return out


@odd
def filling_a_list(x, idx):
    out = torch.zeros_like(x)
    names = []
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok])
        names.append(f"e{e}")
    return out * len(names)


@odd
def looking_up_a_dictionary(x, idx):
    out = torch.zeros_like(x)
    d = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] * d[e])
    return out


@odd
def counting(x, idx):
    out = torch.zeros_like(x)
    n = 0
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok])
        n += 1
    return out * n


@odd
def computing_with_e(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] * e + e)
    return out


@odd
def keeping_the_last_iterations_sum(x, idx):
    out = torch.zeros_like(x)
    prev = None
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] if prev is None else x[tok] * prev)
        prev = x[tok].sum()
    return out


@odd
def with_a_finally(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        try:
            out.index_add_(0, tok, x[tok] / (e - 5))
        finally:
            out.add_(1)
    return out


@odd
def carrying_two(x, idx):
    out = torch.zeros_like(x)
    last = out
    for e in range(E):
        tok, s = torch.where(idx == e)
        last, out = (out, out.index_add(0, tok, x[tok]))
    return out + last


@odd
def read_afterwards(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        y = x[tok]
        out.index_add_(0, tok, y)
    return (out, tok, y)


@odd
def an_iterator_that_has_begun(x, idx):
    out = torch.zeros_like(x)
    it = iter(range(E))
    next(it)
    for e in it:
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok])
    return out


@odd
def an_iterator_that_is_kept(x, idx):
    out = torch.zeros_like(x)
    it = iter(range(E))
    for e in it:
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok])
    return out + len(list(it))


@odd
def an_iterator_that_the_iteration_advances(x, idx):
    out = torch.zeros_like(x)
    it = iter(range(E))
    for e in it:
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok])
        next(it, None)
    return out


@odd
def random(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] * torch.rand(1))
    return out


@odd
def setting_e(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] * -e)
        e = e * 2
    return out + e


@odd
def calling_a_closure(x, idx):
    out = torch.zeros_like(x)

    def f():
        return torch.where(idx == e)[0]

    for e in range(E):
        tok = f()
        out.index_add_(0, tok, x[tok])
        if (idx == e).sum() > 3:
            continue
        out.add_(0.5)
    return out


@odd
def asking_whether_e_is_zero(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] / (e if e else 7))
    return out


@odd
def arithmetic_on_e(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok] / (1 + e // 2) ** 2 * (e % 3) + (e < 2) * x[tok])
    return out


@odd
def e_as_a_float(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok].repeat(1, 1)[:, :4].new_full((len(tok), x.shape[1]), float(e)))
    return out


@odd
def slices_by_e(x, idx):
    out = torch.zeros_like(x)
    for e in range(E):
        tok, s = torch.where(idx == e)
        out.index_add_(0, tok, x[tok, e : e + 1].expand(-1, x.shape[1]) + x[tok][:, :e].sum(1, keepdim=True))
    return out


def results(function, seed):
    generator = torch.Generator().manual_seed(seed)
    x, index = torch.randn(9, 5, generator=generator), torch.randint(0, E, (9, 2), generator=generator)
    torch.manual_seed(5)
    found = function(x, index)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.share(8)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("name", LOOPS)
def test_the_same_bits(name, backend):
    captured = capture(LOOPS[name], backend=backend)
    for seed in range(3):
        for a, b in zip(results(captured, seed), results(LOOPS[name], seed), strict=True):
            assert torch.equal(a, b) if backend == "eager" else torch.allclose(a, b, rtol=1e-5, atol=1e-6)
