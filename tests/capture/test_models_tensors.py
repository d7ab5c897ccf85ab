"""Tensors with more to them: subclasses, DTensor, modes, hooks, custom operators, generators, numpy."""

# ruff: noqa: B007, B018, B028, B904, B905, E731, E741, E742, F841, UP031, UP042 (the programs are as users write them)

from __future__ import annotations

import random

import numpy as np
import plain_python
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode


class Sub(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        LOGS.append(getattr(func, "__name__", "?"))
        return super().__torch_function__(func, types, args, kwargs or {})


LOGS = []


class Meta(torch.Tensor):
    tag = "x"


class TwoT(torch.Tensor):
    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(
            cls, a.shape, dtype=a.dtype, device=a.device, requires_grad=a.requires_grad
        )

    def __init__(self, a, b):
        self.a = a
        self.b = b

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        LOGS.append(func.__name__)
        f = lambda t, k: getattr(t, k) if isinstance(t, TwoT) else t
        import torch.utils._pytree as pt

        ra = func(*pt.tree_map(lambda t: f(t, "a"), args), **(kwargs or {}))
        rb = func(*pt.tree_map(lambda t: f(t, "b"), args), **(kwargs or {}))
        return TwoT(ra, rb) if isinstance(ra, torch.Tensor) else ra

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(t, m, s, st):
        return TwoT(t["a"], t["b"])


@torch.library.custom_op("moebius_models::mul2", mutates_args=())
def mul2(x: torch.Tensor, k: float) -> torch.Tensor:
    return x * k


@mul2.register_fake
def _(x, k):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.k = inputs[1]


mul2.register_autograd(lambda ctx, g: (g * ctx.k, None), setup_context=_setup)


@torch.library.custom_op("moebius_models::inc_", mutates_args=("x",))
def inc_(x: torch.Tensor, n: int) -> None:
    x.add_(n)


LIB = torch.library.Library("moebius_models_library", "DEF")
LIB.define("twice(Tensor x) -> Tensor")
LIB.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")


@torch.library.custom_op("moebius_models::nofake", mutates_args=())
def nofake(x: torch.Tensor) -> torch.Tensor:
    return x.detach() * 3


@torch.library.custom_op("moebius_models::ret_list", mutates_args=())
def ret_list(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1, x * 2]


@ret_list.register_fake
def _(x):
    return [torch.empty_like(x), torch.empty_like(x)]


def tensor_hooks():
    w = nn.Parameter(torch.ones(4))
    log = []

    def hook(g):
        log.append(g.sum().item())
        return g * 2

    w.register_hook(hook)

    def step(x):
        y = x * w
        y.register_hook(lambda g: g * 3)
        return y.sum()

    return step, [w, log]


def retain_grad():
    def step(x):
        y = x * 2
        y.retain_grad()
        y.sum().backward()
        return y.grad * 1, x.grad.clone()

    return step, []


def einops_functions():
    pytest.importorskip("einops")
    from einops import einsum, pack, rearrange, reduce, repeat, unpack

    def step(x):
        y = rearrange(x, "b (h d) -> h b d", h=2)
        z = repeat(x, "b d -> b r d", r=3)
        r = reduce(z, "b r d -> b d", "mean")
        e = einsum(x, x, "a b, c b -> a c")
        p, ps = pack([x, x * 2], "* d")
        u = unpack(p, ps, "* d")
        return y * 2, r, e, u[1], reduce(x, "a b -> ", "sum")

    return step, []


def einops_layers():
    pytest.importorskip("einops")
    from einops.layers.torch import Rearrange, Reduce

    m = nn.Sequential(Rearrange("b (h d) -> b h d", h=2), nn.Linear(2, 3), Reduce("b h d -> b d", "max"))

    def step(x):
        return m(x)

    return step, [m]


def numpy_interop():
    def step(x):
        a = x.detach().numpy()
        b = torch.from_numpy(a * 2)
        c = torch.as_tensor(np.arange(4.0))
        d = torch.tensor(a.tolist())
        e = np.asarray(x.detach()).sum()
        f = np.mean(a)
        return (
            x * b + c.float() + d,
            float(e),
            x * float(f),
            x * np.float32(2),
            x + torch.tensor(np.float64(3)),
            a.shape,
        )

    return step, []


def numpy_write_through():
    buf = np.zeros(4, dtype=np.float32)
    t = torch.from_numpy(buf)

    def step(x):
        t.add_(1)
        buf[0] += 5
        y = x * t
        a = y.detach().numpy()
        a[0, 0] = 100.0
        return y, buf.sum()

    return step, [t]


def randoms():
    g = torch.Generator().manual_seed(3)
    rs = np.random.RandomState(3)
    rg = np.random.default_rng(3)
    pr = random.Random(3)

    def step(x):
        a = random.random()
        b = np.random.rand()
        c = random.choice([1, 2, 3])
        d = torch.rand(4, generator=g)
        e = np.random.randint(3)
        f = rs.rand()
        h = rg.random()
        i = pr.random()
        l = list(range(5))
        random.shuffle(l)
        return (
            x * a + b * c + d + e,
            f,
            h,
            i,
            l,
            torch.randperm(4),
            torch.randint(0, 5, (3,)),
            random.randint(0, 9),
            np.random.permutation(4),
            torch.rand(2).tolist(),
        )

    return step, []


def gumbel_seeded():
    def step(x):
        torch.manual_seed(len(x))
        a = torch.rand(3)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            b = torch.rand(3)
        s = torch.get_rng_state()
        c = torch.rand(2)
        torch.set_rng_state(s)
        d = torch.rand(2)
        return x * 1, a, b, c, d, torch.initial_seed()

    return step, []


def branch_random():
    def step(x):
        if random.random() < 0.5:
            return x * 2
        if torch.rand(()) > 0.5:
            x = x + 1
        return x * 3

    return step, []


def collate():

    def step(x):
        b = default_collate(
            [{"a": torch.ones(2), "n": 1, "f": 1.5, "s": "q"}, {"a": torch.zeros(2), "n": 2, "f": 2.5, "s": "r"}]
        )
        return x * b["n"].sum() + b["a"].mean() + b["f"].sum(), b["s"]

    return step, []


def loader():
    ds = torch.utils.data.TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))
    dl = torch.utils.data.DataLoader(ds, batch_size=2, shuffle=True)

    def step(x):
        t = 0
        for a, b in dl:
            t = t + a.sum() * b.sum()
        return x * t

    return step, []


def custom_ops():
    b = torch.zeros(4)

    def step(x):
        inc_(b, 2)
        r = ret_list(x.detach())
        return mul2(x, 3.0) + b + torch.ops.moebius_models_library.twice(x) + torch.ops.moebius_models.mul2.default(
            x, 2.0
        ) + r[0], b.clone()

    return step, [b]


def custom_op_nofake():
    def step(x):
        return nofake(x) + x * 1

    return step, []


def autograd_fn():
    class F2(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.save_for_backward(x)
            ctx.k = k
            return x * k, x + 1

        @staticmethod
        def backward(ctx, g, h):
            (x,) = ctx.saved_tensors
            return g * ctx.k * x + h, None

    class Rev(torch.autograd.Function):
        @staticmethod
        def forward(x, l):
            return x.view_as(x)

        @staticmethod
        def setup_context(ctx, i, o):
            ctx.l = i[1]

        @staticmethod
        def backward(ctx, g):
            return -ctx.l * g, None

    def step(x):
        a, b = F2.apply(x, 2.0)
        return a + b * 2 + Rev.apply(x, 0.5)

    return step, []


def saved_hooks():
    log = []

    def step(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (log.append("p"), t * 1)[1], lambda t: t):
            y = x * x
        with torch.autograd.graph.save_on_cpu():
            y = y * x
        return y

    return step, [log]


def sub_function():
    w = torch.ones(4).as_subclass(Sub)
    LOGS.clear()

    def step(x):
        y = (x * w) + 1
        return y.as_subclass(torch.Tensor), type(y).__name__, list(LOGS)

    return step, []


def sub_plain():
    w = torch.ones(4).as_subclass(Meta)
    w.tag = "mine"

    def step(x):
        y = x * w
        z = x.as_subclass(Meta)
        z.tag = "q"
        return y.as_subclass(torch.Tensor), type(y).__name__, w.tag, z.tag, (z * 2).as_subclass(torch.Tensor)

    return step, []


def sub_param():
    class P(nn.Parameter):
        pass

    m = nn.Linear(4, 4)
    m.weight = P(m.weight.data * 2)
    m.weight.loader = "abc"

    def step(x):
        return m(x), m.weight.loader, type(m.weight).__name__

    return step, [m]


def sub_dispatch():
    LOGS.clear()
    t = TwoT(torch.ones(4), torch.zeros(4))

    def step(x):
        y = t * 2
        return x * y.a + y.b, list(LOGS)

    return step, []


def sub_dispatch_mixed():
    LOGS.clear()
    t = TwoT(torch.ones(4), torch.zeros(4))

    def step(x):
        y = (t + 1) * 3
        z = y.sum()
        return x * 2, y.a, z.b, len(LOGS)

    return step, []


def torch_function_mode():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, f, t, a=(), k=None):
            seen.append(f.__name__)
            return f(*a, **(k or {}))

    def step(x):
        with Mode():
            y = x * 2
            y = y + 1
        return y.sin()

    return step, [seen]


def dispatch_mode():

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f, t, a=(), k=None):
            seen.append(str(f))
            return f(*a, **(k or {}))

    def step(x):
        with Mode():
            y = x * 2
        return y + 1

    return step, [seen]


def flops():

    m = nn.Linear(4, 4)

    def step(x):
        with FlopCounterMode(display=False) as f:
            y = m(x)
        return y, f.get_total_flops()

    return step, [m]


def device_ctx():
    def step(x):
        with torch.device("cpu"):
            y = torch.ones(4)
        with torch.device("meta"):
            z = torch.ones(4)
        return x * y, z.device.type

    return step, []


def dtensor():

    mesh = one_rank()
    w = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    def step(x):
        d = DTensor.from_local(x, mesh, [Replicate()])
        y = d @ w
        return y.to_local() * 2, y.full_tensor(), isinstance(y, DTensor), str(y.placements)

    return step, []


def dtensor_module():

    mesh = one_rank()
    m = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step(x):
        return m(x)

    return step, []


@pytest.fixture(autouse=True)
def no_group_stays():
    """Other tests make process groups of their own."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def one_rank():
    """A mesh of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return dist.device_mesh.init_device_mesh("cpu", (1,))


CASES = [
    tensor_hooks,
    retain_grad,
    einops_functions,
    einops_layers,
    numpy_interop,
    numpy_write_through,
    randoms,
    gumbel_seeded,
    branch_random,
    collate,
    loader,
    custom_ops,
    custom_op_nofake,
    autograd_fn,
    saved_hooks,
    sub_function,
    sub_plain,
    sub_param,
    sub_dispatch,
    sub_dispatch_mixed,
    torch_function_mode,
    dispatch_mode,
    flops,
    device_ctx,
    dtensor,
    dtensor_module,
]
UNBROKEN = {"collate", "custom_ops", "einops_layers"}


@pytest.mark.share(4)
@pytest.mark.parametrize("backend", ["moebius", "eager"])
@pytest.mark.parametrize("recipe", CASES, ids=lambda r: r.__name__)
def test_three_calls_are_plain_pythons(recipe, backend):
    found = plain_python.compare(recipe, backend)
    assert recipe.__name__ not in UNBROKEN or not found.breaks
