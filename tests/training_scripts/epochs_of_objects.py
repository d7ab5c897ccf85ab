"""Epochs as people write them in classes: trainers, callbacks, wrappers, configurations, loggers, registries.

Each program returns ``(epoch, arguments, reached)``, as in epochs_of_functions.
"""

# ruff: noqa: B006, B007, B008, B023, B028, B904, B905, E701, E702, E731, E741, F841, UP031, UP032, UP045 (as users write)

import collections
import contextlib
import dataclasses
import enum
import functools
import logging
import math
import os
import tempfile
import time
import types
import typing
import warnings

import torch
import torch.nn.functional as F
from epochs_of_functions import experts, loader, tensors
from script_parts import CLASSES, WIDTH, Attention, Balanced, Listed, Stacked, rebalance
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

logger = logging.getLogger("epochs.objects")


def trainer():
    """A Trainer with hooks to override, a global step and callbacks."""

    @dataclasses.dataclass
    class Config:
        lr: float = 0.05
        clip: typing.Optional[float] = 1.0
        log_every: int = 2
        betas: tuple = (0.9, 0.99)
        names: list = dataclasses.field(default_factory=lambda: ["loss", "lr"])

    class Callback:
        def on_step_end(self, trainer, loss): ...

        def on_epoch_end(self, trainer): ...

    class History(Callback):
        def __init__(self):
            self.values = collections.defaultdict(list)

        def on_step_end(self, trainer, loss):
            self.values["loss"].append(loss)
            self.values["step"].append(trainer.global_step)

    class Printer(Callback):
        def on_step_end(self, trainer, loss):
            if trainer.global_step % trainer.config.log_every == 0:
                print(f"[{trainer.global_step}] {trainer.config.names[0]}={loss:.4f} lr={trainer.lr:.2e}")

        def on_epoch_end(self, trainer):
            print("epoch", trainer.epoch, "done")

    class Trainer:
        def __init__(self, model, config, callbacks=()):
            self.model, self.config, self.callbacks = model, config, list(callbacks)
            self.optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, betas=config.betas)
            self.global_step = self.epoch = 0
            self._best = math.inf

        @property
        def lr(self):
            return self.optimizer.param_groups[0]["lr"]

        def call(self, name, *args):
            for callback in self.callbacks:
                getattr(callback, name)(self, *args)

        def training_step(self, batch):
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def fit_epoch(self, loader):
            self.model.train()
            for batch in loader:
                loss = self.training_step(batch)
                self.optimizer.zero_grad()
                loss.backward()
                if self.config.clip is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
                self.optimizer.step()
                self.global_step += 1
                self._best = min(self._best, loss.item())
                self.call("on_step_end", loss.item())
            self.epoch += 1
            self.call("on_epoch_end")
            return self._best

    history = History()
    t = Trainer(experts(), Config(), [history, Printer()])
    return t.fit_epoch, (loader(),), [t, t.model, t.optimizer, history]


def wrapped():
    """A wrapper like DistributedDataParallel's, with ``module``, ``no_sync`` and delegation."""

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.require_sync = True
            self.synced = 0

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

        @contextlib.contextmanager
        def no_sync(self):
            old, self.require_sync = self.require_sync, False
            try:
                yield
            finally:
                self.require_sync = old

        def reduce(self):
            if self.require_sync:
                self.synced += 1

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    def epoch(model, loader, optimizer, accumulate):
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x), y) + 0.01 * model.aux_loss()
                (loss / accumulate).backward()
                model.reduce()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        unwrapped = model.module if hasattr(model, "module") else model
        return {k: v.norm() for k, v in unwrapped.state_dict().items() if "head" in k}, model.synced

    model = Wrapper(experts())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return epoch, (model, loader(), optimizer, 2), [model, optimizer]


def exit_stack():
    """Contexts by configuration in an ExitStack, entered each step."""

    def epoch(model, loader, optimizer, options):
        losses = []
        for x, y in loader:
            with contextlib.ExitStack() as stack:
                if options.get("autocast"):
                    stack.enter_context(torch.autocast("cpu", torch.bfloat16))
                if options.get("anomaly"):
                    stack.enter_context(torch.autograd.set_detect_anomaly(True))
                for name in options.get("frozen", ()):
                    parameter = model.get_parameter(name)
                    parameter.requires_grad_(False)
                    stack.callback(parameter.requires_grad_, True)
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return epoch, (model, loader(), optimizer, {"autocast": True, "frozen": ["inner.weight"]}), [model, optimizer]


def partials():
    """Step functions made with functools.partial and chosen by name."""

    def focal(logits, target, gamma):
        p = logits.softmax(-1).gather(1, target[:, None])[:, 0]
        return (-((1 - p) ** gamma) * p.log()).mean()

    losses = {"ce": F.cross_entropy, "focal": functools.partial(focal, gamma=2.0)}

    def step(model, optimizer, criterion, scheduler_step, batch):
        x, y = batch
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler_step()
        return loss.detach()

    def epoch(model, optimizer, loader, names):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        out = {}
        for name in names:
            one = functools.partial(step, model, optimizer, losses[name], scheduler.step)
            out[name] = torch.stack(list(map(one, loader))).mean().item()
        return out

    model = experts(Listed, Stacked)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return epoch, (model, optimizer, loader(), ["ce", "focal"]), [model, optimizer]


def wandb_like():
    """A run object with log, summary and config that answers attributes from a dict."""

    class Summary(dict):
        def __setattr__(self, name, value):
            self[name] = value

        __getattr__ = dict.__getitem__

    class Run:
        def __init__(self):
            self.rows, self.summary, self.step = [], Summary(), 0
            self.config = types.SimpleNamespace(lr=0.05, every=2)

        def log(self, data, step=None, commit=True):
            if step is not None:
                self.step = step
            self.rows.append((self.step, {k: float(v) for k, v in data.items()}))
            if commit:
                self.step += 1

    run = Run()

    def epoch(model, loader, optimizer):
        start = time.perf_counter()
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            if i % run.config.every == 0:
                run.log({"train/loss": loss, "train/norm": norm, "lr": optimizer.param_groups[0]["lr"]})
        run.summary.last = loss.item()
        run.summary.took = time.perf_counter() - start > 0
        return run.summary.last

    model = experts()
    optimizer = torch.optim.Adam(model.parameters(), run.config.lr)
    return epoch, (model, loader(), optimizer), [model, optimizer, run.rows, run.summary]


def stream():
    """An IterableDataset, a collate function that pads, sizes that vary."""

    class Stream(IterableDataset):
        def __init__(self):
            self.epoch = 0

        def __iter__(self):
            generator = torch.Generator().manual_seed(self.epoch)
            self.epoch += 1
            for length in (3, 5, 4, 6, 3, 5):
                yield torch.randn(length, WIDTH, generator=generator), length % CLASSES

    def pad(rows):
        longest = max(len(x) for x, _ in rows)
        out = torch.zeros(len(rows), longest, WIDTH)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, (x, _) in enumerate(rows):
            out[i, : len(x)] = x
            mask[i, : len(x)] = True
        return out, mask, torch.tensor([y for _, y in rows])

    def epoch(model, loader, optimizer, log):
        for x, mask, y in loader:
            B, T, D = x.shape
            logits = model(x.reshape(B * T, D)).view(B, T, -1)
            pooled = (logits * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            loss = F.cross_entropy(pooled, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append((T, round(loss.item(), 3)))

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    log = []
    return epoch, (model, DataLoader(Stream(), batch_size=2, collate_fn=pad), optimizer, log), [model, optimizer, log]


def checkpoints_on_disk():
    """A checkpoint each k steps, only the last two are kept, resumed from the newest at the start."""
    folder = tempfile.mkdtemp()

    def save(model, optimizer, step, path):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)

    def train(model, optimizer, loader, steps, every=2):
        step = 0
        found = sorted(os.listdir(folder))
        if found:
            state = torch.load(os.path.join(folder, found[-1]), weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
            print(f"resuming from step {step}")
        end = step + steps
        while step < end:
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % every == 0:
                    save(model, optimizer, step, os.path.join(folder, f"step_{step:05d}.pt"))
                    for old in sorted(os.listdir(folder))[:-2]:
                        os.remove(os.path.join(folder, old))
                if step >= end:
                    break
        return step, sorted(os.listdir(folder))

    model = experts(Listed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return train, (model, optimizer, loader(), 6), [model, optimizer]


def distillation():
    """Teacher and student, a teacher in eval mode, a temperature that anneals by a closure."""

    def epoch(student, teacher, loader, optimizer, state):
        student.train()
        teacher.eval()
        kd = nn.KLDivLoss(reduction="batchmean")

        def temperature():
            state["calls"] += 1
            return max(1.0, 4.0 - 0.1 * state["calls"])

        for x, y in loader:
            with torch.inference_mode(False), torch.no_grad():
                t = teacher(x)
            s = student(x)
            T = temperature()
            loss = 0.5 * F.cross_entropy(s, y) + 0.5 * T * T * kd((s / T).log_softmax(-1), (t / T).softmax(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item(), state["calls"]

    student, teacher = experts(), experts(Listed)
    optimizer = torch.optim.Adam(student.parameters(), 0.01)
    state = {"calls": 0}
    return epoch, (student, teacher, loader(), optimizer, state), [student, teacher, optimizer, state]


def adversaries():
    """Two models and two optimizers in turns, noise of torch's generator, labels made each step."""

    def epoch(G, D, g_opt, d_opt, loader, log):
        bce = nn.BCEWithLogitsLoss()
        for i, (real, _) in enumerate(loader):
            b = real.size(0)
            ones, zeros = torch.ones(b, 1), torch.zeros(b, 1)
            z = torch.randn(b, WIDTH)
            fake = G(z)
            d_loss = bce(D(real), ones) + bce(D(fake.detach()), zeros)
            d_opt.zero_grad()
            d_loss.backward()
            d_opt.step()
            if i % 2 == 0:
                g_loss = bce(D(fake), ones)
                g_opt.zero_grad()
                g_loss.backward()
                g_opt.step()
            log["d"] += d_loss.item()
            log["g"] += g_loss.item()
        return {k: v / (i + 1) for k, v in log.items()}

    G = nn.Sequential(nn.Linear(WIDTH, WIDTH), Stacked(), nn.Tanh())
    D = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    g_opt, d_opt = torch.optim.Adam(G.parameters(), 0.01), torch.optim.Adam(D.parameters(), 0.01)
    log = collections.defaultdict(float)
    return epoch, (G, D, g_opt, d_opt, loader(), log), [G, D, g_opt, d_opt, log]


def balancing():
    """DeepSeek's bias that balances loads after each step; expert counts logged every epoch."""

    def epoch(model, loader, optimizer, counts):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            for name, module in model.named_modules():
                if isinstance(module, Balanced):
                    counts[name] = counts.get(name, 0) + module.load.clone()
            rebalance(model)
        return {name: c.tolist() for name, c in counts.items()}

    model = experts(Balanced, Attention)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counts = {}
    return epoch, (model, loader(), optimizer, counts), [model, optimizer, counts]


def registry():
    """Losses and schedules from a registry by decorators and enums, mode by match."""

    class Phase(enum.Enum):
        WARM = "warm"
        MAIN = "main"
        COOL = "cool"

    registered = {}

    def register(phase):
        def wrap(f):
            registered[phase] = f
            return f

        return wrap

    @register(Phase.WARM)
    def warm(step):
        return 0.01 * (step + 1)

    @register(Phase.MAIN)
    def main(step):
        return 0.05

    @register(Phase.COOL)
    def cool(step):
        return 0.05 / (1 + step)

    def phase_of(step):
        match step:
            case 0 | 1:
                return Phase.WARM
            case s if s < 10:
                return Phase.MAIN
            case _:
                return Phase.COOL

    class Run:
        step = 0
        seen: typing.ClassVar[list] = []

    def epoch(model, loader, optimizer, run):
        for x, y in loader:
            phase = phase_of(run.step)
            for group in optimizer.param_groups:
                group["lr"] = registered[phase](run.step)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step += 1
            if not run.seen or run.seen[-1] != phase.name:
                run.seen.append(phase.name)
                logger.info("entering phase %s at step %d", phase.value, run.step)
        return phase

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = Run()
    return epoch, (model, loader(), optimizer, run), [model, optimizer, run, run.seen]


def curriculum():
    """A sampler with a generator, a batch size that grows, rows that are dropped, a moving average of the loss."""

    class Average:
        def __init__(self, window):
            self.window = collections.deque(maxlen=window)
            self.total, self.count = 0.0, 0

        def update(self, value):
            self.window.append(value)
            self.total += value
            self.count += 1

        @property
        def median(self):
            return torch.tensor(list(self.window)).median().item()

        @property
        def global_avg(self):
            return self.total / self.count

        def __format__(self, spec):
            return f"{self.median:{spec or '.3f'}} ({self.global_avg:{spec or '.3f'}})"

    class MetricLogger:
        def __init__(self):
            self.meters = collections.defaultdict(lambda: Average(3))

        def update(self, **kwargs):
            for k, v in kwargs.items():
                if isinstance(v, torch.Tensor):
                    v = v.item()
                assert isinstance(v, (float, int))
                self.meters[k].update(v)

        def log_every(self, iterable, print_freq, header=""):
            i = 0
            for obj in iterable:
                yield obj
                if i % print_freq == 0:
                    print(header, f"[{i}/{len(iterable)}]", "  ".join(f"{k}: {m:.4f}" for k, m in self.meters.items()))
                i += 1

    state = {"epoch": 0}

    def epoch(model, dataset, optimizer, metric_logger):
        generator = torch.Generator()
        generator.manual_seed(state["epoch"])
        batch = 4 * (1 + state["epoch"] // 2)
        loader = DataLoader(dataset, batch, sampler=RandomSampler(dataset, generator=generator), drop_last=True)
        for x, y in metric_logger.log_every(loader, 3, f"Epoch: [{state['epoch']}]"):
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            if not math.isfinite(loss.item()):
                print("Loss is {}, stopping training".format(loss.item()))
                raise SystemExit(1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metric_logger.update(loss=loss, lr=optimizer.param_groups[0]["lr"])
        state["epoch"] += 1
        return {k: m.global_avg for k, m in metric_logger.meters.items()}

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    metric_logger = MetricLogger()
    return epoch, (model, TensorDataset(*tensors()), optimizer, metric_logger), [
        model, optimizer, metric_logger.meters, state,
    ]


def lightning_like():
    """A module that logs by itself and configures its optimizers; the loop is a class's ``__call__``."""

    class LitModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = experts(Stacked)
            self._logged = {}
            self.trainer = None

        def log(self, name, value, prog_bar=False, on_epoch=False):
            if isinstance(value, torch.Tensor):
                value = value.detach()
            if on_epoch:
                self._logged.setdefault(name, []).append(value)
            else:
                self._logged[name] = value

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss, prog_bar=True, on_epoch=True)
            self.log("batch", batch_idx)
            return {"loss": loss}

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

        def on_train_epoch_end(self):
            values = self._logged.pop("train_loss")
            self._logged["train_loss_epoch"] = torch.stack(values).mean()

    class Loop:
        def __init__(self, module):
            self.module = module
            (self.optimizer,), (self.scheduler,) = module.configure_optimizers()
            module.trainer = self
            self.current_epoch = 0

        def __call__(self, loader):
            self.module.train(True)
            torch.set_grad_enabled(True)
            for batch_idx, batch in enumerate(loader):
                def closure():
                    out = self.module.training_step(batch, batch_idx)
                    self.optimizer.zero_grad()
                    out["loss"].backward()
                    return out["loss"]

                self.optimizer.step(closure)
            self.module.on_train_epoch_end()
            self.scheduler.step()
            self.current_epoch += 1
            return self.module._logged["train_loss_epoch"]

    module = LitModel()
    loop = Loop(module)
    return lambda data: loop(data), (loader(),), [module, loop.optimizer, module._logged, loop.scheduler]


def warned():
    """warnings once a run, a NaN check that skips, assertions, a rolling checkpoint in memory."""

    def epoch(model, batches, optimizer, bag):
        snapshot = {k: v.clone() for k, v in model.state_dict().items()}
        for n, (x, y) in enumerate(batches):
            assert x.ndim == 2 and len(x) == len(y), f"bad batch {x.shape}"
            loss = F.cross_entropy(model(x), y)
            if torch.isnan(loss) or torch.isinf(loss):
                warnings.warn(f"batch {n} has no finite loss")
                bag["skipped"].append(n)
                model.load_state_dict(snapshot)
                optimizer.zero_grad()
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if n % 2 == 0:
                snapshot = {k: v.clone() for k, v in model.state_dict().items()}
        return loss

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = tensors()
    x = x.clone()
    x[9] = math.nan
    bag = {"skipped": []}
    return epoch, (model, list(zip(x.split(8), y.split(8))), optimizer, bag), [model, optimizer, bag]


def queued():
    """A prefetching iterator class with __iter__/__next__ and a queue, and a second model average by hand."""

    class Prefetcher:
        def __init__(self, loader):
            self.loader, self.queue = loader, collections.deque()

        def __len__(self):
            return len(self.loader)

        def __iter__(self):
            self.it = iter(self.loader)
            self.preload()
            return self

        def preload(self):
            try:
                self.queue.append(next(self.it))
            except StopIteration:
                self.queue.append(None)

        def __next__(self):
            batch = self.queue.popleft()
            if batch is None:
                raise StopIteration
            self.preload()
            return batch

    def epoch(model, average, prefetcher, optimizer):
        for i, batch in enumerate(prefetcher, 1):
            x, y = batch
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for a, p in zip(average.parameters(), model.parameters()):
                    a.mul_(0.9).add_(p, alpha=0.1)
        return i, loss.item()

    model, average = experts(), experts()
    average.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return epoch, (model, average, Prefetcher(loader()), optimizer), [model, average, optimizer]


def whole_run():
    """Several epochs in one call: a table of rows, best metric, a learning rate on a plateau."""

    def fit(model, train_loader, val_loader, epochs=2, lr=0.05, verbose=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        rows, best = [], (float("inf"), None)
        for epoch in range(epochs):
            sums = collections.Counter()
            for phase, data in (("train", train_loader), ("val", val_loader)):
                model.train(phase == "train")
                for x, y in data:
                    with torch.set_grad_enabled(phase == "train"):
                        logits = model(x)
                        loss = F.cross_entropy(logits, y)
                    if phase == "train":
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                    sums[phase, "loss"] += loss.item() * len(x)
                    sums[phase, "right"] += int((logits.argmax(-1) == y).sum())
                    sums[phase, "rows"] += len(x)
            row = {p: sums[p, "loss"] / sums[p, "rows"] for p in ("train", "val")}
            scheduler.step(row["val"])
            rows.append(row)
            if row["val"] < best[0]:
                best = (row["val"], epoch)
            if verbose:
                print(" | ".join([f"{epoch:3d}", *(f"{k} {v:.4f}" for k, v in row.items())]))
        return rows, best

    model = experts()
    return fit, (model, loader(), loader(20)), [model]


PROGRAMS = (
    trainer, wrapped, exit_stack, partials, wandb_like, stream, checkpoints_on_disk, distillation, adversaries,
    balancing, registry, curriculum, lightning_like, warned, queued, whole_run,
)  # fmt: skip
