"""Questions for the strides of what an operator computed, where torch's fake of the operator has others."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional

from moebius import capture, stats
from moebius.tensors import layouts, tensors


def asked(y):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = y.dim() in formats and y.is_contiguous(memory_format=formats[y.dim()])
    return y.stride(), y.is_contiguous(), last


def images(x):
    return x.unsqueeze(1).expand(-1, 4, -1, -1).contiguous(memory_format=torch.channels_last)


def volumes(x):
    return x[:, None, None].expand(-1, 4, 4, -1, -1).contiguous(memory_format=torch.channels_last_3d)


def norm_of_transposed(x):
    y = functional.batch_norm(x.transpose(1, 2), None, None, training=True)
    return (y if y.is_contiguous() else y.flip(0)), y.stride()


def made_contiguous(x):
    return functional.channel_shuffle(images(x), 2).contiguous().view(-1)


def padded(x):
    y = functional.pad(images(x), (1, 1, 1, 1), mode="reflect") * 2
    return y.contiguous().view(-1), asked(y), asked(functional.pad(images(x), (1, 1, 1, 1), "replicate"))


def unpooled(x):
    y, indices = functional.max_pool2d(images(x), 2, return_indices=True)
    return asked(functional.max_unpool2d(y, indices, 2)), asked(indices)


def pooled(x):
    y, indices = functional.max_pool3d(volumes(x), 2, return_indices=True)
    return asked(y), asked(indices)


def elementwise(x):
    return [
        asked(y)
        for y in (
            torch.div(x[0].T, 2, rounding_mode="floor"),
            x[0].T // 2,
            x[0].T / 2,
            torch.copysign(x[0].T, torch.tensor(1.0)),
            torch.logical_and(x.transpose(1, 2), x[:1].transpose(1, 2)),
        )
    ]


def others(x):
    y = x.transpose(1, 2)
    square = y[..., :4]
    return [
        asked(found)
        for found in (
            images(x).roll(1, 0),
            functional.one_hot((y > 0).long(), 2),
            torch.isin(y, y),
            torch.xlogy(square, square.mT),
            torch.angle(torch.complex(y, y)),
            torch.poisson(y.abs()),
            functional.logsigmoid(y),
            functional.rrelu(y, training=True),
            torch.fft.fftshift(y),
            torch.matrix_exp(square),
            functional.unfold(x[:, None], 2),
            torch.ldexp(torch.tensor(1.0), y),
            x[:, (y > 0).long()[0].mT],
        )
    ]


def thin(x):
    """Axes of size 1, along which strides say nothing but are there."""
    y = images(x)[:, :1]
    z = x[:, None].transpose(0, 3)
    return [
        (found.stride(), found.is_contiguous(), found.dim_order())
        for found in (
            1 - y,
            y * x[:, None],
            y.flip(1),
            torch.nan_to_num(y),
            torch.zeros_like(z),
            y.diff(dim=0),
            z.sort(0)[0] * 2,
            functional.prelu(z, torch.ones(1)),
            torch.einsum("abc,acd->abd", x[:1], x[:1].mT),
            torch.fft.fft(x[:, :1]),
            functional.interpolate(images(x), size=(1, 1)),
        )
    ]


def into_others(x):
    y, first, second, third = x.transpose(1, 2), x.new_empty(0), x.new_empty(0), torch.empty_like(x)
    torch.add(y, 1, out=first)
    torch.mul(x, 2, out=second)
    torch.add(x, 1, out=third)
    return asked(first), asked(first * 2), asked(second), asked(third)


def into_the_sizes_of_operands(x):
    y = x.permute(2, 1, 0)
    first, second, third = y.new_empty(y[:, :1].shape), y.new_empty(y.shape), torch.empty_like(y)
    torch.add(y[:, :1], y, out=first)
    torch.sum(y, 0, out=second)
    torch.mul(y, y[:, :1], out=third)
    return asked(first), asked(second), asked(third)


def viewed(x):
    return functional.logsigmoid(x.transpose(1, 2)).view(-1)


def filled(x):
    y = x.new_zeros(2, 2, 3).permute(2, 0, 1)
    torch.arange(0, 12, out=y)
    z = torch.linspace(0, 1, 12, out=x.new_zeros(3, 4))
    return y.flatten(), y.shape, z, torch.arange(4, out=torch.zeros(7, dtype=torch.long)[:4])


def derived_forward(x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x + 1)
        versions = [dual._version]
        y = dual.sin()
        versions.append(x._version)
        return forward_ad.unpack_dual(dual).tangent, forward_ad.unpack_dual(y * 2).tangent, versions


PROGRAMS = (
    derived_forward, filled, norm_of_transposed, made_contiguous, padded, unpooled, pooled, elementwise, others, thin,
    into_others, into_the_sizes_of_operands, viewed,
)  # fmt: skip


def answers(program, run):
    torch.manual_seed(0)
    return [str(run(torch.randn(3, 5, 4))) for _ in range(2)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_answer_is_the_operators(program):
    assert answers(program, capture(program, backend="eager")) == answers(program, program)


def test_what_is_contiguous_is_no_break():
    def step(x):
        y = functional.batch_norm(x.transpose(1, 2).contiguous(), None, None, training=True)
        z = functional.batch_norm(images(x), None, None, training=True)
        y = y.contiguous() if y.is_contiguous() else y * 2
        y = functional.pad(y.mT, (1, 1)).contiguous() * 2
        return y, asked(z), asked(x.mT @ x), asked(functional.max_pool2d(x, 2))

    captured = capture(step, backend="eager", fullgraph=True)
    x = torch.randn(3, 3, 3)
    assert str(captured(x)) == str(step(x))
    assert stats(captured).graphs == 1


@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_answered_by_the_fakes_it_is_wrong(monkeypatch):
    monkeypatch.setattr(layouts.Layouts, "refuse_unsure", lambda *_: None)
    monkeypatch.setattr(tensors, "refuse_lost_tangent", lambda *_: None)
    wrong = []
    for program in PROGRAMS:
        try:
            same = answers(program, capture(program, backend="eager")) == answers(program, program)
        except RuntimeError:  # a view of what was to be contiguous
            same = False
        wrong += [] if same else [program]
    surely = {derived_forward, filled, norm_of_transposed, made_contiguous, elementwise, others, thin, into_others}
    assert set(wrong) >= surely
