"""Whether the ranks run one program: the code and the options of what is captured, compared where a model is first met.

Only where they differ do the ranks tell one another the parts, so that the error names the one that does.
"""
from __future__ import annotations

import dataclasses
import itertools
import json
import types
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from moebius.lowering.distribution.agree import agree
from moebius.lowering.distribution.errors import RanksDisagreeError
from moebius.lowering.distribution.rendezvous import RULE, exchange_words

PLAIN = (int, float, str, bool, type(None), torch.dtype)
asked = itertools.count()  # so many comparisons were there, on each rank


def same_program(mesh: Any, parts: Mapping[str, str]) -> None:
    """Collective. Raises RanksDisagreeError, on every rank, where a part is another one on some rank, and names it."""
    number = next(asked)
    mine = json.dumps(dict(parts))
    if agree(mesh, "comparing what is captured", zlib.crc32(mine.encode())):
        return
    ranks = mesh.mesh.flatten().tolist()
    keys = [f"moebius/program/{number}/{rank}" for rank in ranks]
    told = exchange_words(keys, ranks.index(torch.distributed.get_rank()), mine)
    held = {rank: json.loads(words) for rank, words in zip(ranks, told, strict=True) if words[:1] == "{"}
    names = dict.fromkeys(name for each in held.values() for name in each)
    apart = [name for name in names if len({each.get(name) for each in held.values()}) > 1]
    said = "; ".join(
        f"{name}: " + ", ".join(f"rank {rank} has {each.get(name, 'nothing')}" for rank, each in held.items())
        for name in apart[:3]
    )
    raise RanksDisagreeError(f"the ranks do not run the same program: {said}. {RULE}")


def parts_of(
    function: types.FunctionType, options: Mapping[str, Any], modules: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
) -> dict[str, str]:
    """What has to be alike: of a captured function, the options, the classes of modules, what optimizers are set to."""
    parts = {f"the option {name}": _words(value) for name, value in options.items()}
    classes = dict.fromkeys(type(inner) for module in modules for inner in module.modules())
    own = {base for cls in classes for base in cls.__mro__ if _package(base) not in ("torch", "builtins")}
    pending = [function, *(value for base in own for value in vars(base).values())]
    seen: set[types.FunctionType] = set()
    while pending:
        found = pending.pop()
        if type(found) is types.FunctionType and found not in seen:
            seen.add(found)
            called = [found.__globals__.get(name) for name in found.__code__.co_names]
            pending += [one for one in called if type(one) is types.FunctionType and _package(one) == _package(found)]
    parts |= dict(sorted((_name(one.__code__), f"code {_digest(one.__code__):08x}") for one in seen))
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    parts[f"{name} of group {place} of optimizer {number}, {type(optimizer).__name__}"] = _words(value)
    return parts


def _package(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _name(code: types.CodeType) -> str:
    return f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def _words(value: Any) -> str:
    """A value as text that is the same on all ranks."""
    if type(value) in (tuple, list):
        return f"({', '.join(map(_words, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [f"{field.name}={_words(getattr(value, field.name))}" for field in dataclasses.fields(value)]
        return f"{type(value).__name__}({', '.join(held)})"
    return repr(value) if type(value) in PLAIN else type(value).__name__


def _digest(code: types.CodeType) -> int:
    held = [_digest(each) if type(each) is types.CodeType else _constant(each) for each in code.co_consts]
    return zlib.crc32(repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, held)).encode())


def _constant(value: Any) -> str:
    return f"{sorted(map(_constant, value))}" if type(value) is frozenset else repr(value)
