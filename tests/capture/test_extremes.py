"""max() and min() of numbers and tensors: Python asks the tensors which is the greater, and gives one of them back."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain, stats


def scaled(x, out):
    return x * max(1e-3, x.norm())


def tensor_first(x, out):
    return max(x.norm(), 1e-3), min(1.0, x.norm(), x.sum())


def of_tensors(x, out):
    return max(x.norm(), x.sum(), x.mean())


def which(x, out):
    greatest = max(0.5, (x * 2).pow(2).mean().sqrt())
    return x - 0.1 * greatest, type(greatest).__name__


def in_a_loop(x, out):
    out.append("begun")
    for i in range(3):
        out.append(max(0.2 * i, x.sum() / (i + 1)))
    return len(out)


def of_a_boolean(x, out):
    return max(True, x.sum()), min(x.sum(), 2)


@pytest.mark.parametrize("step", [scaled, tensor_first, of_tensors, which, in_a_loop, of_a_boolean])
def test_each_call_gives_what_python_gives(step):
    captured = capture(step, backend="eager")
    torch.manual_seed(0)
    for scale in (1.0, 1e-5, 1.0, float("nan"), -1.0, 0.0, 1e-5):
        x, ours, theirs = torch.randn(3).abs() * scale, [], []
        assert repr(captured(x, ours)) == repr(step(x, theirs))
        assert repr(ours) == repr(theirs)
    assert not explain(step, backend="eager")(torch.ones(3), []).breaks


def test_an_optimizer_scaled_by_its_weights_is_one_graph():
    """As transformers' Adafactor does it: a step count in Python, a root mean square that is replaced each step."""

    class Scaled(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if len(state) == 0:
                        state["step"] = 0
                    state["step"] += 1
                    state["rms"] = p.norm() / p.numel() ** 0.5
                    p.sub_(p.grad * max(1e-3, state["rms"]) * min(1e-2, state["step"] ** -0.5))

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))  # 40 branches
        optimizer = Scaled(model.parameters(), {"lr": 1.0})

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    captured, plain = capture(made(), backend="eager"), made()
    for _ in range(6):
        x = torch.randn(2, 4)
        assert torch.equal(captured(x), plain(x))
    seen = stats(captured)
    assert seen.breaks == 0 and seen.hits == 3  # state appears, then counts are numbers; nothing after that


class Ranked:
    """Ordered by its own methods, which keep a record."""

    def __init__(self, rank, asked):
        self.rank, self.asked = rank, asked

    def __gt__(self, other):
        self.asked.append((">", self.rank, other.rank))
        return self.rank > other.rank

    def __lt__(self, other):
        self.asked.append(("<", self.rank, other.rank))
        return self.rank < other.rank


KNOWN = [[0, 1], [2], [2, -1]]
ITEMS = {
    "numbers": lambda x: [x.sum().item(), 2.0, x.mean().item(), 2],
    "named": lambda x: [(x.sum().item(), "a"), (x.mean().item(), "b"), (2.0, "c")],
    "lists": lambda x: [[1, x.sum().item()], [1], [1, 2.0, 0]],
    "known lists": lambda x: KNOWN,
    "sizes": lambda x: [(x.shape[0], 1), (3, 2), (x.shape[0], 0)],
    "tensors": lambda x: [(x.sum(), 0), (x.mean(), 1)],
    "one": lambda x: [[x.sum().item()]],
    "none": lambda x: [],
}
KEYS = {
    "none": None,
    "first": lambda item: item[0] if isinstance(item, (list, tuple)) else item,
    "pair": lambda item: (len(item), item) if isinstance(item, (list, tuple)) else (0, item),
}


@pytest.mark.share(12)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("items", ITEMS)
@pytest.mark.parametrize("choose", [max, min], ids=["max", "min"])
def test_what_is_chosen_of_any_items(choose, items, key):
    """Numbers that only the step knows, sequences of them, ties and NaN, and which of two equal ones it is."""

    def step(x):
        given = ITEMS[items](x)
        chosen = choose(given, key=KEYS[key], default="nothing")
        held = (i for i, one in enumerate(given) if one is chosen and not isinstance(one, int | float))
        return chosen, next(held, None)  # (which of two equal numbers it is, nobody sees)

    captured = capture(step, backend="eager")
    torch.manual_seed(0)
    for scale, rows in ((1.0, 3), (-1.0, 3), (float("nan"), 3), (0.0, 3), (8.0, 2), (8.0, 5), (1.0, 3)):
        x = torch.randn(rows, 2).abs() * scale
        assert repr(captured(x)) == repr(step(x)), (scale, rows)


@pytest.mark.parametrize("key", [None, lambda one: one], ids=["no key", "a key"])
def test_their_own_comparisons_are_asked_as_c_asks_them(key):
    def step(x, asked):
        ranked = [Ranked(x.sum().item(), asked), Ranked(0.0, asked), Ranked(1.0, asked)]
        return max(ranked, key=key).rank, min(ranked, key=key).rank

    captured = capture(step, backend="eager")
    for scale in (1.0, -1.0, 0.1, 1.0):
        ours, theirs, x = [], [], torch.ones(3) * scale
        assert captured(x, ours) == step(x, theirs)
        assert ours == theirs


def test_choosing_by_a_number_is_one_graph():
    def step(x):
        losses = [x.sum().item(), 2.0, x.mean().item()]
        return max(losses, default=0.0), min(range(3), key=lambda i: losses[i]), max(KNOWN), KNOWN < [[x.shape[0]]]

    captured = capture(step, backend="eager")
    for scale in (1.0, -1.0, 3.0, 0.5):
        assert captured(torch.ones(3) * scale) == step(torch.ones(3) * scale)
    assert stats(captured).misses == 1
    assert not stats(captured).breaks


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">=", "==", "!="])
def test_sequences_are_ordered_as_python_orders_them(sign):
    of_two = eval(f"lambda a, b: a {sign} b")

    def compared(a, b):
        try:
            return of_two(a, b)
        except TypeError as error:  # a number and a tuple, where what is before them is equal
            return str(error)

    def step(x):
        number, rows = x.sum().item(), x.shape[0]
        sequences = [[number], [number, 1], [2.0], [], [rows, (number,)], [rows, (2.0, 1)], [3, (number, 0)]]
        tuples = [tuple(one) for one in sequences]
        return [compared(a, b) for kind in (sequences, tuples) for a in kind for b in kind]

    captured = capture(step, backend="eager")
    for scale, rows in ((1.0, 2), (-1.0, 2), (float("nan"), 2), (2 / 3, 3), (1.0, 3), (1.0, 2)):
        x = torch.ones(rows) * scale
        assert captured(x) == step(x), (scale, rows)


@pytest.mark.parametrize("kind", ["list", "tuple"])
@pytest.mark.parametrize(
    "asked",
    ["s > t", "s == t", "t <= s", "s[:1] == t", "n in t", "t.count(n)", "[*t, n].index(n)", "{1: s[0]} == {1: t[0]}"],
)
def test_a_nan_is_found_where_it_is_the_same_object(asked, kind):
    """What a graph break leaves is read again, at each place for itself."""
    source = f"def step(x, held):\n    n = x.sum().item()\n    s, t = {kind}([n, 1.0]), {kind}([n])\n"
    source += f"    held.append(t > {kind}([2.0]))\n    return {asked}, held"
    namespace = {}
    exec(source, namespace)
    plain = namespace["step"]
    step = capture(plain, backend="eager")
    for total in (1.0, float("nan"), 3.0, float("nan"), -1.0, float("nan")):
        x = torch.tensor([total, 0.0])
        assert step(x, []) == plain(x, []), total
