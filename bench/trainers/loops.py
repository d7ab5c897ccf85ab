# mypy: ignore-errors
"""What people write around a step: closures, averages, bars, logs, checkpoints, evaluation."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import time
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

from .models import Gpt, MixtralExperts
from .script import STEPS, Script, labelled, mlp, rows, script, texts, vectors

OPTIMIZERS, HABITS = "optimizers", "habits"


@script(OPTIMIZERS)
def lbfgs_with_a_closure() -> Script:
    model = mlp(4, 16, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=5)

    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    return Script(step, vectors(4, 1), [model])


@script(OPTIMIZERS)
def stochastic_weight_averaging() -> Script:
    model = mlp(8, 32, 4)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)

    def step(x, y, i):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i > 20:
            averaged.update_parameters(model)
            scheduler.step()
        return loss.item()

    return Script(step, [(*b, i) for i, b in enumerate(labelled(8, 4))], [model, averaged])


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization, as in davda54/sam."""

    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for g in self.param_groups for p in g["params"]]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


@script(OPTIMIZERS)
def sharpness_aware() -> Script:
    model = mlp(8, 32, 4)
    optimizer = Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.second_step(zero_grad=True)
        return loss.item()

    return Script(step, labelled(8, 4), [model])


@script(OPTIMIZERS)
def meta_learning() -> Script:
    model = mlp(4, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x, y):
        fast = {k: p for k, p in model.named_parameters()}
        half = (len(x) + 1) // 2
        for _ in range(2):
            loss = F.mse_loss(torch.func.functional_call(model, fast, (x[:half],)), y[:half])
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {k: p - 0.01 * g for (k, p), g in zip(fast.items(), grads, strict=True)}
        loss = F.mse_loss(torch.func.functional_call(model, fast, (x[half:],)), y[half:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, vectors(4, 1), [model])


@script(OPTIMIZERS)
def plateau_and_early_stopping() -> Script:
    model = mlp(8, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    best = {"loss": math.inf, "wait": 0, "state": None}

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
        if loss.item() < best["loss"]:
            best.update(loss=loss.item(), wait=0, state=copy.deepcopy(model.state_dict()))
        else:
            best["wait"] += 1
        return best["wait"] > 10

    return Script(step, labelled(8, 4), [model])


@script(OPTIMIZERS)
def physics_informed() -> Script:
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(points):
        points = points.clone().requires_grad_(True)
        u = model(points)
        (du,) = torch.autograd.grad(u, points, torch.ones_like(u), create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0], points, torch.ones_like(du[:, 0]), create_graph=True)
        loss = (du[:, 1] - 0.1 * ddu[:, 0]).pow(2).mean() + u.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, vectors(2), [model])


@script(HABITS)
def bar_around_the_batches() -> Script:
    from tqdm import tqdm

    model = mlp(8, 32, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x, y):
        bar = tqdm(zip(x.split(4), y.split(4), strict=True), total=2, file=io.StringIO())
        total = 0.0
        for a, b in bar:
            loss = F.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            bar.set_postfix(loss=f"{loss.item():.3f}")
        return total

    return Script(step, labelled(8, 4), [model])


@script(HABITS)
def csv_and_json_logs() -> Script:
    model, table, lines = Gpt(), io.StringIO(), io.StringIO()
    optimizer, writer = torch.optim.AdamW(model.parameters(), lr=1e-3), csv.writer(table)
    started = time.time()

    def step(x, y, i):
        t0 = time.perf_counter()
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.writerow([i, loss.item(), optimizer.param_groups[0]["lr"]])
        lines.write(json.dumps({"step": i, "loss": round(loss.item(), 4)}) + "\n")
        elapsed, _ = time.perf_counter() - t0, time.time() - started
        return elapsed > 0

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [model], 2)


class WandbLike:
    def __init__(self):
        self.history, self.summary, self.step = [], {}, 0

    def log(self, data, step=None, commit=True):
        row = {k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v for k, v in data.items()}
        row["_step"] = self.step if step is None else step
        self.history.append(row)
        self.summary.update(row)
        self.step += 1


@script(HABITS)
def wandb_like() -> Script:
    model, run = Gpt(), WandbLike()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log({"train/loss": loss, "train/grad_norm": norm, "lr": optimizer.param_groups[0]["lr"]})
        return run.summary["train/loss"]

    return Script(step, texts(), [model], 2)


class SummaryWriterLike:
    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, global_step=None):
        self.scalars.setdefault(tag, []).append((global_step, float(value)))

    def add_histogram(self, tag, values, global_step=None):
        self.histograms[tag, global_step] = torch.histc(values.detach().float(), 8).tolist()


@script(HABITS)
def summary_writer_like() -> Script:
    model, writer = mlp(8, 32, 4), SummaryWriterLike()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y, i):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("Loss/train", loss, i)
        if i % 25 == 0:
            for name, p in model.named_parameters():
                writer.add_histogram(name, p, i)
        return loss.item()

    return Script(step, [(*b, i) for i, b in enumerate(labelled(8, 4))], [model])


@script(HABITS)
def checkpoints_in_the_loop() -> Script:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saved = deque(maxlen=2)

    def step(x, y, i):
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 20 == 19:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": i}, file)
            saved.append(file)
        return loss.item()

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [model], 2)


@script(HABITS)
def evaluation_in_between() -> Script:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    held_out = [(torch.randint(40, (4, 12)), torch.randint(40, (4, 12))) for _ in range(2)]

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = torch.zeros(len(held_out))
        for k, (x, y) in enumerate(held_out):
            _, loss = model(x, y)
            losses[k] = loss.item()
        model.train()
        return losses.mean()

    def step(x, y, i):
        found = float(estimate_loss()) if i % 10 == 0 else None
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item(), found

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [model], 2)


@script(HABITS)
def an_epoch_as_one_call() -> Script:
    model = mlp(8, 32, 4)
    optimizer = torch.optim.Adam(model.parameters())
    data = labelled(8, 4, steps=6)
    epochs = 16

    def train_epoch(epoch):
        model.train()
        total, log = 0.0, []
        for i, (x, y) in enumerate(data):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            if i % 3 == 0:
                log.append(f"Epoch {epoch} [{i}/{len(data)}] {loss.item():.4f}")
        return total / len(data), log

    return Script(train_epoch, [(e,) for e in range(epochs)], [model])


@script(HABITS)
def logged_by_a_lambda() -> Script:
    model, lines = mlp(8, 32, 4), []
    optimizer = torch.optim.Adam(model.parameters())
    log = lambda **kv: lines.append(" ".join(f"{k}={v:.3f}" for k, v in kv.items()))  # noqa: E731

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        return math.floor(loss.item() * 100)

    return Script(step, labelled(8, 4), [model])


@script(HABITS)
def curriculum_of_lengths() -> Script:
    model = Gpt(MixtralExperts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y, i):
        length = min(x.shape[1], 4 + 2 * (i // 5))
        _, loss = model(x[:, :length], y[:, :length])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [model], 2)


@script(HABITS)
def tasks_in_turns() -> Script:
    trunk, heads = mlp(8, 32), nn.ModuleDict({name: nn.Linear(32, 3) for name in ("a", "b", "c")})
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()])

    def step(x, y, task):
        loss = F.cross_entropy(heads[task](trunk(x)), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, [(*b, "abc"[i % 3]) for i, b in enumerate(labelled(8, 3))], [trunk, heads])


@script(HABITS)
def refined_until_it_settles() -> Script:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = [(torch.randn(rows(i), 8), 1 + i % 4) for i in range(STEPS)]

    def step(x, turns):
        z = torch.zeros_like(x)
        while turns > 0:
            z = torch.tanh(model(z) + x)
            turns -= 1
        loss = z.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, batches, [model])
