"""Parameters on ranks that code without capture reads: gathered once for what was written, however it was written."""
from __future__ import annotations

import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moebius.lowering.distribution import DistributionError, Plan, Sharded, place_parameters, traffic
from moebius.lowering.distribution.reduce import REDUCERS

E, D = 5, 3


def without_gradients(write):
    return torch.no_grad()(write)


def step(optimizer, **options):
    def write(model):
        model.weight.sum().backward()
        optimizer(model.parameters(), lr=0.1, **options).step()

    return write


def assign_data(model):
    model.weight.data = torch.ones(E, D)


def assign_item(model):
    with torch.no_grad():
        model.weight[1] = 5.0


def take_in_parts(model):
    nn.utils.vector_to_parameters(torch.ones(E * D), model.parameters())


WAYS = {
    "data.copy_": lambda m: m.weight.data.copy_(torch.ones(E, D)),
    "data.add_": lambda m: m.weight.data.add_(1),
    "data =": assign_data,
    "[i] =": assign_item,
    "add_": without_gradients(lambda m: m.weight.add_(1)),
    "detach().add_": lambda m: m.weight.detach().add_(1),
    "_foreach_add_": without_gradients(lambda m: torch._foreach_add_([m.weight], 1.0)),
    "lerp_": without_gradients(lambda m: m.weight.lerp_(torch.ones(E, D), 0.5)),
    "zeros_": lambda m: nn.init.zeros_(m.weight),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.ones(E, D)}),
    "vector_to_parameters": take_in_parts,
    "SGD": step(torch.optim.SGD),
    "Adam, foreach": step(torch.optim.Adam, foreach=True),
    "Adam, one by one": step(torch.optim.Adam, foreach=False),
    "AdamW, fused": step(torch.optim.AdamW, fused=True),
}


def build(placed):
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(float(E * D)).reshape(E, D))
    if placed:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        place_parameters([model.weight], mesh, Plan(axis="ep"))
    return model


def read(weight):
    """Rows, as loops over experts and others read them; another number of them on each rank."""
    rows = range(dist.get_rank(), E)
    found = torch.zeros(E, D)
    for row in rows:
        found[row] = weight[row] if row % 2 else weight.unbind()[row]
    return found, weight[torch.tensor([dist.get_rank()])], torch.ones(2, E) @ weight


def write_and_read():
    REDUCERS.clear()  # (the process may have run other tests, whose meshes train what is still there)
    wrong = []
    for way, write in WAYS.items():
        ours, theirs = build(True), build(False)
        for number in range(3):
            twin = copy.deepcopy(ours.weight)
            for weight in (ours.weight, twin, ours.weight.detach()):
                assert isinstance(weight, Sharded)
                pairs = zip(read(weight), read(theirs.weight), strict=True)
                if not all(torch.allclose(mine, other, atol=1e-6) for mine, other in pairs):
                    wrong.append((way, number))
            write(ours)
            write(theirs)
    return wrong


def test_what_is_read_is_what_was_written(on_ranks):
    assert on_ranks(2, write_and_read) == [[], []]


A, B = 3, 2
VIEWS = {  # of experts' weights [E, A * B]
    "itself": lambda w: w, "detach": lambda w: w.detach(), "view": lambda w: w.view(len(w), A, B),
    "flatten": lambda w: w.flatten(), "more rows": lambda w: w.view(len(w) * A, B),
    "reshape": lambda w: w.reshape(len(w), B, A), "unflatten": lambda w: w.unflatten(1, (A, B)),
    "transpose": lambda w: w.view(len(w), A, B).transpose(1, 2), "mT": lambda w: w.view(len(w), A, B).mT,
    "permute": lambda w: w.view(len(w), A, B).permute(2, 0, 1), "t": lambda w: w.t(),
    "[:, a:b]": lambda w: w.view(len(w), A, B)[:, 1:], "chunk": lambda w: w.chunk(2, 1)[1],
    "unsqueeze": lambda w: w.unsqueeze(0), "squeeze": lambda w: w.view(len(w), 1, A, B).squeeze(1),
    "expand": lambda w: w.view(len(w), 1, A, B).expand(len(w), 2, A, B), "diagonal": lambda w: w.diagonal(),
    "as other numbers": lambda w: w.view(torch.int32),
}
READS = {
    "[i]": lambda v: v[1], "[i, ...]": lambda v: v[1, ...], "narrow": lambda v: v.narrow(0, 0, 1),
    "unbind": lambda v: v.unbind()[1], "chunk": lambda v: v.chunk(len(v))[0], "split": lambda v: v.split(1)[1],
    "list": lambda v: list(v)[0], "matmul": lambda v: torch.ones(1, v.shape[-2]) @ v,
}


def weights_of(experts):
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(experts, A * B))
    theirs = nn.Parameter(ours.detach().clone())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    place_parameters([ours], mesh, Plan(axis="ep"))
    return ours, theirs


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, Sharded) else tensor


def look_at_views(experts):
    """What is read of views otherwise than in one process, is gathered again, or gives another gradient."""
    wrong = []
    for (name, view), (way, read), grad in itertools.product(VIEWS.items(), READS.items(), (False, True)):
        ours, theirs = weights_of(experts)
        with torch.set_grad_enabled(grad):
            try:
                expected = read(view(theirs))
            except (RuntimeError, IndexError):
                continue
            read(ours)  # now it is there
            traffic.reset()
            found = read(view(ours))
            where = (name, way, grad)
            wrong += [(*where, "gathered")] * bool(traffic.collectives and (name, way) != ("expand", "matmul"))
            wrong += [(*where, "value")] * (not torch.equal(whole(found.detach()), expected.detach()))
            wrong += [(*where, "autograd")] * (found.requires_grad != expected.requires_grad)
            if grad and found.requires_grad and expected.requires_grad:
                (found * 2).sum().backward()
                (expected * 2).sum().backward()
                wrong += [(*where, "gradient")] * (not torch.equal(whole(ours.grad), theirs.grad))
    return wrong


@pytest.mark.share(1)
@pytest.mark.parametrize("experts", [4, 5])
def test_a_view_is_of_what_was_gathered(on_ranks, experts):
    assert on_ranks(2, look_at_views, experts) == [[], []]


def write_through_views(experts):
    """Views through which a write did not reach the parameter: those are refused."""
    found = {}
    for name, view in VIEWS.items():
        ours, theirs = weights_of(experts)
        with torch.no_grad():
            ours[1]
            try:
                view(theirs).mul_(2)
            except RuntimeError:
                continue
            try:
                view(ours).mul_(2)
            except DistributionError as error:
                found[name] = "collect_parameters" in str(error)
            else:
                found[name] = torch.equal(ours[1], theirs[1]) and torch.equal(whole(ours.detach()), theirs)
    return found


@pytest.mark.parametrize("experts", [4, 5])
def test_what_is_written_through_a_view_is_there_or_refused(on_ranks, experts):
    for found in on_ranks(2, write_through_views, experts):
        assert len(found) > 12 and all(found.values()), found


def count():
    model, found = build(True), []
    for _ in range(2):
        for times in range(1, 3 + 2 * dist.get_rank()):
            traffic.reset()
            for _ in range(times):
                read(model.weight)
            found.append(traffic.collectives)
        with torch.no_grad():
            model.weight.add_(1)
    return found


def test_it_is_gathered_once_for_each_write(on_ranks):
    first, second = on_ranks(2, count)
    assert [bool(number) for number in first] == [True, False] * 2
    assert [bool(number) for number in second] == [True, False, False, False] * 2


def pickled(weight):
    return pickle.loads(pickle.dumps(weight))


def saved(weight):
    file = io.BytesIO()
    torch.save(weight, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    return torch.load(file, weights_only=False)


def solved(w):
    return torch.linalg.solve(w @ w.mT + torch.eye(A), w)


def by_safetensors(weight):
    return safetensors.torch.load(safetensors.torch.save({"weight": whole(weight)}))["weight"]


NUMBERS = {  # of experts' weights [E, A, B] without gradients, as logs, metrics, checks and files take them
    "numpy": lambda w: torch.tensor(w.numpy()), "cpu().numpy": lambda w: torch.tensor(w.cpu().numpy()),
    "asarray": lambda w: torch.tensor(np.asarray(w)), "numpy, forced": lambda w: torch.tensor(w.numpy(force=True)),
    "tolist": lambda w: torch.tensor(w.tolist()), "a row's numpy": lambda w: torch.tensor(w[1].numpy()),
    "a row's tolist": lambda w: torch.tensor(w[0, 1].tolist()), "item": lambda w: torch.tensor(w[0, 0, 0].item()),
    "float": lambda w: torch.tensor(float(w.sum())), "pickle": pickled,
    "safetensors": by_safetensors, "save": saved, "deepcopy": copy.deepcopy,
    "tensor": torch.tensor, "new_tensor": lambda w: w.new_tensor(w), "copy_": lambda w: torch.empty(w.shape).copy_(w),
    "stack": lambda w: torch.stack([w, w]), "cat": lambda w: torch.cat([w, w]),
    "iter": lambda w: torch.stack(list(w)), "half": lambda w: w.half(), "contiguous": lambda w: w.mT.contiguous(),
    "flip": lambda w: w.flip(0), "isfinite": lambda w: torch.isfinite(w).all(),
    "equal": lambda w: torch.tensor(torch.equal(w, w.clone())), "histc": lambda w: torch.histc(w, 5),
    "quantile": lambda w: torch.quantile(w, 0.3), "topk": lambda w: w.flatten().topk(3)[0],
    "count": lambda w: w.gt(0).sum(), "nonzero": lambda w: w.nonzero(), "masked": lambda w: w[w > 0],
    "where": lambda w: torch.where(w > 0, w, 0.0), "median": lambda w: w.median(), "sort": lambda w: w.sort(0)[0],
    "argmax": lambda w: w.argmax(), "amax": lambda w: w.amax((1, 2)), "var": lambda w: w.var(0),
    "std": lambda w: w.std((1, 2)), "norm": lambda w: w.norm(dim=-1), "svdvals": torch.linalg.svdvals,
    "solve": solved, "matrix norm": lambda w: torch.linalg.matrix_norm(w, 2), "matmul": lambda w: w @ w.mT,
    "bmm": lambda w: torch.bmm(w, w.mT), "of a product": lambda w: (w @ w.mT) @ w,
    "a product's rows": lambda w: (w @ w.mT).flatten(1).norm(dim=1),
    "baddbmm": lambda w: torch.baddbmm(torch.ones(len(w), A, A), w, w.mT),
    "linear": lambda w: nn.functional.linear(w, torch.ones(2, B)),
    "einsum": lambda w: torch.einsum("eab,ecb->eac", w, w),
    "vmap": lambda w: torch.vmap(lambda each: each @ each.T)(w), "mm": lambda w: w.reshape(-1, B) @ torch.ones(B, 2),
    "cosine": lambda w: nn.functional.cosine_similarity(w, torch.ones(A, B), dim=-1),
    "normalize": nn.functional.normalize, "softmax": lambda w: w.softmax(0), "logsumexp": lambda w: w.logsumexp(0),
    "cumsum": lambda w: w.cumsum(0), "roll": lambda w: w.roll(1, 0),
    "layer_norm": lambda w: nn.functional.layer_norm(w, (B,)), "pad": lambda w: nn.functional.pad(w, (1, 1)),
    "repeat": lambda w: w.repeat(1, 2, 1),
    "gather": lambda w: w.gather(1, torch.zeros(len(w), 1, B, dtype=torch.long)),
    "index_select": lambda w: w.index_select(0, torch.tensor([1, 0])), "split": lambda w: w.split([1, len(w) - 1])[1],
    "unfold": lambda w: w.unfold(1, 2, 1), "triu": torch.triu, "cdist": lambda w: torch.cdist(w, w),
}
OF_MEMORY = {
    "data_ptr": lambda w: w.data_ptr(), "a row's data_ptr": lambda w: w[1].data_ptr(), "dlpack": torch.from_dlpack,
    "storage": lambda w: w.storage().data_ptr(),
    "safetensors": lambda w: safetensors.torch.save({"weight": w}),
    "safetensors of a model": lambda w: safetensors.torch.save_model(held_by_a_model(w), "never written"),
}


def held_by_a_model(weight):
    model = nn.Module()
    model.register_buffer("weight", weight)
    return model


def take_numbers(experts):
    ours, theirs = (weight.detach().view(experts, A, B) for weight in weights_of(experts))
    wrong = []
    for name, take in NUMBERS.items():
        mine, other = whole(take(ours)), take(theirs)
        same = (mine.shape, mine.dtype) == (other.shape, other.dtype)
        wrong += [] if same and torch.allclose(mine.double(), other.double(), atol=1e-5) else [name]
    for name, take in OF_MEMORY.items():
        take(theirs.clone()) if "model" not in name else None
        try:
            take(ours)
            wrong.append(name)
        except DistributionError as error:
            wrong += [] if "full_tensor()" in str(error) else [name]
    array = ours.numpy()
    return wrong, array.flags.writeable, ours.untyped_storage().nbytes() == ours.local.nbytes


@pytest.mark.parametrize(("ranks", "experts"), [(2, 4), (2, 3), (2, 5), (4, 5), (4, 3)])
def test_what_others_take_of_weights_is_of_all_of_them(on_ranks, ranks, experts):
    """Ranks have as many rows, or not, or one, or none. What would read this rank's memory alone says so."""
    for wrong, writeable, counts_own_bytes in on_ranks(ranks, take_numbers, experts):
        assert not wrong and not writeable and counts_own_bytes


def make_parameters(experts):
    """Of values that live on ranks, in ways that torch has; read as experts are, on each rank others."""
    weight, _ = weights_of(experts)
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(experts, A * B))
    model.load_state_dict({"weight": weight.detach() * 2}, assign=True)
    made = [nn.Parameter(weight.detach() + 1), nn.Parameter(weight.detach()), copy.deepcopy(weight)]
    for found in (model.weight, *made):
        if not isinstance(found, nn.Parameter) or isinstance(found.detach(), nn.Parameter):
            return "a parameter"
        traffic.reset()
        for row in range(dist.get_rank(), experts):
            found[row]
        if traffic.collectives != 1:
            return f"gathered {traffic.collectives} times"
    return ""


def test_a_parameter_that_is_made_of_another_is_gathered_once(on_ranks):
    assert on_ranks(2, make_parameters, 5) == ["", ""]
