"""A loaded step whose batch leaves an expert module without a gradient, or gives one to a module that had none."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moebius
from moebius import LoadError, capture, load
from moebius.lowering.step import MissingGradientError

from .test_hostile import edited, members_of, pack

E, D, N = 4, 8, 6
ALL = (0, 1, 2, 3)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Layer(nn.Module):
    """Token t goes to the expert whose feature of it is largest."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x):
        weight, index = x[:, :E].softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weight[token, slot, None])
        return out


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def training(kind):
    torch.manual_seed(0)
    model = Layer()
    return model, OPTIMIZERS[kind](model.parameters())


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def batch(experts, seed):
    x = torch.randn(10, D, generator=torch.Generator().manual_seed(seed)) * 0.1
    for row in range(10):
        x[row, experts[row % len(experts)]] += 3
    return x


def exported(path, kind, batches, function=step):
    """The plain run that has seen the same batches."""
    moebius.reset()
    captured = capture(function, backend="eager")
    mine, plain = training(kind), training(kind)
    for seed, experts in enumerate(batches):
        captured(*mine, batch(experts, seed))
        function(*plain, batch(experts, seed))
    captured.export(path)
    return plain


BEFORE = [(ALL, ALL, ALL), (ALL, ALL, (0, 1, 2)), ((0, 1), (0, 1), (0, 1)), ((0, 1), ALL, ALL, (0, 1))]
AFTER = [(0, 1), ALL, (2,), ALL, (3, 0)]


@pytest.mark.share(5)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", BEFORE)
def test_as_plain(before, kind, tmp_path):
    model, optimizer = exported(tmp_path / "f", kind, before)
    loaded = load(tmp_path / "f")
    for seed, experts in enumerate(AFTER):
        x = batch(experts, 100 + seed)
        assert torch.equal(loaded(x), step(model, optimizer, x))
        state = loaded.state_dict()
        for name, parameter in model.named_parameters():
            mine = state[f"model.{name}"]
            assert torch.equal(mine, parameter), (name, experts)
            assert (mine.grad is None) == (parameter.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, parameter.grad)


ELSEWHERE = """
import pickle, sys
from moebius import load
loaded = load(sys.argv[1])
for x in pickle.load(open(sys.argv[2], "rb")):
    loaded(x)
pickle.dump({n: v for n, v in loaded.state_dict().items() if n.startswith("model.")}, open(sys.argv[3], "wb"))
"""


def test_in_another_process(tmp_path):
    model, optimizer = exported(tmp_path / "f", "adamw", BEFORE[0])
    batches = [batch(experts, 100 + seed) for seed, experts in enumerate(AFTER)]
    (tmp_path / "x").write_bytes(pickle.dumps(batches))
    files = [str(tmp_path / name) for name in "fxy"]
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, *files], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for x in batches:
        step(model, optimizer, x)
    found = pickle.loads((tmp_path / "y").read_bytes())
    assert all(torch.equal(found[f"model.{name}"], parameter) for name, parameter in model.named_parameters())


def looks_at_gradients(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    total = sum(p.grad.abs().sum() for p in model.parameters())
    optimizer.step()
    return total.detach()


def test_somebody_else_asks(tmp_path):
    """What the code would do without the gradient only Python knows: an error."""
    exported(tmp_path / "f", "sgd", (ALL, ALL), looks_at_gradients)
    with pytest.raises(MissingGradientError):
        load(tmp_path / "f")(batch((0, 1), 9))


def test_without_what_the_file_says(tmp_path):
    """An older file, which does not say whose the state is, loads, and raises the error."""
    exported(tmp_path / "f", "adamw", BEFORE[0])
    members = edited(tmp_path / "f", "program.json", lambda p: {name: p[name] for name in p if name != "owners"})
    loaded = load(pack(tmp_path / "old", members))
    loaded(batch(ALL, 7))
    with pytest.raises(MissingGradientError):
        loaded(batch((0, 1), 8))


def test_files_that_say_something_else(tmp_path):
    exported(tmp_path / "f", "adamw", BEFORE[0])
    count = len(json.loads(members_of(tmp_path / "f")["program.json"])["inputs"])
    for owners in ([[0, count]], [[-1, 0]], [[0]], [[0, 1, 2]], [["a", 0]], {"a": 1}, [[True, 0]], "x"):
        with pytest.raises(LoadError, match="hostile"):
            changed = edited(tmp_path / "f", "program.json", lambda p, owners=owners: p.update(owners=owners))
            load(pack(tmp_path / "hostile", changed))
    for role in ("optimiser", 1, None, ["optimizer"], {"role": "helper"}):
        def change(graph, role=role):
            next(node for node in graph["nodes"] if node["op"] == "call")["role"] = role

        with pytest.raises(LoadError, match="hostile"):
            load(pack(tmp_path / "hostile", edited(tmp_path / "f", "graph.json", change)))


def test_every_input_everybodys_state(tmp_path):
    """Wrong owners leave out other nodes, and run nothing that the file could not name anyway."""
    exported(tmp_path / "f", "adamw", BEFORE[0])
    count = len(json.loads(members_of(tmp_path / "f")["program.json"])["inputs"])
    pairs = [[i, j] for i in range(count) for j in (0, count // 2)]
    loaded = load(pack(tmp_path / "odd", edited(tmp_path / "f", "program.json", lambda p: p.update(owners=pairs))))
    try:
        loaded(batch((0, 1), 8))
    except (MissingGradientError, KeyError, RuntimeError) as error:
        assert str(error)
