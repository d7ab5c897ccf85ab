"""The user's own autograd functions: forward and backward are graphs, gradients are plain Python's to the bit."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gradient_programs import kept

from moebius import capture, explain, stats
from moebius.regions.functions import AutogradFunctions

SCALE = 2.0
CALLS = []


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Gated(torch.autograd.Function):
    """Two tensors, a number, an attribute of the context, an intermediate kept, a gradient only where it is needed."""

    @staticmethod
    def forward(ctx, x, w, power, unused=None):
        gate = torch.sigmoid(x @ w)
        ctx.save_for_backward(x, w, gate)
        ctx.power = power
        return gate**power * SCALE

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        x, w, gate = ctx.saved_tensors
        inner = gradient * SCALE * ctx.power * gate ** (ctx.power - 1) * gate * (1 - gate)
        d_x = inner @ w.t() if ctx.needs_input_grad[0] else None
        d_w = x.t() @ inner if ctx.needs_input_grad[1] else None
        return d_x, d_w, None, None


class TopOne(torch.autograd.Function):
    """Two outputs, one of them not differentiable."""

    @staticmethod
    def forward(ctx, scores):
        best, where = scores.max(-1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = scores.shape
        return best, where

    @staticmethod
    def backward(ctx, gradient, _):
        (where,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).scatter_(-1, where[:, None], gradient[:, None])


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round() + 0.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class OwnSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, power):
        return x**power, x.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        x, sign = ctx.saved_tensors
        return gradient * ctx.power * x ** (ctx.power - 1) * sign, None


class Reversed(torch.autograd.Function):
    """Its argument comes back: torch makes a view of it."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Rows(torch.autograd.Function):
    """A view of its argument comes back, or of a tensor of its own."""

    @staticmethod
    def forward(ctx, x, own):
        ctx.shape = x.shape
        return (x * 1.0).view(-1)[:8] if own else x.view(-1)[:8]

    @staticmethod
    def backward(ctx, gradient):
        return torch.nn.functional.pad(gradient * 3, (0, ctx.shape.numel() - 8)).view(ctx.shape), None


class AuxiliaryLoss(torch.autograd.Function):
    """How DeepSeek's modelling code gives a loss to the router: the tokens pass, the loss gets a gradient of one."""

    @staticmethod
    def forward(ctx, x, loss):
        assert loss.numel() == 1
        ctx.dtype, ctx.wanted = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones(1, dtype=ctx.dtype) if ctx.wanted else None


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2)]


def square(x, w):
    return Square.apply(x @ w).sum()


def gated(x, w):
    return Gated.apply(x, w, 3).square().mean() + Gated.apply(x.detach(), w, 2, None).mean()


def top_one(x, w):
    best, where = TopOne.apply(x @ w)
    return (best * (where + 1)).sum()


def straight_through(x, w):
    return (StraightThrough.apply(x @ w) * w).sum()


def twice_the_same(x, w):
    return Gated.apply(w, w, 2).sum() + x.sum()


def own_setup(x, w):
    power, sign = OwnSetup.apply(x @ w, 3)
    return (power * sign).sum()


def reversed_gradient(x, w):
    return (Reversed.apply(x @ w, 0.5) * w).sum() + Reversed.apply(x, 2.0).square().sum()


def rows(x, w):
    return Rows.apply(x @ w, False).square().sum() + Rows.apply(x * w, True).square().sum()


def auxiliary_loss(x, w):
    scores = (x @ w).softmax(-1)
    passed = AuxiliaryLoss.apply(x * 1.5, (scores.mean(0) * scores.sum(0)).sum())
    return (AuxiliaryLoss.apply(passed, scores.detach().sum()) @ w).sum()


FUNCTIONS = [
    square, gated, top_one, straight_through, twice_the_same, own_setup, reversed_gradient, rows,
    auxiliary_loss,
]  # fmt: skip


def step(loss, x, w):
    x.grad = w.grad = None
    total = loss(x, w)
    total.backward()
    return total.detach(), x.grad.clone(), w.grad.clone()


@pytest.mark.parametrize("loss", FUNCTIONS)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_a_function_is_inside_the_graph(loss, backend):
    captured = capture(step, backend=backend)
    for _ in range(3):
        ours, theirs = captured(loss, *parameters()), step(loss, *parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert stats(captured).graphs == 1 and stats(captured).breaks == 0


@pytest.mark.parametrize("loss", FUNCTIONS)
def test_a_function_in_a_captured_forward_pass(loss):
    captured = capture(loss, backend="eager")
    for _ in range(2):
        mine, yours = parameters(), parameters()
        captured(*mine).backward()
        loss(*yours).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, yours, strict=True))


def test_a_function_without_gradients():
    captured = capture(lambda x: Square.apply(x) + 1, backend="eager")
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(captured(x), x * x + 1) and not captured(x).requires_grad
    assert torch.equal(captured(x.detach()), x.detach() ** 2 + 1)
    assert captured(x).requires_grad


def test_what_forward_and_backward_read_is_guarded(monkeypatch):
    captured = capture(step, backend="eager")
    for scale in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        ours, theirs = captured(gated, *parameters()), step(gated, *parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_autograd_keeps_what_the_users_backward_reads_and_no_more():
    captured = capture(gated, backend="eager")
    captured(*parameters())
    assert 0 < kept(captured, *parameters()) <= kept(gated, *parameters())


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        CALLS.append("forward")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        CALLS.append("backward")
        return gradient * 2


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx, first, second):
        return first * 2 + second * 2


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def first_of(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("function", [Logs, Twice, InPlace])
def test_what_is_no_graph_is_a_break_with_plain_pythons_results(function):
    def loss(x, w):
        return (first_of(function.apply(x @ w)) * w).sum()

    captured = capture(step, backend="eager")
    for _ in range(2):
        CALLS.clear()
        ours, mine = captured(loss, *parameters()), list(CALLS)
        CALLS.clear()
        theirs = step(loss, *parameters())
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and mine == CALLS
    assert explain(step, backend="eager")(loss, *parameters()).breaks


def written_into(x, w):
    return Reversed.apply(x @ w, 1.0).mul_(2).sum()


def written_into_as_a_view(x, w):
    return Rows.apply(x @ w, True).mul_(2).sum()


def written_into_from_outside(x, w):
    h = x @ w
    same = Reversed.apply(h, 0.5)
    with torch.no_grad():
        h.mul_(2)
    return (same * 3).sum()


@pytest.mark.parametrize("backend", ["eager", "moebius"])
@pytest.mark.parametrize("loss", [written_into, written_into_as_a_view, written_into_from_outside])
def test_what_torch_forbids_after_a_function_is_the_same_error(loss, backend):
    texts = []
    for function in (capture(step, backend=backend), step):
        with pytest.raises(RuntimeError) as raised:
            function(loss, *parameters())
        texts.append(str(raised.value))
    assert texts[0] == texts[1]


def test_the_result_carries_the_functions_name():
    def forward(x):
        return Square.apply(x)

    x = torch.ones(3, requires_grad=True)
    assert type(capture(forward)(x).grad_fn).__name__ == type(forward(x).grad_fn).__name__ == "SquareBackward"


def test_what_came_back_shares_the_arguments_memory():
    def forward(x):
        same = Reversed.apply(x, 1.0)
        with torch.no_grad():
            x.add_(1)
        return same, same is x

    for captured in (forward, capture(forward, backend="eager"), capture(forward)):
        for _ in range(2):
            x = torch.zeros(3, requires_grad=True)
            same, is_x = captured(x)
            assert same.data_ptr() == x.data_ptr() and not is_x and same.tolist() == [1.0] * 3 and same.requires_grad
            with torch.no_grad():
                again, _ = captured(x)
            assert again.data_ptr() == x.data_ptr() and not again.requires_grad


def test_a_modules_backward_hook_is_a_break_that_says_so():
    def train(model, x):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model[2].register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))
    x = torch.randn(3, 4)
    want = train(model, x)
    for backend in ("eager", "moebius"):
        captured = capture(train, backend=backend)
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(captured(model, x), want, strict=True))
        assert "module backward hook" in {b.reason for b in explain(train, backend=backend)(model, x).breaks}
        with torch.no_grad():
            assert not explain(lambda: model(x), backend=backend)().breaks


class Auxiliary(torch.autograd.Function):
    """As Megatron's: the scale of an auxiliary loss's gradient is set once the forward pass is done."""

    scale = torch.tensor(1.0)
    factor = 1.0

    @staticmethod
    def forward(ctx, out, loss):
        ctx.save_for_backward(loss)
        return out * 1

    @staticmethod
    def backward(ctx, gradient):
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss) * Auxiliary.scale * Auxiliary.factor


def set_tensor(n):
    Auxiliary.scale = torch.tensor(n)


def set_number(n):
    Auxiliary.factor = n


def double(n):
    Auxiliary.scale.mul_(2)


def nothing(n):
    pass


def auxiliary_step(w, x, n, before, after):
    h = x @ w
    before(n)
    y = Auxiliary.apply(h, h.square().mean())
    after(n)
    w.grad = None
    y.square().sum().backward()
    return y.detach()


def run_auxiliary(function, before, after):
    torch.manual_seed(0)
    Auxiliary.scale, Auxiliary.factor, gradients = torch.tensor(1.0), 1.0, []
    w = torch.nn.Parameter(torch.randn(4, 4))
    for n in range(4):
        gradients.append((function(w, torch.randn(3, 4), float(n), before, after), w.grad))
    return gradients


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (set_tensor, nothing, False),
        (nothing, double, False),
        (nothing, nothing, False),
        (nothing, set_tensor, True),
        (set_tensor, set_number, True),
    ],
)
def test_what_backward_reads_is_what_it_is_at_backward(before, after, changes, monkeypatch):
    captured = capture(auxiliary_step, backend="eager")
    ours, plain = run_auxiliary(captured, before, after), run_auxiliary(auxiliary_step, before, after)
    assert all(
        torch.equal(a, b) for pair, other in zip(ours, plain, strict=True) for a, b in zip(pair, other, strict=True)
    )
    report = explain(auxiliary_step, backend="eager")(
        torch.ones(4, 4, requires_grad=True), torch.ones(3, 4), 2.0, before, after
    )
    assert not report.breaks
    if changes:
        monkeypatch.setattr(AutogradFunctions, "is_unchanged", lambda *_: True)
        ours = run_auxiliary(capture(auxiliary_step, backend="eager"), before, after)
        assert not all(torch.equal(a[1], b[1]) for a, b in zip(ours, plain, strict=True))


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in backward")


def caught_at_backward(x):
    loss = Raising.apply(x * 2).sum()
    try:
        loss.backward()
    except ValueError:
        return "at backward"


def caught_around(x):
    try:
        return caught_at_backward(x)
    except ValueError:
        return "where the function was applied"


def caught_by_a_block(x):
    try:
        with contextlib.nullcontext():
            return caught_at_backward(x)
    except ValueError:
        return "where the function was applied"


@pytest.mark.parametrize("step", [caught_at_backward, caught_around, caught_by_a_block])
def test_what_backward_raises_is_met_where_backward_is_called(step):
    """Backward is interpreted where the function is applied: there its error is nobody's."""
    assert capture(step, backend="eager")(torch.ones(2, requires_grad=True)) == "at backward"


GIVEN = {
    "view": lambda x, y: x[:],
    "another view": lambda x, y: x.view(-1, 1),
    "argument": lambda x, y: x,
    "new": lambda x, y: x * y,
    "detached": lambda x, y: x.detach(),
    "view of what is new": lambda x, y: (x * y)[:1],
    "constant": lambda x, y: torch.ones(2),
}


@pytest.mark.share(13)
@pytest.mark.parametrize("constant", (False, True))
@pytest.mark.parametrize("recorded", (False, True))
@pytest.mark.parametrize("what", GIVEN)
def test_what_is_given_requires_gradients_as_torch_says(what, recorded, constant):
    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            result = GIVEN[what](x, y)
            if constant:
                ctx.mark_non_differentiable(result)
            return result

        @staticmethod
        def backward(ctx, gradient):
            return gradient.sum().expand(2), None

    def step(x, y):
        with torch.set_grad_enabled(recorded):
            result = Given.apply(x, y)
        doubled = result * 2
        return (result.requires_grad, result.is_leaf, doubled.requires_grad), result

    captured = capture(step, backend="eager")
    for needed in (False, True):
        for leaf in (False, True):
            x, y = torch.ones(2), torch.full((2,), 3.0)
            x = x.requires_grad_(needed) if leaf else x.requires_grad_(needed) * 1
            (told, result), (expected, plain) = captured(x, y), step(x, y)
            assert told == expected
            kinds = [(t.requires_grad, t.is_leaf, t._is_view(), t.tolist()) for t in (result, plain)]
            assert kinds[0] == kinds[1]
    assert stats(captured).graphs
