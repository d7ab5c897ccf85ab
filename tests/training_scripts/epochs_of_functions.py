"""Epochs as people write them in functions: ``train_one_epoch``, validation, loaders, meters, logs, checkpoints.

Each program returns ``(epoch, arguments, reached)``: the function that is captured, what it is called with each time,
and everything that it may change.
"""

# ruff: noqa: B006, B007, B008, B023, B028, B904, B905, E701, E702, E731, E741, F841, UP031, UP032, UP045 (as users write)

import argparse
import collections
import contextlib
import copy
import gc
import io
import itertools
import logging
import math
import sys
import time

import torch
import torch.nn.functional as F
from script_parts import CLASSES, WIDTH, Dropping, Listed, Model, Stacked
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

logger = logging.getLogger("epochs")
ROWS = 40


def tensors(rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, WIDTH, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


def loader(batch_size=8, **options):
    return DataLoader(TensorDataset(*tensors()), batch_size=batch_size, **options)


def experts(*blocks):
    return Model(blocks or (Stacked,), lambda: nn.LayerNorm(WIDTH), 0.0, False)


def imagenet():
    """PyTorch's ImageNet example."""

    class AverageMeter:
        def __init__(self, name, fmt=":f"):
            self.name = name
            self.fmt = fmt
            self.reset()

        def reset(self):
            self.val = 0
            self.avg = 0
            self.sum = 0
            self.count = 0

        def update(self, val, n=1):
            self.val = val
            self.sum += val * n
            self.count += n
            self.avg = self.sum / self.count

        def __str__(self):
            fmtstr = "{name} {val" + self.fmt + "} ({avg" + self.fmt + "})"
            return fmtstr.format(**self.__dict__)

    class ProgressMeter:
        def __init__(self, num_batches, meters, prefix=""):
            num_digits = len(str(num_batches // 1))
            self.batch_fmtstr = "[{:" + str(num_digits) + "d}/" + f"{num_batches}" + "]"
            self.meters = meters
            self.prefix = prefix

        def display(self, batch):
            entries = [self.prefix + self.batch_fmtstr.format(batch)]
            entries += [str(meter) for meter in self.meters]
            print("\t".join(entries))

    def accuracy(output, target, topk=(1,)):
        with torch.no_grad():
            maxk = max(topk)
            batch_size = target.size(0)
            _, pred = output.topk(maxk, 1, True, True)
            pred = pred.t()
            correct = pred.eq(target.view(1, -1).expand_as(pred))
            res = []
            for k in topk:
                correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)
                res.append(correct_k.mul_(100.0 / batch_size))
            return res

    def train(train_loader, model, criterion, optimizer, epoch, device, args):
        batch_time = AverageMeter("Time", ":6.3f")
        losses = AverageMeter("Loss", ":.4e")
        top1 = AverageMeter("Acc@1", ":6.2f")
        progress = ProgressMeter(len(train_loader), [losses, top1], prefix="Epoch: [{}]".format(epoch["n"]))
        epoch["n"] += 1
        model.train()
        end = time.time()
        for i, (images, target) in enumerate(train_loader):
            images = images.to(device, non_blocking=True)
            target = target.to(device, non_blocking=True)
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                progress.display(i + 1)

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    args = argparse.Namespace(print_freq=2)
    epoch = {"n": 0}
    generator = torch.Generator().manual_seed(1)
    data = loader(shuffle=True, generator=generator)
    return train, (data, model, nn.CrossEntropyLoss(), optimizer, epoch, torch.device("cpu"), args), [
        model, optimizer, epoch, generator,
    ]


def validate():
    """The same example's validation, after training in one function."""

    def run(model, loader, val_loader, criterion, optimizer, history):
        model.train()
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        model.eval()
        total, correct, seen = 0.0, 0, 0
        with torch.no_grad():
            for x, y in val_loader:
                logits = model(x)
                total += criterion(logits, y).item() * x.size(0)
                correct += (logits.argmax(1) == y).sum().item()
                seen += x.size(0)
        history["loss"].append(total / seen)
        history["accuracy"].append(correct / seen)
        return total / seen

    model = experts(Listed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    history = collections.defaultdict(list)
    return run, (model, loader(), loader(16), nn.CrossEntropyLoss(), optimizer, history), [model, optimizer, history]


def nanogpt():
    """nanoGPT's training loop: micro steps, schedule, estimates, checkpoints in one ``while True``."""
    data = torch.randint(0, CLASSES, (200,), generator=torch.Generator().manual_seed(2))
    gradient_accumulation_steps, batch_size, block_size = 2, 3, 6
    max_iters, eval_interval, log_interval, eval_iters = 6, 3, 2, 2
    learning_rate, min_lr, warmup_iters, lr_decay_iters, grad_clip = 1e-2, 1e-3, 2, 6, 1.0

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(CLASSES, WIDTH)
            self.moe = Stacked()
            self.head = nn.Linear(WIDTH, CLASSES, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, idx, targets=None):
            x = self.wte(idx)
            B, T, D = x.size()
            x = x + self.moe(x.view(-1, D)).view(B, T, D)
            if targets is not None:
                logits = self.head(x)
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
            else:
                logits, loss = self.head(x[:, [-1], :]), None
            return logits, loss

    def get_batch(split):
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([data[i : i + block_size] for i in ix])
        y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
        return x, y

    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    ctx = contextlib.nullcontext()
    saved = []

    @torch.no_grad()
    def estimate_loss():
        out = {}
        model.eval()
        for split in ["train", "val"]:
            losses = torch.zeros(eval_iters)
            for k in range(eval_iters):
                X, Y = get_batch(split)
                with ctx:
                    logits, loss = model(X, Y)
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        assert 0 <= decay_ratio <= 1
        coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
        return min_lr + coeff * (learning_rate - min_lr)

    def train():
        iter_num, best_val_loss = 0, 1e9
        X, Y = get_batch("train")
        t0 = time.time()
        running_mfu = -1.0
        while True:
            lr = get_lr(iter_num)
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr
            if iter_num % eval_interval == 0:
                losses = estimate_loss()
                print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
                if losses["val"] < best_val_loss:
                    best_val_loss = losses["val"]
                    if iter_num > 0:
                        checkpoint = {"model": model.state_dict(), "iter_num": iter_num, "best": best_val_loss}
                        file = io.BytesIO()
                        torch.save(checkpoint, file)
                        saved.append(len(file.getvalue()) > 0)
            for micro_step in range(gradient_accumulation_steps):
                with ctx:
                    logits, loss = model(X, Y)
                    loss = loss / gradient_accumulation_steps
                X, Y = get_batch("train")
                loss.backward()
            if grad_clip != 0.0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            t1 = time.time()
            dt = t1 - t0
            t0 = t1
            if iter_num % log_interval == 0:
                lossf = loss.item() * gradient_accumulation_steps
                print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms")
            iter_num += 1
            if iter_num > max_iters:
                break
        return best_val_loss

    return train, (), [model, optimizer, saved]


def timm_style():
    """timm's train_one_epoch: accumulation, need_update, meters, an OrderedDict for a result."""

    class AverageMeter:
        def __init__(self):
            self.reset()

        def reset(self):
            self.val = self.avg = self.sum = self.count = 0

        def update(self, val, n=1):
            self.val = val
            self.sum += val * n
            self.count += n
            self.avg = self.sum / self.count

    def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler=None, model_ema=None):
        has_no_sync = hasattr(model, "no_sync")
        update_time_m, data_time_m, losses_m = AverageMeter(), AverageMeter(), AverageMeter()
        model.train()
        accum_steps = args.grad_accum_steps
        last_accum_steps = len(loader) % accum_steps
        updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
        num_updates = epoch * updates_per_epoch
        last_batch_idx = len(loader) - 1
        last_batch_idx_to_accum = len(loader) - last_accum_steps
        data_start_time = update_start_time = time.time()
        optimizer.zero_grad()
        update_sample_count = 0
        for batch_idx, (input, target) in enumerate(loader):
            last_batch = batch_idx == last_batch_idx
            need_update = last_batch or (batch_idx + 1) % accum_steps == 0
            update_idx = batch_idx // accum_steps
            if batch_idx >= last_batch_idx_to_accum:
                accum_steps = last_accum_steps
            data_time_m.update(accum_steps, update_sample_count or 1)

            def _forward():
                output = model(input)
                loss = loss_fn(output, target)
                if accum_steps > 1:
                    loss /= accum_steps
                return loss

            def _backward(_loss):
                _loss.backward(create_graph=False)
                if need_update:
                    if args.clip_grad is not None:
                        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
                    optimizer.step()

            if has_no_sync and not need_update:
                with model.no_sync():
                    loss = _forward()
                    _backward(loss)
            else:
                loss = _forward()
                _backward(loss)
            losses_m.update(loss.item() * accum_steps, input.size(0))
            update_sample_count += input.size(0)
            if not need_update:
                data_start_time = time.time()
                continue
            num_updates += 1
            optimizer.zero_grad()
            if model_ema is not None:
                model_ema.update_parameters(model)
            time_now = time.time()
            update_time_m.update(time.time() - update_start_time)
            update_start_time = time_now
            if update_idx % args.log_interval == 0:
                lrl = [param_group["lr"] for param_group in optimizer.param_groups]
                lr = sum(lrl) / len(lrl)
                logger.info(
                    f"Train: {epoch} [{update_idx:>4d}/{updates_per_epoch} "
                    f"({100.0 * (update_idx + 1) / updates_per_epoch:>3.0f}%)]  "
                    f"Loss: {losses_m.val:#.3g} ({losses_m.avg:#.3g})  LR: {lr:.3e}"
                )
            update_sample_count = 0
            data_start_time = time.time()
            if lr_scheduler is not None:
                lr_scheduler.step()
        return collections.OrderedDict([("loss", losses_m.avg)])

    model = experts(Stacked, Listed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    args = argparse.Namespace(grad_accum_steps=2, clip_grad=1.0, log_interval=1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return (
        train_one_epoch,
        (1, model, loader(), optimizer, nn.CrossEntropyLoss(), args, scheduler, ema),
        [model, optimizer, ema, scheduler],
    )


def no_trainer():
    """transformers' run_glue_no_trainer: dict batches, a collate function, completed_steps, metrics."""

    class Rows(Dataset):
        def __init__(self):
            self.x, self.y = tensors()

        def __len__(self):
            return len(self.y)

        def __getitem__(self, i):
            return {"input": self.x[i], "labels": self.y[i], "idx": i}

    def collate(rows):
        return {
            "input": torch.stack([r["input"] for r in rows]),
            "labels": torch.stack([r["labels"] for r in rows]),
        }

    class Output(collections.OrderedDict):
        def __getattr__(self, name):
            try:
                return self[name]
            except KeyError:
                raise AttributeError(name) from None

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = experts(Stacked)

        def forward(self, input, labels=None, **kwargs):
            logits = self.net(input)
            loss = None
            if labels is not None:
                loss = F.cross_entropy(logits, labels)
            return Output(loss=loss, logits=logits)

    class Accuracy:
        def __init__(self):
            self.right, self.all = [], 0

        def add_batch(self, predictions, references):
            self.right += (predictions == references).tolist()
            self.all += len(references)

        def compute(self):
            result = {"accuracy": sum(self.right) / self.all}
            self.right, self.all = [], 0
            return result

    def train(args, model, train_dataloader, eval_dataloader, optimizer, lr_scheduler, metric, state):
        completed_steps = state["completed_steps"]
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            batch = {k: v.to("cpu") for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss = loss / args.gradient_accumulation_steps
            loss.backward()
            if step % args.gradient_accumulation_steps == 0 or step == len(train_dataloader) - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
            if isinstance(args.checkpointing_steps, int):
                if completed_steps % args.checkpointing_steps == 0:
                    output_dir = f"step_{completed_steps}"
                    if args.output_dir is not None:
                        output_dir = args.output_dir + "/" + output_dir
                    logger.info("saving to %s", output_dir)
            if completed_steps >= args.max_train_steps:
                break
        model.eval()
        samples_seen = 0
        for step, batch in enumerate(eval_dataloader):
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            metric.add_batch(predictions=predictions, references=batch["labels"])
        eval_metric = metric.compute()
        logger.info(f"epoch: {eval_metric}")
        state["completed_steps"] = completed_steps
        return {"accuracy": eval_metric, "train_loss": total_loss.item() / len(train_dataloader)}

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / 30))
    args = argparse.Namespace(
        gradient_accumulation_steps=2, checkpointing_steps=2, output_dir="out", max_train_steps=1000
    )
    state = {"completed_steps": 0}
    data = DataLoader(Rows(), batch_size=8, collate_fn=collate)
    return train, (args, model, data, data, optimizer, scheduler, Accuracy(), state), [model, optimizer, state, args]


def workers():
    """A loader with two worker processes."""

    def epoch(model, loader, optimizer):
        losses = []
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model = experts(Dropping)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return epoch, (model, loader(num_workers=2), optimizer), [model, optimizer]


def bar():
    """tqdm around the loader, the loss in its postfix."""
    from tqdm import tqdm

    def epoch(model, loader, optimizer, n):
        model.train()
        total = 0.0
        pbar = tqdm(loader, desc=f"epoch {n}", leave=False, disable=False, file=io.StringIO())
        for i, (x, y) in enumerate(pbar):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
            pbar.set_postfix(loss=f"{total / (i + 1):.3f}")
        return total / len(loader)

    model = experts()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return epoch, (model, loader(), optimizer, 3), [model, optimizer]


def cycled():
    """itertools.cycle over a loader, islice for so many steps; the cycle is a generator of the user's."""

    def forever(loader):
        while True:
            yield from loader

    def run(model, batches, optimizer, steps, log):
        for step, (x, y) in enumerate(itertools.islice(batches, steps)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log[step] = loss.item()
        return step

    model = experts()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    log = {}
    return run, (model, forever(loader()), optimizer, 4, log), [model, optimizer, log]


def cycle_of_itertools():
    """``itertools.cycle`` of a list of batches, ``next`` for each step."""
    x, y = tensors()
    batches = itertools.cycle(list(zip(x.split(8), y.split(8))))

    def run(model, optimizer, steps):
        total = torch.zeros(())
        for step in range(steps):
            x, y = next(batches)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total / steps

    model = experts(Listed)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return run, (model, optimizer, 4), [model, optimizer]


def two_loaders():
    """Labelled and unlabelled batches, zipped; the shorter one decides."""

    def epoch(model, labelled, unlabelled, optimizer, weight=0.5):
        sums = [0.0, 0.0]
        for step, ((x, y), (u, _)) in enumerate(zip(labelled, unlabelled)):
            supervised = F.cross_entropy(model(x), y)
            with torch.no_grad():
                pseudo = model(u).softmax(-1)
                mask = pseudo.max(-1).values.ge(0.25).float()
            unsupervised = (F.cross_entropy(model(u * 0.9), pseudo.argmax(-1), reduction="none") * mask).mean()
            loss = supervised + weight * unsupervised
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums[0] += supervised.item()
            sums[1] += unsupervised.item()
        return [s / (step + 1) for s in sums]

    model = experts(Stacked)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return epoch, (model, loader(8), loader(12), optimizer), [model, optimizer]


def next_or_again():
    """The usual ``try: next(it) except StopIteration: it = iter(loader)``."""

    def train(model, loader, optimizer, steps):
        it = iter(loader)
        losses = []
        for step in range(steps):
            try:
                x, y = next(it)
            except StopIteration:
                it = iter(loader)
                x, y = next(it)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return train, (model, loader(16), optimizer, 5), [model, optimizer]


def lists_of_batches():
    """A plain list of batches, a shuffle of Python's, early stopping with patience."""
    import random

    def fit(model, batches, optimizer, state):
        order = list(range(len(batches)))
        random.shuffle(order)
        total = 0.0
        for i in order:
            x, y = batches[i]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = total / len(batches)
        if mean < state["best"] - 1e-4:
            state["best"] = mean
            state["bad"] = 0
            state["weights"] = copy.deepcopy(model.state_dict())
        else:
            state["bad"] += 1
            if state["bad"] >= state["patience"]:
                print("stopping early")
                return True
        return False

    model = experts()
    x, y = tensors()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    state = {"best": math.inf, "bad": 0, "patience": 2, "weights": None}
    return fit, (model, list(zip(x.split(8), y.split(8))), optimizer, state), [model, optimizer, state]


def out_of_memory():
    """The handler that skips a batch that is too large, and one for the keyboard."""

    def epoch(model, batches, optimizer, stats):
        try:
            for i, (x, y) in enumerate(batches):
                try:
                    if x.shape[0] > 8:
                        raise RuntimeError("CUDA out of memory. Tried to allocate")
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
                except RuntimeError as e:
                    if "out of memory" in str(e):
                        print(f"| WARNING: ran out of memory, skipping batch {i}", file=sys.stderr)
                        for p in model.parameters():
                            if p.grad is not None:
                                del p.grad
                        stats["skipped"] += 1
                        optimizer.zero_grad()
                        continue
                    else:
                        raise e
                optimizer.step()
                optimizer.zero_grad()
                stats["steps"] += 1
        except KeyboardInterrupt:
            print("interrupted")
        finally:
            stats["epochs"] += 1
        return dict(stats)

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = tensors()
    batches = list(zip(x.split([8, 8, 16, 8]), y.split([8, 8, 16, 8])))
    stats = collections.Counter()
    return epoch, (model, batches, optimizer, stats), [model, optimizer, stats]


def generator_of_metrics():
    """A training loop that yields its metrics; the caller is captured, too."""

    def steps(model, loader, optimizer):
        for step, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield {"step": step, "loss": loss.item()}

    def train(model, loader, optimizer, history):
        for metrics in steps(model, loader, optimizer):
            history.append(metrics["loss"])
            if metrics["step"] % 2 == 0:
                print("step", metrics["step"], "loss %.4f" % metrics["loss"])
        return history[-1]

    model = experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    history = []
    return train, (model, loader(), optimizer, history), [model, optimizer, history]


def scaler_and_autocast():
    """The AMP recipe, with a schedule per step and a gradient norm that is logged."""

    def train_epoch(model, loader, optimizer, scaler, scheduler, max_norm=1.0):
        model.train()
        norms = []
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
                loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            norms.append(norm.item())
        return norms, scheduler.get_last_lr()[0]

    model = experts(Listed)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    return train_epoch, (model, loader(), optimizer, scaler, scheduler), [model, optimizer, scheduler]


def fabric_style():
    """Lightning Fabric's loop: fabric.backward, fabric.log_dict, dry_run."""

    class Fabric:
        def __init__(self):
            self.logged = []

        def backward(self, loss):
            loss.backward()

        def log_dict(self, metrics, step):
            self.logged.append({**metrics, "step": step})

        def print(self, *args, **kwargs):
            print(*args, **kwargs)

        @contextlib.contextmanager
        def autocast(self):
            yield

    def train(fabric, model, optimizer, loader, hparams):
        for batch_idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            with fabric.autocast():
                output = model(data)
                loss = F.nll_loss(F.log_softmax(output, dim=1), target)
            fabric.backward(loss)
            optimizer.step()
            if (batch_idx == 0) or ((batch_idx + 1) % hparams.log_interval == 0):
                fabric.print(
                    f"Train: [{batch_idx * len(data)}/{len(loader.dataset)}"
                    f" ({100.0 * batch_idx / len(loader):.0f}%)]\tLoss: {loss.item():.6f}"
                )
                fabric.log_dict({"loss": loss.detach()}, step=batch_idx)
                if hparams.dry_run:
                    break

    model = experts()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    fabric = Fabric()
    return train, (fabric, model, optimizer, loader(), argparse.Namespace(log_interval=2, dry_run=False)), [
        model, optimizer, fabric,
    ]


def collect_garbage():
    """gc between steps, memory printed, the best model kept as bytes, restored at the end."""

    def run(model, batches, optimizer, keep):
        best = float("inf")
        for i, (x, y) in enumerate(batches):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loss.item() < best:
                best = loss.item()
                keep.seek(0)
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": i}, keep)
            if i % 2 == 1:
                gc.collect()
        keep.seek(0)
        checkpoint = torch.load(keep)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        return best, checkpoint["step"]

    model = experts()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x, y = tensors()
    return run, (model, list(zip(x.split(10), y.split(10))), optimizer, io.BytesIO()), [model, optimizer]


PROGRAMS = (
    imagenet, validate, nanogpt, timm_style, no_trainer, workers, bar, cycled, cycle_of_itertools, two_loaders,
    next_or_again, lists_of_batches, out_of_memory, generator_of_metrics, scaler_and_autocast, fabric_style,
    collect_garbage,
)  # fmt: skip
