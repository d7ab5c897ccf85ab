"""Training loops as people write them, on ranks with batches of their own: a model, a step, what stands between steps,
an optimizer, the sizes of batches, and what is captured, each with each. Equal to one process on the mean of the ranks'
losses."""
from __future__ import annotations

import contextlib
import copy
import io
import random
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from moe_models import EXPERTS, LOOPS, MORE, ROUTERS, E, Model, V, loss_of, sigmoid_with_bias
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius import capture
from moebius.errors import MoebiusError
from moebius.lowering.distribution import DistributionError, Sharded

STEPS, BOUND = 5, 10  # seconds, for a call that fails


def mean_of_losses(model, parts):
    loss = 0
    for tokens in parts:
        loss = loss + loss_of(model, tokens) / len(parts)
    return loss


# Steps. parts: of one rank, or, in one process, of each. They return what is the same on all ranks.


def plain(t, parts):
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    t.optimizer.step()


def rebalanced(t, parts):
    """Biases of routers from the tokens that each expert had, within the step: its all_reduce is a graph break."""
    plain(t, parts)
    t.rebalance()


def accumulate(t, parts):
    """In halves; a model that DDP has wrapped would say not to synchronize."""
    t.optimizer.zero_grad(set_to_none=False)
    for half in range(2):
        no_sync = getattr(t.model, "no_sync", None)
        with no_sync() if no_sync is not None and half == 0 else contextlib.nullcontext():
            (mean_of_losses(t.model, [tokens[half::2] for tokens in parts]) / 2).backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    t.optimizer.step()
    return norm


def scaled(t, parts):
    t.optimizer.zero_grad()
    t.scaler.scale(mean_of_losses(t.model, parts)).backward()
    t.scaler.unscale_(t.optimizer)
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    t.scaler.step(t.optimizer)
    t.scaler.update()
    return norm


def scaled_alone(t, parts):
    t.optimizer.zero_grad(set_to_none=True)
    t.scaler.scale(mean_of_losses(t.model, parts)).backward()
    t.scaler.step(t.optimizer)
    t.scaler.update()
    return t.scaler.get_scale()


def autocast(t, parts):
    t.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # (float64 stays)
        loss = mean_of_losses(t.model, parts)
    loss.backward()
    t.optimizer.step()


def greatest(t, parts):
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.01, norm_type=float("inf"))
    t.optimizer.step()
    return norm


def norm_of_ones(t, parts):
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.5, norm_type=1.0, foreach=False)
    t.optimizer.step()
    return norm


def by_value(t, parts):
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    nn.utils.clip_grad_value_(t.model.parameters(), 0.01)
    t.optimizer.step()


def by_hand(t, parts):
    """Clipping as people write it themselves."""
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    grads = [p.grad for p in t.model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((g.detach() ** 2).sum() for g in grads))
    for g in grads:
        g.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
    t.optimizer.step()
    return norm


def each_group(t, parts):
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    norms = [nn.utils.clip_grad_norm_(group["params"], 0.3) for group in t.optimizer.param_groups]
    t.optimizer.step()
    return sum(norms)


def metrics(t, parts):
    """The loss of all ranks, for the log."""
    t.optimizer.zero_grad()
    loss = mean_of_losses(t.model, parts)
    loss.backward()
    t.optimizer.step()
    with torch.no_grad():
        return t.mean(loss.detach().clone())


def right_answers(t, parts):
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    t.optimizer.step()
    t.model.eval()
    with torch.no_grad():
        right = sum((t.model(tokens).argmax(-1) == tokens).sum() for tokens in parts) / len(parts)
    t.model.train()
    return t.mean(right.double())


def in_a_closure(t, parts):
    def closure():
        t.optimizer.zero_grad()
        loss = mean_of_losses(t.model, parts)
        loss.backward()
        return loss

    t.optimizer.step(closure)


def noisy(t, parts):
    """Gradients that are changed by hand, and weights that are decayed by hand."""
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    with torch.no_grad():
        for p in t.model.parameters():
            if p.grad is not None:
                p.grad.add_(p, alpha=0.01)
                p.mul_(1 - 1e-3)
    t.optimizer.step()


def if_finite(t, parts):
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    if torch.isfinite(norm):
        t.optimizer.step()
    return norm


def balanced(t, parts):
    """A term of the weights beside the loss."""
    t.optimizer.zero_grad()
    decay = sum((p**2).sum() for p in t.model.parameters() if p.dim() > 1 and p.requires_grad)
    (mean_of_losses(t.model, parts) + 1e-3 * decay).backward()
    t.optimizer.step()


def orthogonal(t, parts):
    """Products of the gradients of each expert, as Muon takes them."""
    t.optimizer.zero_grad()
    mean_of_losses(t.model, parts).backward()
    with torch.no_grad():
        for p in t.model.parameters():
            if p.grad is not None and p.dim() > 1:
                g = p.grad / (p.grad.norm(dim=(-2, -1), keepdim=True) + 1e-2)
                p.sub_(1.5 * g - 0.5 * (g @ g.mT) @ g, alpha=1e-2)


def of_some(t, parts):
    t.optimizer.zero_grad()
    trained = [p for name, p in t.model.named_parameters() if p.requires_grad and "norm" not in name]
    mean_of_losses(t.model, parts).backward(inputs=trained)
    t.optimizer.step()


def beside_a_base(t, parts):
    """A loss without history first, whose views of the weights live on while these are stepped."""
    with torch.no_grad():
        base = mean_of_losses(t.model, parts)
    t.optimizer.zero_grad()
    (mean_of_losses(t.model, parts) + base * 0).backward()
    t.optimizer.step()


# Not drawn: where its backward breaks the graph, each rank needs a token.
BESIDE = (beside_a_base,)
WAYS = (rebalanced, orthogonal, of_some, plain, accumulate, scaled, scaled_alone, autocast, greatest,
        norm_of_ones, by_value, by_hand, each_group, metrics, right_answers, in_a_closure, noisy, if_finite, balanced)


# What stands between steps: of a training, before step ``number``.


def nothing(t, number):
    pass


def evaluated(t, number):
    """On batches of other lengths, without capture: there each rank needs a token."""
    if number % 2:
        t.model.eval()
        with torch.no_grad():
            t.told.append(t.mean(sum(loss_of(t.model, p) for p in t.parts(20 + number, 3, 1)) / len(t.parts(0))))
        t.model.train()


def evaluated_captured(t, number):
    t.model.eval()
    with torch.inference_mode():
        t.told.append(t.mean(t.judge(t.model, t.parts(20 + number, 3 + number))))
    t.model.train()


def averaged(t, number):
    """A moving average of the weights, in a model of its own."""
    if t.average is None:
        t.average = copy.deepcopy(t.model).requires_grad_(False).eval()  # (it counts no tokens)
    with torch.no_grad():
        for mean, p in zip(t.average.parameters(), t.model.parameters(), strict=True):
            mean.mul_(0.9).add_(p, alpha=0.1)
    if number == STEPS - 1:
        t.told.append(t.mean(sum(loss_of(t.average, p) for p in t.parts(50, 5, 1)) / len(t.parts(0))).detach())


def torch_averaged(t, number):
    if t.average is None:
        t.average = torch.optim.swa_utils.AveragedModel(t.model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9))
    t.average.update_parameters(t.model)


def saved(t, number):
    """A checkpoint of all, in the loop; at its end one process has what the file has."""
    file = io.BytesIO()
    torch.save({"model": t.model.state_dict(), "optimizer": t.optimizer.state_dict()}, file)
    t.files.append(file.getvalue())


def loaded(t, number):
    if number == 2:
        file = io.BytesIO()
        torch.save({"model": t.model.state_dict(), "optimizer": t.optimizer.state_dict()}, file)
        file.seek(0)
        held = torch.load(file, weights_only=True)
        t.model.load_state_dict(held["model"])
        t.optimizer.load_state_dict(held["optimizer"])


def best_kept(t, number):
    """The weights so far in memory, and back to them."""
    if number == 1:
        t.kept = copy.deepcopy(t.model.state_dict())
    elif number == 3:
        t.model.load_state_dict(t.kept)


def scheduled(t, number):
    if t.scheduler is None:
        t.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            t.optimizer, 2e-2, total_steps=STEPS + 1, cycle_momentum=False)
    elif number:
        t.scheduler.step()


def frozen_later(t, number):
    t.model.layers[1].gate.requires_grad_(number != 2)
    t.model.head.requires_grad_(number < 3)


def halve(p):
    p.grad.mul_(0.5)


def hooked(t, number):
    if number == 1:
        t.model.layers[1].norm.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    elif number == 2:
        for p in filter(lambda p: p.requires_grad, t.model.layers[1].experts.parameters()):
            p.register_post_accumulate_grad_hook(halve)


def logged(t, number):
    """Norms for the log, each of one parameter."""
    norms = [p.detach().norm() for p in t.model.parameters()]
    norms += [p.grad.norm() for p in t.model.parameters() if p.grad is not None]
    t.told.append(torch.stack([norm.double() for norm in norms]).sum())


def a_rate_by_hand(t, number):
    for group in t.optimizer.param_groups:
        group["lr"] = 1e-2 / (1 + number)


def begun_again(t, number):
    """A new optimizer for the second phase."""
    if number == 2:
        t.optimizer = t.make(t.model)


def counted(t, number):
    t.told.append(torch.tensor(float(sum(p.numel() for p in t.model.parameters() if p.requires_grad))))
    if dist.is_initialized() and not t.alone:
        dist.barrier()


def permuted(t, number):
    order = torch.randperm(E, generator=torch.Generator().manual_seed(number))
    with torch.no_grad():
        for p in t.model.layers[1].experts.parameters():
            if len(p) == E:
                p.copy_(p[order])


def drawn_anew(t, number):
    torch.manual_seed(number)
    for p in t.model.layers[1].experts.parameters():
        if p.dim() > 1 and number == 2:
            nn.init.kaiming_uniform_(p)


def taken_over(t, number):
    """The tensors of a checkpoint become the parameters."""
    if number == 2:
        held = {name: value.detach() * 0.9 for name, value in t.model.state_dict().items()}
        t.model.load_state_dict(held, assign=True)
        t.optimizer = t.make(t.model)


def as_numbers(t, number):
    found = [torch.tensor(p.detach().numpy()) for p in t.model.parameters()]
    t.told.append(sum(value.abs().sum() for value in found) + sum(t.model.layers[1].norm.weight.tolist()))


BETWEEN = (permuted, drawn_anew, taken_over, as_numbers, nothing, evaluated, evaluated_captured, averaged,
           torch_averaged, saved, loaded, best_kept, scheduled, frozen_later, hooked, logged, a_rate_by_hand,
           begun_again, counted)


# Optimizers


def two_groups(model):
    """Weight decay for matrices alone, and another rate for experts."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    experts = [p for name, p in named if "experts" in name]
    matrices = [p for name, p in named if "experts" not in name and p.dim() > 1]
    others = [p for name, p in named if "experts" not in name and p.dim() < 2]
    groups = [{"params": experts, "lr": 5e-3}, {"params": matrices, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, weight_decay=0.0, eps=1e-3)


def of(kind, **options):
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **options)


adam = {"lr": 1e-2, "eps": 1e-3}
OPTIMIZERS = {
    "AdamW": of(torch.optim.AdamW, **adam), "AdamW, foreach": of(torch.optim.AdamW, foreach=True, **adam),
    "AdamW, one by one": of(torch.optim.AdamW, foreach=False, amsgrad=True, **adam),
    "AdamW, fused": of(torch.optim.AdamW, fused=True, **adam), "groups": two_groups,
    "SGD": of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, fused": of(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": of(torch.optim.Adagrad, lr=1e-2, eps=1e-3), "RMSprop": of(torch.optim.RMSprop, lr=1e-3, eps=1e-3),
    "NAdam": of(torch.optim.NAdam, **adam), "RAdam": of(torch.optim.RAdam, **adam),
    "Adafactor": of(torch.optim.Adafactor, lr=1e-2), "Adadelta": of(torch.optim.Adadelta, lr=0.1, eps=1e-3),
}

SIZES = {  # rows of each rank, in each step
    "equal": [(2, 2, 2, 2)], "unequal": [(3, 1, 2, 4)], "none on one": [(3, 0, 1, 2)],
    "none on the other, then": [(2, 2, 1, 1), (0, 2, 0, 1), (2, 2, 0, 3)],
    "last one short": [(3, 3, 3, 3), (3, 3, 3, 3), (3, 3, 3, 3), (3, 3, 3, 3), (3, 1, 0, 0)],
}
MESHES = {"2": {"ep": 2}, "4": {"ep": 4}, "2 x 2": {"dp": 2, "ep": 2}}


class Training:
    """alone: one process, which has the batches of all ranks."""

    average = scheduler = kept = None

    def __init__(self, kind, optimizer, sizes, mesh, alone):
        torch.manual_seed(0)
        self.model, self.make = Model(*kind).double(), OPTIMIZERS[optimizer]
        self.optimizer, self.scaler = self.make(self.model), torch.amp.GradScaler("cpu", init_scale=256.0)
        self.sizes, self.alone, self.told, self.files = SIZES[sizes], alone, [], []
        self.judge = mean_of_losses
        if not alone:
            axes = MESHES[mesh]
            self.mesh = init_device_mesh("cpu", (*axes.values(),), mesh_dim_names=(*axes,))
            self.judge = capture(mean_of_losses, mesh=self.mesh)

    def parts(self, number, length=6, least=0):
        generator, rows = torch.Generator().manual_seed(number), self.sizes[number % len(self.sizes)]
        rows = rows[: dist.get_world_size()]
        found = [torch.randint(V, (max(count, least), length), generator=generator) for count in rows]
        return found if self.alone else [found[dist.get_rank()]]

    def mean(self, value):
        """Over the ranks; what one process has is the mean already."""
        if not self.alone:
            dist.all_reduce(value)
            value = value / dist.get_world_size()
        return value

    def rebalance(self):
        """The biases of the routers, from the tokens that each expert had, of all ranks."""
        for layer in self.model.layers:
            if getattr(layer, "route", None) is sigmoid_with_bias:
                if not self.alone:
                    dist.all_reduce(layer.counts)
                with torch.no_grad():
                    layer.bias.add_(torch.sign(layer.counts.mean() - layer.counts), alpha=0.05)
                    layer.counts.zero_()

    def train(self, step, between):
        for number in range(STEPS):
            between(self, number)
            self.began = time.perf_counter()
            found = step(self, self.parts(number))
            self.rebalance()
            if found is not None:
                self.told.append(torch.as_tensor(found))

    def state(self):
        """All that training has come to, by name."""
        models = {"": self.model} | ({"average ": self.average} if self.average is not None else {})
        for what, model in models.items():
            for name, p in (*model.named_parameters(), *model.named_buffers()):
                yield f"{what}{name}", p
                if p.requires_grad:
                    yield f"gradient of {what}{name}", p.grad
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                yield f"{key} of {name}", value
        for number, told in enumerate(self.told):
            yield f"result {number}", told
        for number, file in enumerate(self.files):
            held = torch.load(io.BytesIO(file), weights_only=True)
            for name, value in held["model"].items():
                yield f"{name} in file {number}", value
            for place, each in held["optimizer"]["state"].items():
                for key, value in each.items():
                    yield f"{key} of parameter {place} in file {number}", value


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def differ(ours, theirs):
    """Where two trainings are apart, in words."""
    ours, theirs = dict(ours.state()), dict(theirs.state())
    found = [f"{name} is on one side alone" for name in ours.keys() ^ theirs.keys()]
    for name in theirs:
        mine, other = ours.get(name), theirs[name]
        if mine is None or other is None:
            if mine is not None or other is not None:
                found.append(f"{name}: {mine is None}, {other is None}")
        elif isinstance(other, torch.Tensor):
            mine = whole(mine.detach())
            apart = (mine.double() - other.detach().double()).abs().max().item() if other.numel() else 0
            if mine.shape != other.shape or mine.dtype != other.dtype or not apart <= 1e-10:
                found.append(f"{name} is {apart:.2g} apart")
        elif mine != other:
            found.append(f"{name}: {mine}, {other}")
    return found


def run_loop(kind, way, between, optimizer, sizes, captured, mesh):
    """Where this rank is apart from one process; or the error, and how long the step took that failed."""
    named = ((WAYS + BESIDE, way), (BETWEEN, between))
    step, between = (next(f for f in held if f.__name__ == name) for held, name in named)
    ours, theirs = (Training(kind, optimizer, sizes, mesh, alone) for alone in (False, True))
    error, took = "", 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "(?s)moebius could not capture.*please report")
        try:
            if captured == "the model":
                ours.model.forward = capture(ours.model.forward, mesh=ours.mesh)
            ours.train(capture(step, mesh=ours.mesh) if captured == "the step" else step, between)
        except (DistributionError, MoebiusError) as raised:
            error, took = f"{type(raised).__name__}: {raised}", time.perf_counter() - ours.began
        if error:
            return [], error, took
        theirs.train(step, between)
    return differ(ours, theirs), error, took


NAMES = [[f.__name__ for f in held] for held in (WAYS, BETWEEN)]
KIND = [list(EXPERTS), list(LOOPS), list(ROUTERS), MORE]
AXES = (*NAMES, list(OPTIMIZERS), list(SIZES), ("the step", "the model"))
DRAW = random.Random(0)


def possible(kind, way, between):
    """Where a step in one process is that of ranks, and is one at all. There the batches of all ranks are in one
    backward pass, so that hooks run for each of them; terms of the loss that recomputation adds are of no loss."""
    more, terms = kind[3], kind[2] in ("balanced", "with_z")
    if more == "reentrant" and (between == "hooked" or way == "of_some"):
        return False
    return not (terms and more in ("checkpoint", "reentrant"))


def draw(mesh, count):
    found = (([DRAW.choice(axis) for axis in KIND], *map(DRAW.choice, AXES), mesh) for _ in range(count))
    return [case for case in found if possible(*case[:3])]


CASES = {mesh: draw(mesh, 1000) for mesh in MESHES}
MENDED = [
    (["Transposed", "repeated", "plain", "shared expert"], "beside_a_base", "nothing", "SGD", "equal", "the step", "2"),
]


def words(case):
    return ", ".join((*case[0], *case[1:]))


def look_at(answers):
    assert len({bool(error) for _, error, _ in answers}) == 1, answers
    for apart, error, took in answers:
        assert not apart and not error and took < BOUND, (apart, error, took)


@pytest.mark.parametrize("case", MENDED, ids=words)
def test_what_once_failed(on_ranks, case):
    look_at(on_ranks(2, run_loop, *case))


@pytest.mark.share(2)
@pytest.mark.parametrize("case", CASES["2"], ids=words)
def test_a_loop_is_that_of_one_process(on_ranks, case):
    look_at(on_ranks(2, run_loop, *case))


@pytest.mark.share(1)
@pytest.mark.parametrize("case", [*CASES["4"], *CASES["2 x 2"]], ids=words)
def test_a_loop_on_four_ranks(on_ranks, case):
    look_at(on_ranks(4, run_loop, *case))
