"""Attention of our own: within rounding of torch's, in its layouts, and torch's wherever ours is not meant."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import moebius
from moebius.kernels import attention as ours
from moebius.kernels.native import panel_work

pytestmark = pytest.mark.skipif(
    not panel_work.rows or not panel_work.rows.GEMM, reason="this processor's products are the library's")
SHAPES = [  # batch, heads, heads of keys, length, width
    (2, 6, 2, 128, 32), (1, 3, 3, 1, 16), (2, 2, 1, 47, 20), (1, 4, 4, 48, 64), (1, 2, 1, 97, 33), (3, 1, 1, 300, 100),
    (1, 8, 2, 256, 128),
]
LAYOUTS = ["heads", "length", "packed", "expanded"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def taken(monkeypatch):
    """What ours was asked, and whether it did it."""
    answers, real = [], ours.takes
    monkeypatch.setattr(ours, "takes", lambda *tensors: answers.append(real(*tensors)) or answers[-1])
    return answers


def tensor(batch: int, heads: int, length: int, width: int, layout: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if layout == "expanded":
        return torch.randn(1, heads, length, width, generator=generator).expand(batch, -1, -1, -1)
    if layout == "heads":
        return torch.randn(batch, heads, length, width, generator=generator)
    parts = 3 if layout == "packed" else 1
    return torch.randn(batch, length, parts, heads, width, generator=generator)[:, :, 0].transpose(1, 2)


def gradients(attend, tensors: list[Tensor], grad: Tensor, causal: bool, dtype: torch.dtype) -> list[Tensor]:
    """The result, and the gradients of q, k and v."""
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in tensors)
    out = attend(q, k, v, causal)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.to(dtype))]


def torchs(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


@pytest.mark.parametrize(("shape", "causal"), list(itertools.product(SHAPES, [False, True])))
def test_as_near_to_float64_as_torch(shape: tuple[int, ...], causal: bool) -> None:
    batch, heads, groups, length, width = shape
    for layout in LAYOUTS:
        tensors = [tensor(batch, count, length, width, layout, i) for i, count in enumerate((heads, groups, groups))]
        grad = tensor(batch, heads, length, width, layout, 3)
        exact = gradients(torchs, tensors, grad, causal, torch.float64)
        theirs = gradients(torchs, tensors, grad, causal, torch.float32)
        mine = gradients(lambda q, k, v, c: ours.attention(q, k, v, c, None), tensors, grad, causal, torch.float32)
        for a, b, c in zip(mine, theirs, exact, strict=True):
            limit = 2 * (b - c).abs().max() + 3e-6 * c.abs().max()  # rounded in another order
            assert (a - c).abs().max() <= limit
        assert mine[0].stride() == theirs[0].stride()


def test_the_same_bits_for_any_number_of_threads() -> None:
    tensors = [tensor(3, heads, 130, 32, "length", i) for i, heads in enumerate((6, 2, 2))]
    grad = tensor(3, 6, 130, 32, "length", 3)

    def run() -> list[Tensor]:
        return gradients(lambda q, k, v, c: ours.attention(q, k, v, c, None), tensors, grad, True, torch.float32)

    first = run()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, first, run()))


def test_large_scores_and_what_is_no_number() -> None:
    q, k, v = (tensor(1, 2, 64, 32, "heads", i) for i in range(3))
    torch.testing.assert_close(ours.attention(q * 60, k * 60, v, True, None), torchs(q * 60, k * 60, v, True))
    torch.testing.assert_close(
        ours.attention(q, k, v, True, 3.0), F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=3.0))
    assert ours.attention(q, k, v, True, -3.0) is None  # no number at all by torch's
    q[0, 0, 5, 3], k[0, 1, 9, 0], v[0, 0, 11, 2] = float("nan"), float("nan"), float("inf")
    mine, theirs = ours.attention(q, k, v, False, None), torchs(q, k, v, False)
    assert torch.equal(mine.isfinite(), theirs.isfinite())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor, **options) -> Tensor:
        q, k, v = self.project(self.norm(x)).view(*x.shape[:2], 4, 32).transpose(1, 2).split([2, 1, 1], 1)
        return x + F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2).flatten(2)


def step(model, optimizer, x, options):
    for layer in model:
        x = layer(x, **options)
    loss = x.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(run, layers: int, options: dict, around=None) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.ModuleList(Layer() for _ in range(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 40, 64)
    losses = []
    for _ in range(4):
        with around() if around else torch.enable_grad():
            losses.append(run(model, optimizer, x, options).item())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("layers", [1, 6])
def test_a_captured_step(layers: int, taken: list[bool]) -> None:
    """Layers that are written out, and layers that are one function."""
    plain = trained(step, layers, {"is_causal": True})
    captured = moebius.capture(step)
    found = trained(captured, layers, {"is_causal": True})
    assert taken and all(taken)
    torch.testing.assert_close(plain, found, rtol=1e-5, atol=1e-6)
    assert not moebius.stats(captured).breaks


@pytest.mark.parametrize("options", [{"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril()}, {"dropout_p": 0.1}])
def test_a_mask_and_dropout_are_torchs(options: dict, taken: list[bool]) -> None:
    plain, found = trained(step, 2, options), trained(moebius.capture(step), 2, options)
    assert plain[0] == found[0] and all(map(torch.equal, plain[1], found[1])) and not taken


def test_backend_eager_and_the_programs_choice_are_torchs(taken: list[bool]) -> None:
    options = {"is_causal": True}
    plain = trained(step, 2, options)
    eager = trained(moebius.capture(step, backend="eager"), 2, options)
    assert plain[0] == eager[0] and all(map(torch.equal, plain[1], eager[1])) and not taken

    def chosen():
        return sdpa_kernel(SDPBackend.MATH)

    plain, found = trained(step, 2, options, chosen), trained(moebius.capture(step), 2, options, chosen)
    assert plain[0] == found[0] and all(map(torch.equal, plain[1], found[1])) and not any(taken)
