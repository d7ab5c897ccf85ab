"""Parameters that live on the ranks: unchanged torch code trains as in one process, and the memory is really split."""
from __future__ import annotations

import copy
import io
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from moebius.kernels import experts
from moebius.lowering.distribution import (
    DistributionError,
    PlacementError,
    Plan,
    Sharded,
    average_gradients,
    collect_parameters,
    place_parameters,
    place_state,
    to_graph_input,
)
from moebius.lowering.distribution.exchange import remember_group
from moebius.lowering.distribution.expert_parallel import combine, dispatch
from moebius.lowering.planner.traffic import chunk_span

T, K, D, N = 13, 2, 6, 5


class Layer(torch.nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.router = torch.nn.Linear(D, num_experts)
        self.norm = torch.nn.LayerNorm(D)
        self.gate_up = torch.nn.Parameter(torch.randn(num_experts, 2 * N, D))
        self.down = torch.nn.Parameter(torch.randn(num_experts, D, N))
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x):
        weight, index = self.router(x).softmax(-1).topk(K)
        return self.norm(x + self.scale * experts(x, self.gate_up, self.down, index, weight))


def spread(layer, x):
    """What a captured and lowered call of ``layer`` does."""
    group = remember_group(dist.group.WORLD)
    weight, index = layer.router(x).softmax(-1).topk(K)
    gate_up, down = (to_graph_input(p, "shard→local") for p in (layer.gate_up, layer.down))
    x_RD, expert_R1, weight_R1, *ticket = dispatch(x, index, weight, layer.gate_up.shape[0], group)
    out = combine(experts(x_RD, gate_up, down, expert_R1, weight_R1), *ticket)
    return layer.norm(x + layer.scale * out)


def build(num_experts, seed=0):
    torch.manual_seed(seed)
    layer = Layer(num_experts).double()
    return layer, copy.deepcopy(layer), torch.randn(T, D, dtype=torch.float64)


def place_layer(layer):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = [layer.gate_up, layer.down]
    moved = place_parameters(wanted, mesh, Plan())
    average_gradients([layer], [], mesh, Plan())
    return moved


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded | DTensor) else tensor


def same_parameters(layer, reference):
    for (name, mine), theirs in zip(layer.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-11, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True, amsgrad=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def train(num_experts, optimizer_name, foreach, set_to_none):
    layer, reference, x = build(num_experts)
    optimizers = [OPTIMIZERS[optimizer_name](model.parameters()) for model in (layer, reference)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.8**step) for o in optimizers]
    place_layer(layer)
    for step in range(5):
        losses, norms = [], []
        for model, optimizer, scheduler, forward in zip(
            (layer, reference), optimizers, schedulers, (spread, Layer.forward), strict=True
        ):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in x.split(7):  # two parts: gradients accumulate
                loss = (forward(model, part) ** 2).sum() * (1 + step)
                loss.backward()
            losses.append(loss.detach())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach))
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(*losses, rtol=1e-11, atol=1e-11)
        assert type(norms[0]) is torch.Tensor
        torch.testing.assert_close(*norms, rtol=1e-11, atol=1e-11)
        assert norms[1] > 0.5, "clipping must have had something to do"
        assert isinstance(layer.gate_up.grad, Sharded) and type(layer.router.weight.grad) is torch.Tensor
    same_parameters(layer, reference)
    low, high = chunk_span(num_experts, dist.get_world_size(), dist.get_rank())
    held = [layer.gate_up, layer.gate_up.grad]
    held += [v for v in optimizers[0].state[layer.gate_up].values() if torch.is_tensor(v) and v.dim()]
    assert len(held) >= 3
    for tensor in held:
        assert tensor.local.untyped_storage().nbytes() == (high - low) * 2 * N * D * 8
    return [p.tolist() for p in (layer.router.weight, layer.norm.weight)]


@pytest.mark.parametrize("ranks, num_experts", [(2, 4), (2, 5), (3, 7), (3, 2)])
def test_five_steps_equal_one_process(on_ranks, ranks, num_experts):
    results = on_ranks(ranks, train, num_experts, "adamw", None, True)
    assert all(result == results[0] for result in results), "replicated parameters differ between ranks"


@pytest.mark.share(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [True, False])
def test_every_way_to_step(on_ranks, optimizer, foreach):
    on_ranks(2, train, 5, optimizer, foreach, foreach)


def identity():
    layer, reference, _ = build(4, seed=dist.get_rank())  # seeds differ: the first rank's values count
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.down.requires_grad_(False)
    layer.gate_up.no_decay = True
    before = [id(p) for p in layer.parameters()]
    watched = weakref.ref(layer.gate_up)
    assert [id(p) for p in place_layer(layer)] == [id(layer.gate_up), id(layer.down)]
    assert place_layer(layer) == []
    assert [id(p) for p in layer.parameters()] == before == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert watched() is layer.gate_up and layer.gate_up.no_decay
    assert isinstance(layer.gate_up, torch.nn.Parameter) and isinstance(layer.gate_up, Sharded)
    assert not layer.down.requires_grad and layer.gate_up.requires_grad and layer.gate_up.is_leaf
    assert layer.gate_up.shape == (4, 2 * N, D) and layer.gate_up.local.shape == (2, 2 * N, D)
    values = [whole(t).tolist() for t in (*layer.parameters(), *layer.buffers())]
    return values, [t.tolist() for t in (*reference.parameters(), *reference.buffers())]


def test_identity_stays_and_ranks_become_equal(on_ranks):
    (first, initial), (second, other) = on_ranks(2, identity)
    assert first == second == initial != other


def gradients_and_state_move_along():
    layer, reference, x = build(5)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (layer, reference)]
    for model, optimizer in zip((layer, reference), optimizers, strict=True):
        model(x).pow(2).sum().backward()
        optimizer.step()
    place_layer(layer)  # gradients are there, and optimizer state too
    assert isinstance(layer.down.grad, Sharded)
    place_state(optimizers[0])
    for model, optimizer, forward in zip((layer, reference), optimizers, (spread, Layer.forward), strict=True):
        forward(model, x).pow(2).sum().backward()
        optimizer.step()
    same_parameters(layer, reference)


def test_gradients_and_optimizer_state_move_along(on_ranks):
    on_ranks(2, gradients_and_state_move_along)


WRITES = {  # of a tensor and of others like it, which all ranks have whole or split
    "copy": lambda t, a, b: t.copy_(a), "add": lambda t, a, b: t.add_(a, alpha=2),
    "lerp": lambda t, a, b: t.lerp_(a, 0.5), "item": lambda t, a, b: t.__setitem__(0, b[0]),
    "addcmul": lambda t, a, b: t.addcmul_(a, b), "where": lambda t, a, b: t.copy_(torch.where(t > 0, 1.2, a)),
    "other dtype": lambda t, a, b: t.copy_(a.double()), "a row": lambda t, a, b: t.mul_(a[0]),
    "foreach copy": lambda t, a, b: torch._foreach_copy_([t, t], [a, b]),
    "foreach lerp": lambda t, a, b: torch._foreach_lerp_([t], [a], 0.5),
    "foreach add": lambda t, a, b: torch._foreach_add_([t], [b], alpha=0.5),
}


def written_in_place(num_experts):
    """What differs from one process: writes of whole tensors, and of split ones, into a split one."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for name, write in WRITES.items():
        for kinds in ((False, False), (True, True)):
            torch.manual_seed(0)
            plain = [torch.randn(num_experts, 3, 2) for _ in range(3)]
            held = [torch.nn.Parameter(t.clone()) for t in plain]
            place_parameters([p for p, split in zip(held, (True, *kinds), strict=True) if split], mesh, Plan())
            with torch.no_grad():
                write(*plain)
                write(*(t.detach() for t in held))
                for number, (mine, theirs) in enumerate(zip(held, plain, strict=True)):
                    if not torch.equal(whole(mine.detach()), theirs):
                        found.append((name, kinds, number))
    return found


@pytest.mark.share(1)
@pytest.mark.parametrize("num_experts", [3, 4, 6])
def test_writes_in_place(on_ranks, num_experts):
    assert on_ranks(4, written_in_place, num_experts) == [[]] * 4


def uncaptured_use():
    layer, reference, x = build(5)
    place_layer(layer)
    for use in (  # plain torch on whole weights, in several ways that people write it
        lambda m: m(x).sin().sum(),
        lambda m: torch.einsum("edn,ten->td", m.down, torch.einsum("emd,td->tem", m.gate_up, x).relu()[:, :, :N]).sum(),
        lambda m: sum((torch.nn.functional.linear(x, w) ** 2).sum() * (i + 1) for i, w in enumerate(m.gate_up)),
        lambda m: m.gate_up[3].exp().sum() + m.down.norm() + m.down.amax(dim=(1, 2)).sum(),
        lambda m: torch.cat([w.flatten() for w in m.parameters()]).pow(3).sum(),
        lambda m: (m.down * 2).flip(0).cumsum(0).sum(),
    ):
        found, expected = use(layer), use(reference)
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        found.backward()
        expected.backward()
    for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert isinstance(mine.grad, Sharded) == isinstance(mine, Sharded)
        torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        for model in (layer, reference):
            model.down.mul_(0.5).add_(model.down.abs(), alpha=0.1)
            model.gate_up.data.clamp_(min=0)
            model.gate_up.data = model.gate_up * 3
            model.down[1] = 7.0
            model.down[:, 2:4] += model.gate_up[2, 3, 1]
            model.down[3:, 0].transpose(0, 1)
            model.gate_up.transpose(1, 2)[:, 1].mul_(2)  # a view that each rank has its part of
            torch.manual_seed(3)
            model.gate_up.normal_().add_(torch.rand_like(model.gate_up)).add_(model.down.new_ones(()))
            model.router.weight.uniform_()  # generators are still in step
            model.norm.weight.copy_(model.down[1, :, 2]).add_(torch.ones_like(model.down)[0, :, 0])
            model.gate_up.sub_(torch.nn.functional.dropout(model.gate_up, 0.5))
    same_parameters(layer, reference)
    before = layer.down.full_tensor().detach().clone()
    for write in (  # views that no rank has: a write into them would be lost
        lambda w: w[1].fill_(3.0), lambda w: w.unbind(0)[2].zero_(), lambda w: w[1:][0].mul_(0),
        lambda w: w.flatten()[1:].zero_(), lambda w: torch.nn.init.ones_(w[2]), lambda w: torch.neg(w[0], out=w[1]),
    ):
        with torch.no_grad(), pytest.raises(DistributionError, match="collect_parameters"):
            write(layer.down)
    assert torch.equal(layer.down.full_tensor(), before)
    with torch.no_grad():
        assert torch.equal(layer.down[1] + 1, before[1] + 1)
        assert torch.equal(layer.down[1:][0].T @ before[0], before[1].T @ before[0])


def test_uncaptured_use_is_right(on_ranks):
    on_ranks(2, uncaptured_use)


def save_and_load():
    layer, reference, x = build(5)
    optimizer = torch.optim.AdamW(layer.parameters())
    place_layer(layer)
    twin = copy.deepcopy(layer)
    assert isinstance(twin.down, Sharded) and isinstance(twin.down, torch.nn.Parameter)
    spread(twin, x).sum().backward()
    assert isinstance(twin.down.grad, Sharded) and layer.down.grad is None

    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    kept = torch.load(file)
    for name, parameter in reference.named_parameters():
        assert type(kept[name]) is torch.Tensor and torch.equal(kept[name], parameter)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(type(p) is torch.nn.Parameter and torch.equal(p, reference.get_parameter(name))
               for name, p in loaded.named_parameters())

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    layer.load_state_dict(reference.state_dict())
    assert isinstance(layer.down, Sharded)
    same_parameters(layer, reference)

    with pytest.raises(DistributionError, match="convert the model before"):
        copy.deepcopy(layer).float()
    spread(layer, x).sum().backward()
    Layer.forward(reference, x).sum().backward()
    collect_parameters(layer.parameters())
    assert type(layer.down) is torch.nn.Parameter
    assert any(p is layer.down for p in optimizer.param_groups[0]["params"])
    for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-11)
    layer(x).sum().backward()
    place_layer(layer)  # and back to the ranks
    same_parameters(layer, reference)


def test_copies_saving_loading_and_collecting(on_ranks):
    on_ranks(2, save_and_load)


def checkpoint(directory):
    layer, reference, x = build(5)
    optimizer = torch.optim.AdamW(layer.parameters())
    place_layer(layer)
    spread(layer, x).sum().backward()
    optimizer.step()
    kept = {name: whole(p).detach().clone() for name, p in layer.named_parameters()}
    momentum = whole(optimizer.state[layer.down]["exp_avg"]).clone()
    dcp.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=directory)
    with torch.no_grad():
        for tensor in (*layer.parameters(), optimizer.state[layer.down]["exp_avg"]):
            tensor.zero_()
    dcp.load({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=directory)
    for name, parameter in layer.named_parameters():
        assert torch.equal(whole(parameter), kept[name]), name
    assert torch.equal(whole(optimizer.state[layer.down]["exp_avg"]), momentum) and momentum.any()
    single = {name: torch.zeros_like(value) for name, value in kept.items()}  # another layout: ordinary tensors
    dcp.load({"model": single}, checkpoint_id=directory)
    assert all(torch.equal(single[name], kept[name]) for name in kept)


def test_distributed_checkpoint(on_ranks, tmp_path):
    on_ranks(2, checkpoint, str(tmp_path))


def scale_gradients(overflow):
    layer, reference, x = build(4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, reference)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in optimizers]
    place_layer(layer)
    for model, optimizer, scaler, forward in zip(
        (layer, reference), optimizers, scalers, (spread, Layer.forward), strict=True
    ):
        scaler.scale(forward(model, x).sum()).backward()
        if overflow:  # in one expert, so on one rank
            with torch.no_grad():
                mask = torch.zeros(4, 1, 1, dtype=torch.float64)
                mask[0] = float("inf")
                model.down.grad.add_(mask)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == (512.0 if overflow else 1024.0)
    same_parameters(layer, reference)


@pytest.mark.parametrize("overflow", [False, True])
def test_loss_scaling_skips_a_step_on_all_ranks(on_ranks, overflow):
    on_ranks(2, scale_gradients, overflow)


def cannot_move(obstacle):
    layer, reference, x = build(4)
    rank = dist.get_rank()
    keep = None
    if rank == 1:  # one rank cannot: all must refuse
        if obstacle == "graph":
            keep = layer(x).sum()
        elif obstacle == "hook":
            layer.down.register_hook(lambda grad: grad)
        else:
            layer.down.register_post_accumulate_grad_hook(lambda parameter: None)
    words = {"graph": "live autograd graph", "hook": "backward hook", "post": "backward hook"}[obstacle]
    with pytest.raises(PlacementError, match=words if rank == 1 else "another rank"):
        place_layer(layer)
    assert not any(isinstance(p, Sharded) for p in layer.parameters())
    assert keep is None or keep.requires_grad
    with pytest.raises(PlacementError, match="place it first"):
        to_graph_input(layer.down, "shard→local")


@pytest.mark.parametrize("obstacle", ["graph", "hook", "post"])
def test_parameter_that_cannot_move(on_ranks, obstacle):
    on_ranks(2, cannot_move, obstacle)
