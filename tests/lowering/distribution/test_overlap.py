"""Layers in chunks, whose exchanges run beside products: equal to serial ones, and what runs between start and wait."""
from __future__ import annotations

import itertools
from math import prod

import pytest
import torch
import torch.distributed as dist
from rank_layers import Experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from moebius import capture, stats
from moebius.errors import MeshError, OptionError
from moebius.kernels import cpu
from moebius.kernels.contract import Weights
from moebius.lowering.distribution import Plan, RanksDisagreeError, Sharded, overlap, traffic
from moebius.lowering.distribution.channels import Channel, Waiting
from moebius.lowering.distribution.expert_parallel import start_dispatch
from moebius.lowering.distribution.rendezvous import GROUPS

E, D, N, K = 5, 12, 7, 2


class Layer(nn.Module):
    """Experts and a shared one, behind a router."""

    def __init__(self, D=D, E=E, N=N):
        super().__init__()
        self.router, self.norm, self.experts = nn.Linear(D, E), nn.LayerNorm(D), Experts(E, D, N)
        self.shared = nn.Sequential(nn.Linear(D, N), nn.GELU(), nn.Linear(N, D))

    def forward(self, x):
        h = self.norm(x)
        weights, index = torch.topk(self.router(h).softmax(-1), K)
        return x + self.experts(h, index, weights / weights.sum(-1, keepdim=True)) + self.shared(h)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), nn.Tanh(), Layer()).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (model(batch) ** 2).sum() / 30
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :])


def local(tensor):
    return tensor.local if isinstance(tensor, Sharded) else tensor


def distance(mine, theirs):
    """The largest difference, as a part of the largest number where that is above 1."""
    mine, theirs = local(mine), local(theirs)
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1)) if mine.numel() else 0.0


def train(sizes, chunks, tokens):
    """20 steps in chunks beside 20 serial ones: how far they are apart, and the text of the last graph."""
    generator = torch.Generator().manual_seed(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    serial, piped = build(), build()
    mesh = mesh_of(*sizes)
    runs = [capture(step, mesh=mesh), capture(step, mesh=mesh, plan=Plan("ep", chunks=chunks))]
    apart, sent = 0.0, []
    for number in range(20):
        counts = [tokens[(number // 3 + i) % len(tokens)] for i in range(ranks)]
        batch = [torch.randn(count, D, generator=generator, dtype=torch.float64) for count in counts][rank]
        results = []
        for run, training in zip(runs, (serial, piped), strict=True):
            traffic.reset()
            results += run(*training, batch)
            sent.append((traffic.header, traffic.dispatch, traffic.combine, traffic.reduce, traffic.collectives))
        apart = max(apart, *(distance(results[i + 2], results[i]) for i in (0, 1)))
        (*bytes_there, few), (*bytes_here, many) = sent[-2:]
        assert bytes_there == bytes_here and many == few + 2 * 4 * (chunks - 1)
    for mine, theirs in zip(piped[0].parameters(), serial[0].parameters(), strict=True):
        apart = max(apart, distance(mine, theirs), distance(mine.grad, theirs.grad))
    assert not any(group.pending or group.half for group in GROUPS.values())  # all that was begun was waited for
    return apart, stats(runs[1]).breaks


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "sizes, chunks, tokens", [((2,), 3, [8, 0, 31, 1]), ((2,), 2, [9, 30, 1]), ((2, 2), 4, [9, 3, 14, 1, 6])]
)
def test_trains_as_without_chunks(on_ranks, sizes, chunks, tokens):
    for apart, breaks in on_ranks(prod(sizes), train, sizes, chunks, tokens):
        assert apart <= 1e-12 and breaks == 0


class Clock:
    """Time as it passes on a machine whose experts do ``rate`` operations a second, on a link of ``bandwidth`` bytes a
    second that carries one exchange after the other; all else takes none. The exchanges are gloo's: a wait for one is
    over when it has arrived, and not before the link has carried its bytes to other ranks."""

    def __init__(self, rate, bandwidth):
        self.rate, self.bandwidth = rate, bandwidth
        self.now, self.free, self.carried, self.multiplied = 0.0, 0.0, 0.0, 0.0

    def computing(self, run, times):
        """The experts' forward, or backward, which has twice the products."""
        def computed(*args):
            weights = next(one for one in args if isinstance(one, Weights))
            order_S = next(one for one in args if isinstance(one, torch.Tensor) and one.dtype == torch.int32)
            operations = times * order_S.numel() * weights.down_EDN[0].numel()
            self.now += operations / self.rate
            self.multiplied += operations
            return run(*args)

        return computed

    def around(self, begin):
        """A Channel's way to begin an exchange, with this clock."""
        def begun(channel, received, sent, back, out, options):
            work = begin(channel, received, sent, back, out, options)
            if channel.purpose == "header":
                return work
            size = prod(sent.shape[1:]) * sent.element_size() * (sum(out) - out[channel.rank()])
            self.carried += size
            self.free = end = max(self.now, self.free) + size / self.bandwidth

            def done():
                work.wait()
                self.now = max(self.now, end)

            return Waiting(done)

        return begun


def build_wide():
    """A layer whose expert products are worth a name, and its shared expert."""
    torch.manual_seed(0)
    model = Layer(32, 4, 16).double()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def ready(chunks):
    """A captured step of a layer in chunks, warm."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    run, training = capture(step, mesh=mesh_of(2), plan=Plan("ep", chunks=chunks)), build_wide()
    batch = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    for _ in range(2):
        run(*training, batch)
    return lambda: run(*training, batch)


def timed(chunks):
    """What passes on the clock in a step without chunks and in one with them, where the link takes as long as the
    products."""
    runs = [ready(number) for number in (1, chunks)]
    patched = (Channel, "alltoall_base"), (cpu, "forward"), (cpu, "backward")
    begin, forward, backward = (getattr(*place) for place in patched)

    def on(clock, run):
        with pytest.MonkeyPatch.context() as patch:
            ways = clock.around(begin), clock.computing(forward, 1), clock.computing(backward, 2)
            for place, way in zip(patched, ways, strict=True):
                patch.setattr(*place, way)
            run()
        return clock

    first = on(Clock(1.0, 1.0), runs[0])
    return [on(Clock(first.multiplied, first.carried), run).now for run in runs]


@pytest.mark.parametrize("chunks, most", [(2, 0.8), (4, 0.75), (8, 0.75)])
def test_a_step_is_shorter_where_the_link_takes_as_long_as_products(on_ranks, chunks, most):
    for serial, piped in on_ranks(2, timed, chunks):
        assert serial == pytest.approx(2) and piped <= most * serial


NAMES = {"_c10d_functional::all_to_all_single": "start", "_c10d_functional::wait_tensor": "wait",
         "moebius::experts": "experts", "moebius::experts_backward": "experts", "aten::gelu": "shared",
         "aten::gelu_backward": "shared"}


def in_order(chunks):
    """What a step does on this rank, by torch's own account: exchanges, experts, and the shared one's activation."""
    run = ready(chunks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [NAMES[event.name] for event in events if event.name in NAMES]


def test_what_runs_between_start_and_wait(on_ranks):
    """Forward and backward, after forward's header: all rows are begun before the first products, a chunk's results are
    on their way while the next one is computed, and the shared expert runs before they are waited for."""
    way = ["start"] * 3 + ["wait", "experts", "start"] * 3 + ["shared"] + ["wait"] * 3
    back = ["start"] * 3 + ["shared"] + ["wait", "experts", "start"] * 3 + ["wait"] * 3
    for events in on_ranks(2, in_order, 3):
        assert events == ["start", "wait", *way, *back, "wait"]  # the last one is for the norm of all gradients


def leave_in_the_way(node):
    return []


def swap_two(sent, local, home, chunks, write=overlap.pipeline):
    out = write(sent, local, home, chunks)
    out.args = (out.args[0], *out.args[:0:-1])
    return out


@pytest.mark.faults
@pytest.mark.parametrize("name, broken, words", [
    ("wait_late", leave_in_the_way, "does not need it"), ("pipeline", swap_two, "does not wait for all chunks"),
])
def test_a_pipeline_that_breaks_the_contract_is_named(monkeypatch, name, broken, words):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        monkeypatch.setattr(overlap, name, broken)
        with pytest.warns(UserWarning, match=f"pass 'overlap' promises: .*{words}"):
            capture(step, mesh=mesh_of(2), plan=Plan("ep", chunks=2))(*build(), torch.ones(4, D, dtype=torch.float64))
    finally:
        dist.destroy_process_group()


def test_what_moved_is_in_what_ranks_compare_of_backward(monkeypatch):
    """Ranks whose graphs have another order promise one another nothing: their backward takes a header."""
    digests, found = [], []

    def write(gm, chunks, of=overlap.write_chunks):
        of(gm, chunks)
        digests[:] = [node.args[overlap.DIGEST] for node in gm.graph.nodes if node.target is start_dispatch]

    def otherwise(node, of=overlap.wait_late):
        return [*of(node), "another"]

    monkeypatch.setattr(overlap, "write_chunks", write)
    for way in (overlap.wait_late, overlap.wait_late, otherwise):
        monkeypatch.setattr(overlap, "wait_late", way)
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            capture(step, mesh=mesh_of(2), plan=Plan("ep", chunks=2))(*build(), torch.ones(4, D, dtype=torch.float64))
        finally:
            dist.destroy_process_group()
        found.append(list(digests))
    first, again, other = found
    assert 0 not in first and first == again and set(first).isdisjoint(other)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True, "2"])
def test_a_number_of_chunks_that_is_none_is_refused(chunks):
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(OptionError, match="chunks="):
            capture(step, mesh=mesh_of(2), plan=Plan("ep", chunks=chunks))
    finally:
        dist.destroy_process_group()


def plan_otherwise():
    run = capture(step, mesh=mesh_of(2), plan=Plan("ep", chunks=2 + dist.get_rank()))
    with pytest.raises(MeshError, match=r"chunks=2\), rank 1 has .*chunks=3\)"):
        run(*build(), torch.ones(4, D, dtype=torch.float64))


def test_other_numbers_of_chunks_on_the_ranks_are_told(on_new_ranks):
    on_new_ranks(2, plan_otherwise)


def fail_between_chunks():
    """The second rank has no memory for its second chunk, while results of the first are on their way."""
    run, training = capture(step, mesh=mesh_of(2), plan=Plan("ep", chunks=3)), build()
    batch = torch.randn(9, D, dtype=torch.float64)
    for _ in range(2):
        run(*training, batch)
    before = [local(parameter).clone() for parameter in training[0].parameters()]
    calls = itertools.count()

    def forward(*args, of=cpu.forward):
        if dist.get_rank() and next(calls) == 1:
            raise torch.OutOfMemoryError("no more")
        return of(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "forward", forward)
        with pytest.raises(torch.OutOfMemoryError if dist.get_rank() else RanksDisagreeError, match="no more"):
            run(*training, batch)
    return all(torch.equal(a, local(b)) for a, b in zip(before, training[0].parameters(), strict=True))


def test_a_rank_that_fails_between_chunks_is_named(on_new_ranks):
    assert on_new_ranks(2, fail_between_chunks) == [True, True]
