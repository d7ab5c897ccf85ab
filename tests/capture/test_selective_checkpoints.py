"""Selective activation checkpointing inside the graph: plain Python's numbers; what is kept is what the policy says."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

import pytest
import torch
from expert_layer import HitExperts
from peaks import peak_bytes
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moebius.lowering.step.selective as lowered
from moebius import capture, explain, stats

F = torch.nn.functional
KEPT = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
SMALL: set[torch.Size] = set()


def policy_of(counts):
    """As torchtitan's: every second matrix product, and attention."""

    def policy(ctx, func, *args, **kwargs):
        key = f"{'recompute' if ctx.is_recompute else 'forward'}_mm_count"
        if (
            func == torch.ops.aten._to_copy.default
            and str(kwargs.get("device")) == "cpu"
            and "cuda" in str(args[0].device)
        ):
            return CheckpointPolicy.MUST_SAVE
        if func == torch.ops.aten.mm.default:
            if args[1].shape in SMALL:
                return CheckpointPolicy.PREFER_RECOMPUTE
            counts[key] += 1
        keep = func in KEPT and not (func == torch.ops.aten.mm.default and counts[key] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def every_second():
    return create_selective_checkpoint_contexts(policy_of(defaultdict(int)))


LIST = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (m(x).view(1, -1, 2, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 8))


class Layer(torch.nn.Module):
    def __init__(self, experts=True):
        super().__init__()
        self.attention, self.norm, self.dropout = Attention(), torch.nn.RMSNorm(8), torch.nn.Dropout(0.2)
        self.mlp = HitExperts(bias=False) if experts else torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.mlp(self.norm(x)))


class Model(torch.nn.Module):
    def __init__(self, options, experts=True):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(experts) for _ in range(2))
        self.options = options
        if options is not None and options.get("wrapped"):
            given = {name: value for name, value in options.items() if name != "wrapped"}
            self.layers, self.options = torch.nn.ModuleList(checkpoint_wrapper(m, **given) for m in self.layers), None

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.options is None else checkpoint(layer, x, use_reentrant=False, **self.options)
        return x


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def build(options, experts=True):
    torch.manual_seed(0)
    model = Model(options, experts)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(seed, rows=6):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


def check(options, experts=True, step=step, between=None):
    """Three steps, bitwise as plain Python's. between: called before the third."""
    ours, theirs, captured = build(options, experts), build(options, experts), capture(step, backend="eager")
    for seed in range(3):
        results = []
        if seed == 2 and between is not None:
            between()
        for function, (model, optimizer) in ((captured, ours), (step, theirs)):
            torch.manual_seed(seed)
            results.append((function(model, optimizer, batch(seed)), torch.get_rng_state()))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        expected = theirs[0].state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in ours[0].state_dict().items())
    return stats(captured)  # while the models live


def products(function, *args):
    """How often each operator that is looked at ran, by torch's profiler; a product that is kept shows in its second
    run by its outer event alone."""
    with torch.autograd.profiler.profile() as profiler:
        function(*args)
    seen = Counter(event.name for event in profiler.function_events)
    return {name: seen[f"aten::{name}"] for name in ("mm", "_scaled_dot_product_flash_attention_for_cpu", "bernoulli_")}


WAYS = {
    "a list of operators": {"context_fn": LIST},
    "a policy that counts": {"context_fn": every_second},
    "a wrapper": {"context_fn": every_second, "wrapped": True},
    "to the end": {"context_fn": every_second, "early_stop": False},
    "a lambda": {"context_fn": lambda: every_second()},
}


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_selectively_checkpointed_layer_is_inside_the_graph(options, experts):
    seen = check(options, experts)
    assert seen.graphs == 1 and seen.breaks == 0


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_what_is_kept_is_what_the_policy_says(options, monkeypatch):
    def run():
        ours, theirs, captured = build(options, False), build(options, False), capture(step, backend="eager")
        for seed in range(2):
            captured(*ours, batch(seed))
            step(*theirs, batch(seed))
        return products(captured, *ours, batch(2)), products(step, *theirs, batch(2))

    ours, theirs = run()
    assert ours == theirs
    monkeypatch.setattr(lowered, "answers_of", lambda node: [])
    assert run()[0] != theirs  # (it can fail)


def test_experts_are_lowered_and_need_no_more_memory():
    ours, theirs, captured = build(WAYS["a policy that counts"]), build(WAYS["a policy that counts"]), capture(step)
    report = explain(step)(*build(WAYS["a policy that counts"]), batch(0))
    assert [r.lowered for r in report.expert_regions] == [True, True] and not report.breaks
    for seed in range(3):
        results = []
        for function, (model, optimizer) in ((captured, ours), (step, theirs)):
            torch.manual_seed(seed)
            results.append(function(model, optimizer, batch(seed, 256)))
        torch.testing.assert_close(*results)
    peaks = [peak_bytes(lambda: f(*args, batch(3, 256))) for f, args in ((captured, ours), (step, theirs))]  # noqa: B023
    assert 0 < peaks[0] <= peaks[1]


def test_a_policy_that_reads_what_changes_is_asked_again():
    def change():
        KEPT.discard(torch.ops.aten.mm.default)

    try:
        seen = check(WAYS["a policy that counts"], False, between=change)
        assert seen.misses == 2 and seen.graphs == 1 and seen.breaks == 0  # (the first one's policy was replaced)
        ours, theirs, captured = (
            (build(WAYS["a policy that counts"], False) for _ in range(2)),
            None,
            capture(step, backend="eager"),
        )
        ours, theirs = tuple(ours)
        for add in (False, True):
            if add:
                KEPT.add(torch.ops.aten.mm.default)
            for seed in range(2):
                captured(*ours, batch(seed))
                step(*theirs, batch(seed))
            assert products(captured, *ours, batch(2)) == products(step, *theirs, batch(2))
    finally:
        KEPT.add(torch.ops.aten.mm.default)


asked: list[str] = []


def writes_down(ctx, func, *args, **kwargs):
    asked.append(str(func))
    return False


def prints(ctx, func, *args, **kwargs):
    print(func)
    return False


def fails(ctx, func, *args, **kwargs):
    raise ValueError("no policy")


def reads_numbers(ctx, func, *args, **kwargs):
    return func == torch.ops.aten.mm.default and bool(args[0].sum() > 0)


class Other:
    def __enter__(self):
        asked.append("in")

    def __exit__(self, *_):
        asked.append("out")


BREAKS = {
    "changes Python state": (
        {"context_fn": partial(create_selective_checkpoint_contexts, writes_down)},
        "changes Python state",
    ),
    "prints": ({"context_fn": partial(create_selective_checkpoint_contexts, prints)}, "print"),
    "draws others": ({"context_fn": every_second, "preserve_rng_state": False}, "random numbers"),
    "reads numbers": ({"context_fn": partial(create_selective_checkpoint_contexts, reads_numbers)}, ""),
    "other contexts": ({"context_fn": lambda: (Other(), Other())}, "other contexts"),
}


@pytest.mark.parametrize(("options", "word"), BREAKS.values(), ids=BREAKS)
def test_what_a_graph_cannot_say_is_a_break(options, word, capsys):
    seen = check(options, False)
    assert seen.breaks
    report = explain(step)(*build(options, False), batch(0))
    assert any(word in f"{b.reason} {b.detail}" for b in report.breaks)
    asked.clear()
    torch.manual_seed(0)
    capture(step, backend="eager")(*build(options, False), batch(0))
    ours = list(asked), capsys.readouterr().out.count("aten")
    asked.clear()
    step(*build(options, False), batch(0))
    assert ours[0] == asked


def test_random_numbers_that_are_kept_are_a_break():
    """What is drawn after them in backward is then not what was drawn in forward."""

    def run(weight, x):
        return ((x * torch.rand_like(x)) @ weight).sin() * torch.rand_like(x)

    def forward(weight, x):
        return checkpoint(run, weight, x, use_reentrant=False, context_fn=KEEPS).sum()

    KEEPS = partial(create_selective_checkpoint_contexts, [torch.ops.aten.rand_like.default])
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    assert "random numbers" in explain(forward)(weight, x).breaks[0].detail
    gradients = []
    for function in (forward, capture(forward, backend="eager")):
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(function(weight, x), weight)[0])
    assert torch.equal(*gradients)


def test_a_policy_that_raises_raises():
    options = {"context_fn": partial(create_selective_checkpoint_contexts, fails)}
    for function in (step, capture(step, backend="eager")):
        with pytest.raises(ValueError, match="no policy"):
            function(*build(options, False), batch(0))


def test_without_gradients_only_the_context_function_is_called():
    calls = []

    def contexts():
        return create_selective_checkpoint_contexts(writes_down)

    asked.clear()
    model, _ = build({"context_fn": contexts}, False)
    captured = capture(lambda m, x: m(x), backend="eager")
    model.eval()
    with torch.no_grad():
        assert torch.equal(captured(model, batch(0)), model(batch(0)))
    assert stats(captured).breaks == 0 and not asked and not calls


def test_one_in_a_plain_checkpoint_and_a_plain_one_in_it():
    def outer(model, optimizer, x):
        optimizer.zero_grad()

        def run(x):
            return model(x) + checkpoint(torch.sin, x, use_reentrant=False)

        loss = checkpoint(run, x, use_reentrant=False).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert check(WAYS["a policy that counts"], step=outer).graphs >= 1


def test_a_kept_result_that_is_written_to_is_the_error_that_torch_raises():
    def run(weight, x):
        y = x @ weight
        y.mul_(2)
        return y.sin()

    def forward(weight, x):
        return checkpoint(run, weight, x, use_reentrant=False, context_fn=LIST).sum()

    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    captured = capture(forward, backend="eager")
    for function in (forward, captured):
        with pytest.raises(RuntimeError, match="has been mutated"):
            function(weight, x).backward()
    allowed = partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default], allow_cache_entry_mutation=True
    )
    LISTS = {"context_fn": allowed}

    def forward_allowed(weight, x):
        return checkpoint(run, weight, x, use_reentrant=False, **LISTS).sum()

    grads = [
        torch.autograd.grad(f(weight, x), weight)[0]
        for f in (forward_allowed, capture(forward_allowed, backend="eager"))
    ]
    assert torch.equal(*grads)
