"""Writes training scripts: each takes parts that people put together and puts them together in another way.

A script has ``build()``, which makes everything the step works on; ``step(**built, x, y)``, one training step as one
writes it; ``between(number, **built)``, what happens to the model and the optimizer before call ``number``; and
``SIZES``, the batches' sizes. The seed decides all of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from textwrap import indent
from typing import TypeVar

T = TypeVar("T")

HEAD = """
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from script_parts import (
    CLASSES, WIDTH, Attention, Balanced, Dense, Dropping, Listed, Meter, Model, Stacked, by_hand, decayed, head_first,
    rebalance,
)
"""
BLOCKS = (
    "Stacked", "Listed", "lambda: Stacked(top_k=1)", "lambda: Listed(top_k=2)", "Dense", "Balanced", "Dropping",
    "Attention",
)  # fmt: skip
NORMS = ("lambda: nn.LayerNorm(WIDTH)", "lambda: nn.RMSNorm(WIDTH)", "nn.Identity", "lambda: nn.BatchNorm1d(WIDTH)")
GROUPS = ("list(model.parameters())", "list(model.parameters())", "decayed(model)", "head_first(model)")
OPTIMIZERS = (
    "torch.optim.SGD(params, lr=0.1)",
    "torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "torch.optim.Adam(params, lr=0.01)",
    "torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)",
    "torch.optim.AdamW(params, lr=0.01, foreach=True)",
    "torch.optim.AdamW(params, lr=0.01, fused=True)",
    "torch.optim.Adam(params, lr=0.01, amsgrad=True, maximize=True)",
    "torch.optim.Adafactor(params, lr=0.05)",
    "torch.optim.RMSprop(params, lr=0.01, momentum=0.5)",
    "torch.optim.Adagrad(params, lr=0.05)",
    "torch.optim.NAdam(params, lr=0.01)",
    "torch.optim.RAdam(params, lr=0.01)",
    "torch.optim.Adamax(params, lr=0.01)",
    "torch.optim.ASGD(params, lr=0.01)",
    "torch.optim.Rprop(params, lr=0.01)",
    "torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)",
)
SCHEDULES = (
    "None",
    "None",
    "schedules.LambdaLR(optimizer, lambda s: 1 / (1 + s))",
    "schedules.CosineAnnealingLR(optimizer, 6)",
    "schedules.StepLR(optimizer, 2)",
    "schedules.OneCycleLR(optimizer, 0.1, total_steps=12, cycle_momentum=False)",
)
COPIES = "[p.detach().clone() for p in model.parameters()]"
AVERAGES = {  # how it is made, and how a step updates it
    "none": ("None", ""),
    "by hand": (
        COPIES, "with torch.no_grad():\n    for a, p in zip(average, model.parameters()):\n        a.lerp_(p, 0.1)"
    ),
    "foreach": (COPIES, "with torch.no_grad():\n    torch._foreach_lerp_(average, list(model.parameters()), 0.1)"),
    "torch's": ("AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))", "average.update_parameters(model)"),
}
SCALER = "torch.amp.GradScaler('cpu', init_scale=8.0)"
HOOKS = (
    "", "", "", "", "model.head.weight.register_hook(lambda g: g * 0.5)",
    "model.norm.register_forward_hook(lambda module, given, out: out * 1.5)",
    "model.head.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))",
    "model.norm.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0.5,))",
)  # fmt: skip
ZEROS = (
    "optimizer.zero_grad()",
    "optimizer.zero_grad(set_to_none=False)",
    "model.zero_grad()",
    "for p in model.parameters():\n    p.grad = None",
)
LOSSES = (
    "F.cross_entropy(logits, y)",
    "F.cross_entropy(logits, y, label_smoothing=0.1)",
    "F.nll_loss(logits.log_softmax(-1), y)",
    "(logits.float() - F.one_hot(y, CLASSES)).pow(2).mean()",
)
AUXILIARY = ("", "loss = loss + 0.01 * model.aux_loss()", "aux = 0.01 * model.aux_loss()\nloss = loss + aux")
CLIPS = (
    "",
    "",
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)",
    "norm = sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None) ** 0.5",
    "for p in model.parameters():\n    if p.grad is not None:\n        p.grad.mul_(0.5)",
)
UPDATES = (
    *["optimizer.step()"] * 6,
    "by_hand(list(model.parameters()))",
    "if all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):\n    optimizer.step()",
    "optimizer.step(lambda: loss.detach())",
)
LOGS = (
    "history.append(float({result}))",
    "metrics['loss'] = 0.9 * metrics['loss'] + 0.1 * {result}.item()",
    "metrics['last'] = {result}.detach()",
    "print(f'loss {{{result}.item():.4f}}')",
    "metrics['lr'] = optimizer.param_groups[0]['lr']",
    "for group in optimizer.param_groups:\n    group['lr'] = group['lr'] * 0.9",
    "metrics.setdefault('meter', Meter()).update({result}.item())",
    "meter = metrics.setdefault('meter', Meter())\nmeter.update({result}.detach(), rows=len(x))\n"
    "metrics['smooth'] = meter.corrected",
    "metrics.setdefault('norms', []).append(torch.stack([p.detach().norm() for p in model.parameters()]).max())",
    "print(f\"{{metrics['steps']:03d}} {{{result}:.3f}}\", *(list(x.shape)), sep=' | ')",
    "metrics.setdefault('rows', 0)\nmetrics['rows'] += x.shape[0]",
    "if {result}.isnan():\n    raise FloatingPointError('the loss is not a number')",
    "if {result} > 1.5:\n    metrics['large'] = metrics.get('large', 0) + 1",
)
RESULTS = (
    "{result}.detach()",
    "{{'loss': {result}.detach(), 'lr': optimizer.param_groups[0]['lr']}}",
    "{result}.item()",
    "None",
    "({result}.detach(), logits.argmax(-1))",
)
BETWEEN = (
    *["pass"] * 8, "model.eval()", "model.train()", "optimizer.param_groups[0]['lr'] *= 0.5", "model.zero_grad()",
    "model.head.bias.requires_grad_(False)", "model.head.bias.requires_grad_(True)",
    "optimizer.load_state_dict(optimizer.state_dict())", "model.load_state_dict(model.state_dict())",
    "model.head.weight.data = model.head.weight.data * 0.9", "torch.nn.init.zeros_(model.head.bias)",
    "torch.manual_seed(3)", "metrics.update(steps=0, loss=0.0)", "optimizer.state.clear()",
    "model.norm.register_forward_hook(lambda module, given, out: out + 0.1)",
    "model.head.weight.grad = torch.ones_like(model.head.weight)",
)  # fmt: skip
CALLS = 6


class Writer:
    """The script of one seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def once_in(self, times: int) -> bool:
        return self.random.randrange(times) == 0

    def write(self) -> str:
        self.scheduler, self.average = self.pick(SCHEDULES), AVERAGES[self.pick(["none"] * 4 + list(AVERAGES))]
        self.scaled = self.once_in(7)
        built = self.build()
        step = "\n".join(self.step())
        events = ["pass", *(self.pick(BETWEEN) for _ in range(CALLS - 1))]
        between = "\n".join(f"if number == {n}:\n    {event}" for n, event in enumerate(events))
        sizes = [self.pick([12, 12, 12, 6, 18]) for _ in range(CALLS)]
        return (
            f"{HEAD}\ndef build():\n{indent(built, '    ')}\n\n"
            f"def step(model, optimizer, scheduler, average, scaler, history, metrics, x, y):\n"
            f"{indent(step, '    ')}\n\n"
            f"def between(number, model, optimizer, metrics, **others):\n{indent(between, '    ')}\n\nSIZES = {sizes}\n"
        )

    def build(self) -> str:
        blocks = self.blocks = ", ".join(self.pick(BLOCKS) for _ in range(self.pick([1, 1, 2])))
        dropout, tied = self.pick([0.0, 0.0, 0.0, 0.1]), self.once_in(4)
        frozen = "model.inner.weight.requires_grad_(False)" if self.once_in(4) else ""
        return "\n".join(
            line
            for line in (
                f"model = Model([{blocks}], {self.pick(NORMS)}, {dropout}, {tied})",
                frozen,
                f"params = {self.pick(GROUPS)}",
                f"optimizer = {self.pick(OPTIMIZERS)}",
                f"scheduler = {self.scheduler}",
                f"average = {self.average[0]}",
                f"scaler = {SCALER if self.scaled else None}",
                self.pick(HOOKS),
                "history, metrics = [], {'steps': 0, 'loss': 0.0}",
                "return dict(model=model, optimizer=optimizer, scheduler=scheduler, average=average, scaler=scaler,",
                "            history=history, metrics=metrics)",
            )
            if line
        )

    def step(self) -> list[str]:
        zero, when = self.pick(ZEROS), self.pick(["start", "start", "end", "every second time"])
        parts = self.pick([1, 1, 1, 2, 3]) if when != "every second time" else 1
        result = "loss" if parts == 1 else "total"
        begin = [zero] if when == "start" else []
        begin += ["model.train()"] if self.once_in(3) else []
        work = [self.forward(), self.backward("loss" if parts == 1 else f"(loss / {parts})")]
        if parts > 1:
            inner = indent("\n".join([*work, "total = total + loss.detach()"]), "    ")
            work = ["total = 0.0", f"for x, y in zip(x.chunk({parts}), y.chunk({parts})):\n{inner}"]
        update = ["scaler.step(optimizer)", "scaler.update()"] if self.scaled else [self.pick(UPDATES)]
        update += ["scheduler.step()"] if self.scheduler != "None" else []
        update += ["rebalance(model)"] if "Balanced" in self.blocks else []
        update += [line for line in (self.average[1], zero if when != "start" else "") if line]
        if when == "every second time":
            inner = indent("\n".join(update), "    ")
            update = ["metrics['steps'] += 1", f"if metrics['steps'] % 2 == 0:\n{inner}"]
        unscale = ["scaler.unscale_(optimizer)"] if self.scaled and self.once_in(2) else []
        logs = [log.format(result=result) for log in self.random.sample(LOGS, self.pick([0, 1, 2]))]
        returned = f"return {self.pick(RESULTS).format(result=result)}"
        return [line for line in (*begin, *work, *unscale, self.pick(CLIPS), *update, *logs, returned) if line]

    def forward(self) -> str:
        model = "torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)" if self.once_in(7) else "model(x)"
        lines = "\n".join(
            line for line in (f"logits = {model}", f"loss = {self.pick(LOSSES)}", self.pick(AUXILIARY)) if line
        )
        return f"with torch.autocast('cpu', torch.bfloat16):\n{indent(lines, '    ')}" if self.once_in(5) else lines

    def backward(self, loss: str) -> str:
        if self.scaled:
            return f"scaler.scale({loss}).backward()"
        ways = (
            f"{loss}.backward()",
            f"{loss}.backward()",
            f"{loss}.backward()",
            f"(0.5 * {loss}).backward(retain_graph=True)\n(0.5 * {loss}).backward()",
            f"torch.autograd.backward([{loss}])",
            "trained = [p for p in model.parameters() if p.requires_grad]\n"
            f"gradients = torch.autograd.grad({loss}, trained, allow_unused=True)\n"
            "for p, g in zip(trained, gradients):\n    if g is not None:\n"
            "        p.grad = g if p.grad is None else p.grad + g",
        )
        return self.pick(ways)


def script(seed: int) -> str:
    """The text of one training script."""
    return Writer(seed).write()
