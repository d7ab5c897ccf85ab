"""Steps that set attributes of classes, as users write them and as nobody should.

Calls of each beside plain Python: results, errors, what the classes hold, and what a change between calls does.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_python import Reader, breaks_of, compare, shown
from torch import nn

from moebius import capture, stats
from moebius.guards.recorder import GuardRecorder
from moebius.heap.class_attributes import ClassAttributes
from moebius.regions.module_reuse import ModuleReuse

ROWS = (3, 3, 3, 4, 4, 5, 5, 5)


def own(*classes: type) -> list[Any]:
    """What the comparison sees of classes: their data."""

    def read() -> Any:
        return [
            [(name, shown(value)) for name, value in vars(cls).items() if not name.startswith("__")] for cls in classes
        ]

    return [Reader(read)]


def base_and_derived() -> tuple[type, type]:
    class Base:
        count = 0
        scale = 2.0
        name = "base"

    class Derived(Base):
        pass

    return Base, Derived


def counts():
    base, _ = base_and_derived()

    def step(x):
        base.count += 1
        return x * base.count, f"call {base.count}"

    return step, own(base)


def counts_below():
    """The first call makes the attribute of the derived class."""
    base, derived = base_and_derived()
    thing = derived()

    def step(x):
        type(thing).count += 1
        return x * thing.count + base.count, derived.count

    return step, own(base, derived)


def counts_above():
    base, derived = base_and_derived()
    thing = derived()

    def step(x):
        before = thing.count
        base.count = before + 1
        after = thing.count
        if x.shape[0] == 5:
            derived.count = 100
        return x * after, before, after, derived.count, base.count

    return step, own(base, derived)


def averages():
    base, _ = base_and_derived()

    def step(x):
        base.scale = 0.9 * base.scale + 0.1 * x.mean().item()
        base.last = x.detach().sum()
        return x * base.scale

    return step, own(base)


def reads_the_last():
    base, _ = base_and_derived()
    base.last = torch.zeros(())

    def step(x):
        y = x + base.last
        base.last = x.detach().sum()
        base.name = f"{x.shape[0]} rows"
        return y, base.name

    return step, own(base)


def seen_by_calls():
    base, derived = base_and_derived()

    class Deeper(derived):
        @classmethod
        def add(cls, n):
            cls.count += n
            return cls.count

        @property
        def twice(self):
            return 2 * self.count

        def up(self):
            return super().count

    thing = Deeper()

    def step(x):
        first = Deeper.add(2)
        base.count += 10
        setattr(derived, "count", getattr(derived, "count", 0) + 1)  # noqa: B010
        return x * thing.twice, first, thing.up(), hasattr(derived, "nothing"), Deeper.add(1)

    return step, own(base, derived, Deeper)


def containers():
    base, derived = base_and_derived()
    base.registry, base.log = {}, []

    def step(x):
        derived.registry[x.shape[0]] = x.detach().sum()
        base.log.append(x.shape[0])
        base.latest = {"rows": x.shape[0], "sum": x.detach().sum()}
        derived.latest["more"] = [base.count]
        return x * 2

    return step, own(base, derived)


def raises_in_the_middle():
    base, _ = base_and_derived()

    def step(x):
        base.count += 1
        if x.shape[0] == 4:
            raise ValueError(f"{base.count}")
        base.after = base.count
        return x * 2

    return step, own(base)


def fails_in_the_middle():
    base, _ = base_and_derived()

    def step(x):
        base.count += 1
        base.last = x.detach().sum()
        try:
            y = torch.ones(3)[(x.detach() * 0).long() + 6 - x.shape[0]]
        finally:
            base.scale = base.count + 0.5
        base.after = base.count
        return x * y.sum()

    return step, own(base)


def on_the_way_of_data():
    """The write stands behind a branch on data."""
    base, _ = base_and_derived()

    def step(x):
        if x.sum() > -x.shape[0]:
            base.count += 1
        base.seen = base.count
        return x * base.count

    return step, own(base)


def of_modules():
    class Layer(nn.Module):
        calls, scale = 0, 1.0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            type(self).calls += 1
            return self.linear(x) * self.scale

    model = nn.Sequential(Layer(), Layer(), Layer())

    def step(x):
        Layer.scale = 1.0
        y = model(x)
        return y, Layer.calls

    return step, [model, *own(Layer)]


def equal_layers():
    """The class changes between two layers that are alike."""

    class Layer(nn.Module):
        scale = 1.0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * self.scale

    layers = nn.ModuleList([Layer() for _ in range(3)])

    def step(x):
        x = x * 2  # (all three get a tensor that the step made)
        for n, layer in enumerate(layers):
            x = layer(x)
            Layer.scale = n + 2.0
        y = layers[0](x)
        Layer.scale = 1.0
        return y

    return step, [layers, *own(Layer)]


def flags():
    """What is set already is no change."""
    base, _ = base_and_derived()

    def step(x):
        base.ready = True
        base.name = "base"
        return x * 2

    return step, own(base)


def abstract():
    class Shape(abc.ABC):
        made = 0

        @abc.abstractmethod
        def area(self): ...

    class Square(Shape):
        def area(self):
            return 4

    thing = Square()

    def step(x):
        Shape.made += 1
        return x * thing.area() * thing.made

    return step, own(Shape, Square)


def one_name_of_two():
    """Two classes of one name, made by one function."""
    (first, _), (second, _) = base_and_derived(), base_and_derived()

    def step(x):
        first.count += 1
        second.count += 10
        return x * first.count, second.count

    return step, own(first, second)


def in_a_generator():
    base, _ = base_and_derived()

    def iterations(n):
        for i in range(n):
            base.count += i
            yield base.count

    def step(x):
        return x * sum(iterations(3)), base.count

    return step, own(base)


def passed():
    base, derived = base_and_derived()

    def count(cls, x):
        cls.count += 1
        return x * cls.count

    def step(x):
        for cls in (base, derived, base):
            x = count(cls, x)
        return x

    return step, own(base, derived)


CAPTURED = [
    counts, counts_below, counts_above, averages, reads_the_last, seen_by_calls, containers, on_the_way_of_data,
    fails_in_the_middle, of_modules, equal_layers, flags, abstract, one_name_of_two, in_a_generator, passed,
]  # fmt: skip


@pytest.mark.share(15)
@pytest.mark.parametrize("recipe", CAPTURED, ids=lambda r: r.__name__)
@pytest.mark.parametrize("backend", ["eager", "moebius"])
def test_one_graph(recipe: Any, backend: str) -> None:
    found = compare(recipe, backend, ROWS)
    assert found.breaks == 0 and found.hits


def test_an_error_in_the_middle() -> None:
    assert {b.reason for b in breaks_of(raises_in_the_middle, ROWS)} == {"exception"}


# ----------------------------------------------------------------------------------------------------------------------
# What breaks the graph
# ----------------------------------------------------------------------------------------------------------------------


def metaclass_sets():
    class Meta(type):
        def __setattr__(cls, name, value):
            super().__setattr__(name, value * 2)

    class Thing(metaclass=Meta):
        pass

    Thing.count = 1

    def step(x):
        Thing.count = Thing.count + 1
        return x * Thing.count

    return step, own(Thing)


def metaclass_property():
    class Meta(type):
        kept = 1

        @property
        def count(cls):
            return cls.kept

        @count.setter
        def count(cls, value):
            cls.kept = value + 1

    class Thing(metaclass=Meta):
        pass

    def step(x):
        Thing.count = Thing.count + 1
        return x * Thing.count

    return step, own(Thing)


def descriptor_in_the_way():
    class Loud:
        def __get__(self, obj, kind=None):
            return 5

    class Thing:
        count = Loud()

    def step(x):
        y = x * Thing.count
        Thing.count = 3
        return y * Thing().count

    return step, own(Thing)


def a_method():
    class Thing:
        def value(self):
            return 2

    def step(x):
        y = x * Thing().value()
        Thing.value = lambda self: 3
        return y * Thing().value()

    return step, own(Thing)


def an_operator():
    class Thing:
        def __len__(self):
            return 2

    def step(x):
        y = x * len(Thing())
        Thing.__len__ = lambda self: 3
        return y * len(Thing())

    return step, own(Thing)


def whole_dict():
    base, _ = base_and_derived()

    def step(x):
        shown_before = vars(base)
        base.count += 1
        return x * shown_before["count"], vars(base)["count"], "count" in base.__dict__

    return step, own(base)


def members():
    class Color(enum.Enum):
        RED = 1

    def step(x):
        Color.extra = x.shape[0]
        return x * Color.extra

    return step, own()


def deleted():
    base, _ = base_and_derived()

    def step(x):
        base.extra = 2
        y = x * base.extra
        del base.extra
        return y, hasattr(base, "extra")

    return step, own(base)


def in_c():
    def step(x):
        try:
            int.extra = 1
        except TypeError as error:
            return x, str(error)
        return x

    return step, []


BREAKS = [
    metaclass_sets, metaclass_property, descriptor_in_the_way, a_method, an_operator, whole_dict, members, deleted,
    in_c,
]  # fmt: skip


@pytest.mark.parametrize("recipe", BREAKS, ids=lambda r: r.__name__)
def test_breaks(recipe: Any) -> None:
    """In the first call: what was captured for something that the step replaces is forgotten with the next one."""
    assert breaks_of(recipe, ROWS[:1])
    compare(recipe, sizes=ROWS)


# ----------------------------------------------------------------------------------------------------------------------
# Changes from outside
# ----------------------------------------------------------------------------------------------------------------------


def warm(make: Callable[[], tuple[Any, ...]], change: Callable[..., None]) -> tuple[list[Any], Any]:
    """Results before and after the change, of plain Python and of a captured step; and the captured one."""
    found, captured = [], None
    for is_captured in (False, True):
        step, *reached = make()
        captured = capture(step, backend="eager") if is_captured else step
        results = [captured(torch.ones(2)) for _ in range(5)]
        change(*reached)
        results += [captured(torch.ones(2)) for _ in range(3)]
        found.append((shown(results), shown(own(*reached))))
    return found, captured


def counting(reads: bool = True) -> tuple[Any, type, type]:
    """reads: on an instance, too."""
    base, derived = base_and_derived()

    def step(x):
        base.count += 1
        return x * derived.count, derived().count if reads else 0

    return step, base, derived


def replaced(base: type, derived: type) -> None:
    base.count = 40  # type: ignore[attr-defined]


def hidden_by_another(base: type, derived: type) -> None:
    derived.count = base.count + 7  # type: ignore[attr-defined]


def other_type(base: type, derived: type) -> None:
    base.count = base.count + 0.5  # type: ignore[attr-defined]


def other_bases(base: type, derived: type) -> None:
    derived.__bases__ = (type("Other", (), {"count": 3}),)


def by_a_property(base: type, derived: type) -> None:
    derived.count = property(lambda self: 9)  # type: ignore[attr-defined]


CHANGES = [replaced, hidden_by_another, other_type, other_bases, by_a_property]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_changed_between_calls(change: Any) -> None:
    def make() -> tuple[Any, type, type]:
        if change is by_a_property:
            base, derived = base_and_derived()

            def step(x):
                base.count += 1
                return x * derived().count

            return step, base, derived
        return counting()

    (plain, ours), _ = warm(make, change)
    assert ours == plain


def test_a_number_that_others_set_is_an_input() -> None:
    """As a schedule on a class: two calls teach it, no further one is captured."""
    base, derived = base_and_derived()

    @capture(backend="eager")
    def step(x):
        return x * derived.scale

    for n in range(8):
        base.scale = n + 0.5  # type: ignore[attr-defined]
        assert step(torch.ones(2)).tolist() == [n + 0.5] * 2
    assert stats(step).entries == 2


def test_a_counter_is_captured_once() -> None:
    step, *_ = counting()
    captured = capture(step, backend="eager")
    for _ in range(8):
        captured(torch.ones(2))
    assert stats(captured).entries <= 3 and stats(captured).hits >= 5


def test_without_the_guards_the_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ClassAttributes.find

    def find(self: ClassAttributes, cls: type, name: str) -> Any:
        with monkeypatch.context() as off:
            off.setattr(GuardRecorder, "dict_entry", lambda *_: None)
            off.setattr(GuardRecorder, "class_order", lambda recorder, _: WatchedNothing())
            return real(self, cls, name)

    monkeypatch.setattr(ClassAttributes, "find", find)
    (plain, ours), _ = warm(counting, hidden_by_another)
    assert ours != plain
    (plain, ours), _ = warm(lambda: counting(reads=False), other_bases)
    assert ours != plain


class WatchedNothing:
    entries: dict[str, Any] = {}


def test_equal_layers_ask_the_class_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleReuse.key_of

    def key_of(self: ModuleReuse, *args: Any) -> Any:
        key = real(self, *args)
        return None if key is None else key[:-1]

    monkeypatch.setattr(ModuleReuse, "key_of", key_of)
    with pytest.raises(AssertionError, match="call "):
        compare(equal_layers, "eager", ROWS)
