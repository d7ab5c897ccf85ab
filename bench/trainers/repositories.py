# mypy: ignore-errors
"""Scripts of well-known repositories: what each has of its own is in its first line."""

from __future__ import annotations

import copy
import itertools
import math
import random
import sys
from collections import OrderedDict, defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .script import STEPS, Script, images, rows, script


@script("generative")
def self_conditioned_diffusion() -> Script:
    """Diffusion with self-conditioning in inference mode, an average of weights with its own counters."""

    from einops import rearrange, reduce

    def exists(x):
        return x is not None

    def default(v, d):
        if exists(v):
            return v
        return d() if callable(d) else d

    def extract(a, t, shape):
        b, *_ = t.shape
        out = a.gather(-1, t)
        return out.reshape(b, *((1,) * (len(shape) - 1)))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.time = nn.Linear(8, 16)
            self.a = nn.Conv2d(1, 16, 3, padding=1)
            self.b = nn.Conv2d(16, 1, 3, padding=1)
            self.gn = nn.GroupNorm(4, 16)

        def forward(self, x, t, x_self_cond=None):
            half = 4
            emb = math.log(10000) / (half - 1)
            emb = torch.exp(torch.arange(half, device=x.device) * -emb)
            emb = t[:, None] * emb[None, :]
            emb = torch.cat((emb.sin(), emb.cos()), dim=-1)
            h = self.gn(self.a(x if not exists(x_self_cond) else x + x_self_cond)) + rearrange(
                self.time(emb), "b c -> b c 1 1"
            )
            return self.b(F.silu(h))

    class GaussianDiffusion(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.num_timesteps = 50
            self.self_condition = True
            betas = torch.linspace(1e-4, 0.02, 50, dtype=torch.float64)
            ac = torch.cumprod(1 - betas, 0)

            def reg(n, v):
                return self.register_buffer(n, v.to(torch.float32))

            reg("sa", ac.sqrt())
            reg("sb", (1 - ac).sqrt())
            reg("loss_weight", torch.minimum(ac / (1 - ac), torch.tensor(5.0)))

        def p_losses(self, x, t, noise=None):
            noise = default(noise, lambda: torch.randn_like(x))
            xt = extract(self.sa, t, x.shape) * x + extract(self.sb, t, x.shape) * noise
            x_self_cond = None
            if self.self_condition and random.random() < 0.5:
                with torch.inference_mode():
                    x_self_cond = self.model(xt, t).clamp(-1, 1)
                    x_self_cond.detach_()
            out = self.model(xt, t, x_self_cond)
            loss = F.mse_loss(out, noise, reduction="none")
            loss = reduce(loss, "b ... -> b", "mean")
            loss = loss * extract(self.loss_weight, t, loss.shape)
            return loss.mean()

        def forward(self, img, *a, **k):
            (
                b,
                _c,
                h,
                w,
                device,
            ) = *img.shape, img.device
            assert h == w == 8, "height and width of image must be 8"
            t = torch.randint(0, self.num_timesteps, (b,), device=device).long()
            return self.p_losses(img * 2 - 1, t, *a, **k)

    class EMA(nn.Module):
        def __init__(self, model, beta=0.995, update_after_step=5, update_every=3):
            super().__init__()
            self.beta = beta
            self.online = [model]
            self.ema_model = copy.deepcopy(model)
            self.ema_model.requires_grad_(False)
            self.update_after_step, self.update_every = update_after_step, update_every
            self.register_buffer("initted", torch.tensor(False))
            self.register_buffer("step", torch.tensor(0))

        def get_current_decay(self):
            epoch = (self.step - self.update_after_step - 1).clamp(min=0.0)
            value = 1 - (1 + epoch / 1.0) ** -(2 / 3)
            if epoch.item() <= 0:
                return 0.0
            return value.clamp(min=0.0, max=self.beta).item()

        def copy_params(self):
            pairs = zip(self.ema_model.named_parameters(), self.online[0].named_parameters(), strict=True)
            for (_, a), (_, b) in pairs:
                a.data.copy_(b.data)

        def update(self):
            step = self.step.item()
            self.step += 1
            if (step % self.update_every) != 0:
                return
            if step <= self.update_after_step:
                self.copy_params()
                return
            if not self.initted.item():
                self.copy_params()
                self.initted.data.copy_(torch.tensor(True))
            d = self.get_current_decay()
            pairs = zip(self.ema_model.named_parameters(), self.online[0].named_parameters(), strict=True)
            for (_, a), (_, b) in pairs:
                if b.is_floating_point():
                    a.data.lerp_(b.data, 1.0 - d)

    gd = GaussianDiffusion(Net())
    ema = EMA(gd)
    opt = torch.optim.Adam(gd.parameters(), 8e-4, betas=(0.9, 0.99))

    class T:
        step = 0

    tr = T()

    def step(x, _):
        total_loss = 0.0
        for _ in range(2):
            loss = gd(x) / 2
            total_loss += loss.item()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(gd.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        tr.step += 1
        ema.update()
        return f"loss: {total_loss:.4f}"

    return Script(step, images(), [gd, ema, opt])


@script("generative")
def cyclegan_with_pools() -> Script:
    """Two generators, pools of images from which Python's random draws, losses named by texts."""

    class ImagePool:
        def __init__(self, n):
            self.pool_size = n
            self.num_imgs = 0
            self.images = []

        def query(self, images):
            if self.pool_size == 0:
                return images
            ret = []
            for image in images:
                image = torch.unsqueeze(image.data, 0)
                if self.num_imgs < self.pool_size:
                    self.num_imgs = self.num_imgs + 1
                    self.images.append(image)
                    ret.append(image)
                else:
                    p = random.uniform(0, 1)
                    if p > 0.5:
                        rid = random.randint(0, self.pool_size - 1)
                        tmp = self.images[rid].clone()
                        self.images[rid] = image
                        ret.append(tmp)
                    else:
                        ret.append(image)
            return torch.cat(ret, 0)

    def G():
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1), nn.Tanh()
        )

    def D():
        return nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 3, padding=1))

    class Model:
        def __init__(self):
            self.netG_A, self.netG_B, self.netD_A, self.netD_B = G(), G(), D(), D()
            self.fake_A_pool, self.fake_B_pool = ImagePool(10), ImagePool(10)
            self.optimizer_G = torch.optim.Adam(
                itertools.chain(self.netG_A.parameters(), self.netG_B.parameters()), lr=2e-4, betas=(0.5, 0.999)
            )
            self.optimizer_D = torch.optim.Adam(
                itertools.chain(self.netD_A.parameters(), self.netD_B.parameters()), lr=2e-4, betas=(0.5, 0.999)
            )
            self.optimizers = [self.optimizer_G, self.optimizer_D]
            self.loss_names = ["D_A", "G_A", "cycle_A", "idt_A", "D_B", "G_B", "cycle_B", "idt_B"]
            self.schedulers = [
                torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1.0 - max(0, e + 1 - 20) / float(31))
                for o in self.optimizers
            ]
            self.rl, self.fl = torch.tensor(1.0), torch.tensor(0.0)

        def gan(self, pred, real):
            return F.mse_loss(pred, (self.rl if real else self.fl).expand_as(pred))

        def set_input(self, a, b):
            self.real_A, self.real_B = a.to("cpu"), b.to("cpu")

        def forward(self):
            self.fake_B = self.netG_A(self.real_A)
            self.rec_A = self.netG_B(self.fake_B)
            self.fake_A = self.netG_B(self.real_B)
            self.rec_B = self.netG_A(self.fake_A)

        def set_requires_grad(self, nets, rg=False):
            if not isinstance(nets, list):
                nets = [nets]
            for n in nets:
                if n is not None:
                    for p in n.parameters():
                        p.requires_grad = rg

        def backward_D_basic(self, d, real, fake):
            loss = (self.gan(d(real), True) + self.gan(d(fake.detach()), False)) * 0.5
            loss.backward()
            return loss

        def backward_G(self):
            self.idt_A = self.netG_A(self.real_B)
            self.loss_idt_A = F.l1_loss(self.idt_A, self.real_B) * 5.0
            self.idt_B = self.netG_B(self.real_A)
            self.loss_idt_B = F.l1_loss(self.idt_B, self.real_A) * 5.0
            self.loss_G_A = self.gan(self.netD_A(self.fake_B), True)
            self.loss_G_B = self.gan(self.netD_B(self.fake_A), True)
            self.loss_cycle_A = F.l1_loss(self.rec_A, self.real_A) * 10
            self.loss_cycle_B = F.l1_loss(self.rec_B, self.real_B) * 10
            self.loss_G = (
                self.loss_G_A
                + self.loss_G_B
                + self.loss_cycle_A
                + self.loss_cycle_B
                + self.loss_idt_A
                + self.loss_idt_B
            )
            self.loss_G.backward()

        def optimize_parameters(self):
            self.forward()
            self.set_requires_grad([self.netD_A, self.netD_B], False)
            self.optimizer_G.zero_grad()
            self.backward_G()
            self.optimizer_G.step()
            self.set_requires_grad([self.netD_A, self.netD_B], True)
            self.optimizer_D.zero_grad()
            self.loss_D_A = self.backward_D_basic(self.netD_A, self.real_B, self.fake_B_pool.query(self.fake_B))
            self.loss_D_B = self.backward_D_basic(self.netD_B, self.real_A, self.fake_A_pool.query(self.fake_A))
            self.optimizer_D.step()

        def get_current_losses(self):
            r = OrderedDict()
            for n in self.loss_names:
                if isinstance(n, str):
                    r[n] = float(getattr(self, "loss_" + n))
            return r

    m = Model()

    def step(a, b):
        m.set_input(a, b)
        m.optimize_parameters()
        for sc in m.schedulers:
            sc.step()
        return m.get_current_losses()

    return Script(
        step,
        [(torch.randn(rows(i), 1, 8, 8), torch.randn(rows(i), 1, 8, 8)) for i in range(STEPS)],
        [m.netG_A, m.netG_B, m.netD_A, m.netD_B, *m.optimizers],
    )


@script("generative")
def sentence_vae() -> Script:
    """Packed sentences, dropped words, an annealed divergence, a tracker that grows."""

    class SVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.e = nn.Embedding(20, 8)
            self.enc, self.dec = nn.GRU(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
            self.mu, self.lv, self.l2h, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 20)
            self.word_dropout_rate = 0.2

        def forward(self, seq, length):
            bs = seq.size(0)
            sl, si = torch.sort(length, descending=True)
            seq = seq[si]
            emb = self.e(seq)
            packed = pack_padded_sequence(emb, sl.data.tolist(), batch_first=True)
            _, h = self.enc(packed)
            h = h.squeeze(0)
            mean, logv = self.mu(h), self.lv(h)
            std = torch.exp(0.5 * logv)
            z = torch.randn([bs, 4]) * std + mean
            h = self.l2h(z).unsqueeze(0)
            if self.word_dropout_rate > 0:
                prob = torch.rand(seq.size())
                prob[(seq.data - 1) * (seq.data - 0) == 0] = 1
                ds = seq.clone()
                ds[prob < self.word_dropout_rate] = 3
                emb = self.e(ds)
            packed = pack_padded_sequence(emb, sl.data.tolist(), batch_first=True)
            o, _ = self.dec(packed, h)
            po = pad_packed_sequence(o, batch_first=True)[0].contiguous()
            _, ri = torch.sort(si)
            po = po[ri]
            b, t, _ = po.size()
            return F.log_softmax(self.out(po.view(-1, 8)), dim=-1).view(b, t, 20), mean, logv

    model = SVAE()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    NLL = nn.NLLLoss(ignore_index=0, reduction="sum")
    tracker = defaultdict(lambda: torch.empty(0))
    st = {"step": 0}

    def kl_anneal(fn, step, k, x0):
        if fn == "logistic":
            return float(1 / (1 + np.exp(-k * (step - x0))))
        elif fn == "linear":
            return min(1, step / x0)

    def step(seq, target, length):
        lp, mean, logv = model(seq, length)
        target = target[:, : torch.max(length).item()].contiguous().view(-1)
        nll = NLL(lp.view(-1, lp.size(2)), target)
        kl = -0.5 * torch.sum(1 + logv - mean.pow(2) - logv.exp())
        w = kl_anneal("logistic", st["step"], 0.25, 20)
        loss = (nll + w * kl) / seq.size(0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        st["step"] += 1
        tracker["ELBO"] = torch.cat((tracker["ELBO"], loss.data.view(1, -1)), dim=0)
        return loss.item(), tracker["ELBO"].mean()

    return Script(
        step,
        [
            (torch.randint(1, 20, (rows(i), 7)), torch.randint(1, 20, (rows(i), 7)), torch.randint(3, 8, (rows(i),)))
            for i in range(STEPS)
        ],
        [model, opt],
    )


@script("vision")
def show_attend_and_tell() -> Script:
    """Captions sorted by length; each word has as many rows as there are sentences that long."""

    class Dec(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(20, 8)
            self.cell = nn.LSTMCell(16, 8)
            self.ih, self.ic = nn.Linear(8, 8), nn.Linear(8, 8)
            self.a1, self.a2, self.a3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.fb = nn.Linear(8, 8)
            self.fc = nn.Linear(8, 20)

        def forward(self, enc, caps, lens):
            bs = enc.size(0)
            enc = enc.view(bs, -1, 8)
            npx = enc.size(1)
            lens, sort_ind = lens.squeeze(1).sort(dim=0, descending=True)
            enc = enc[sort_ind]
            caps = caps[sort_ind]
            emb = self.emb(caps)
            m = enc.mean(dim=1)
            h, c = self.ih(m), self.ic(m)
            dl = (lens - 1).tolist()
            preds = torch.zeros(bs, max(dl), 20)
            alphas = torch.zeros(bs, max(dl), npx)
            for t in range(max(dl)):
                bt = sum([length > t for length in dl])
                att = self.a3(F.relu(self.a1(enc[:bt]) + self.a2(h[:bt]).unsqueeze(1))).squeeze(2)
                al = F.softmax(att, 1)
                awe = (enc[:bt] * al.unsqueeze(2)).sum(1)
                awe = torch.sigmoid(self.fb(h[:bt])) * awe
                h, c = self.cell(torch.cat([emb[:bt, t, :], awe], dim=1), (h[:bt], c[:bt]))
                preds[:bt, t, :] = self.fc(h)
                alphas[:bt, t, :] = al
            return preds, caps, dl, alphas, sort_ind

    dec = Dec()
    opt = torch.optim.Adam(dec.parameters(), 4e-4)

    def clip_gradient(o, gc):
        for g in o.param_groups:
            for p in g["params"]:
                if p.grad is not None:
                    p.grad.data.clamp_(-gc, gc)

    def accuracy(scores, targets, k):
        bs = targets.size(0)
        _, ind = scores.topk(k, 1, True, True)
        correct = ind.eq(targets.view(-1, 1).expand_as(ind))
        return correct.view(-1).float().sum().item() * (100.0 / bs)

    def step(img, caps, lens):
        scores, cs, dl, alphas, _ = dec(img, caps, lens)
        targets = cs[:, 1:]
        scores = pack_padded_sequence(scores, dl, batch_first=True).data
        targets = pack_padded_sequence(targets, dl, batch_first=True).data
        loss = F.cross_entropy(scores, targets)
        loss += 1.0 * ((1.0 - alphas.sum(dim=1)) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        clip_gradient(opt, 5.0)
        opt.step()
        return loss.item(), accuracy(scores, targets, 5)

    return Script(
        step,
        [
            (torch.randn(rows(i), 4, 8), torch.randint(20, (rows(i), 7)), torch.randint(4, 8, (rows(i), 1)))
            for i in range(STEPS)
        ],
        [dec, opt],
    )


@script("engines")
def convnext_engine() -> Script:
    """numpy's tables of learning rates for each layer's group, meters that smooth, stochastic depth."""

    class SmoothedValue:
        def __init__(self, window_size=20, fmt=None):
            self.fmt = fmt or "{median:.4f} ({global_avg:.4f})"
            self.deque = deque(maxlen=window_size)
            self.total = 0.0
            self.count = 0

        def update(self, value, n=1):
            self.deque.append(value)
            self.count += n
            self.total += value * n

        @property
        def median(self):
            return torch.tensor(list(self.deque)).median().item()

        @property
        def avg(self):
            return torch.tensor(list(self.deque), dtype=torch.float32).mean().item()

        @property
        def global_avg(self):
            return self.total / self.count

        @property
        def max(self):
            return max(self.deque)

        @property
        def value(self):
            return self.deque[-1]

        def __str__(self):
            return self.fmt.format(
                median=self.median, avg=self.avg, global_avg=self.global_avg, max=self.max, value=self.value
            )

    class MetricLogger:
        def __init__(self, delimiter="\t"):
            self.meters = defaultdict(SmoothedValue)
            self.delimiter = delimiter

        def update(self, **kwargs):
            for k, v in kwargs.items():
                if v is None:
                    continue
                if isinstance(v, torch.Tensor):
                    v = v.item()
                assert isinstance(v, (float, int))
                self.meters[k].update(v)

        def __getattr__(self, a):
            if a in self.meters:
                return self.meters[a]
            if a in self.__dict__:
                return self.__dict__[a]
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{a}'")

        def __str__(self):
            return self.delimiter.join(f"{n}: {str(m)}" for n, m in self.meters.items())

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.dw = nn.Conv2d(8, 8, 3, padding=1, groups=8)
            self.n = nn.LayerNorm(8)
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
            self.gamma = nn.Parameter(1e-2 * torch.ones(8))
            self.dp = 0.1

        def forward(self, x):
            i = x
            x = self.dw(x).permute(0, 2, 3, 1)
            x = self.gamma * self.b(F.gelu(self.a(self.n(x))))
            x = x.permute(0, 3, 1, 2)
            if self.dp == 0.0 or not self.training:
                return i + x
            keep = 1 - self.dp
            rt = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
            if keep > 0.0:
                rt.div_(keep)
            return i + x * rt

    model = nn.Sequential(
        nn.Conv2d(1, 8, 2, 2), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    groups = {}
    for n, p in model.named_parameters():
        lid = int(n.split(".")[0])
        dec = 0.0 if p.ndim == 1 else 0.05
        groups.setdefault(f"layer_{lid}_{dec}", {"weight_decay": dec, "params": [], "lr_scale": 0.8 ** (5 - lid)})[
            "params"
        ].append(p)
    opt = torch.optim.AdamW(list(groups.values()), lr=1e-3)
    lrs = np.concatenate(
        (
            np.linspace(0, 1e-3, 10),
            np.array([1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * i / 40)) for i in np.arange(40)]),
        )
    )
    wds = np.linspace(0.05, 0.2, STEPS)
    ml = MetricLogger(delimiter="  ")

    def step(it, samples, targets):
        for _i, g in enumerate(opt.param_groups):
            if lrs is not None:
                g["lr"] = lrs[it] * g["lr_scale"]
            if wds is not None and g["weight_decay"] > 0:
                g["weight_decay"] = wds[it]
        out = model(samples)
        loss = F.cross_entropy(out, targets)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        loss /= 1
        loss.backward()
        opt.step()
        opt.zero_grad()
        class_acc = (out.max(-1)[-1] == targets).float().mean()
        ml.update(loss=loss_value)
        ml.update(class_acc=class_acc)
        min_lr, max_lr = 10.0, 0.0
        for g in opt.param_groups:
            min_lr = min(min_lr, g["lr"])
            max_lr = max(max_lr, g["lr"])
        ml.update(lr=float(max_lr))
        ml.update(min_lr=float(min_lr))
        wd = None
        for g in opt.param_groups:
            if g["weight_decay"] > 0:
                wd = g["weight_decay"]
        ml.update(weight_decay=float(wd))
        if it % 10 == 0:
            print(ml)
        return {k: m.global_avg for k, m in ml.meters.items()}

    return Script(step, [(i, *b) for i, b in enumerate(images())], [model, opt])
