"""Items at keys that the step computes of what counts: which key it is, is no guard; what stands there is asked there.

Programs are drawn: containers that an object holds (some items being one object), keys, reads and writes in a row. All
that the object holds, and which of it is one object, is compared with plain Python after each step.
"""

import collections
import random

import pytest
import torch

from moebius import capture, stats

N, STEPS = 5, 9
KEYS = ("i % N", "(i * 2) % N", "me.order[i % N]", "i % 2", "(i + 1) % N", "3")
SLICES = ("i % 3:i % 3 + 2", "-(i % N):", ":i % N", "i % N::2", "i % 2:4")
FROM_THE_END = ("-(i % N) - 1",)
# by kind of item: how it is made, read as a tensor or number, and written in place
ITEMS = {
    "numbers": ("float(j)", "{}", ("{} += 1.5", "{} = {} * 2 + i")),
    "ints": ("j + 3", "{}", ("{} += 1", "{} = i")),
    "lists": ("[float(j), j, None]", "{}[0]", ("{}[0] += 1.5", "{}.append(i)", "{}[1] = i", "{} = [float(i), i]")),
    "dicts": ("{'n': j, 'v': torch.ones(3) * j}", "{}['v']", ("{}['n'] += 1", "{}['v'] = {}['v'] + x", "{}['w'] = i")),
    "tensors": ("torch.ones(3) * j", "{}", ("{}.add_(1)", "{} = {} + x", "{} = x.clone()")),
    "objects": ("Counter(j)", "{}.n", ("{}.n += 1", "{}.last = x * 2", "{} = Counter(i)")),
    "tuples": ("(float(j), torch.ones(3) * j)", "{}[1]", ("{} = (float(i), x + i)",)),
}
OF_DICTS = (
    "x = x + me.{c}.get({k} + shift, me.{c}[0]){r}",
    "x = x * 2 if {k} + shift in me.{c} else x",
    "me.{c}.pop({k} + 1, None)",
    "me.{c}.setdefault({k} + shift, {m}); x = x + me.{c}[{k} + shift]{r}",
)


class Counter:
    def __init__(self, n: int):
        self.n, self.last = float(n), None


class State:
    def __init__(self, kind: str, base: str, shared: bool):
        self.step = 0
        self.order = [2, 0, 3, 1, 4]
        made = [eval(ITEMS[kind][0], {"torch": torch, "Counter": Counter, "j": j}) for j in range(N)]
        if shared and kind not in ("numbers", "ints"):
            made[3] = made[1]
        for name in ("a", "b"):
            setattr(self, name, list(made) if base == "list" else dict(enumerate(made)))
            made = [*made[1:], made[0]] if shared else [eval(ITEMS[kind][0], globals() | {"j": j}) for j in range(N)]


def drawn(seed: int, kind: str, base: str) -> str:
    draw = random.Random(seed)
    lines = ["def step(me, x, shift):", "    me.step += 1", "    i = me.step"]
    _, read, writes = ITEMS[kind]
    for _ in range(draw.randint(2, 4)):
        key, c = draw.choice(KEYS + FROM_THE_END * (base == "list")), draw.choice("ab")
        item, what = f"me.{c}[{key}]", draw.random()
        if what < 0.15 and base == "list":
            lines.append(f"    for v in me.{c}[{draw.choice(SLICES)}]: x = x + {read.format('v')}")
        elif what < 0.5:
            lines.append(f"    x = x + {read.format(item)}")
        elif what < 0.8 or base == "list":
            lines.append(f"    {draw.choice(writes).replace('{}', item)}")
        else:
            made = ITEMS[kind][0].replace("j", "2")
            lines.append("    " + draw.choice(OF_DICTS).format(c=c, k=key, r=read.removeprefix("{}"), m=made))
    return "\n".join([*lines, "    return x * 1.0"])


def picture(value, seen):
    """All that hangs from a value, with the numbers of objects that were met before."""
    if isinstance(value, torch.Tensor | list | dict | tuple | Counter | State):
        if id(value) in seen:
            return seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        return "tensor", value.tolist()
    if isinstance(value, list | tuple):
        return type(value), [picture(v, seen) for v in value]
    if isinstance(value, dict):
        return [(k, picture(v, seen)) for k, v in value.items()]
    if isinstance(value, Counter | State):
        return type(value), picture(vars(value), seen)
    return type(value), value


def outcome(step, *args):
    try:
        return picture(step(*args), {})
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("base", ["list", "dict"])
@pytest.mark.parametrize("kind", ITEMS)
def test_drawn_programs(kind: str, base: str, tmp_path, recwarn):
    for seed in range(12):
        text = drawn(seed, kind, base)
        (file := tmp_path / f"drawn_{seed}.py").write_text(text)
        space = {"torch": torch, "Counter": Counter, "N": N}
        exec(compile(text, str(file), "exec"), space)
        plain, captured = (State(kind, base, shared=seed % 3 == 0) for _ in range(2))
        step = capture(space["step"], backend="eager")
        for n in range(STEPS):
            x = torch.full((3,), float(n))
            assert outcome(step, captured, x, n % 4) == outcome(space["step"], plain, x, n % 4), text
            assert picture(captured, {}) == picture(plain, {}), text


FEW = 3  # captures: the count as a constant; as a number; what an item held at first (None, 0 or 1) was no other number


ALONE = [(base, key) for base in ("list", "dict") for key in ("i % N", "me.order[i % N]")]


@pytest.mark.parametrize(("base", "key"), [*ALONE, ("dict", "f'k{i % N}'"), ("dict", "('k', i % N)")])
@pytest.mark.parametrize("kind", ITEMS)
def test_which_key_it_is_is_no_guard(kind: str, base: str, key: str, tmp_path, recwarn):
    """One read, and each kind of write, by itself: captured a few times at most, whatever the key is."""
    _, read, writes = ITEMS[kind]
    for number, statement in enumerate((f"x = x + {read}", *writes)):
        text = f"""
def step(me, x):
    me.step += 1
    i = me.step
    {statement.replace("{}", f"me.a[{key}]")}
    return x * 1.0
"""
        (file := tmp_path / f"alone_{number}.py").write_text(text)
        space = {"torch": torch, "Counter": Counter, "N": N}
        exec(compile(text, str(file), "exec"), space)
        plain, captured = (State(kind, base, shared=False) for _ in range(2))
        for state in (plain, captured) if "'k" in key else ():
            state.a = {eval(key, {"i": k, "N": N}): v for k, v in state.a.items()}
        step = capture(space["step"], backend="eager", fullgraph=True)
        for n in range(12):
            x = torch.full((3,), float(n))
            assert outcome(step, captured, x) == outcome(space["step"], plain, x), text
            assert picture(captured, {}) == picture(plain, {}), text
        assert stats(step).misses <= FEW, (text, [(r.guard, r.old, r.new) for r in stats(step).recompiles])


def test_slices_of_lists(tmp_path, recwarn):
    """A batch of a list, numbers that index a tensor among them: captured a few times, wherever it begins."""

    def step(me, rows, table):
        me.step = (me.step + 4) % 20
        batch = me.order[me.step : me.step + 4]
        pairs = [table[pair] for pair in me.pairs[me.step : me.step + 4]]
        return rows[batch].sum() + rows[[n for n, _ in me.pairs[me.step : me.step + 4]]].sum() * pairs[0] + sum(pairs)

    me, other = (State("ints", "list", shared=False) for _ in range(2))
    for state in (me, other):
        state.order = [(7 * k) % 20 for k in range(20)]
        state.pairs = [((3 * k) % 20, f"k{k}") for k in range(20)]
    table = {pair: float(k) for k, pair in enumerate(me.pairs)}
    captured, rows = capture(step, backend="eager"), torch.arange(40.0).reshape(20, 2)
    for _ in range(15):
        assert torch.equal(captured(me, rows, table), step(other, rows, table))
    assert stats(captured).misses <= FEW + 1, [(r.guard, r.old, r.new) for r in stats(captured).recompiles]


def test_a_key_that_is_missing_later(recwarn):
    """A default is taken where there is no such key, and not where there is one; a defaultdict makes none."""
    def step(table, i, x):
        return x + table.get(i, 10.0) if i not in table else x * table[i]

    table = collections.defaultdict(lambda: 7.0, {k: torch.ones(2) * k for k in range(6)})
    captured = capture(step, backend="eager")
    for i in (3, 4, 5, 6, 7, 1, 8, 0, 2):
        x = torch.ones(2)
        assert torch.equal(captured(table, i, x), step(table, i, x)), i
    assert list(table) == list(range(6))
    item = capture(lambda table, i: table[i], backend="eager")
    for i in (3, 4, 5, 1):
        assert torch.equal(item(dict(table), i), table[i])
    with pytest.raises(KeyError, match="^9$"):
        item(dict(table), 9)


@pytest.mark.parametrize("key", ["i * 1.0 % N", "i % N / 1", "round(i / 2, 0) % N"])
@pytest.mark.parametrize("kind", ["numbers", "tensors"])
def test_a_float_is_no_place_of_a_list(kind: str, key: str, tmp_path, recwarn):
    """Not where it equals one that was written at, either."""
    text = f"""
def step(me, x):
    me.step += 1
    i = me.step
    me.a[int({key})] = x
    return x + me.a[{key}]
"""
    (file := tmp_path / "floats.py").write_text(text)
    space = {"N": N}
    exec(compile(text, str(file), "exec"), space)
    for base in ("list", "dict"):
        plain, captured = (State(kind, base, shared=False) for _ in range(2))
        step = capture(space["step"], backend="eager")
        for n in range(6):
            x = torch.full((3,), float(n))
            assert outcome(step, captured, x) == outcome(space["step"], plain, x), base
            assert picture(captured, {}) == picture(plain, {}), base
