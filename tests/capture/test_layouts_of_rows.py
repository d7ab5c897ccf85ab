"""How rows of unknown number lie in memory: strides, whether there is a copy, and what a write into it reaches."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, stats
from moebius.tensors import layouts

ROWS = {
    "masked": lambda x_TD, mask_T: x_TD[mask_T],
    "by number": lambda x_TD, mask_T: x_TD[torch.where(mask_T)[0]],
    "transposed": lambda x_TD, mask_T: x_TD[mask_T].T,
    "the first": lambda x_TD, mask_T: x_TD[: int(mask_T.sum())],
    "joined": lambda x_TD, mask_T: torch.cat([x_TD[mask_T], x_TD[mask_T]]),
    "numbers": lambda x_TD, mask_T: x_TD.masked_select(mask_T[:, None])[:, None],
    "of three axes": lambda x_TD, mask_T: x_TD[mask_T].view(-1, 2, 2),
    "of three axes, transposed": lambda x_TD, mask_T: x_TD[mask_T].view(-1, 2, 2).transpose(0, 1),
}
VIEWS = {
    "as they are": lambda rows: rows,
    "transposed": lambda rows: rows.transpose(0, 1),
    "each second": lambda rows: rows[:, ::2],
    "an axis in front": lambda rows: rows.unsqueeze(0),
    "an axis between": lambda rows: rows.unsqueeze(1).transpose(0, 1),
    "a column": lambda rows: rows[:, 0],
    "expanded": lambda rows: rows.unsqueeze(-1).expand(*rows.shape, 3),
    "one row": lambda rows: rows[:1],
    "flipped": lambda rows: rows.flip(0).transpose(0, 1),
}


def written(made):
    """What a write into ``made(view)`` reaches."""

    def step(view, base_TD):
        found = made(view)
        found.add_(1)
        return view.sum(), base_TD.sum(), found.sum()

    return step


def tried(made):
    def step(view, base_TD):
        try:
            return made(view).sum()
        except RuntimeError:
            return view.sum() * 5

    return step


ASKED = {
    "is_contiguous": lambda view, base_TD: view.sum() * (2.0 if view.is_contiguous() else 1.0),
    "stride": lambda view, base_TD: view.sum() + float(sum(view.stride())),
    "is it given back": lambda view, base_TD: view.sum() * (2.0 if view.contiguous() is view else 1.0),
    "stride of a clone": lambda view, base_TD: view.sum() + view.clone().stride()[0],
    "stride of a like one": lambda view, base_TD: view.sum() + torch.empty_like(view).stride()[-1],
    "stride of a result": lambda view, base_TD: view.sum() + view.relu().stride()[0],
    "axes": lambda view, base_TD: view.sum() + view.squeeze().dim(),
    "bytes": lambda view, base_TD: view.sum() + view.untyped_storage().nbytes(),
    "where it begins": lambda view, base_TD: view.sum() + view.storage_offset(),
    "is it a view": lambda view, base_TD: view.sum() + (view._base is None),
    "view": tried(lambda view: view.view(-1)),
    "view, transposed": tried(lambda view: view.transpose(0, -1).view(-1)),
    **{
        name: written(made)
        for name, made in {
            "into contiguous": lambda view: view.contiguous(),
            "into reshaped": lambda view: view.reshape(-1),
            "into flattened": lambda view: view.flatten(),
            "into raveled": lambda view: view.ravel(),
            "into unflattened": lambda view: view.unflatten(-1, (1, -1)),
            "into one of its shape": lambda view: view.reshape(*view.shape),
            "into a conversion": lambda view: view.to(torch.float32, memory_format=torch.contiguous_format),
        }.items()
    },
}
CHOSEN = ([0, 1, 2], [1], [], [0, 1, 4], [5], [0, 1, 2, 3, 4, 5])  # of six rows, in six calls


def differing(rows, view, asked, trains: bool = False) -> list[int]:
    """The calls that differ from plain Python."""

    def step(x_TD, mask_T):
        base_TD = x_TD * 1
        return asked(view(rows(base_TD, mask_T)), base_TD)

    def outcome(each, chosen):
        x_TD = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_(trains)
        try:
            found = each(x_TD, torch.isin(torch.arange(6), torch.tensor(chosen)))
        except (RuntimeError, IndexError) as error:
            return type(error)
        return [one.item() for one in (found if isinstance(found, tuple) else (found,))]

    captured = capture(step, backend="eager")
    calls = [[repr(outcome(each, chosen)) for each in (captured, step)] for chosen in CHOSEN]
    assert stats(captured).hits
    return [number for number, (ours, plain) in enumerate(calls) if ours != plain]


@pytest.mark.share(30)
@pytest.mark.filterwarnings("ignore::moebius.MoebiusWarning")
@pytest.mark.parametrize("trains", (False, True))
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("rows", ROWS)
def test_as_in_python(rows, view, asked, trains):
    assert differing(ROWS[rows], VIEWS[view], ASKED[asked], trains) == []


def test_where_no_unknown_number_may_be_one(monkeypatch):
    monkeypatch.setattr(layouts, "may_be_thin", lambda size: type(size) is int and size < 2)
    assert differing(ROWS["by number"], VIEWS["a column"], ASKED["stride of a clone"])
