"""Losses that are means over as many tokens as each rank has, weighted: as one process on all of them."""
from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from rank_layers import Experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import capture, stats
from moebius.lowering.distribution import DistributionError, Sharded, traffic

E, D, N, K, OUT = 4, 10, 6, 2, 3
IGNORED = -100


class Model(nn.Module):
    def __init__(self, way="plain"):
        super().__init__()
        self.router, self.first, self.last, self.way = nn.Linear(D, E), Experts(E, D, N), nn.Linear(D, OUT), way
        self.other = nn.Linear(D, OUT)

    def layer(self, x):
        weights, index = self.router(x).softmax(-1).topk(K)
        return x + self.first(x, index, weights)

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=False) if self.way == "checkpoint" else self.layer(x)
        return self.last(x)


def loss_of(model, x, y):
    """A mean over the labels that count, and one over all tokens; how many there are of each."""
    logits = model(x)
    labels = y != IGNORED
    return (nn.functional.cross_entropy(logits, y, ignore_index=IGNORED), labels.sum()), ((logits**2).mean(), len(x))


def natively(model, x, y):
    return sum(moebius.weigh_by_tokens(*part) for part in loss_of(model, x, y))


below_a_break = moebius.disable(natively)
SCALERS = {}


def step(model, optimizer, batches):
    """batches: what follows one another before the optimizer steps."""
    optimizer.zero_grad()
    scaler = SCALERS.get(id(model))
    total = 0
    for x, y in batches:
        loss = (below_a_break if model.way == "below a break" else natively)(model, x, y) / len(batches)
        (loss if scaler is None else scaler.scale(loss)).backward()
        total = total + loss.detach()
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return total, norm


def build(way):
    torch.manual_seed(0)
    model = Model(way).double()
    if way == "scaler":
        SCALERS[id(model)] = torch.amp.GradScaler("cpu", init_scale=256.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def draw(counts, generator):
    """For each rank: so many tokens, about a half with labels; in a third of all draws the first rank has none."""
    parts = []
    for rank, count in enumerate(counts):
        y = torch.randint(OUT, (count,), generator=generator)
        y[torch.rand(count, generator=generator) < 0.5] = IGNORED
        if rank == 0 and torch.rand((), generator=generator) < 0.33:
            y[:] = IGNORED
        parts.append((torch.randn(count, D, generator=generator, dtype=torch.float64), y))
    if all((y == IGNORED).all() for _, y in parts):
        parts[-1][1][0] = 0
    return parts


ALONE = ("the model alone",)


def train(way, sizes, seed):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :])
    run, plain, spread = capture(step, mesh=mesh), build(way), build(way)
    if way in ALONE:  # the loss is weighed, and goes backward, outside of captured calls
        spread[0].forward, run = capture(spread[0].forward, mesh=mesh), step
    far = 0.0
    for _ in range(4):
        batches = []
        for _ in range(1 + (way == "accumulation")):
            counts = [int(torch.randint(0, 9, (), generator=generator)) for _ in range(ranks - 1)]
            batches.append(draw([*counts, 5], generator))
        loss, norm = run(*spread, [parts[rank] for parts in batches])
        joined = [tuple(torch.cat(each) for each in zip(*parts, strict=True)) for parts in batches]
        theirs, their_norm = step(*plain, joined)
        dist.all_reduce(loss)
        far = max(far, float((loss / ranks - theirs).abs()), float((norm - their_norm).abs()))
    for mine, other in zip(spread[0].parameters(), plain[0].parameters(), strict=True):
        mine = mine.full_tensor() if isinstance(mine, Sharded) else mine
        far = max(far, float((mine.detach() - other.detach()).abs().max()))
    return far, stats(spread[0].forward if run is step else run).breaks, isinstance(spread[0].first.down, Sharded)


@pytest.mark.share(2)
@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
@pytest.mark.parametrize("way", ["plain", "accumulation", "checkpoint", "below a break", "scaler", *ALONE])
def test_as_one_process_on_all_tokens(on_ranks, way, sizes):
    ranks = sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]
    for far, breaks, sharded in on_ranks(ranks, train, way, sizes, len(way)):
        assert far < 1e-10
        assert sharded == (way != "below a break")
        assert breaks == 0 or way in ("below a break", "scaler")


def after_another(again):
    """What a loss below no call is worth on this rank, where models of older meshes are left, but not on rank 0."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = []
    for sizes in ((ranks,), (2, 2), (ranks,))[: 2 + again]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :])
        model, optimizer = build("below a break")
        parts = draw([5, 7, 2, 6], torch.Generator().manual_seed(1))
        capture(step, mesh=mesh)(model, optimizer, parts[rank : rank + 1])
        held.append(model)
        if rank == 0:
            del held[:-1]
        del model, optimizer
        gc.collect()
    return float(moebius.weigh_by_tokens(torch.ones(()), rank + 1.0))


@pytest.mark.parametrize("again", [False, True])
def test_models_of_older_meshes_that_are_left_on_some_ranks(on_new_ranks, again):
    """Ranks have to ask over one mesh, though not all of them have the older one's parameters still."""
    assert on_new_ranks(4, after_another, again) == pytest.approx([0.4, 0.8, 1.2, 1.6])


def plain_mean(model, x, y):
    return sum(loss for loss, _ in loss_of(model, x, y))


def collectives():
    """Of a warm step, with and without weights; the header of a loss keeps what layers before it have promised."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model, (x, y) = build("plain")[0], draw([5], torch.Generator().manual_seed(0))[0]
    counts = []
    for loss in (plain_mean, natively):
        run = capture(lambda loss=loss: loss(model, x, y).backward(), mesh=mesh)
        for _ in range(3):
            traffic.reset()
            run()
        counts.append(traffic.collectives)
    return counts


def test_a_weighted_loss_takes_one_header_more(on_ranks):
    for plain, weighted in on_ranks(2, collectives):
        assert weighted == plain + 2  # (there are two losses)


def no_number(tokens):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    with pytest.raises(DistributionError) as raised:
        capture(moebius.weigh_by_tokens, mesh=mesh)(torch.ones(()), torch.tensor(tokens[dist.get_rank()]))
    return str(raised.value)


@pytest.mark.parametrize("tokens", [(3.0, -1.0), (float("nan"), 2.0)])
def test_tokens_that_are_no_number_are_an_error_on_all_ranks(on_ranks, tokens):
    assert all("tokens on this rank" in text for text in on_ranks(2, no_number, tokens))


def test_without_ranks_it_is_the_loss_itself():
    loss = torch.tensor(2.5, requires_grad=True)
    for run in (moebius.weigh_by_tokens, capture(moebius.weigh_by_tokens)):
        assert run(loss, 7) == loss and torch.autograd.grad(run(loss, 0), loss)[0] == 1
