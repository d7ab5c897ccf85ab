# mypy: ignore-errors
"""Vision and generative models: pytorch/examples, timm-like scripts, diffusion, adversaries."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn

from .models import Block, MixtralExperts, SwitchExperts
from .script import STEPS, Script, images, mlp, rows, script, vectors

VISION, GENERATIVE = "vision", "generative"


class Mnist(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1), nn.Conv2d(8, 8, 3, 1)
        self.dropout1, self.fc1 = nn.Dropout(0.25), nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        return F.log_softmax(self.fc1(torch.flatten(self.dropout1(x), 1)), dim=1)


@script(VISION)
def mnist() -> Script:
    model = Mnist()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def step(data, target, batch_idx):
        model.train()
        data, target = data.to("cpu"), target.to("cpu")
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            done = f"{batch_idx * len(data)}/400 ({100.0 * batch_idx / 50:.0f}%)"
            print(f"Train Epoch: 1 [{done}]\tLoss: {loss.item():.6f}")

    return Script(step, [(*b, i) for i, b in enumerate(images())], [model])


class Patches(nn.Module):
    def __init__(self, ffn):
        super().__init__()
        self.patch, self.pos = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 5, 32))
        self.cls = nn.Parameter(torch.zeros(1, 1, 32))
        self.blocks = nn.Sequential(*(Block(32, 4, ffn(32), causal=False) for _ in range(2)))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.blocks(x)[:, 0])


@script(VISION)
def vit_with_experts() -> Script:
    model = Patches(MixtralExperts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step(x, y):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, images(3), [model], 2)


class AverageMeter:
    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


@script(VISION)
def timm_like_with_mixup() -> Script:
    model = Patches(SwitchExperts)
    ema = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    losses = AverageMeter()

    def step(x, y, update):
        lam = random.betavariate(0.8, 0.8)
        mixed = x * lam + x.flip(0) * (1 - lam)
        target = F.one_hot(y, 10).float()
        target = target * lam + target.flip(0) * (1 - lam)
        loss = torch.sum(-target * F.log_softmax(model(mixed), dim=-1), dim=-1).mean()
        losses.update(loss.item(), x.size(0))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        decay = min(0.99, (1 + update) / (10 + update))
        with torch.no_grad():
            for e, p in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                e.copy_(e * decay + p * (1 - decay))
        return losses.avg

    return Script(step, [(*b, i) for i, b in enumerate(images(3))], [model, ema], 2)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


@script(VISION)
def imagenet() -> Script:
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *head)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    criterion, meters = nn.CrossEntropyLoss(), [AverageMeter() for _ in range(3)]

    def step(x, y):
        output = model(x)
        loss = criterion(output, y)
        acc1, acc5 = accuracy(output, y, topk=(1, 5))
        for meter, value in zip(meters, (loss, acc1[0], acc5[0]), strict=True):
            meter.update(value.item(), x.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return meters[0].avg

    return Script(step, images(3), [model])


@script(VISION)
def simclr() -> Script:
    model = nn.Sequential(nn.Flatten(), mlp(192, 64, 32))
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)

    def step(x, _):
        z = F.normalize(model(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])), dim=1)
        similar = z @ z.T
        n = x.shape[0]
        labels = torch.cat([torch.arange(n) for _ in range(2)])
        labels = (labels[:, None] == labels[None]).float()
        mask = torch.eye(2 * n, dtype=torch.bool)
        labels, similar = labels[~mask].view(2 * n, -1), similar[~mask].view(2 * n, -1)
        logits = torch.cat([similar[labels.bool()].view(2 * n, -1), similar[~labels.bool()].view(2 * n, -1)], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(2 * n, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, images(3), [model])


@script(VISION)
def siamese_with_hard_triplets() -> Script:
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 8))
    optimizer = torch.optim.Adam(model.parameters())

    def step(x, y):
        z = model(x)
        d = torch.cdist(z, z)
        same = y[:, None] == y[None]
        hardest = (d * same).max(1).values - (d + 1e6 * same).min(1).values
        loss = F.relu(hardest + 0.2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, images(1, classes=3), [model])


@script(GENERATIVE)
def vae() -> Script:
    encoder, decoder = mlp(64, 32, 16), mlp(8, 32, 64)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def step(x):
        x = x.sigmoid()
        mu, logvar = encoder(x).chunk(2, -1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        bce = F.binary_cross_entropy(decoder(z).sigmoid(), x.view(-1, 64), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        optimizer.zero_grad()
        (bce + kld).backward()
        optimizer.step()
        return (bce + kld).item()

    return Script(step, vectors(64), [encoder, decoder])


@script(GENERATIVE)
def dcgan() -> Script:
    g, d = mlp(8, 32, 64), mlp(64, 32, 1)
    opt_d, opt_g = (torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (d, g))
    criterion = nn.BCEWithLogitsLoss()

    def step(real):
        d.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        err_real = criterion(d(real).view(-1), label)
        err_real.backward()
        fake = g(torch.randn(real.size(0), 8))
        label.fill_(0.0)
        err_fake = criterion(d(fake.detach()).view(-1), label)
        err_fake.backward()
        opt_d.step()
        g.zero_grad()
        label.fill_(1.0)
        err_g = criterion(d(fake).view(-1), label)
        err_g.backward()
        opt_g.step()
        return (err_real + err_fake).item(), err_g.item()

    return Script(step, vectors(64), [g, d])


@script(GENERATIVE)
def wgan_with_gradient_penalty() -> Script:
    g, d = mlp(8, 32, 16), mlp(16, 32, 1)
    opt_d, opt_g = (torch.optim.Adam(m.parameters(), lr=1e-4) for m in (d, g))

    def step(real, i):
        fake = g(torch.randn(real.size(0), 8))
        alpha = torch.rand(real.size(0), 1)
        mix = (alpha * real + (1 - alpha) * fake.detach()).requires_grad_(True)
        (grad,) = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)
        penalty = ((grad.norm(2, dim=1) - 1) ** 2).mean()
        loss_d = d(fake.detach()).mean() - d(real).mean() + 10 * penalty
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        if i % 5 == 0:
            loss_g = -d(g(torch.randn(real.size(0), 8))).mean()
            opt_g.zero_grad()
            loss_g.backward()
            opt_g.step()
        return loss_d.item()

    return Script(step, [(*b, i) for i, b in enumerate(vectors(16))], [g, d])


@script(GENERATIVE)
def diffusion_with_experts() -> Script:
    time, inside, experts, out = nn.Embedding(100, 32), nn.Linear(2, 32), MixtralExperts(), nn.Linear(32, 2)
    modules = [time, inside, experts, out]
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-3)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)

    def step(x):
        x = x.view(x.shape[0], 8, 2)
        t = torch.randint(0, 100, (x.shape[0],))
        noise = torch.randn_like(x)
        a = alphas[t].view(-1, 1, 1)
        noised = a.sqrt() * x + (1 - a).sqrt() * noise
        loss = F.mse_loss(out(experts(inside(noised) + time(t)[:, None])), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Script(step, vectors(16), modules, 1)


@script(GENERATIVE)
def coupling_flow() -> Script:
    nets = nn.ModuleList(mlp(2, 16, 4) for _ in range(3))
    optimizer = torch.optim.Adam(nets.parameters(), lr=1e-3)

    def step(x):
        logdet = x.new_zeros(x.shape[0])
        for i, net in enumerate(nets):
            a, b = x.chunk(2, 1) if i % 2 == 0 else reversed(x.chunk(2, 1))
            s, t = net(a).chunk(2, 1)
            s = torch.tanh(s)
            b = b * s.exp() + t
            x, logdet = torch.cat([a, b], 1), logdet + s.sum(1)
        prior = torch.distributions.Normal(0.0, 1.0)
        loss = -(prior.log_prob(x).sum(1) + logdet).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, vectors(4), [nets])


@script(VISION)
def segmentation_with_dice() -> Script:
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 3, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=True)
    shapes = [(rows(i), 8, 8) for i in range(STEPS)]

    def step(image, mask):
        logits = model(image)
        loss = F.cross_entropy(logits, mask)
        p, t = logits.softmax(1), F.one_hot(mask, 3).permute(0, 3, 1, 2).float()
        inter, union = (p * t).sum((2, 3)), p.sum((2, 3)) + t.sum((2, 3))
        union = torch.where(union == 0, inter, union)
        loss = loss + 1 - ((2 * inter + 1e-6) / (union + 1e-6)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, [(torch.randn(s)[:, None], torch.randint(3, s)) for s in shapes], [model])
