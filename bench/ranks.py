"""Models of transformers on ranks, each its own part of the batch, against one process on the joined batch: float64, 20
steps of AdamW with clipping. The largest difference of losses, norms, parameters and optimizer state: of
|a - b| / max(1, |b|).

Equal parts: the mean of the ranks' losses. Unequal ones: rows differ from rank to rank and step to step, and each
rank's mean over its tokens is weighed by them. "in parts": the largest difference of all of these from one process that
is given the ranks' parts one after the other; where a model computes its router in float32, one process itself is 1e-8
apart by that. Ends with 1 where the ranks are more than 1e-10 from it.

    moebius bench ranks
    moebius bench ranks --families dbrx gpt_oss --meshes 2 2x2-unequal
"""

from __future__ import annotations

import argparse
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import add_arguments, join, run_on_ranks, tell
from torch import nn

import moebius
from moebius.lowering.distribution import Sharded

MESHES = ("2", "4", "2x2", "2x2-unequal")
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")
KINDS = ("losses", "norms", "parameters", "state")
WHAT = (*KINDS, "in parts")
STEPS, LENGTH, ALLOWED = 20, 16, 1e-10


def mean_loss(model: nn.Module, tokens_BT: torch.Tensor) -> torch.Tensor:
    """A mean over the batch's tokens (the model's own is computed in float32)."""
    logits = model(input_ids=tokens_BT).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BT: torch.Tensor, weigh: bool) -> Any:
    optimizer.zero_grad()
    loss = mean_loss(model, tokens_BT)
    if weigh:
        loss = moebius.weigh_by_tokens(loss, tokens_BT[:, 1:].numel())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), norm


def build(family: str) -> Any:
    from zoo.tiny import build

    model = build(family)[0].double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def apart(ours: torch.Tensor, theirs: torch.Tensor | None, source: int) -> float:
    """How far a tensor, whole here or on the ranks, is from a plain one of that rank. Collective."""
    whole = (ours.full_tensor() if isinstance(ours, Sharded) else ours).detach()
    expected = torch.empty_like(whole) if theirs is None else theirs.detach().clone()
    dist.broadcast(expected, source)
    distance = ((whole - expected).abs() / expected.abs().clamp(min=1.0)).double()
    return float(torch.where(distance.isfinite(), distance, torch.inf).amax()) if whole.numel() else 0.0


class Plain:
    """One process, on the joined batch or on the ranks' parts of it one after the other: the first rank is the one
    besides, the last one the other."""

    def __init__(self, family: str, parts: bool):
        self.source, self.parts = (dist.get_world_size() - 1) * parts, parts
        self.held = build(family) if self.source == dist.get_rank() else None
        self.far = dict.fromkeys(KINDS, 0.0)

    def train(self, batches: list[torch.Tensor]) -> Any:
        if not self.held:
            return None, None
        model, optimizer = self.held
        batches, tokens = batches if self.parts else [torch.cat(batches)], sum(len(batch) for batch in batches)
        optimizer.zero_grad()
        losses = [mean_loss(model, batch) * (len(batch) / tokens) for batch in batches]
        for loss in losses:
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return sum(loss.detach() for loss in losses), norm

    def compare(self, what: str, ours: Any, theirs: Any) -> None:
        self.far[what] = max(self.far[what], apart(ours, theirs, self.source))

    def compare_all(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        plain, other = self.held or (None, None)
        parameters = list(plain.parameters()) if plain else [None] * len(list(model.parameters()))
        for p, q in zip(model.parameters(), parameters, strict=True):
            self.compare("parameters", p, q)
            for key, value in optimizer.state.get(p, {}).items():
                self.compare("state", value, other.state[q][key] if other else None)


def train(family: str, name: str) -> dict[str, Any]:
    """A family on a mesh: how far it is from one process, and what was captured."""
    sizes, unequal = tuple(int(size) for size in name.partition("-")[0].split("x")), name.endswith("unequal")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")[-len(sizes) :])
    model, optimizer = build(family)
    run, generator = moebius.capture(step, mesh=mesh), torch.Generator().manual_seed(3)
    references = [Plain(family, parts) for parts in (False, True)]
    for number in range(STEPS):
        rows = [(1, 4, 2, 3)[(number // 8 + i) % 4] if unequal else 2 for i in range(ranks)]
        batches = [torch.randint(3, 128, (n, LENGTH), generator=generator) for n in rows]
        loss, norm = run(model, optimizer, batches[rank], unequal)
        dist.all_reduce(loss)
        for reference in references:
            expected, expected_norm = reference.train(batches)
            reference.compare("losses", loss / ranks, expected)
            reference.compare("norms", norm, expected_norm)
    for reference in references:
        reference.compare_all(model, optimizer)
    joined, parts = references
    told = moebius.stats(run)
    split = sum(isinstance(p, Sharded) for p in model.parameters())
    return {
        **joined.far, "in parts": max(parts.far.values()), "graphs": told.graphs, "breaks": told.breaks, "split": split
    }


def size_of(name: str) -> int:
    return prod(int(size) for size in name.partition("-")[0].split("x"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), help="of bench/zoo (default: %(default)s)")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), help="ep, or dp x ep (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args()
    if args.rank is not None:
        join(args.rank, size_of(args.meshes[0]), args.store)
        for family in args.families:
            tell(train(family, args.meshes[0]))
        dist.destroy_process_group()
        return 0
    titles = " | ".join(["model", "ranks", "graphs, breaks", "split parameters", *WHAT])
    print(f"| {titles} |\n{'|---' * 9}|", flush=True)
    equal = True
    for name in args.meshes:
        told = run_on_ranks(__file__, size_of(name), ["--families", *args.families, "--meshes", name])
        for family, each in zip(args.families, zip(*told, strict=True), strict=True):
            far = {what: max(one[what] for one in each) for what in WHAT}
            equal = equal and far["in parts"] <= ALLOWED
            captured = f"{each[0]['graphs']}, {each[0]['breaks']} | {each[0]['split']}"
            cells = " | ".join(f"{value:.0e}" for value in far.values())
            print(f"| {family} | {name} | {captured} | {cells} |", flush=True)
    return int(not equal)


if __name__ == "__main__":
    raise SystemExit(main())
