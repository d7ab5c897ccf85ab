"""Whole captured steps of many ranks in one process, under torch's LocalTensorMode: forward, backward, the average,
clipping and the optimizer equal one process on the joined batch. And what one of many ranks captures, on the fake
group: the same graph, however many there are."""
from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_layers import Experts
from seeds import examples
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import capture, stats
from moebius.errors import MeshError
from moebius.lowering import distribution
from moebius.lowering.distribution import Sharded

D, N, K = 8, 6, 2
pytestmark = pytest.mark.faults  # (a size of many ranks at once, which that mode alone has, is no index)


class Block(nn.Module):
    """``favour_E`` is added to the router's scores where experts are chosen: a test says where tokens go."""

    def __init__(self, E):
        super().__init__()
        self.router, self.experts = nn.Linear(D, E), Experts(E, D, N)

    def forward(self, x, favour_E):
        scores = self.router(x)
        index = (scores + favour_E).topk(K)[1]
        return x + self.experts(x, index, scores.softmax(-1).gather(-1, index))


class Model(nn.Module):
    def __init__(self, E, recompute, layers):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(Block(E) for _ in range(layers)), recompute

    def forward(self, x, favour_E):
        for block in self.blocks:
            x = checkpoint(block, x, favour_E, use_reentrant=False) if self.recompute else block(x, favour_E)
        return x


def step(model, optimizer, parts, divisor, by_tokens):
    """parts: of this rank, a backward pass for each."""
    optimizer.zero_grad()
    shown = 0
    for x, favour_E, y in parts:
        loss = (model(x, favour_E) - y).square().sum() / divisor
        if by_tokens:
            loss = moebius.weigh_by_tokens(loss, x.shape[0])
        loss.backward()
        shown = shown + loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()
    return shown, norm


def build(E, recompute=False, layers=2):
    torch.manual_seed(0)
    model = Model(E, recompute, layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@contextlib.contextmanager
def fake_group(ranks, rank=0):
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(dp, ep, data="dp"):
    return init_device_mesh("cpu", (dp, ep), mesh_dim_names=(data, "ep"))


def draw(generator, sizes, E, favoured=()):
    """For each rank its tokens, what makes them go to the favoured experts, and targets."""
    favour_E = torch.zeros(E, dtype=torch.float64)
    favour_E[list(favoured)] = 1e3
    return [
        (torch.randn(n, D, generator=generator, dtype=torch.float64), favour_E,
         torch.randn(n, D, generator=generator, dtype=torch.float64))
        for n in sizes
    ]


def on_each_rank(values):
    return LocalTensor({rank: value.clone() for rank, value in enumerate(values)})


def of_rank(value, rank):
    return value._local_tensors[rank] if isinstance(value, LocalTensor) else value


class Simulation:
    """So many ranks and one process, from the same weights."""

    def __init__(self, dp, ep, E, recompute=False, chunks=1, layers=2):
        self.ranks, self.run = dp * ep, capture(step, mesh=mesh_of(dp, ep), plan=distribution.Plan("ep", chunks=chunks))
        self.mode, self.one = LocalTensorMode(self.ranks), build(E, layers=layers)
        with self.mode:
            self.ours = build(E, recompute, layers)

    def train(self, batches, by_tokens=False, passes=1):
        """One step of each, which are equal: the mean of the ranks' losses, the norm, and all that the step leaves.
        by_tokens: the loss of a rank is a mean over its tokens, not the sum."""
        x, favour_E, y = zip(*batches, strict=True)
        joined = [(torch.cat(x), favour_E[0], torch.cat(y))]
        counts = [float(len(part)) for part in x]
        loss, norm = step(*self.one, joined, sum(counts) if by_tokens else self.ranks, False)
        mine = [
            (on_each_rank(part[i::passes] for part in x), on_each_rank(favour_E),
             on_each_rank(part[i::passes] for part in y)) for i in range(passes)
        ]
        with self.mode:
            divisor = on_each_rank(map(torch.tensor, counts)) if by_tokens else 1.0
            losses, norms = self.run(*self.ours, mine, divisor, by_tokens)
            each = range(self.ranks)
            torch.testing.assert_close(sum(of_rank(losses, rank) for rank in each) / self.ranks, loss)
            self.compare([(norms, norm)])
            for p, q in zip(self.ours[0].parameters(), self.one[0].parameters(), strict=True):
                held, state = self.ours[1].state[p], self.one[1].state[q]
                self.compare([(p.detach(), q.detach()), (p.grad, q.grad), *((held[key], state[key]) for key in state)])

    def compare(self, pairs):
        for found, expected in pairs:
            whole = found.full_tensor() if isinstance(found, Sharded) else found
            for rank in (0, self.ranks // 2, self.ranks - 1):
                torch.testing.assert_close(of_rank(whole, rank), expected, rtol=1e-10, atol=1e-12)


def test_sixty_four_ranks_equal_one_process():
    """8 x 8, experts that 8 does not divide, batches of 0 to 5 tokens."""
    E = 20
    with fake_group(64):
        many = Simulation(8, 8, E)
        generator = torch.Generator().manual_seed(1)
        for number in range(3):
            many.train(draw(generator, [(rank * 7 + number) % 6 for rank in range(64)], E))
        assert stats(many.run).graphs == 1 and stats(many.run).breaks == 0
        held = many.ours[0].blocks[0].experts.gate_up
        assert isinstance(held, Sharded)
        assert [len(held.local._local_tensors[rank]) for rank in range(8)] == [3] * 6 + [2, 0]


@pytest.mark.share(2)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("way", ["plain", "two backward passes", "recomputed", "by tokens"])
def test_ways_to_train(way, chunks):
    with fake_group(4):
        many = Simulation(2, 2, 5, way == "recomputed", chunks)
        generator = torch.Generator().manual_seed(2)
        for sizes in ([3, 5, 2, 4], [4, 0, 1, 6]):
            many.train(draw(generator, sizes, 5), way == "by tokens", 1 + (way == "two backward passes"))
        assert stats(many.run).breaks == 0


@pytest.mark.share(1)
@pytest.mark.parametrize("dp, ep, E", [(1, 3, 4), (2, 2, 5)])
def test_generated_batches(dp, ep, E):
    """Empty ranks, all tokens to a few experts, E that ep does not divide; one capture for all batches."""
    sizes = st.lists(st.integers(0, 6), min_size=dp * ep, max_size=dp * ep).filter(any)
    favoured = st.sets(st.integers(0, E - 1), max_size=3)
    with fake_group(dp * ep):
        many = Simulation(dp, ep, E)

        @settings(max_examples=examples(16), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(sizes, favoured, st.integers(0, 99))
        def check(sizes, favoured, seed):
            many.train(draw(torch.Generator().manual_seed(seed), sizes, E, favoured))

        check()


def test_a_tensor_that_is_not_of_all_ranks_is_told():
    with fake_group(2):
        ours = build(4)
        with LocalTensorMode(2), pytest.raises(MeshError, match="within the mode"):
            parts = [tuple(map(on_each_rank, zip(*draw(torch.Generator(), [2, 2], 4), strict=True)))]
            capture(step, mesh=mesh_of(1, 2))(*ours, parts, 1.0, False)


def captured_by(ranks, rank, E, monkeypatch, data="dp", chunks=1):
    """The text of the graph that one rank captures, and how many experts it has. data: another name for each of two
    equal meshes, as DTensor remembers the first one's groups."""
    graphs = []

    def place(gm, options, of=distribution.place):
        graphs.append(of(gm, options))
        return graphs[-1]

    with fake_group(ranks, rank), monkeypatch.context() as patch:
        patch.setattr(distribution, "place", place)
        model, optimizer = build(E)
        run = capture(step, mesh=mesh_of(2, ranks // 2, data), plan=distribution.Plan("ep", chunks=chunks))
        for sizes in ([5], [7]):
            run(model, optimizer, draw(torch.Generator(), sizes, E), 1.0, False)
        assert stats(run).breaks == 0
        return str(graphs[-1].graph).replace(f"{data} of ", "dp of "), len(model.blocks[0].experts.gate_up.local)


@pytest.mark.share(1)
@pytest.mark.parametrize("chunks", [1, 3])
def test_graphs_are_the_same_text_on_all_ranks_and_as_long_for_thousands(monkeypatch, chunks):
    few, here = captured_by(8, 0, 9, monkeypatch, "dp", chunks)
    last, there = captured_by(8, 7, 9, monkeypatch, "data", chunks)
    assert few == last and (here, there) == (3, 0)
    assert few.count("expert_parallel.start_combine]") == (0 if chunks == 1 else 2 * chunks)
    for ranks in (1024, 16384):
        many, _ = captured_by(ranks, 0, 9, monkeypatch, "dp", chunks)
        assert len(many.splitlines()) == len(few.splitlines())
