"""Tile shapes by measurement: a few configurations of each kernel, timed on the caller's own tensors, and a cache.

    from moebius.kernels.triton_form import tune
    tune(x_TD, weights, order_S, offsets, weight_TK, top_k, options)        # or MOEBIUS_TUNE=1, see below

The result is kept in a JSON file in $MOEBIUS_CACHE (default ~/.cache/moebius) whose name holds the card, the version of
Triton and a hash of the kernels' sources: another card, compiler or kernel begins anew. configs.choose reads it; what
is not in it runs with the defaults, which were chosen by the compiler's report. With MOEBIUS_TUNE=1 in the environment
the first call of a shape tunes it.

Compilers do miscompile. A configuration is kept only after it gave, in the kernel that it is for and with the defaults
in all others, the layer's result and gradients as the defaults give them, but for rounding. What a kernel leaves out in
another call (H in inference, a gradient that nothing needs) is compiled anew there, and was not compared.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor

from moebius.kernels.triton_form.launch import Config, Launch, Problem, timing

ROUNDS = 5  # timed runs of a configuration, after one that compiles it

# What is tried beside the default, of 16-bit operands; `waves` makes a grid persistent. One that does not run on a card
# is passed over.
TRIED: dict[str, tuple[Config, ...]] = {
    "up": (Config(128, 128, 64, 8, 3, 1), Config(128, 128, 64, 8, 4), Config(128, 64, 64, 4, 4),
           Config(64, 128, 64, 8, 4), Config(64, 128, 64, 8, 4, 2)),
    "down": (Config(128, 256, 64, 8, 3, 1), Config(128, 128, 64, 8, 4), Config(128, 128, 64, 4, 4),
             Config(64, 256, 64, 8, 4), Config(64, 128, 64, 4, 4, 2)),
    "grad_act": (Config(128, 128, 64, 8, 3, 1), Config(128, 128, 64, 8, 4), Config(128, 64, 64, 4, 4),
                 Config(64, 128, 64, 8, 4)),
    "weight_grad": (Config(128, 128, 64, 8, 4), Config(128, 256, 64, 8, 3), Config(128, 128, 32, 4, 4),
                    Config(64, 128, 64, 4, 4)),
}
for _same, _as in (("up_ungated", "up"), ("up_packed", "up"), ("up_ungated_packed", "up"), ("grad_x", "down")):
    TRIED[_same] = TRIED[_as]


def problem(kernel: str, dtype: torch.dtype, name: str | None, slots: int, num_experts: int, inner: int, outer: int
            ) -> Problem:
    rows = slots // max(num_experts, 1)
    return Problem(kernel, str(dtype).removeprefix("torch."), name or "none",
                   1 << max(rows, 1).bit_length() - 1, inner, outer)


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------


@cache
def source_hash() -> str:
    """Of every kernel's source: a change of any file of this folder makes what was measured void."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_path(card: str) -> Path:
    """The file for a card, under this Triton and these kernels."""
    folder = Path(os.environ.get("MOEBIUS_CACHE") or Path.home() / ".cache" / "moebius")
    plain = "".join(c if c.isalnum() else "-" for c in f"{card} triton {triton.__version__}")
    return folder / f"experts {plain} {source_hash()}.json".replace(" ", "_")


class Cache:
    """Measured configurations of one card, read once and written whole."""

    def __init__(self, card: str) -> None:
        self.path = cache_path(card)
        self.found: dict[str, Config] = read(self.path)

    def store(self, chosen: dict[Problem, Config]) -> None:
        """Add to the file; another process's additions of meanwhile are kept. A folder that cannot be written is a
        warning: the choice holds for this process."""
        self.found = read(self.path) | self.found | {str(each): config for each, config in chosen.items()}
        text = json.dumps({name: asdict(config) for name, config in sorted(self.found.items())}, indent=1)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".new", delete=False) as file:
                file.write(text)
            os.replace(file.name, self.path)
        except OSError as error:
            warnings.warn(f"tile shapes are not kept: {self.path}: {error}", stacklevel=2)


def read(path: Path) -> dict[str, Config]:
    """What a file holds. One that is not what store writes is a warning, and empty: it is written anew."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"tile shapes cannot be read and are measured anew: {path}: {error}", stacklevel=3)
        return {}
    try:
        entries = json.loads(text)
        names = {each.name for each in fields(Config)}
        found = {}
        for name, entry in entries.items():
            if set(entry) != names or not all(type(value) is int and value >= 0 for value in entry.values()):
                raise ValueError(f"{name}: {entry}")
            blocks = (entry["block_m"], entry["block_n"], entry["block_k"], entry["warps"])
            if any(value < 1 or value & value - 1 for value in blocks) or entry["stages"] < 1:
                raise ValueError(f"{name}: {entry}")
            found[name] = Config(**entry)
    except (ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"tile shapes are damaged and are measured anew: {path}: {error}", stacklevel=3)
        return {}
    return found


CACHES: dict[str, Cache] = {}


def cache_of(device: torch.device) -> Cache:
    card = torch.cuda.get_device_name(device)
    if card not in CACHES:
        CACHES[card] = Cache(card)
    return CACHES[card]


# ----------------------------------------------------------------------------------------------------------------------
# Choosing
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """A run in which every kernel takes its configuration of that number (0: the default); which problem took which.
    only: the problem that does; the others take their defaults."""

    number: int
    taken: dict[Problem, Config]
    only: Problem | None = None


trial: ContextVar[Trial | None] = ContextVar("trial", default=None)


def configured(each: Problem, default: Config, device: torch.device) -> Config:
    """The configuration of a problem: the trial's, else the cache's, else the default."""
    now = trial.get()
    if now is not None:
        half = each.format == "none" and each.dtype in ("bfloat16", "float16")
        options = (default, *(TRIED.get(each.kernel, ()) if half else ()))
        if now.number < len(options) and now.only in (None, each):
            now.taken[each] = options[now.number]
            return options[now.number]
        return default
    if device.type != "cuda":
        return default
    return cache_of(device).found.get(str(each), default)


@contextmanager
def attempt(number: int, only: Problem | None = None) -> Iterator[Trial]:
    made = Trial(number, {}, only)
    token = trial.set(made)
    try:
        yield made
    finally:
        trial.reset(token)


def measure(run: Callable[[], Sequence[Tensor]], seconds_of: Callable[[Launch], float], coarse: bool = False
            ) -> dict[Problem, tuple[float, Config]]:
    """The fastest configuration of every kernel that run launches, with its time.

    All kernels take their first configuration in the first run, their second in the next, and are timed launch by
    launch: as many runs as the longest list has entries. seconds_of runs a launch and says how long it took. A
    configuration that does not compile or run is passed over; the default must. One that would be kept is compared
    first (``agrees``, with coarse as there): run returns what the launches made. If it is refused, the next one is.
    """
    found: dict[Problem, list[tuple[float, int, Config]]] = {}
    want: Sequence[Tensor] = ()
    for number in range(1 + max(map(len, TRIED.values()))):
        clock = Clock(number, seconds_of)
        with attempt(number) as made, timing(clock):
            results = run()
        if number == 0:
            want = results
        del results
        for each, config in made.taken.items():
            if clock.times.get(each, math.inf) < math.inf:
                found.setdefault(each, []).append((clock.times[each], number, config))
    best: dict[Problem, tuple[float, Config]] = {}
    for each, candidates in found.items():
        for seconds, number, config in sorted(candidates, key=lambda one: one[:2]):
            if number == 0 or agrees(run, seconds_of, each, number, config, want, coarse):
                best[each] = seconds, config
                break
    return best


# ----------------------------------------------------------------------------------------------------------------------
# Comparing
# ----------------------------------------------------------------------------------------------------------------------

# By how much a configuration may be off, in ulps of the dtype beside |element| + the root mean square of its row: sums
# in another order change a few elements of H and A by an ulp, and then every result by less than one, which rounds it
# to a neighbour. A tile that is wrong is off by about 1, a step of the contraction that is lost by 0.1 and more.
ULPS = 4
COARSE = 0.25  # more where something is rounded to E4M3, whose neighbours are an eighth apart
SHORT = 32  # elements; the mean over a shorter row says little, and is taken over the whole tensor
AT_ONCE = 1 << 24  # elements compared at a time


def agrees(run: Callable[[], Sequence[Tensor]], seconds_of: Callable[[Launch], float], each: Problem, number: int,
           config: Config, want: Sequence[Tensor], coarse: bool) -> bool:
    """Whether run gives ``want`` where this problem has its configuration of that number and all others have their
    defaults. If not, a warning that says how far off it is. coarse: something in it is rounded to E4M3."""
    with attempt(number, each), timing(Clock(number, seconds_of)):
        got = run()
    error = max((difference(a, b) for a, b in zip(got, want, strict=True)), default=0.0)
    limit = ULPS * torch.finfo(getattr(torch, each.dtype)).eps + (COARSE if coarse else 0.0)
    if error <= limit:
        return True
    warnings.warn(f"tile shapes: {each.kernel} is wrong with {config}, and does not use it: it is off by {error:.1e} "
                  f"where rounding explains {limit:.1e} (problem {each}, Triton {triton.__version__})", stacklevel=4)
    return False


def difference(got: Tensor, want: Tensor) -> float:
    """The largest |got - want|, element by element, beside |want| + the root mean square of want's row. Infinite where
    one is finite and the other is not. Tensors without data, on the meta device, do not differ."""
    if want.is_meta or want.numel() == 0:
        return 0.0
    width = want.shape[-1] if want.dim() and want.shape[-1] >= SHORT else want.numel()
    rows, worst = max(1, AT_ONCE // width), 0.0
    for a, b in zip(got.reshape(-1, width).split(rows), want.reshape(-1, width).split(rows), strict=True):
        a, b = a.double(), b.double()
        finite = b.where(b.isfinite(), 0.0)
        off = (a - b).abs() / (finite.abs() + finite.square().mean(1, keepdim=True).sqrt())
        same = (a == b) | (a.isnan() & b.isnan())
        worst = max(worst, float(off.nan_to_num(math.inf, math.inf).masked_fill(same, 0.0).max()))
    return worst


@dataclass
class Clock:
    """Runs launches and adds up their times by problem. number: of the trial; the defaults' must run."""

    number: int
    seconds_of: Callable[[Launch], float]
    times: dict[Problem, float] = field(default_factory=dict)

    def __call__(self, launch: Launch) -> None:
        try:
            taken = self.seconds_of(launch)
        except Exception:
            if not self.number:
                raise
            taken = math.inf
        if launch.problem is not None:
            self.times[launch.problem] = self.times.get(launch.problem, 0.0) + taken


def seconds_on_gpu(launch: Launch) -> float:
    """The median of a launch's times, after one that is not counted."""
    launch.run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    events[0].record()
    for event in events[1:]:
        launch.run()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False))
    return times[len(times) // 2]
