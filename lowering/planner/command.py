"""``moebius plan``: its options, and what it prints."""
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from moebius.lowering.planner import hardware, page, routing, search, shapes
from moebius.lowering.planner.errors import PlannerError
from moebius.lowering.planner.files import write_text
from moebius.lowering.planner.models import MODELS
from moebius.lowering.planner.plans import OPTIMIZERS, WEIGHTS, Job
from moebius.lowering.planner.work import base_precision

EXAMPLE = "moebius plan --model qwen3-30b-a3b --gpus 64 --gpu h200 --nodes 8"
PER_GPU = 8  # sequences of a step for each GPU, where --batch says nothing


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moebius plan", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Says, without running anything, how a training step of a model would best be run on a cluster:\n"
                    "the mesh, how many sequences at once, what experts save; milliseconds, bytes, what binds it.",
        epilog=f"example: {EXAMPLE}\n\ndocs/plan.md says how to read the answer, and what it rests on.",
    )
    model = parser.add_argument_group("the model")
    model.add_argument("--model", metavar="NAME", help="a model of the table; --list has their names")
    model.add_argument("--config", metavar="FILE", help="instead: the config.json of any MoE model of the hub")
    model.add_argument("--list", action="store_true", help="print the models and devices that are known, and stop")
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--gpus", type=int, metavar="N", help="how many GPUs in all")
    cluster.add_argument("--gpu", default="h100", metavar="NAME",
                         help=f"{', '.join(hardware.DEVICES)}, or a file that --calibrate wrote (default: %(default)s)")
    cluster.add_argument("--nodes", type=int, metavar="N", help="machines they stand in (default: full ones)")
    cluster.add_argument("--network", type=float, metavar="GB/S",
                         help="bytes a second between nodes for each GPU, one direction (default: 50, 400 Gb/s)")
    cluster.add_argument("--calibrate", metavar="FILE", help="measure this machine's CPU, and gloo between two of its "
                         "processes, into FILE (half a minute), and stop; then --gpu FILE")
    step = parser.add_argument_group("the step")
    step.add_argument("--seq", type=int, default=4096, metavar="N", help="tokens of a sequence (default: %(default)s)")
    step.add_argument("--batch", type=int, metavar="N",
                      help=f"sequences of a step, on all GPUs together (default: {PER_GPU} for each)")
    step.add_argument("--weights", choices=sorted(WEIGHTS), default="fp32",
                      help="how parameters, gradients and optimizer state are held; fp32: products take 16-bit copies, "
                           "as autocast does (default: %(default)s)")
    step.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="(default: %(default)s)")
    step.add_argument("--precision", nargs="+", metavar="P", default=[],
                      help=f"of the experts' products, one or several to compare: {', '.join(hardware.PRECISIONS)} "
                           f"(default: bf16)")
    step.add_argument("--operators", choices=("eager", "fused"), default="eager",
                      help="how what stands between products runs: one by one, as captured steps do, or fused by a "
                           "compiler (default: %(default)s)")
    step.add_argument("--routing", metavar="FILE", help="recorded slots of each expert, JSON: [E] numbers or "
                      "[layers][E] (default: uniform)")
    out = parser.add_argument_group("the answer")
    out.add_argument("--top", type=int, default=5, metavar="N", help="plans in each table (default: %(default)s)")
    out.add_argument("--trace", metavar="FILE", help="also write one layer of the fastest plan that fits, what is sent "
                     "and what is computed when, as a file that Perfetto opens")
    out.add_argument("--json", metavar="FILE", help="also write the answer as JSON; - prints it instead of the text")
    return parser


def run(words: Sequence[str]) -> int:
    """Run the command. Raises PlannerError for what cannot be planned, with what to ask instead."""
    args = make_parser().parse_args(words)
    if args.list:
        print(known())
        return 0
    if args.calibrate:
        return calibrate(args.calibrate)
    found = search.search(job_for(args), precisions_for(args))
    if args.trace:
        write_text(args.trace, json.dumps(page.as_trace(found)))
    if args.json:
        text = json.dumps(page.as_data(found, args.top), indent=1)
        if args.json == "-":
            print(text)
            return 0
        write_text(args.json, text + "\n")
    print(page.render(found, args.top))
    return 0


def job_for(args: argparse.Namespace) -> Job:
    """The job that the options say."""
    if (args.model is None) == (args.config is None):
        raise PlannerError(f"plan needs one of --model NAME and --config FILE: {EXAMPLE}")
    if args.gpus is None:
        raise PlannerError(f"plan needs --gpus N: {EXAMPLE}")
    if args.top < 1:
        raise PlannerError(f"--top {args.top}: at least one")
    shape = shapes.read_config(args.config) if args.model is None else shapes.named(args.model)
    device = hardware.device(args.gpu)
    if args.network is not None:
        device = hardware.with_network(device, args.network * 1e9)
    cluster = hardware.cluster(device, args.gpus, args.nodes)
    if args.routing:
        routed = routing.read(args.routing, shape.experts, shape.top_k, shape.moe_layers)
    else:
        routed = routing.Routing(shape.experts, shape.top_k, shape.groups, shape.group_limit)
    batch = PER_GPU * args.gpus if args.batch is None else args.batch
    job = Job(shape, cluster, batch, args.seq, routed, args.weights, args.optimizer, args.operators == "eager")
    job.check()
    return job


def precisions_for(args: argparse.Namespace) -> list[str]:
    device = hardware.device(args.gpu)
    for precision in args.precision:
        device.rate(precision)
    return args.precision or [base_precision(device)]


def known() -> str:
    """The tables, as text."""
    lines = ["models"]
    for name in shapes.names():
        shape = shapes.named(name)
        lines.append(f"  {name:<20}{shape.parameters / 1e9:>8.1f} billion, {shape.active_parameters / 1e9:>5.1f} of "
                     f"one token; {shape.experts} experts, {shape.top_k} a token ({MODELS[name].source})")
    lines.append("devices")
    for name, device in hardware.DEVICES.items():
        lines.append(f"  {name:<20}{device.rates['bf16'] / 1e12:>8.0f} TFLOP/s bf16, {device.memory_bytes / 1e9:.0f} GB"
                     f" at {device.memory_rate / 1e12:.2f} TB/s; {device.near_rate / 1e9:.0f} GB/s in a node,"
                     f" {device.far_rate / 1e9:.0f} between nodes ({device.source})")
    return "\n".join(lines)


def calibrate(file: str) -> int:
    from moebius.lowering.planner.calibrate import measure

    if not Path(file).absolute().parent.is_dir():
        raise PlannerError(f"there is no folder {Path(file).absolute().parent} to write {file} to")
    device = measure()
    hardware.write(device, file)
    print(f"{device.name}: {device.rates['fp32'] / 1e9:.0f} GFLOP/s, {device.memory_rate / 1e9:.1f} GB/s of memory, "
          f"{1e6 * device.reached.launch:.1f} µs an operator; gloo between two processes {device.near_rate / 1e9:.2f} "
          f"GB/s, {1e6 * device.reached.near_start:.0f} µs a start. Written to {file}: --gpu {file}")
    return 0
