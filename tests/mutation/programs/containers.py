"""Nested containers as arguments: read whole, read by key, tested for membership, and written to."""

import collections

import torch

Point = collections.namedtuple("Point", "x y")


def f(numbers, table, ordered, queue, chosen, pair, point, log, *, options):
    y = torch.ones(2)
    for i, number in enumerate(numbers):
        y = y + number * (i + 1)
    for key, value in table.items():
        y = y * value if isinstance(value, float) else y + len(value) + (1 if key == "xs" else 0)
    for step, value in enumerate(ordered.values()):
        y = y + step * value
    y = y + sum(queue) + (1 if 3.0 in chosen else 2) + len(chosen)
    a, b = pair
    y = y * a + len(b) + point.x * 2 + point.y
    y = y + options.get("added", 0.5) + (options["scale"] if "scale" in options else 1.0)
    log.append(len(numbers) * 1.0)
    numbers[-1] = numbers[0] + 1.0
    table["calls"] = table.get("calls", 0.0) + 1.0
    return y, [numbers, b, log]


def make():
    table = {"a": 2.0, "b": 3.0, "xs": [1, 2]}
    return (
        f,
        [
            [1.0, 2.0, 3.0],
            table,
            collections.OrderedDict(p=1.0, q=2.0),
            collections.deque([1.0, 2.0]),
            {3.0, 4.0},
            (2.0, [1.0]),
            Point(1.0, 2.0),
            [],
        ],
        {"options": {"scale": 2.0, "other": 1.0}},
    )
