"""Trains a small Mixtral twice, as plain PyTorch and captured by moebius, and shows that the two agree.

The model is ``MixtralForCausalLM`` from transformers, unmodified, its experts the plain Python loop that everybody
reads first. The text is the source code of the Python that runs this file. Nothing is downloaded.

    python examples/train_mixtral.py                    # about two minutes on two CPU cores
    python examples/train_mixtral.py --ranks 2          # two processes: half of each batch, and of the experts, each

Writes a plot of both loss curves, the report and the figures into ``--out`` (default: out/train_mixtral).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import MixtralConfig, MixtralForCausalLM

from moebius import capture, explain

BATCH, LENGTH = 8, 128
TOLERANCE = 1e-4  # how far the losses may be apart, relative, in float32
WARM = 5  # steps that tokens per second leaves out


@capture
def step(model, optimizer, scheduler, batch):
    """One training step: ordinary Python."""
    optimizer.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss.detach()


def make_training(seed: int, steps: int):
    """The model, its optimizer and its schedule: the same for the same seed."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=256,  # bytes
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
        # the Python loop over experts
        experts_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    model = MixtralForCausalLM(config).train()
    # At 1e-3 this training is chaotic: weights changed by one rounding give losses 1e-2 apart, capture or not.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    warmup = max(1, steps // 10)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, steps - warmup)),
        ],
        milestones=[warmup],
    )
    return model, optimizer, scheduler


def make_batches(seed: int, steps: int) -> list[torch.Tensor]:
    """``steps`` batches of bytes, int64 [BATCH, LENGTH], cut at random out of Python's own standard library."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (steps, BATCH), generator=generator)
    return [torch.stack([text[start : start + LENGTH] for start in row]).long() for row in starts.tolist()]


@dataclass
class Run:
    """What one training run came to. seconds: one wall time a step; saved_bytes: kept for backward in the last step."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    saved_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        return BATCH * LENGTH / statistics.median(self.seconds[WARM:] or self.seconds)


@contextmanager
def count_saved(model: torch.nn.Module, run: Run):
    """Counts the bytes that autograd keeps for backward: each storage once, the parameters' own left out."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    run.saved_bytes = sum(size for where, size in storages.items() if where not in parameters)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The loss of the whole batch, of which each rank has an equal part."""
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def train(
    steps: dict[str, Callable], seed: int, count: int, part: slice = slice(None), quiet: bool = False
) -> list[Run]:
    """Train one model from scratch for each of these step functions; all see the same ``count`` batches, or this part
    of each.

    They take turns, batch by batch, so that whatever else the machine does slows all of them alike. The last step is
    watched for what it keeps, and not timed.
    """
    trainings = [(Run(name), step, *make_training(seed, count)) for name, step in steps.items()]
    bar = tqdm(make_batches(seed, count), desc="training", unit="step", disable=quiet)
    for number, batch in enumerate(bar, 1):
        batch = batch[part]
        for run, step, model, optimizer, scheduler in trainings:
            if number == count:
                with count_saved(model, run):
                    loss = step(model, optimizer, scheduler, batch)
            else:
                start = time.perf_counter()
                loss = step(model, optimizer, scheduler, batch)
                run.seconds.append(time.perf_counter() - start)
            run.losses.append(mean_over_ranks(loss))
        bar.set_postfix({run.name: f"{run.losses[-1]:.4f}" for run, *_ in trainings}, refresh=False)
    return [run for run, *_ in trainings]


def differences(run: Run, other: Run) -> list[float]:
    """How far the losses are apart at each step, relative."""
    return [abs(a - b) / abs(a) for a, b in zip(run.losses, other.losses, strict=True)]


def compare(plain: Run, other: Run) -> bool:
    """Print both runs side by side; True where the losses agree at every step up to the 100th."""
    apart = differences(plain, other)
    checked = apart[:100]
    agree = max(checked) <= TOLERANCE
    less = other.saved_bytes / plain.saved_bytes
    faster = other.tokens_per_second / plain.tokens_per_second
    rows = [
        ("", plain.name, other.name, ""),
        (f"loss at step {len(plain.losses)}", f"{plain.losses[-1]:.5f}", f"{other.losses[-1]:.5f}", ""),
        ("first step, seconds", f"{plain.seconds[0]:.2f}", f"{other.seconds[0]:.2f}", ""),
        ("tokens per second", f"{plain.tokens_per_second:,.0f}", f"{other.tokens_per_second:,.0f}", f"{faster:.2f}×"),
        (
            "saved for backward",
            f"{plain.saved_bytes / 2**20:.1f} MiB",
            f"{other.saved_bytes / 2**20:.1f} MiB",
            f"{less:.2f}×",
        ),
    ]
    print()
    for title, left, right, ratio in rows:
        print(f"  {title:<22}{left:>14}{right:>14}{ratio:>9}")
    print(
        f"\n  losses {'agree' if agree else 'DO NOT AGREE'} step for step: at most {max(checked):.1e} apart over the"
        f" first {len(checked)} steps, {checked[-1]:.1e} at step {len(checked)} (relative; limit {TOLERANCE:.0e})\n"
    )
    return agree


def plot(runs: list[Run], path: Path) -> None:
    """Loss curves on top, how far they are apart below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained")
    for run, (color, width, style) in zip(runs, [("#b9bcc8", 5, "-"), ("#6a43d9", 1.4, "-")], strict=True):
        top.plot(range(1, len(run.losses) + 1), run.losses, style, color=color, linewidth=width, label=run.name)
    top.set_ylabel("loss, nats a byte")
    top.set_title("Mixtral, 8 experts, on Python's own sources")
    top.legend(frameon=False)
    apart = [max(value, 1e-9) for value in differences(*runs)]
    bottom.semilogy(range(1, len(apart) + 1), apart, color="#6a43d9", linewidth=1)
    bottom.axhline(TOLERANCE, color="#d43d51", linewidth=1, linestyle=":")
    bottom.text(1, TOLERANCE * 1.3, "limit", color="#d43d51", fontsize=8)
    bottom.set_ylim(5e-10, 1e-2)
    bottom.set_ylabel("relative difference")
    bottom.set_xlabel("step")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def write_report(step: Callable, args: argparse.Namespace, out: Path) -> None:
    """Explain one step of a fresh training: text on the terminal, HTML and JSON beside the plot."""
    report = explain(step)(*make_training(args.seed, args.steps), make_batches(args.seed, 1)[0])
    print(report)
    report.to_html(out / "report.html")
    report.to_json(out / "report.json")


def finish(runs: list[Run], out: Path) -> int:
    """Compare, plot, write the figures down. Returns the exit status: 0 where the losses agree."""
    plot(runs, out / "losses.png")
    figures = [{**vars(run), "tokens_per_second": run.tokens_per_second} for run in runs]
    (out / "figures.json").write_text(json.dumps(figures, indent=1))
    agree = compare(*runs)
    print(f"  {out / 'losses.png'}  the plot\n  {out / 'report.html'}  the report")
    return 0 if agree else 1


def one_process(args: argparse.Namespace, out: Path) -> int:
    """Train with and without capture."""
    runs = train({"plain": step.__wrapped__, "captured": step}, args.seed, args.steps)
    write_report(step.__wrapped__, args, out)
    return finish(runs, out)


def launch_ranks(args: argparse.Namespace, out: Path) -> int:
    """Train in this one process without capture, then start this file again on several processes through torchrun."""
    [plain] = train({"plain": step.__wrapped__}, args.seed, args.steps)
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    environment = {"OMP_NUM_THREADS": str(max(1, cores // args.ranks)), **os.environ}
    status = subprocess.run([*command, __file__, *sys.argv[1:]], env=environment).returncode
    if status:
        return status
    return finish([plain, Run(**json.loads((out / "ranks.json").read_text()))], out)


def one_rank(args: argparse.Namespace, out: Path) -> int:
    """One of several processes: the same step on its own part of each batch, with the experts spread over a mesh."""
    dist.init_process_group("gloo")
    part = slice(dist.get_rank(), None, dist.get_world_size())
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    first = dist.get_rank() == 0
    spread = capture(step.__wrapped__, mesh=mesh)
    [run] = train({f"{args.ranks} ranks": spread}, args.seed, args.steps, part, quiet=not first)
    batch = make_batches(args.seed, 1)[0][part]
    report = explain(step.__wrapped__, mesh=mesh)(*make_training(args.seed, args.steps), batch)
    if first:
        print(report)
        report.to_html(out / "report.html")
        (out / "ranks.json").write_text(json.dumps(vars(run)))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="training steps (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes, each with its part of the batch (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/train_mixtral"), help="folder for results (default: %(default)s)"
    )
    args = parser.parse_args()
    if args.steps < 2 or args.ranks < 1 or BATCH % args.ranks:
        parser.error(f"--steps is at least 2, and --ranks divides the batch of {BATCH}")
    args.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        return one_rank(args, args.out)
    if args.ranks > 1:
        return launch_ranks(args, args.out)
    return one_process(args, args.out)


if __name__ == "__main__":
    sys.exit(main())
