"""`make exports`: one torch goes on with the same bits, and what is not the same is told."""

from __future__ import annotations

import json

import pytest
import torch

from . import across


def outcomes(folder, capsys):
    capsys.readouterr()
    across.read(folder)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("across") / "written"
    across.write(at, [])
    return at


def test_one_torch_goes_on_with_the_same_bits(folder, capsys):
    found = outcomes(folder, capsys)
    assert len(found) == 5
    assert all(outcome["difference"] == 0.0 for outcome in found), found


def test_a_difference_and_a_damaged_file_are_told(folder, capsys):
    expected = torch.load(folder / "0" / "expected", weights_only=True)
    name = next(name for name in expected["state"] if name.endswith("exp_avg"))
    expected["state"][name].mul_(1.001)
    torch.save(expected, folder / "0" / "expected")
    data = bytearray((folder / "1" / "step.moebius").read_bytes())
    (folder / "1" / "step.moebius").write_bytes(data[: len(data) // 2])
    changed, damaged, *others = outcomes(folder, capsys)
    assert changed["difference"] > across.ROUNDING
    assert damaged["error"].startswith("LoadError")
    assert all(outcome["difference"] == 0.0 for outcome in others)
