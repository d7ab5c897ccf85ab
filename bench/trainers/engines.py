# mypy: ignore-errors
"""Trainers that own the loop: Hugging Face's and accelerate's own, and small ones of the structure of Lightning,
Fabric, composer, DeepSpeed, Keras, ignite and torchtitan."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from .models import Gpt, MinimindExperts, MixtralExperts
from .script import STEPS, Script, labelled, mlp, script, texts

ENGINES = "engines"


@script(ENGINES)
def hugging_face_trainer() -> Script:
    from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

    config = MixtralConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32, experts_implementation="eager",
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(folder, use_cpu=True, report_to=[], max_grad_norm=1.0, learning_rate=1e-3)
    trainer = Trainer(model=model, args=arguments)
    trainer.create_optimizer_and_scheduler(STEPS)
    trainer.current_gradient_accumulation_steps = 1  # what ``train()`` sets
    optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler

    def step(x, y):
        loss = trainer.training_step(model, {"input_ids": x, "labels": y})
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        return loss

    return Script(step, texts(), [model], 2)


@script(ENGINES)
def accelerate() -> Script:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def step(x, y):
        with accelerator.accumulate(model):
            _, loss = model(x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss.item()

    return Script(step, texts(), [model], 2)


class LightningLike(nn.Module):
    """A module with ``training_step``, ``log`` and ``configure_optimizers``."""

    def __init__(self):
        super().__init__()
        self.model, self.logged, self.global_step = Gpt(), defaultdict(list), 0

    def log(self, name, value, prog_bar=False, on_step=True):
        if on_step:
            self.logged[name].append(value.detach() if isinstance(value, torch.Tensor) else value)

    def training_step(self, batch, batch_idx):
        _, loss = self.model(*batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 20)}


@script(ENGINES)
def lightning_like() -> Script:
    module = LightningLike()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]

    def step(x, y, batch_idx):
        def closure():
            loss = module.training_step((x, y), batch_idx)
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure=closure)
        module.global_step += 1
        scheduler.step()

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [module], 2)


class FabricLike:
    def __init__(self, precision="bf16"):
        self.precision = precision

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else contextlib.nullcontext()

    @contextlib.contextmanager
    def no_backward_sync(self, module, enabled=True):
        yield

    def backward(self, loss):
        loss.backward()

    def clip_gradients(self, module, optimizer, max_norm):
        return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm=max_norm)


@script(ENGINES)
def fabric_like() -> Script:
    fabric, model = FabricLike(), Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"iter_num": 0, "step_count": 0}

    def step(x, y):
        state["iter_num"] += 1
        accumulating = state["iter_num"] % 2 != 0
        with fabric.no_backward_sync(model, enabled=accumulating), fabric.autocast():
            _, loss = model(x, y)
            fabric.backward(loss / 2)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1
        return loss.detach()

    return Script(step, texts(), [model], 2)


class Callback:
    def run(self, event, state):
        handler = getattr(self, event, None)
        if handler is not None:
            handler(state)


class SpeedMonitor(Callback):
    def batch_end(self, state):
        state.timestamps.append(state.batch)


class LossLogger(Callback):
    def after_loss(self, state):
        state.history[f"loss/{state.batch}"] = state.loss.detach()


class LayerFreezing(Callback):
    def batch_end(self, state):
        if state.batch == 40:
            for p in state.model.wpe.parameters():
                p.requires_grad_(False)


@script(ENGINES)
def composer_like() -> Script:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = SimpleNamespace(model=model, batch=0, loss=None, timestamps=[], history={})
    callbacks = [SpeedMonitor(), LossLogger(), LayerFreezing()]

    def emit(event):
        for callback in callbacks:
            callback.run(event, state)

    def step(x, y):
        emit("before_forward")
        _, state.loss = model(x, y)
        emit("after_loss")
        state.loss.backward()
        emit("after_backward")
        optimizer.step()
        optimizer.zero_grad()
        state.batch += 1
        emit("batch_end")

    return Script(step, texts(), [model], 2)


class DeepSpeedLike(nn.Module):
    """An engine: ``engine(x)``, ``engine.backward(loss)``, ``engine.step()``."""

    def __init__(self, module, optimizer, accumulation=2):
        super().__init__()
        self.module, self.optimizer, self.accumulation = module, optimizer, accumulation
        self.micro_steps = self.global_steps = 0

    def forward(self, *args):
        return self.module(*args)

    def is_boundary(self):
        return (self.micro_steps + 1) % self.accumulation == 0

    def backward(self, loss):
        (loss / self.accumulation).backward()

    def step(self):
        if self.is_boundary():
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.global_steps += 1
        self.micro_steps += 1


@script(ENGINES)
def deepspeed_like() -> Script:
    model = Gpt(MinimindExperts)
    engine = DeepSpeedLike(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(x, y):
        _, loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Script(step, texts(), [model], 2)


@script(ENGINES)
def keras_like() -> Script:
    model = mlp(8, 32, 4)
    optimizer, loss_fn = torch.optim.RMSprop(model.parameters()), nn.CrossEntropyLoss()
    metrics = {"loss": 0.0, "accuracy": 0.0, "seen": 0}

    def train_on_batch(x, y):
        model.train()
        predicted = model(x)
        loss = loss_fn(predicted, y)
        model.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        with torch.no_grad():
            for g in gradients:
                g.clamp_(-1.0, 1.0)
        optimizer.step()
        metrics["seen"] += len(x)
        metrics["loss"] += loss.item() * len(x)
        metrics["accuracy"] += (predicted.argmax(-1) == y).sum().item()
        return {k: v / metrics["seen"] for k, v in metrics.items() if k != "seen"}

    return Script(train_on_batch, labelled(8, 4), [model])


class Engine:
    """ignite's: handlers of events around ``process``."""

    def __init__(self, process):
        self.process, self.handlers = process, defaultdict(list)
        self.state = SimpleNamespace(iteration=0, output=None, metrics={})

    def on(self, event):
        return lambda handler: self.handlers[event].append(handler) or handler

    def fire(self, event):
        for handler in self.handlers[event]:
            handler(self)

    def run_one(self, *batch):
        self.state.iteration += 1
        self.fire("started")
        self.state.output = self.process(self, batch)
        self.fire("completed")
        return self.state.output


@script(ENGINES)
def ignite_like() -> Script:
    model = mlp(8, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def process(engine, batch):
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    engine = Engine(process)

    @engine.on("completed")
    def running_average(engine):
        before = engine.state.metrics.get("loss", engine.state.output)
        engine.state.metrics["loss"] = 0.98 * before + 0.02 * engine.state.output

    return Script(lambda *batch: engine.run_one(*batch), labelled(8, 4), [model])


@script(ENGINES)
def torchtitan_like() -> Script:
    model = Gpt(MixtralExperts)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=False, foreach=True)]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) / 10)) for o in optimizers]
    metrics = SimpleNamespace(ntokens=0, step=0, losses=[])

    def step(x, y):
        metrics.step += 1
        metrics.ntokens += y.numel()
        for o in optimizers:
            o.zero_grad()
        loss = F.cross_entropy(model(x)[0].flatten(0, 1).float(), y.flatten(0, 1))
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, 2.0, False, True)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, True)
        for o, s in zip(optimizers, schedulers, strict=True):
            o.step()
            s.step()
        if metrics.step % 10 == 0:
            metrics.losses.append((metrics.step, loss.item(), norm.item()))

    return Script(step, texts(), [model], 2)
