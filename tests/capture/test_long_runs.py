"""What happens to a model and its optimizer between the steps of a long run: each step is that of plain Python.

A script is a generator that changes its world between the calls it asks for. It runs twice, on a world that is stepped
as plain Python and on one that is captured; after each call parameters, gradients, optimizer state, random state and
Python objects are compared.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import moebius
from moebius import capture, stats


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.3)
        self.register_buffer("shift", torch.ones(4))
        self.calls, self.scale, self.seen = 0, 1.5, []
        self.config: dict[Any, Any] = {"k": 2.0, "l": [1.0, 2.0]}

    @property
    def factor(self):
        self.calls += 1
        return self.scale

    def forward(self, x):
        self.seen.append(self.scale)
        y = self.b(self.drop(torch.relu(self.a(x)))) * self.factor * self.config["k"]
        return y + sum(self.config["l"]) * self.shift


class OtherNet(Net):
    def forward(self, x):
        return Net.forward(self, x) * 2 + 1


class World(types.SimpleNamespace):
    model: Any
    optimizer: Any
    step: Any
    call: Any


def make_world() -> World:
    torch.manual_seed(0)
    model: Any = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(x, parts=1):
        optimizer.zero_grad()
        for _ in range(parts):
            loss = model(x).square().mean() / parts
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return World(model=model, optimizer=optimizer, step=step, call=step)


def state(world: World, result: Any) -> dict[str, Any]:
    """Everything to compare, as it is now."""
    found = {"result": result, "random": torch.get_rng_state(), "model": type(world.model).__name__}
    found |= {name: t.detach().clone() for name, t in world.model.state_dict().items()}
    for name, p in world.model.named_parameters():
        found[f"{name}.grad"] = None if p.grad is None else p.grad.clone()
        found[f"{name}.requires_grad"] = p.requires_grad
    for number, entries in enumerate(world.optimizer.state.values()):
        found |= {f"state {number} {k}": copy.deepcopy(v) for k, v in entries.items()}
    found["rates"] = repr([g["lr"] for g in world.optimizer.param_groups])
    found["seen"] = f"{world.model.calls} {world.model.seen} {world.model.config}"
    return found


def run(script: Callable[[World], Iterator[tuple]], captured: bool) -> tuple[list[dict[str, Any]], World]:
    world = make_world()
    if captured:
        world.call = capture(world.step)
    states: list[dict[str, Any]] = []
    first = world.call
    for args in script(world):
        torch.manual_seed(len(states))
        try:
            result = world.call(*args)
        except (Exception, KeyboardInterrupt) as error:
            result = type(error).__name__
        states.append(state(world, result))
    world.call = first
    return states, world


def x(seed: int = 0, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def once(change: Callable[[World], Any]) -> Callable[[World], Iterator[tuple]]:
    def script(world):
        for i in range(2):
            yield (x(i),)
        change(world)
        for i in range(2):
            yield (x(i),)

    return script


def double_rows(module, args, out):
    return out * 2


def swap_child(world):
    world.model.a = copy.deepcopy(world.model.b)


def add_group(world):
    swap_child(world)
    world.optimizer.add_param_group({"params": list(world.model.a.parameters()), "lr": 0.1})


def hooks(world):
    handle = world.model.a.register_forward_hook(double_rows)
    world.model.b.register_forward_hook(double_rows)
    handle.remove()


def gone_gradients(world):
    world.model.a.requires_grad_(False)
    for p in world.model.a.parameters():
        p.grad = None


def tie(world):
    world.model.b.weight = world.model.a.weight


def new_parameter(world):
    world.model.a.weight = nn.Parameter(torch.ones(4, 4))
    world.optimizer.param_groups[0]["params"][0] = world.model.a.weight


def own_dict(world):
    class Mine(dict):
        def __getitem__(self, key):
            return 7.0 if key == "k" else dict.__getitem__(self, key)

    world.model.config = Mine(world.model.config)


def own_key(world):
    class Key:
        def __hash__(self):
            return hash("k")

        def __eq__(self, other):
            return other == "k"

        def __repr__(self):
            return "Key()"

    del world.model.config["k"]
    world.model.config[Key()] = 9.0


def in_a_thread(world):
    def change():
        world.model.config["l"].append(5.0)
        world.model.config["k"] = 3.0

    thread = threading.Thread(target=change)
    thread.start()
    thread.join()


def assigned(world):
    world.model.load_state_dict({k: v.clone() * 2 for k, v in world.model.state_dict().items()}, assign=True)


def swapped_with_average(world):
    average = copy.deepcopy(world.model)
    for p, q in zip(world.model.parameters(), average.parameters(), strict=True):
        p.data, q.data = q.data * 0.9, p.data


CHANGES: dict[str, Callable[[World], Any]] = {
    "the class of a module": lambda w: setattr(w.model, "__class__", OtherNet),
    "a parameter's data": lambda w: setattr(w.model.a.weight, "data", torch.ones(4, 4)),
    "a buffer's data, another dtype": lambda w: setattr(w.model.shift, "data", w.model.shift.data.double()),
    "a buffer": lambda w: setattr(w.model, "shift", torch.zeros(4)),
    "a buffer that is a number now": lambda w: (delattr(w.model, "shift"), setattr(w.model, "shift", 3.0)),
    "forward hooks": hooks,
    "a gradient hook": lambda w: w.model.a.weight.register_hook(lambda g: g * 3),
    "a hook after accumulation": lambda w: w.model.a.weight.register_post_accumulate_grad_hook(
        lambda p: p.grad.mul_(2) is None or None
    ),
    "a child": swap_child,
    "a child, and a group for it": add_group,
    "learning rate": lambda w: w.optimizer.param_groups[0].update(lr=0.5),
    "weight decay": lambda w: w.optimizer.param_groups[0].update(weight_decay=0.5),
    "betas": lambda w: w.optimizer.param_groups[0].update(betas=(0.5, 0.6)),
    "a group's parameters": lambda w: w.optimizer.param_groups[0]["params"].pop(),
    "the model's state loaded": lambda w: w.model.load_state_dict(copy.deepcopy(w.model.state_dict())),
    "the model's state assigned": assigned,
    "the optimizer's state loaded": lambda w: w.optimizer.load_state_dict(copy.deepcopy(w.optimizer.state_dict())),
    "the optimizer's state cleared": lambda w: w.optimizer.state.clear(),
    "the optimizer's class": lambda w: setattr(w.optimizer, "__class__", torch.optim.Adam),
    "rounded to bfloat16": lambda w: w.model.bfloat16().float(),
    "bfloat16": lambda w: w.model.bfloat16(),
    "float64": lambda w: w.model.double(),
    "frozen": lambda w: w.model.a.requires_grad_(False),
    "frozen, gradients removed": gone_gradients,
    "evaluation": lambda w: w.model.eval(),
    "tied weights": tie,
    "a new parameter": new_parameter,
    "a dict of the user's own": own_dict,
    "a key of the user's own": own_key,
    "a list, in another thread": in_a_thread,
    "swapped with an average": swapped_with_average,
    "pruned": lambda w: prune.random_unstructured(w.model.a, "weight", 0.5),
    "parametrized": lambda w: parametrize.register_parametrization(w.model.a, "weight", nn.ReLU()),
    "the call itself, copied": lambda w: setattr(w, "call", copy.deepcopy(w.call)),
    "forgotten": lambda w: moebius.reset(),
}


def thaw(world):
    for i in range(6):
        if i % 2 == 0:
            world.model.a.requires_grad_(i % 4 == 0)
        yield (x(i),)


def accumulate(world):
    for parts in (1, 2, 2, 4, 1, 2):
        yield x(parts), parts


def subclasses(world):
    class Batch(torch.Tensor):
        pass

    for i in range(5):
        yield (x(i).as_subclass(Batch) if i in (2, 3) else x(i),)


def sizes(world):
    for rows in (5, 3, 7, 1, 0, 2, 16):
        yield (x(rows, rows),)


def schedule(world):
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 2)
    for i in range(6):
        yield (x(i),)
        scheduler.step()


def gradients_from_outside(world):
    for i in range(5):
        if i == 2:
            for p in world.model.parameters():
                p.grad = torch.ones_like(p)
        if i == 3:
            world.model.a.weight.grad = None
        if i == 4:
            world.optimizer.zero_grad(set_to_none=False)
        yield (x(i),)


def not_a_number(world):
    for i in range(4):
        yield (x(i) * (float("nan") if i == 2 else 1),)


def interrupted(world):
    class Signal(nn.Module):
        calls = 0

        def forward(self, x):
            Signal.calls += 1
            if Signal.calls in (2, 4):
                raise KeyboardInterrupt
            return x

    world.model.drop = Signal()
    for i in range(6):
        yield (x(i),)


def other_default_dtype(world):
    for i in range(6):
        torch.set_default_dtype(torch.float64 if i in (2, 3) else torch.float32)
        yield (x(i).float(),)
    torch.set_default_dtype(torch.float32)


def within(make):
    def script(world):
        call = world.call
        for i in range(6):
            if i in (2, 3):
                with make():
                    yield (x(i),)
            else:
                yield (x(i),)
        assert world.call is call

    return script


def from_threads(world):
    call = world.call

    def threaded(*args):
        results: list[Any] = []

        def work():
            torch.manual_seed(3)
            results.append(call(*args))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return results[0]

    for i in range(4):
        world.call = threaded if i % 2 else call
        yield (x(i),)


def strange_inputs(world):
    yield (x(0, 4),)
    yield (world.model.a.weight,)
    yield (world.model.a.weight.detach(),)
    yield (world.model.shift.expand(4, 4),)
    yield (x(1, 4).t(),)
    yield (x(1, 4).requires_grad_(),)


SCRIPTS: dict[str, Callable[[World], Iterator[tuple]]] = {
    "frozen and thawed": thaw,
    "another number of parts": accumulate,
    "batches of a subclass": subclasses,
    "sizes": sizes,
    "a schedule": schedule,
    "gradients from outside": gradients_from_outside,
    "not a number": not_a_number,
    "interrupted": interrupted,
    "another default dtype": other_default_dtype,
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "no gradients": within(torch.no_grad),
    "from threads": from_threads,
    "strange inputs": strange_inputs,
}


def difference(plain: dict[str, Any], captured: dict[str, Any]) -> str | None:
    if plain.keys() != captured.keys():
        return f"other entries: {plain.keys() ^ captured.keys()}"
    for name, want in plain.items():
        got = captured[name]
        if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
            a, b = want.as_subclass(torch.Tensor), got.as_subclass(torch.Tensor)
            if a.dtype != b.dtype or a.shape != b.shape or type(want).__name__ != type(got).__name__:
                return f"{name}: {want} against {got}"
            # two sums of gradients may be added up in another order
            if not torch.equal(a, b) and not torch.allclose(a, b, rtol=1e-5, atol=1e-7, equal_nan=True):
                return f"{name}: {want} against {got}"
        elif type(want) is not type(got) or want != got:
            return f"{name}: {want} against {got}"
    return None


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [*CHANGES, *SCRIPTS])
def test_each_step_is_that_of_plain_python(name):
    script = once(CHANGES[name]) if name in CHANGES else SCRIPTS[name]
    plain, _ = run(script, captured=False)
    captured, world = run(script, captured=True)
    assert len(plain) == len(captured) >= 4
    for number, (want, got) in enumerate(zip(plain, captured, strict=True)):
        assert (found := difference(want, got)) is None, f"step {number}: {found}"
    assert stats(world.call).hits or name in ("sizes", "strange inputs")  # (of another kind in each call)


def test_the_comparison_notices_a_change_that_was_missed():
    plain, _ = run(once(lambda w: None), captured=False)
    for name in ("learning rate", "frozen", "a parameter's data", "a dict of the user's own", "evaluation"):
        other, _ = run(once(CHANGES[name]), captured=False)
        assert any(difference(a, b) for a, b in zip(plain, other, strict=True)), name
