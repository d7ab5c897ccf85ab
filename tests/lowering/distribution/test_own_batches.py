"""Each rank its own batch, in the ways that people train: after some steps, parameters, gradients and the optimizer's
state are those of one process that trains on the mean of the ranks' losses; or one clear error, on all ranks."""
from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from rank_layers import Experts
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import capture, stats
from moebius.errors import MeshError
from moebius.lowering.distribution import DistributionError, Sharded, collect_parameters

E, D, N, K, OUT = 4, 10, 6, 2, 3
DIVISOR = 20  # of a sum over tokens: a rank may have none


class Block(nn.Module):
    def __init__(self, experts=None):
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(D), nn.Linear(D, E), experts or Experts(E, D, N)

    def forward(self, x):
        h = self.norm(x)
        weights, index = self.router(h).softmax(-1).topk(K)
        return x + self.experts(h, index, weights)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.way = Block(), nn.Linear(D, OUT), "plain"
        self.other, self.native = nn.Linear(D, OUT), nn.Linear(D, D)

    def forward(self, x, flag=False):
        x = self.first(x)
        return self.other(x) if flag else self.last(x)


class Shared(Model):
    def __init__(self):
        super().__init__()
        self.second = Block(self.first.experts)
        self.other.weight = self.last.weight

    def forward(self, x, flag=False):
        x = self.second(self.first(x))
        return self.last(x) + self.other(x.tanh())


class ModulesOfExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.ModuleList(nn.Sequential(nn.Linear(D, N), nn.SiLU(), nn.Linear(N, D)) for _ in range(E))

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.each):
            token, slot = torch.where(index == number)
            if token.numel():
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class OfModules(Model):
    def __init__(self):
        super().__init__()
        self.first = Block(ModulesOfExperts())


class BelowABreak(Model):
    def forward(self, x, flag=False):
        return self.last(apply_natively(self.native, self.first(x)))


@moebius.disable
def apply_natively(module, x):
    return module(x).tanh()


class AllNative(Model):
    def forward(self, x, flag=False):
        return forward_natively(self, x)


@moebius.disable
def forward_natively(model, x):
    return model.last(model.first(x))


class Checkpointed(Model):
    reentrant = False

    def forward(self, x, flag=False):
        return self.last(checkpoint(self.first, x.requires_grad_(self.reentrant), use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


def loss_of(model, part):
    x, y, flag = part
    return nn.functional.cross_entropy(model(x, flag), y, reduction="sum") / DIVISOR


def mean_of_losses(model, parts):
    loss = 0
    for part in parts:
        loss = loss + loss_of(model, part) / len(parts)
    return loss


def once(model, optimizer, parts):
    """parts: of one rank, or, in one process, of each."""
    optimizer.zero_grad()
    mean_of_losses(model, parts).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm


def accumulate(model, optimizer, parts):
    optimizer.zero_grad()
    for half in range(2):
        for x, y, flag in parts:
            (loss_of(model, (x[half::2], y[half::2], flag)) / len(parts)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norm


SCALERS = {}


def scaled(model, optimizer, parts):
    scaler = SCALERS.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=256.0))
    optimizer.zero_grad()
    scaler.scale(mean_of_losses(model, parts)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    return norm


def by_hand(model, optimizer, parts):
    """A step of the user's own, and weights that are kept in bounds."""
    optimizer.zero_grad()
    mean_of_losses(model, parts).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
        model.first.experts.down.clamp_(-0.3, 0.3)
    return norm


NOW_AND_THEN = [(4, 3), (0, 0), (0, 2), (0, 0)]  # some steps have no token on any rank: they train no expert

WAYS = {  # model, step, tokens of each rank (of each step)
    **{f"no tokens anywhere: {kind.__name__}": (kind, once, NOW_AND_THEN)
       for kind in (Model, Shared, OfModules, BelowABreak, Checkpointed)},
    "plain": (Model, once, (7, 7)),
    "no tokens on a rank": (Model, once, (9, 0)),
    "accumulation": (Model, accumulate, (8, 5)),
    "scaler": (Model, scaled, (6, 3)),
    "a step by hand": (Model, by_hand, (6, 3)),
    "another head on each rank": (Model, once, (5, 8)),
    "frozen, then not": (Model, once, (5, 8)),
    "shared": (Shared, once, (5, 8)),
    "a module for each expert": (OfModules, once, (6, 5)),
    "experts that no token reaches": (OfModules, once, (1, 0)),
    "below a break": (BelowABreak, once, (5, 8)),
    "all native": (AllNative, once, (5, 8)),
    "experts that cannot move": (Model, once, [(5, 8), (5, 8), (5, 1), (5, 8)]),  # (one rank captures a batch of 1)
    "checkpoint": (Checkpointed, once, (5, 8)),
    "reentrant checkpoint": (Reentrant, once, (5, 8)),
}

OF_MODULES = ("a module for each expert", "experts that no token reaches")  # parameters of one expert stay whole


def build(kind):
    torch.manual_seed(0)
    model = kind().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def same(ours, theirs, what):
    if theirs is None:
        assert ours is None, what
        return
    torch.testing.assert_close(
        whole(ours).detach(), theirs.detach(), rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}"
    )


def parts_of_all(way, tokens, generator):
    return [
        (torch.randn(count, D, generator=generator, dtype=torch.float64),
         torch.randint(OUT, (count,), generator=generator), way == "another head on each rank" and rank == 1)
        for rank, count in enumerate(tokens)
    ]


def train(way):
    kind, step, tokens = WAYS[way]
    rank = dist.get_rank()
    plain, spread = build(kind), build(kind)
    run = capture(step, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(2)
    if way == "experts that cannot move":
        spread[0].first.experts.down.register_hook(lambda grad: grad)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(4):
            if way == "frozen, then not":
                for model, _ in (plain, spread):
                    model.first.router.requires_grad_(number > 1)
                    model.last.requires_grad_(number < 3)
            parts = parts_of_all(way, tokens[number] if isinstance(tokens, list) else tokens, generator)
            same(run(*spread, [parts[rank]]), step(*plain, parts), f"norm of step {number}")
    for (name, mine), theirs in zip(spread[0].named_parameters(), plain[0].parameters(), strict=True):
        same(mine, theirs, name)
        same(mine.grad, theirs.grad, f"gradient of {name}")
        for key, value in plain[1].state.get(theirs, {}).items():
            same(spread[1].state[mine][key], value, f"{key} of {name}")
    return [isinstance(p, Sharded) for p in spread[0].first.experts.parameters()], [str(w.message) for w in said]


@pytest.mark.share(4)
@pytest.mark.parametrize("way", WAYS)
def test_trains_as_one_process_does(on_ranks, way):
    for sharded, said in on_ranks(2, train, way):
        whole_experts = way in ("all native", "experts that cannot move")
        assert way.endswith("Modules") or way in OF_MODULES or sharded == [not whole_experts] * 2, said
        assert any("stay whole" in text for text in said) == (way == "experts that cannot move")


def draw_alone(kind):
    """Dropout draws other numbers on each rank, and batch statistics are each rank's own; parameters stay equal."""
    torch.manual_seed(10 + dist.get_rank())
    model = Model().double()
    before = nn.Dropout(0.5) if kind == "dropout" else nn.BatchNorm1d(D, dtype=torch.float64)
    model.last = nn.Sequential(before, model.last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = capture(once, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for _ in range(3):
        run(model, optimizer, [(torch.randn(6, D, dtype=torch.float64), torch.zeros(6, dtype=torch.int64), False)])
    drawn = nn.functional.dropout(torch.ones(64)).tolist()
    return [whole(p).tolist() for p in model.parameters()], drawn, [b.tolist() for b in model.buffers()]


@pytest.mark.parametrize("kind", ["dropout", "batch norm"])
def test_ranks_draw_and_count_alone(on_ranks, kind):
    (first, drawn, buffers), (second, other, others) = on_ranks(2, draw_alone, kind)
    assert first == second and drawn != other
    assert (buffers != others) == (kind == "batch norm")


def unequal_gradients(x, model):
    model.zero_grad()
    return torch.autograd.grad(model(x).sum(), list(model.last.parameters()))


def with_plain_tensors(x, weight):
    (x @ weight).sum().backward()


def refuse(what):
    torch.manual_seed(dist.get_rank() if what == "draws" else 0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    model, x = Model().double(), torch.randn(4, D, dtype=torch.float64)
    with pytest.raises((MeshError, DistributionError)) as raised:
        if what == "autograd.grad":
            capture(unequal_gradients, mesh=mesh)(x, model)
        elif what == "plain tensor":
            capture(with_plain_tensors, mesh=mesh)(x, torch.randn(D, 2, dtype=torch.float64, requires_grad=True))
        elif what == "a communication hook":
            wrapped = nn.parallel.DistributedDataParallel(model)
            wrapped.register_comm_hook(None, allreduce_hook)
            capture(once, mesh=mesh)(wrapped, None, [])
        elif what == "another model on each rank":
            model = nn.Linear(D, 2 + dist.get_rank())
            capture(with_a_model, mesh=mesh)(model, x)
        elif what == "sparse":
            capture(embed, mesh=mesh)(nn.Embedding(5, 3, sparse=True), torch.tensor([1, 2]))
        elif what == "create_graph":
            capture(twice, mesh=mesh)(model, x)
        elif what == "optimizer in backward":
            optimizer = torch.optim.SGD(model.last.parameters(), lr=0.1)
            model.last.weight.register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
            capture(warm_up, mesh=mesh)(model, torch.optim.SGD(model.parameters(), lr=0.1), x)
    return str(raised.value)


def with_a_model(model, x):
    return model(x.float()).sum()


def embed(model, index):
    model(index).sum().backward()


def twice(model, x):
    (model(x) ** 2).sum().backward(create_graph=True)


REFUSED = {
    "autograd.grad": "loss alone", "plain tensor": "no torch.nn.Parameter",
    "a communication hook": "do not wrap the model",
    "another model on each rank": "same model on every rank", "sparse": "sparse=False",
    "create_graph": "create_graph=True", "optimizer in backward": "step after backward()",
}


@pytest.mark.parametrize("what", REFUSED)
def test_one_clear_error_on_all_ranks(on_ranks, what):
    for text in on_ranks(2, refuse, what):
        assert REFUSED[what] in text


def warm_up(model, optimizer, x):
    optimizer.zero_grad()
    (model(x) ** 2).mean().backward()
    optimizer.step()


def begin_late(what):
    """Whole values after steps that each rank took alone before the first captured call, or after experts came back."""
    model, optimizer = build(Model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    run = capture(warm_up, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    steps = {"state from before": [warm_up, warm_up, run, run], "experts come back": [run, collect, warm_up, warm_up],
             "state on one rank": [warm_up if dist.get_rank() == 0 else collect, run]}
    try:
        for take in steps[what]:
            take(model, optimizer, torch.randn(5, D, generator=generator, dtype=torch.float64))
    except MeshError as error:
        return str(error)
    return [whole(p).tolist() for p in model.parameters()]


def collect(model, optimizer, x):
    collect_parameters(model.parameters())
    optimizer.state.clear()


@pytest.mark.parametrize("what", ["state from before", "experts come back", "state on one rank"])
def test_ranks_stay_equal(on_ranks, what):
    first, second = on_ranks(2, begin_late, what)
    assert first == second
    assert ("load the checkpoint on every rank" in first) == (what == "state on one rank")


def put_others_in_their_place(captured):
    """Steps after a checkpoint whose tensors take the place of the parameters: the next one is captured, or native."""
    plain, spread = build(Model)[0], build(Model)[0]
    run = capture(once, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",)))
    generator, error = torch.Generator().manual_seed(2), ""
    for number, (ours, theirs) in enumerate([(run, once), (run if captured else once, once)]):
        parts = parts_of_all("", (6, 3), generator)
        for model in (spread, plain) if number else ():
            held = {name: value.detach() * 0.9 for name, value in model.state_dict().items()}
            model.load_state_dict(held, assign=True)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (spread, plain)]
        try:
            ours(spread, optimizers[0], [parts[dist.get_rank()]])
        except DistributionError as raised:
            return str(raised)
        theirs(plain, optimizers[1], parts)
    for mine, other in zip(spread.parameters(), plain.parameters(), strict=True):
        same(mine, other, "a weight")
    return error


@pytest.mark.parametrize("captured", [True, False])
def test_parameters_in_the_place_of_others(on_ranks, captured):
    for error in on_ranks(2, put_others_in_their_place, captured):
        assert ("gradients of this rank alone" in error) != captured, error


# What a step does with parameters beside forward and the optimizer: in one graph, equal to one process.


def trained(function):
    """A step around the gradients that the function gives parameters."""
    @functools.wraps(function)
    def step(model, optimizer, parts, others):
        optimizer.zero_grad()
        result = function(model, optimizer, parts, others)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return result

    return step


@trained
def with_hooks(model, optimizer, parts, others):
    handles = [p.register_hook(lambda g: g * 2) for p in (model.first.experts.down, model.last.weight)]
    mean_of_losses(model, parts).backward()
    for handle in handles:
        handle.remove()


@trained
def frozen_and_back(model, optimizer, parts, others):
    with torch.no_grad():
        before = mean_of_losses(model, parts)
    model.first.experts.requires_grad_(False)
    model.first.experts.requires_grad_(True)
    mean_of_losses(model, parts).backward()
    return before


@trained
def penalty(model, optimizer, parts, others):
    """The experts' weights are computed with as a whole, too."""
    loss = mean_of_losses(model, parts) + (model.first.experts.down ** 2).sum() / 100
    loss.backward()


def two_steps(model, optimizer, parts, others):
    for _ in range(2):
        optimizer.zero_grad()
        mean_of_losses(model, parts).backward()
        optimizer.step()


@trained
def bounded_before(model, optimizer, parts, others):
    with torch.no_grad():
        model.first.experts.down.clamp_(-0.3, 0.3)
        model.last.weight.clamp_(-0.3, 0.3)
    mean_of_losses(model, parts).backward()


def averages(model, optimizer, parts, others):
    """A moving average of the weights, read after they were written."""
    optimizer.zero_grad()
    mean_of_losses(model, parts).backward()
    optimizer.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            others[name].lerp_(parameter, 0.5)


@trained
def gradients_by_hand(model, optimizer, parts, others):
    mean_of_losses(model, parts).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=0.01)


@trained
def in_halves(model, optimizer, parts, others):
    for x, y, flag in parts:
        for half in range(2):
            (mean_of_losses(model, [(x[half::2], y[half::2], flag)]) / len(parts)).backward()


@trained
def another_head(model, optimizer, parts, others):
    """Each rank's backward reaches another layer: all ranks get all gradients."""
    mean_of_losses(model, [(x, y, rank_has_it) for x, y, rank_has_it in parts]).backward()
    return sum((p.grad ** 2).sum() for p in model.parameters() if p.grad is not None)


STEPS = [
    with_hooks, frozen_and_back, penalty, two_steps, bounded_before, averages, gradients_by_hand, in_halves,
    another_head,
]


def beside_one_process(name):
    step = next(way for way in STEPS if way.__name__ == name)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain, spread = build(Model), build(Model)
    theirs, ours = ({n: p.detach().clone() for n, p in pair[0].named_parameters()} for pair in (plain, spread))
    run = capture(step, mesh=init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))
    generator = torch.Generator().manual_seed(2)
    way = "another head on each rank" if step is another_head else ""
    for number in range(3):
        parts = parts_of_all(way, (6, 3), generator)
        run(*spread, [parts[rank]], ours)
        step(*plain, parts, theirs)
        for (place, mine), other in zip(spread[0].named_parameters(), plain[0].parameters(), strict=True):
            same(mine, other, f"{place} after step {number}")
            same(mine.grad, other.grad, f"gradient of {place} after step {number}")
            same(ours[place], theirs[place], f"average of {place} after step {number}")
    placed = [isinstance(p, Sharded) for p in spread[0].first.experts.parameters()]
    return stats(run).breaks, placed


@pytest.mark.share(3)
@pytest.mark.parametrize("name", [way.__name__ for way in STEPS])
def test_a_step_is_one_graph_and_that_of_one_process(on_ranks, name):
    for breaks, placed in on_ranks(2, beside_one_process, name):
        assert breaks == 0 and placed == [True, name != "penalty"]
