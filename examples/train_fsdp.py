"""Trains a small Mixtral on several ranks: FSDP2 splits the dense parameters over all of them, moebius the experts.

Each rank has its own part of the batch. The checkpoint goes on at any number of ranks; without torchrun the same file
trains in one process.

    torchrun --nproc-per-node 2 examples/train_fsdp.py --steps 4 --save out/train_fsdp
    torchrun --nproc-per-node 4 examples/train_fsdp.py --steps 8 --resume out/train_fsdp
    python examples/train_fsdp.py --steps 8                              # the same losses

A rank that is lost ends the others with an error that names it; torchrun starts all again, from the last checkpoint:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_fsdp.py --save out/a --resume out/a --every 2
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import MixtralConfig, MixtralForCausalLM

from moebius import capture

BATCH, LENGTH, CLIP = 8, 16, 0.5


def clip(groups: list[list[torch.nn.Parameter]], most: float) -> torch.Tensor:
    """Clip gradients to the norm of all groups together: torch takes that of each, as they are split in two ways."""
    norms = []
    for group in groups:
        norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = torch.stack(norms).norm()
    for group in groups:
        clip_grads_with_norm_(group, most, total)
    return total


def step(model, optimizer, tokens):
    """One training step: ordinary Python, which knows of no ranks."""
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    clip([group["params"] for group in optimizer.param_groups], CLIP)
    optimizer.step()
    return loss.detach()


def build(mesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer; with a mesh, the dense parameters split over its ranks."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        use_cache=False, experts_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    model = MixtralForCausalLM(config).train()
    experts = [p for layer in model.model.layers for p in layer.mlp.experts.parameters()]
    if mesh is not None:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, ignored_params=set(experts))
    dense = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    return model, torch.optim.AdamW([{"params": dense}, {"params": experts}], lr=3e-4)


def batch(number: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of a step's batch: int64 [BATCH / ranks, LENGTH]."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(128, (BATCH, LENGTH), generator=generator).chunk(ranks)[rank]


def load_last(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, held: dict[str, Any]) -> None:
    """Go on from the last checkpoint that can be read, if there is one. Those without .metadata, which is written last,
    are not whole; of a torn one (a full disk, a lost machine) dcp.load says so on all ranks, and has written into
    what it was given: the one before is read, or nothing goes on."""
    torn: list[CheckpointException] = []
    for place in sorted((found.parent for found in folder.glob("*/.metadata")), reverse=True):
        held["model"], held["optimizer"] = get_state_dict(model, optimizer)
        try:
            dcp.load(held, checkpoint_id=place)
        except CheckpointException as error:
            torn.append(error)
            print(f"{place.name} cannot be read: going on from the one before", flush=True)
            continue
        set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
        return
    if torn:
        raise torn[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="in all, those of the checkpoint among them")
    parser.add_argument("--save", metavar="FOLDER", help="where checkpoints go, one for each step that has one")
    parser.add_argument("--every", type=int, default=0, help="a checkpoint each so many steps, not at the end alone")
    parser.add_argument("--resume", metavar="FOLDER", help="go on from the last checkpoint there, if there is one")
    args = parser.parse_args()
    mesh, rank, ranks = None, 0, 1
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    model, optimizer = build(mesh)
    held: dict[str, Any] = {"step": 0}
    if args.resume:  # before the first captured call
        load_last(Path(args.resume), model, optimizer, held)
    run = capture(step, mesh=mesh)
    for number in range(held["step"], args.steps):
        loss = run(model, optimizer, batch(number, rank, ranks))
        if mesh is not None:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {number}: loss {float(loss) / ranks:.5f}", flush=True)
        done = number + 1
        if args.save and (done == args.steps or (args.every and done % args.every == 0)):
            held["model"], held["optimizer"] = get_state_dict(model, optimizer)
            dcp.save({**held, "step": done}, checkpoint_id=Path(args.save) / f"{done:08}")
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
