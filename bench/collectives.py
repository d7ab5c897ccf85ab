"""Collectives of a captured training step on ranks, and the bytes that a rank sends in them: predicted and counted.

A tiny Mixtral, AdamW with clipping, each rank its own batch, on gloo processes of this machine. Counted is what torch's
profiler sees of torch.distributed, with shapes and splits, whoever asked for it; predicted is the formula of
docs/distributed.md with the rows that this routing sends. Ends with 1 where they differ.

    moebius bench collectives
    moebius bench collectives --mesh 2x2 --layers 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from models import tiny_mixtral
from rank_processes import add_arguments, join, run_on_ranks, tell
from torch import nn

from moebius import capture
from moebius.lowering.distribution import RegionShape, Sharded, bytes_for
from moebius.lowering.planner.traffic import chunk_span, reduced_bytes

PHASES = ("forward", "backward", "clipping", "optimizer")
SIZES = {"double": 8, "float": 4, "long int": 8, "int": 4, "unsigned char": 1}  # by torch's names of dtypes


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens_BT: torch.Tensor, phases: int) -> torch.Tensor:
    """The first so many phases of a training step."""
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens_BT, labels=tokens_BT).loss
    if phases > 1:
        loss.backward()
    if phases > 2:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if phases > 3:
        optimizer.step()
    return loss.detach()


def sent_by(events: Iterable[Any], rank: int, ranks: int) -> list[int]:
    """Bytes that this rank sends to others in each collective of a profile; axes of the mesh have as many ranks."""
    found = []
    for event in events:
        if event.name == "c10d::alltoall_base_":
            row = SIZES[event.input_dtypes[1]] * prod(event.input_shapes[1][1:])
            out = event.concrete_inputs[4]
            found.append(row * (sum(out) - out[rank]))
        elif event.name.startswith("gloo:") and event.name != "gloo:all_to_all":
            assert event.name == "gloo:all_reduce", event.name
            size = SIZES[event.input_dtypes[0]] * prod(event.input_shapes[0])
            found.append(reduced_bytes(size, ranks))
    return found


def count(run: Callable[[], object], rank: int, ranks: int) -> tuple[int, int]:
    """Collectives of a warm call, and bytes that it sends."""
    for _ in range(3):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run()
    sent = sent_by(profile.events(), rank, ranks)
    return len(sent), sum(sent)


def predict(model: nn.Module, whole: Any, batches: list[torch.Tensor], mesh: Any) -> list[tuple[int, int]]:
    """(collectives, bytes) of each phase. batches: of the ranks of this rank's experts' group. whole: an equal model
    with all experts here."""
    routings: list[Any] = []
    layers = whole.model.layers
    for layer in layers:
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: routings.append(args[1].tolist()))
    for batch in batches:
        whole(input_ids=batch)
    ranks, rank, config = len(batches), mesh.get_local_rank(mesh.ndim - 1), whole.config
    experts, top_k = config.num_local_experts, config.num_experts_per_tok
    owner = {e: r for r in range(ranks) for e in range(*chunk_span(experts, ranks, r))}
    forward = backward = 0
    for number in range(len(layers)):
        went = [[{owner[e] for e in token} for token in routing] for routing in routings[number :: len(layers)]]
        leave = sum(len(token - {rank}) for token in went[rank])
        arrive = sum(rank in token for other, tokens in enumerate(went) if other != rank for token in tokens)
        shape = RegionShape(batches[0].numel(), top_k, experts, config.hidden_size, 4, 4)
        parts = bytes_for(shape, ranks, leave, arrive)
        back = leave * shape.width * 4 + arrive * (shape.width * 4 + top_k * 4)
        forward, backward = forward + int(parts.total - back), backward + int(back)
    dense = sum(p.nbytes for p in model.parameters() if not isinstance(p, Sharded))
    own = sum(p.local.nbytes for p in model.parameters() if isinstance(p, Sharded))
    header = 16 * (ranks - 1)
    backward += mesh.ndim * (header + reduced_bytes(dense, ranks)) + (mesh.ndim - 1) * reduced_bytes(own, ranks)
    norms = 4 * sum(isinstance(p, Sharded) for p in model.parameters())
    clip = mesh.ndim * header + reduced_bytes(norms, ranks)
    ends = 3 * mesh.ndim - 1  # of backward: a header and whole gradients over each axis, the experts' over dp
    step = (1, 16 * (mesh.size() - 1)) if mesh.ndim > 1 else (0, 0)  # all ranks at once, before they write weights
    return [
        (3 * len(layers), forward), (2 * len(layers) + ends, backward), (mesh.ndim + 1, clip), step,
    ]


def measure(sizes: list[int], layers: int) -> list[dict[str, Any]]:
    """What this rank counts and predicts, by phase."""
    mesh = dist.init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("dp", "ep")[-len(sizes) :])
    model, _ = tiny_mixtral(layers)
    whole, _ = tiny_mixtral(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)  # the routing stays
    ranks, rank = sizes[-1], mesh.get_local_rank(len(sizes) - 1)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 128, (2, 16), generator=generator) for _ in range(dist.get_world_size())]
    run = capture(step, mesh=mesh)
    counted = [(0, 0)]
    for phases in (4, 3, 2, 1):
        call = partial(run, model, optimizer, batches[dist.get_rank()], phases)
        counted.insert(1, count(call, rank, ranks))
    first = dist.get_rank() - rank
    predicted = predict(model, whole, batches[first : first + ranks], mesh)
    return [
        {
            "phase": phase, "collectives": [wanted, after[0] - before[0]], "bytes": [size, after[1] - before[1]],
        }
        for phase, (wanted, size), (before, after) in zip(PHASES, predicted, pairwise(counted), strict=True)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2", help="ranks: of ep, or dp x ep of equal size (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="default: %(default)s")
    add_arguments(parser)
    args = parser.parse_args()
    sizes = [int(size) for size in args.mesh.split("x")]
    if len(set(sizes)) > 1 or min(sizes) < 2:
        parser.error("axes have equally many ranks, 2 or more: a profile does not say over which one a sum was taken")
    if args.rank is not None:
        join(args.rank, prod(sizes), args.store)
        tell(measure(sizes, args.layers))
        dist.destroy_process_group()
        return 0
    told = [rows for (rows,) in run_on_ranks(__file__, prod(sizes), sys.argv[1:])]
    same = all(row[what][0] == row[what][1] for rows in told for row in rows for what in ("collectives", "bytes"))
    words = "equal, on all ranks" if same else "NOT EQUAL"
    print(f"Mixtral, {args.layers} layers, {args.mesh} ranks; bytes of the first; predicted and counted {words}\n")
    print("| | collectives, predicted | counted | bytes sent, predicted | counted |\n|---|---|---|---|---|")
    for row in told[0]:
        print(f"| {row['phase']} | " + " | ".join(f"{n:,}" for n in (*row["collectives"], *row["bytes"])) + " |")
    return int(not same)


if __name__ == "__main__":
    raise SystemExit(main())
