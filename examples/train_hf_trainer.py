"""Hugging Face's Trainer with a captured step: two lines of a subclass, everything else as it was.

``Trainer.training_step`` is forward, loss and backward of one micro-batch; captured, it is one graph, and so is the
optimizer's step. (The first call installs the model's hooks, which is a graph break that does not come again.)
Gradient accumulation, clipping, the schedule, logging and saving stay the Trainer's own.

    python examples/train_hf_trainer.py --steps 20            # captured
    python examples/train_hf_trainer.py --steps 20 --compare  # and the plain Trainer beside it, from the same seed
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any, TypeVar

import torch
from stdlib_text import batches
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

from moebius import capture, stats
from moebius.report.records import Stats


class Losses(Trainer):
    """The plain Trainer; it keeps what it logs."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def log(self, logs: dict[str, float], *args: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


class CapturedTrainer(Losses):
    training_step = capture(Trainer.training_step)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(model)
        optimizer.step = self.update = capture(optimizer.step)
        return optimizer


class Text(torch.utils.data.Dataset):
    """Pieces of the standard library's source code, as bytes."""

    def __init__(self, count: int, length: int):
        source = batches(count, length)
        self.rows = next(source)[0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


TrainerKind = TypeVar("TrainerKind", bound=Losses)


def make_model() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=128,
        output_router_logits=True,  # the load-balancing loss is part of the loss
        experts_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    return MixtralForCausalLM(config)


def train(kind: type[TrainerKind], steps: int, accumulate: int, seed: int = 0) -> TrainerKind:
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=accumulate,
            learning_rate=1e-3,
            warmup_steps=2,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            max_grad_norm=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=seed,
        )
        trainer = kind(model=make_model(), args=settings, train_dataset=Text(64, 64))
        trainer.train()
    return trainer


def counted(seen: Stats) -> dict[str, int]:
    return {"graphs": seen.graphs, "breaks": seen.breaks, "hits": seen.hits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--compare", action="store_true", help="train with the plain Trainer as well")
    args = parser.parse_args()
    result: dict[str, Any] = {}
    trainer = train(CapturedTrainer, args.steps, args.accumulate)
    result["captured"] = trainer.losses
    result["step"] = counted(stats(CapturedTrainer.training_step))
    result["update"] = counted(stats(trainer.update))
    if args.compare:
        result["plain"] = train(Losses, args.steps, args.accumulate).losses
    print(json.dumps(result))


if __name__ == "__main__":
    main()
