"""How fast `interpret` runs plain Python: the ratio to native in one run, and instructions per second.

Run it with any supported Python in which `moebius.interpreter` can be imported: `python bench/interpreter.py`. CPU
time, medians; each program's result is compared with the native one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from moebius.interpreter import Domain, Machine, interpret


def fib(n: int) -> int:
    return n if n < 2 else fib(n - 1) + fib(n - 2)


def deep_calls(depth: int) -> int:
    def down(n: int, total: int) -> int:
        if n == 0:
            return total
        return down(n - 1, total + n)

    result = 0
    for _ in range(4):
        result += down(depth, 0)
    return result


def pipeline(n: int) -> int:
    """Generators that feed one another."""

    def numbers(stop: int) -> Any:
        yield from range(stop)

    def squares(source: Any) -> Any:
        for x in source:
            yield x * x

    def odd(source: Any) -> Any:
        for x in source:
            if x & 1:
                yield x

    return sum(x + 1 for x in odd(squares(numbers(n))))


def nbody(steps: int) -> float:
    """The planets of the Computer Language Benchmarks Game: floats in lists, and loops over pairs."""
    bodies: list[Any] = [
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 39.478],
        [[4.84, -1.16, -0.10], [0.606, 2.81, -0.02], 0.037],
        [[8.34, 4.12, -0.4], [-1.01, 1.82, 0.008], 0.011],
        [[12.89, -15.11, -0.22], [1.08, 0.868, -0.01], 0.0017],
        [[15.37, -25.9, 0.179], [0.979, 0.594, -0.034], 0.002],
    ]
    pairs = [(a, b) for i, a in enumerate(bodies) for b in bodies[i + 1 :]]
    dt = 0.01
    for _ in range(steps):
        for (place_a, speed_a, mass_a), (place_b, speed_b, mass_b) in pairs:
            dx = place_a[0] - place_b[0]
            dy = place_a[1] - place_b[1]
            dz = place_a[2] - place_b[2]
            pull = dt * ((dx * dx + dy * dy + dz * dz) ** -1.5)
            speed_a[0] -= dx * mass_b * pull
            speed_a[1] -= dy * mass_b * pull
            speed_a[2] -= dz * mass_b * pull
            speed_b[0] += dx * mass_a * pull
            speed_b[1] += dy * mass_a * pull
            speed_b[2] += dz * mass_a * pull
        for place, (vx, vy, vz), _mass in bodies:
            place[0] += dt * vx
            place[1] += dt * vy
            place[2] += dt * vz
    return sum(place[0] for place, _speed, _mass in bodies)


class Task:
    """Objects that wake one another over queues, as Richards' benchmark has them: attributes, methods, inheritance."""

    def __init__(self, name: int, scheduler: Scheduler) -> None:
        self.name = name
        self.queue: list[int] = []
        self.scheduler = scheduler
        self.handled = 0
        scheduler.tasks[name] = self

    def run(self) -> None:
        while self.queue:
            packet = self.queue.pop(0)
            self.handled += 1
            self.handle(packet)

    def handle(self, packet: int) -> None:
        raise NotImplementedError


class Worker(Task):
    def handle(self, packet: int) -> None:
        if packet > 0:
            self.scheduler.send((self.name + packet) % len(self.scheduler.tasks), packet - 1)


class Device(Task):
    held = 0

    def handle(self, packet: int) -> None:
        self.held ^= packet
        if packet > 1:
            self.scheduler.send((self.name + 1) % len(self.scheduler.tasks), packet - 2)


class Scheduler:
    def __init__(self) -> None:
        self.tasks: dict[int, Task] = {}

    def send(self, name: int, packet: int) -> None:
        self.tasks[name].queue.append(packet)

    def schedule(self) -> int:
        rounds = 0
        while any(task.queue for task in self.tasks.values()):
            rounds += 1
            for task in self.tasks.values():
                task.run()
        return rounds


def richards(packets: int) -> int:
    scheduler = Scheduler()
    for name in range(6):
        (Worker if name % 2 else Device)(name, scheduler)
    for packet in range(packets):
        scheduler.send(packet % 6, packet)
    return scheduler.schedule() + sum(task.handled for task in scheduler.tasks.values())


PROGRAMS: dict[str, tuple[Callable[[int], Any], int]] = {
    "nbody": (nbody, 60),
    "richards": (richards, 60),
    "generator pipeline": (pipeline, 3000),
    "deep calls": (deep_calls, 600),
    "fib": (fib, 16),
}


class Counting(Domain):
    """Counts instructions."""

    observes = True

    def __init__(self) -> None:
        self.instructions = 0

    def observe(self, frame: Any) -> None:
        self.instructions += 1


def instructions_of(function: Callable[[int], Any], size: int) -> int:
    domain = Counting()
    Machine(domain).enter(function, [size], {})
    return domain.instructions


def seconds(function: Callable[[int], Any], size: int, repeats: int, inner: int = 1) -> float:
    """Median CPU time of one call, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(inner):
            function(size)
        times.append((time.process_time() - start) / inner)
    return statistics.median(times)


def measure(name: str, repeats: int) -> dict[str, Any]:
    function, size = PROGRAMS[name]
    interpreted = interpret(function)
    if interpreted(size) != function(size):
        raise AssertionError(f"{name}: the interpreted result differs")
    instructions = instructions_of(function, size)
    native = seconds(function, size, repeats, inner=10)
    ours = seconds(interpreted, size, repeats)
    return {
        "program": name,
        "instructions": instructions,
        "native_s": native,
        "interpreted_s": ours,
        "ratio": ours / native,
        "instructions_per_s": instructions / ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(name, options.repeats) for name in PROGRAMS]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"Python {sys.version.split()[0]}")
    print(f"{'program':20} {'instructions':>12} {'native ms':>10} {'ours ms':>9} {'ratio':>6} {'instructions/s':>15}")
    for row in rows:
        print(
            f"{row['program']:20} {row['instructions']:12,} {row['native_s'] * 1e3:10.2f} "
            f"{row['interpreted_s'] * 1e3:9.1f} {row['ratio']:5.0f}× {row['instructions_per_s']:15,.0f}"
        )


if __name__ == "__main__":
    main()
