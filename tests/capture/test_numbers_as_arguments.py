"""Numbers that tensors hold as arguments of operators: positions, sizes, steps, also those that an operator refuses."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import avg_pool1d, embedding, interpolate, one_hot, pad

from moebius import capture, stats
from moebius.torch_facts import torch_private, torch_sizes


def written_at(x_KD, n):
    made = x_KD.clone()
    made[:, n] = 0
    return made


def written_from(x_KD, n):
    made = x_KD.clone()
    made[:, n:] = 0
    made[:, :n] += 1
    return made


OPERATORS = {
    "view": lambda x_KD, n: x_KD.view(n, -1),
    "reshape": lambda x_KD, n: x_KD.reshape(n, 4),
    "view, the last axis": lambda x_KD, n: x_KD.view(2, n),
    "unflatten": lambda x_KD, n: x_KD.unflatten(1, (n, -1)),
    "expand": lambda x_KD, n: x_KD[:1].expand(abs(n), 4),  # (-1 would keep the size: docs/soundness.md)
    "narrow": lambda x_KD, n: x_KD.narrow(0, n, 1),
    "narrow to": lambda x_KD, n: x_KD.narrow(1, 0, n),
    "split": lambda x_KD, n: x_KD.split([n, 4 - n], 1)[0],
    "split evenly": lambda x_KD, n: x_KD.split(n, 1)[0],
    "chunk": lambda x_KD, n: x_KD.chunk(n, 1)[0],
    "tensor_split": lambda x_KD, n: x_KD.tensor_split(n, 1)[0],
    "select": lambda x_KD, n: x_KD.select(1, n),
    "item": lambda x_KD, n: x_KD[0, n],
    "column": lambda x_KD, n: x_KD[:, n],
    "up to": lambda x_KD, n: x_KD[:, :n],
    "from": lambda x_KD, n: x_KD[:, n:],
    "window": lambda x_KD, n: x_KD[0, n : n + 2],
    "the last": lambda x_KD, n: x_KD[:, -n:],
    "written at": written_at,
    "written from": written_from,
    "in steps": lambda x_KD, n: x_KD[:, ::n],
    "roll": lambda x_KD, n: x_KD.roll(n, 1),
    "sum": lambda x_KD, n: x_KD.sum(n),
    "transpose": lambda x_KD, n: x_KD.transpose(0, n),
    "permute": lambda x_KD, n: x_KD.permute(n, 1 - n),
    "cat": lambda x_KD, n: torch.cat([x_KD, x_KD], n),
    "stack": lambda x_KD, n: torch.stack([x_KD, x_KD], n),
    "softmax": lambda x_KD, n: x_KD.softmax(n),
    "topk": lambda x_KD, n: x_KD.topk(n, 1).values,
    "kthvalue": lambda x_KD, n: x_KD.kthvalue(n, 1).values,
    "arange": lambda x_KD, n: torch.arange(n).sum() + x_KD,
    "zeros": lambda x_KD, n: torch.zeros(n, 2) + x_KD.sum(),
    "eye": lambda x_KD, n: torch.eye(n) * x_KD.sum(),
    "linspace": lambda x_KD, n: torch.linspace(0, 1, n) * x_KD.sum(),
    "repeat": lambda x_KD, n: x_KD.repeat(n, 1),
    "repeat_interleave": lambda x_KD, n: x_KD.repeat_interleave(n, 0),
    "one_hot": lambda x_KD, n: one_hot(torch.tensor([0, 1]), n) + x_KD.sum(),
    "bincount": lambda x_KD, n: torch.bincount(torch.tensor([0, 1]), minlength=n) + x_KD.sum(),
    "pad": lambda x_KD, n: pad(x_KD, (n, 0)),
    "tril": lambda x_KD, n: x_KD.tril(n),
    "diagonal": lambda x_KD, n: x_KD.diagonal(n),
    "avg_pool1d": lambda x_KD, n: avg_pool1d(x_KD[None], n)[0],
    "interpolate": lambda x_KD, n: interpolate(x_KD[None], n)[0],
    "embedding": lambda x_KD, n: embedding(torch.tensor([0]) + n, x_KD),
    "size": lambda x_KD, n: x_KD * x_KD.size(n),
    "mask": lambda x_KD, n: x_KD * (torch.arange(4)[None] < n),
    "power": lambda x_KD, n: x_KD**n,
    "shift": lambda x_KD, n: x_KD + (1 << n),
    "remainder": lambda x_KD, n: x_KD + 7 % n,
}
READ = {
    "item": lambda number: number.item(),
    "int": int,
    "tolist": lambda number: number.tolist(),
    "of a list": lambda number: torch.stack([number, number]).tolist()[0],
    "counted": lambda number: (torch.arange(20) < number + 5).sum().item() - 5,
    "of numpy": lambda number: number.numpy().item(),
}
ASKED = {
    "sum": lambda out: out.sum(),
    "sizes": lambda out: out.sum() + sum((place + 1) * size for place, size in enumerate(out.shape)),
    "number": lambda out: out.numel() + 0 * out.sum(),
}
NUMBERS = (2, 1, -1, 0, 3, 4, -2, 5, 9, 2)


def differing(operator, read, asked) -> list[int]:
    """The calls that differ from plain Python."""

    def step(x_KD, number):
        return asked(operator(x_KD, read(number)))

    def outcome(each, number):
        try:
            return each(torch.arange(8.0).view(2, 4) + 0.5, torch.tensor(number)).item()
        except Exception as error:
            return type(error)

    captured = capture(step, backend="eager")
    calls = [[repr(outcome(each, number)) for each in (captured, step)] for number in NUMBERS]
    assert stats(captured).entries or stats(captured).hits
    return [place for place, (ours, plain) in enumerate(calls) if ours != plain]


@pytest.mark.share(30)
@pytest.mark.filterwarnings("ignore::moebius.MoebiusWarning")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("operator", OPERATORS)
def test_as_in_python(operator, read, asked):
    assert differing(OPERATORS[operator], READ[read], ASKED[asked]) == []


def test_where_a_number_becomes_what_an_operator_took_it_to_be(monkeypatch):
    monkeypatch.setattr(torch_sizes, "as_made", torch_private.expression)
    assert differing(OPERATORS["reshape"], READ["item"], ASKED["sum"])
