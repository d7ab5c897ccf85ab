"""The planner's predictions beside figures: published ones of other trainers, and steps measured here with gloo.

    moebius bench planner                  # published figures
    moebius bench planner --scale          # three families at 64 to 4,096 GPUs, predicted alone
    moebius bench planner --measured       # calibrates this CPU, then runs steps on one and two processes (minutes)

Published runs are of other programs, with fused operators and their own ways to split states: each row says which plan
it is compared with; runs that checkpoint some layers or operators, or do not fit without, are compared with the plan
that keeps layers' inputs. B200's three shares were chosen after its rows; nothing else was fitted to them.
"""
from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import NamedTuple

from moebius.lowering.planner import calibrate, hardware, routing, search, shapes
from moebius.lowering.planner.costs import Cost, Predictor
from moebius.lowering.planner.plans import Candidate, Job

AUTOMODEL = "NVIDIA NeMo AutoModel, performance summary"
BRIDGE = "NVIDIA Megatron-Bridge, performance summary (26.04.01, 26.02, 26.06 containers)"


class Published(NamedTuple):
    """tokens: a second and GPU, as published. accumulate: microbatches of a step."""

    source: str
    model: str
    gpu: str
    gpus: int
    plan: Candidate
    sequence: int
    accumulate: int
    weights: str
    tokens: float


def plan(gpus: int, ep: int, at_once: int, precision: str, save: str, level: str, shard: str) -> Candidate:
    return Candidate(gpus // ep, ep, at_once, precision, save, level, shard, shard != "all")


PUBLISHED = [
    Published(AUTOMODEL, "qwen3-30b-a3b", "h100", 8, plan(8, 8, 4, "bf16", "layers", "rank", "all"), 4096, 16, "bf16",
              12040),
    Published(AUTOMODEL, "gpt-oss-20b", "h100", 8, plan(8, 8, 2, "bf16", "default", "rank", "all"), 4096, 16, "bf16",
              13058),
    Published(AUTOMODEL, "gpt-oss-120b", "h100", 64, plan(64, 64, 2, "bf16", "default", "rank", "all"), 4096, 4, "bf16",
              7626),
    Published(BRIDGE, "qwen3-30b-a3b", "h100", 16, plan(16, 16, 1, "fp8", "default", "slot", "optimizer"), 4096, 64,
              "bf16", 8960),
    Published(BRIDGE, "gpt-oss-120b", "b200", 64, plan(64, 8, 4, "bf16", "default", "slot", "optimizer"), 4096, 5,
              "bf16", 13568),
    Published(BRIDGE, "gpt-oss-120b", "b200", 64, plan(64, 64, 4, "bf16", "default", "slot", "optimizer"), 4096, 5,
              "bf16", 8047),
    Published(BRIDGE, "qwen3-30b-a3b", "b200", 8, plan(8, 8, 4, "mxfp8", "default", "slot", "optimizer"), 4096, 16,
              "bf16", 27136),
    Published(BRIDGE, "qwen3-30b-a3b", "b200", 8, plan(8, 8, 1, "mxfp8", "default", "slot", "optimizer"), 4096, 64,
              "bf16", 9691),
    Published("torchtitan, mlc-ai/pith-train issue 79", "qwen3-30b-a3b", "b200", 8,
              plan(8, 1, 8, "bf16", "layers", "rank", "all"), 8192, 1, "fp32", 19500),
    Published("torchtitan, issue 1789 (batch assumed: 4)", "deepseek-v2-lite", "h100", 8,
              plan(8, 8, 4, "bf16", "layers", "slot", "all"), 4096, 1, "fp32", 11636),
    Published("torchtitan, NousResearch/torchtitan pull 19", "qwen3-30b-a3b", "b200", 8,
              plan(8, 1, 8, "bf16", "layers", "rank", "all"), 4096, 1, "fp32", 14796),
]
# DeepEP: bytes a second of its bottleneck, rows to the own node counted as its authors do; over nodes of 8 GPUs.
NETWORK = [("V1, 4 nodes", 4, 58.0), ("V1, 8 nodes", 8, 51.0), ("V1, 2 nodes", 2, 43.0), ("V2, 2 nodes", 2, 90.0),
           ("V2, 4 nodes", 4, 61.0)]


def predict(row: Published) -> Cost:
    shape = shapes.named(row.model)
    cluster = hardware.cluster(hardware.device(row.gpu), row.gpus)
    job = Job(shape, cluster, row.plan.microbatch * row.accumulate * row.gpus, row.sequence,
              routing.Routing(shape.experts, shape.top_k), row.weights, eager=False)
    return Predictor(job).cost(row.plan)


def print_published() -> None:
    print("| model | GPUs | ep, sequences at once | published tokens/s/GPU | predicted | error | source |")
    print("|---|---|---|---|---|---|---|")
    for row in PUBLISHED:
        found = predict(row).tokens_per_second
        print(f"| {row.model}, {row.plan.precision} | {row.gpus} {row.gpu.upper()} | {row.plan.expert}, "
              f"{row.plan.microbatch} | {row.tokens:,.0f} | {found:,.0f} | {100 * (found / row.tokens - 1):+.0f} % | "
              f"{row.source} |")
    device = hardware.device("h100")
    print("\n| DeepEP dispatch, GB/s by network card | published | predicted | error |\n|---|---|---|---|")
    for name, nodes, rate in NETWORK:
        found = device.far_rate * device.reached.far / 1e9 * nodes / (nodes - 1)
        print(f"| {name} | {rate:.0f} | {found:.0f} | {100 * (found / rate - 1):+.0f} % |")


SCALE = ("qwen3-235b-a22b", "gpt-oss-120b", "deepseek-v3")


def print_scale() -> None:
    """The fastest plan that fits, and what it needs that moebius does not do. Assumed: H200 with 400 Gb/s a GPU, 8
    sequences of 4,096 tokens for each GPU in a step, bf16 weights, AdamW, fused operators, uniform routing."""
    print(f"{' '.join((print_scale.__doc__ or '').split())}\n")
    print("| model | GPUs | plan | tokens/s/GPU | MFU | exposed | needs |\n|---|---|---|---|---|---|---|")
    for name in SCALE:
        shape = shapes.named(name)
        for gpus in (64, 256, 1024, 4096):
            job = Job(shape, hardware.cluster(hardware.device("h200"), gpus), 8 * gpus, 4096,
                      routing.Routing(shape.experts, shape.top_k, shape.groups, shape.group_limit), "bf16", eager=False)
            found = search.search(job)
            fit = sorted([*found.running[:1], *found.later[:1]], key=lambda cost: cost.step)
            if not fit:
                print(f"| {name} | {gpus:,} | none fits | | | | |", flush=True)
                continue
            cost = fit[0]
            needs = ", ".join(cost.plan.missing()) or "nothing"
            print(f"| {name} | {gpus:,} | {cost.plan.mesh}, {cost.plan.microbatch} at once | "
                  f"{cost.tokens_per_second:,.0f} | {100 * cost.utilization:.0f} % | "
                  f"{100 * cost.exposed / cost.step:.0f} % | {needs} |", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Measured here
# ----------------------------------------------------------------------------------------------------------------------

# hidden, expert width, experts, top k, layers, sequences, tokens of each
MEASURED = [(128, 128, 8, 2, 2, 4, 128), (256, 128, 16, 2, 2, 4, 128), (256, 256, 8, 4, 2, 2, 256),
            (128, 256, 32, 4, 2, 4, 256), (256, 512, 8, 2, 4, 4, 128), (512, 256, 16, 2, 2, 4, 128)]
VOCABULARY, HEADS = 512, 4
STEPS = 9


def config_of(case: list[int]) -> dict:
    D, n, E, K, layers, _, _ = case
    return dict(model_type="mixtral", hidden_size=D, intermediate_size=n, num_hidden_layers=layers,
                num_attention_heads=HEADS, num_key_value_heads=HEADS, vocab_size=VOCABULARY, num_local_experts=E,
                num_experts_per_tok=K)


def worker(case: list[int], rank: int, ranks: int, port: int) -> None:
    """One rank: captured steps of a small Mixtral. The first rank prints seconds of a step. So that other programs
    count for little: alone, the median of the process's own time on its one thread; with others, the fastest step."""
    import torch
    import torch.distributed as dist
    from transformers import MixtralConfig, MixtralForCausalLM

    from moebius import capture

    torch.set_num_threads(1)
    mesh = None
    if ranks > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**config_of(case), use_cache=False, experts_implementation="eager"))
    optimizer = torch.optim.AdamW(model.parameters())

    @capture(mesh=mesh)
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    torch.manual_seed(rank)
    batch = torch.randint(0, VOCABULARY, case[5:])
    clock = time.process_time if ranks == 1 else time.perf_counter
    found = []
    for number in range(4 + STEPS):
        start = clock()
        step(model, optimizer, batch)
        if number >= 4:
            found.append(clock() - start)
    if rank == 0:
        print(json.dumps(statistics.median(found) if ranks == 1 else min(found)))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(case: tuple[int, ...], ranks: int) -> float:
    """Seconds of a step on so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", json.dumps(case)]
    started = [subprocess.Popen([*command, str(rank), str(ranks), str(port)], stdout=subprocess.PIPE, text=True)
               for rank in range(ranks)]
    try:
        told = [one.communicate(timeout=240)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    return json.loads(told[0].splitlines()[-1])


def print_measured() -> None:
    device = replace(calibrate.measure(), per_node=2)
    reached = device.reached
    print(f"calibrated: {device.rates['fp32'] / 1e9:.0f} GFLOP/s, {device.memory_rate / 1e9:.1f} GB/s, "
          f"{1e6 * reached.launch:.1f} µs an operator, gloo {device.near_rate / 1e9:.2f} GB/s, "
          f"{1e6 * reached.near_start:.0f} µs\n")
    print("| D, n, E, K, layers, batch × length | ranks | measured ms | predicted ms | error |\n|---|---|---|---|---|")
    for case in MEASURED:
        for ranks in (1, 2):
            shape = shapes.shape_of(config_of(list(case)), "mixtral")
            job = Job(shape, hardware.cluster(device, ranks), case[5] * ranks, case[6],
                      routing.Routing(shape.experts, shape.top_k))
            predicted = Predictor(job).cost(Candidate(1, ranks, case[5], "fp32")).step
            measured = measure(case, ranks)
            print(f"| {', '.join(map(str, case[:5]))}, {case[5]} × {case[6]} | {ranks} | {1e3 * measured:.1f} | "
                  f"{1e3 * predicted:.1f} | {100 * (predicted / measured - 1):+.0f} % |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", action="store_true", help="measure steps here, instead of published figures")
    parser.add_argument("--scale", action="store_true", help="predicted MFU of three families at 64 to 4,096 GPUs")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(json.loads(args.worker[0]), *map(int, args.worker[1:]))
    elif args.scale:
        print_scale()
    elif args.measured:
        print_measured()
    else:
        print_published()
