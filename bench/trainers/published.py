# mypy: ignore-errors
"""More kinds of training that people publish: adversarial, for quantisation, by projections, on packed sequences."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, images, labelled, mlp, rows, script, vectors


@script("optimizers")
def muon() -> Script:
    """Momentum made orthogonal by Newton and Schulz, beside AdamW for vectors; schedules by hand."""
    model = mlp(6, 16, 16, 3)

    class Muon(torch.optim.Optimizer):
        def __init__(self, params, lr=0.02, momentum=0.95, steps=3):
            super().__init__(params, dict(lr=lr, momentum=momentum, steps=steps))

        @torch.no_grad()
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    s = self.state[p]
                    if "buf" not in s:
                        s["buf"] = torch.zeros_like(p.grad)
                    s["buf"].lerp_(p.grad, 1 - g["momentum"])
                    u = p.grad.lerp(s["buf"], g["momentum"])
                    a, b, c = (3.4445, -4.7750, 2.0315)
                    X = u.clone()
                    if u.size(0) > u.size(1):
                        X = X.mT
                    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                    for _ in range(g["steps"]):
                        A = X @ X.mT
                        B = b * A + c * A @ A
                        X = a * X + B @ X
                    if u.size(0) > u.size(1):
                        X = X.mT
                    p.add_(X, alpha=-g["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)

    opts = [
        Muon([p for p in model.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-3, fused=False),
    ]
    for o in opts:
        for g in o.param_groups:
            g["initial_lr"] = g["lr"]
    state = {"it": 0}

    def get_lr(it):
        return 1.0 if it < 10 else 1 - (it - 10) / 20

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for o in opts:
            for g in o.param_groups:
                g["lr"] = g["initial_lr"] * get_lr(state["it"])
        frac = min(state["it"] / 15, 1)
        for g in opts[0].param_groups:
            g["momentum"] = (1 - frac) * 0.85 + frac * 0.95
        for o in opts:
            o.step()
        model.zero_grad(set_to_none=True)
        state["it"] += 1
        return loss.detach()

    return Script(step, labelled(6, 3), [model])


@script("optimizers")
def galore() -> Script:
    """Adam on gradients projected on their largest directions, found anew every few steps."""
    model = mlp(8, 16, 16, 3)

    class GaLore(torch.optim.Optimizer):
        def __init__(self, ps, lr=1e-2, rank=4, gap=5):
            super().__init__(ps, dict(lr=lr, rank=rank, gap=gap))

        @torch.no_grad()
        def step(self):
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    st = self.state[p]
                    if not st:
                        st.update(step=0)
                    gr = p.grad
                    if p.ndim == 2:
                        if st["step"] % g["gap"] == 0:
                            U, S, V = torch.linalg.svd(gr, full_matrices=False)
                            st["P"] = U[:, : g["rank"]]
                        gr = st["P"].T @ gr
                    if "m" not in st:
                        st["m"], st["v"] = torch.zeros_like(gr), torch.zeros_like(gr)
                    st["step"] += 1
                    st["m"].mul_(0.9).add_(gr, alpha=0.1)
                    st["v"].mul_(0.999).addcmul_(gr, gr, value=0.001)
                    up = (st["m"] / (1 - 0.9 ** st["step"])) / ((st["v"] / (1 - 0.999 ** st["step"])).sqrt() + 1e-8)
                    if p.ndim == 2:
                        up = st["P"] @ up
                    p.add_(up, alpha=-g["lr"])

    opt = GaLore(model.parameters())

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss.item()

    return Script(step, labelled(8, 3), [model])


@script("optimizers")
def gradnorm() -> Script:
    """Weights of tasks trained by the norms of their gradients."""
    shared, heads = mlp(6, 16, 8), nn.ModuleList([nn.Linear(8, 1) for _ in range(3)])
    w = nn.Parameter(torch.ones(3))
    init = []
    opt = torch.optim.Adam([*shared.parameters(), *heads.parameters()], 1e-2)
    wopt = torch.optim.Adam([w], 1e-2)

    def step(x, y):
        h = F.relu(shared(x))
        losses = torch.stack([F.mse_loss(hd(h), y[:, i : i + 1]) for i, hd in enumerate(heads)])
        if not init:
            init.append(losses.detach())
        weighted = w * losses
        total = weighted.sum()
        opt.zero_grad()
        total.backward(retain_graph=True)
        w.grad = None
        norms = torch.stack(
            [
                torch.autograd.grad(w[i] * losses[i], shared[2].weight, retain_graph=True, create_graph=True)[0].norm()
                for i in range(3)
            ]
        )
        ratio = losses.detach() / init[0]
        inv = ratio / ratio.mean()
        target = (norms.mean() * inv**1.5).detach()
        gl = (norms - target).abs().sum()
        w.grad = torch.autograd.grad(gl, w)[0]
        opt.step()
        wopt.step()
        w.data = w.data * 3 / w.data.sum()
        return losses.detach().tolist(), w.detach().clone()

    return Script(step, vectors(6, 3), [shared, heads, w])


@script("optimizers")
def maml_functional() -> Script:
    """Meta-learning over parameters in a dict (torch.func.functional_call)."""
    model = mlp(3, 16, 1)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    from torch.func import functional_call

    def step(xs, ys, xq, yq):
        params = dict(model.named_parameters())
        meta = 0.0
        for t in range(xs.shape[0]):
            fast = params
            for _ in range(2):
                inner = F.mse_loss(functional_call(model, fast, (xs[t],)), ys[t])
                g = torch.autograd.grad(inner, tuple(fast.values()), create_graph=True)
                fast = {k: p - 0.1 * d for (k, p), d in zip(fast.items(), g, strict=False)}
            meta = meta + F.mse_loss(functional_call(model, fast, (xq[t],)), yq[t])
        meta = meta / xs.shape[0]
        opt.zero_grad()
        meta.backward()
        opt.step()
        return meta.item()

    b = [
        (
            torch.randn(rows(i) // 2, 5, 3),
            torch.randn(rows(i) // 2, 5, 1),
            torch.randn(rows(i) // 2, 5, 3),
            torch.randn(rows(i) // 2, 5, 1),
        )
        for i in range(STEPS)
    ]
    return Script(step, b, [model])


@script("optimizers")
def ema_swa_utils() -> Script:
    """torch.optim.swa_utils: an average of weights and its schedule."""
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    sch = SWALR(opt, swa_lr=0.05, anneal_epochs=5)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update_parameters(model)
        sch.step()
        with torch.no_grad():
            e = F.cross_entropy(ema.module(x), y)
        return loss.item(), e.item(), opt.param_groups[0]["lr"]

    return Script(step, labelled(6, 3), [model, ema])


@script("optimizers")
def qat_with_ste() -> Script:
    """Training for quantisation: observers in buffers, rounding with a gradient that passes it by."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale, bits):
            q = 2 ** (bits - 1) - 1
            ctx.save_for_backward(x, scale)
            ctx.q = q
            return torch.clamp(torch.round(x / scale), -q, q) * scale

        @staticmethod
        def backward(ctx, g):
            x, s = ctx.saved_tensors
            inside = (x / s).abs() <= ctx.q
            return g * inside, None, None

    class Q(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.l = nn.Linear(a, b)
            self.register_buffer("obs", torch.tensor(1.0))
            self.register_buffer("n", torch.tensor(0))
            self.enabled = False

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    m = x.abs().max()
                    self.obs.copy_(0.9 * self.obs + 0.1 * m) if self.n > 0 else self.obs.copy_(m)
                    self.n += 1
            if self.enabled:
                x = Round.apply(x, self.obs / 127, 8)
            w = (
                Round.apply(self.l.weight, self.l.weight.detach().abs().max() / 127, 8)
                if self.enabled
                else self.l.weight
            )
            return F.linear(x, w, self.l.bias)

    model = nn.Sequential(Q(6, 16), nn.ReLU(), Q(16, 3))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    st = {"i": 0}

    def step(x, y):
        if st["i"] == 8:
            for m in model.modules():
                if isinstance(m, Q):
                    m.enabled = True
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        st["i"] += 1
        return loss.item()

    return Script(step, labelled(6, 3), [model])


@script("optimizers")
def weight_norm_and_pruning() -> Script:
    """Parametrisations and a pruned layer."""
    from torch.nn.utils import parametrizations, prune

    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 16)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(16, 16)),
        nn.ReLU(),
        nn.Linear(16, 3),
    )
    prune.l1_unstructured(model[4], "weight", 0.3)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        sparsity = float((model[4].weight == 0).sum()) / model[4].weight.nelement()
        return loss.item(), sparsity

    return Script(step, labelled(6, 3), [model])


@script("vision")
def pgd() -> Script:
    """Adversarial training: the attack's own backward passes in the step."""
    model = mlp(6, 16, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)

    def attack(x, y, eps=0.1, alpha=0.04, iters=3):
        delta = torch.zeros_like(x).uniform_(-eps, eps)
        delta.requires_grad = True
        for _ in range(iters):
            loss = F.cross_entropy(model(x + delta), y)
            loss.backward()
            grad = delta.grad.detach()
            delta.data = torch.clamp(delta + alpha * torch.sign(grad), -eps, eps)
            delta.grad.zero_()
        return delta.detach()

    def step(x, y):
        model.eval()
        d = attack(x, y)
        model.train()
        out = model(x + d)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item() * y.size(0), (out.max(1)[1] == y).sum().item()

    return Script(step, labelled(6, 3), [model])


@script("vision")
def masked_autoencoder() -> Script:
    """Patches shuffled by argsort, most of them masked; a check that the loss is finite."""
    enc, dec = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True), nn.Linear(16, 4)
    emb = nn.Linear(4, 16)
    tok = nn.Parameter(torch.zeros(1, 1, 16))
    pos = nn.Parameter(torch.randn(1, 16, 16) * 0.02)
    mods = [enc, dec, emb]
    ps = [p for m in mods for p in m.parameters()] + [tok, pos]
    opt = torch.optim.AdamW(ps, 1e-3, betas=(0.9, 0.95))
    sch = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=STEPS + 1)

    def step(img, _):
        B = img.shape[0]
        x = img.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(B, 16, 4)
        h = emb(x) + pos
        L = 16
        keep = int(L * (1 - 0.75))
        noise = torch.rand(B, L)
        shuffle = torch.argsort(noise, 1)
        restore = torch.argsort(shuffle, 1)
        ids = shuffle[:, :keep]
        vis = torch.gather(h, 1, ids.unsqueeze(-1).repeat(1, 1, 16))
        mask = torch.ones(B, L)
        mask[:, :keep] = 0
        mask = torch.gather(mask, 1, restore)
        z = enc(vis)
        full = torch.cat([z, tok.repeat(B, L - keep, 1)], 1)
        full = torch.gather(full, 1, restore.unsqueeze(-1).repeat(1, 1, 16))
        pred = dec(full)
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True)
        loss = ((pred - (x - mean) / (var + 1e-6) ** 0.5) ** 2).mean(-1)
        loss = (loss * mask).sum() / mask.sum()
        if not math.isfinite(loss.item()):
            raise RuntimeError("stop")
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sch.step()
        return loss.item(), sch.get_last_lr()[0]

    return Script(step, images(1, 8, 10), mods + [tok, pos])


@script("reinforcement learning")
def dreamer_like() -> Script:
    """A recurrent world model, its divergences clamped at free bits."""
    enc, gru, prior, post, dec, rew = (
        mlp(6, 16),
        nn.GRUCell(4 + 2, 12),
        mlp(12, 8),
        mlp(12 + 16, 8),
        mlp(12 + 4, 6),
        mlp(16, 1),
    )
    ms = [enc, gru, prior, post, dec, rew]
    opt = torch.optim.Adam([p for m in ms for p in m.parameters()], 1e-3, eps=1e-5)
    D = torch.distributions

    def dist(p):
        m, s = p.chunk(2, -1)
        return D.Independent(D.Normal(m, F.softplus(s) + 0.1), 1)

    def step(obs, act, r):
        B, T = obs.shape[:2]
        h = obs.new_zeros(B, 12)
        z = obs.new_zeros(B, 4)
        e = enc(obs)
        ps, qs, fs = [], [], []
        for t in range(T):
            h = gru(torch.cat([z, act[:, t]], -1), h)
            pr = dist(prior(h))
            po = dist(post(torch.cat([h, e[:, t]], -1)))
            z = po.rsample()
            ps.append(pr)
            qs.append(po)
            fs.append(torch.cat([h, z], -1))
        f = torch.stack(fs, 1)
        rec = F.mse_loss(dec(f), obs)
        rl = F.mse_loss(rew(f).squeeze(-1), r)
        kl = torch.stack([D.kl_divergence(q, p) for q, p in zip(qs, ps, strict=False)]).mean()
        loss = rec + rl + torch.clamp(kl, min=1.0)
        opt.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_([p for m in ms for p in m.parameters()], 100.0)
        opt.step()
        return {"rec": rec.item(), "kl": kl.item(), "gn": float(gn)}

    b = [(torch.randn(rows(i), 4, 6), torch.randn(rows(i), 4, 2), torch.randn(rows(i), 4)) for i in range(STEPS)]
    return Script(step, b, ms)


@script("language models")
def grad_cache() -> Script:
    """Contrastive learning with cached gradients of representations."""
    q, d = mlp(6, 16, 8), mlp(6, 16, 8)
    opt = torch.optim.Adam([*q.parameters(), *d.parameters()], 1e-3)

    def step(a, b):
        ca, cb = a.split(3), b.split(3)
        with torch.no_grad():
            ra, rb = [q(c) for c in ca], [d(c) for c in cb]
        ra_, rb_ = torch.cat(ra).requires_grad_(), torch.cat(rb).requires_grad_()
        s = ra_ @ rb_.T / 0.1
        loss = F.cross_entropy(s, torch.arange(len(s)))
        loss.backward()
        opt.zero_grad()
        for m, chunks, cache in ((q, ca, ra_.grad), (d, cb, rb_.grad)):
            for c, g in zip(chunks, cache.split(3), strict=False):
                (m(c) * g).sum().backward()
        opt.step()
        return loss.item()

    return Script(step, vectors(6, 6), [q, d])


@script("language models")
def packed_lstm() -> Script:
    """Packed sequences of different lengths."""
    emb, rnn, out = nn.Embedding(20, 8), nn.LSTM(8, 12, batch_first=True, bidirectional=True), nn.Linear(24, 2)
    ms = [emb, rnn, out]
    opt = torch.optim.Adam([p for m in ms for p in m.parameters()], 1e-2)

    def step(x, lens, y):
        p = nn.utils.rnn.pack_padded_sequence(emb(x), lens, batch_first=True, enforce_sorted=False)
        _, (h, _) = rnn(p)
        logits = out(torch.cat([h[0], h[1]], -1))
        loss = F.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    b = [
        (torch.randint(20, (rows(i), 7)), torch.randint(1, 8, (rows(i),)), torch.randint(2, (rows(i),)))
        for i in range(STEPS)
    ]
    return Script(step, b, ms)


@script("recommenders")
def transe() -> Script:
    """A knowledge graph's embeddings, corrupted at head or tail by Python's random."""
    ent, rel = nn.Embedding(30, 8), nn.Embedding(5, 8)
    opt = torch.optim.SGD([*ent.parameters(), *rel.parameters()], 0.05)

    def step(h, r, t):
        with torch.no_grad():
            ent.weight.data = F.normalize(ent.weight.data, p=2, dim=-1)
        neg = torch.randint(30, t.shape)
        corrupt_head = random.random() < 0.5
        nh, nt = (neg, t) if corrupt_head else (h, neg)

        def d(a, b, c):
            return (ent(a) + rel(b) - ent(c)).norm(p=1, dim=-1)

        loss = F.relu(1.0 + d(h, r, t) - d(nh, r, nt)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item()

    b = [
        (torch.randint(30, (rows(i),)), torch.randint(5, (rows(i),)), torch.randint(30, (rows(i),)))
        for i in range(STEPS)
    ]
    return Script(step, b, [ent, rel])


@script("language models")
def moe_with_lists_and_jitter() -> Script:
    """Experts in a loop with jittered routing, their loads counted in a list."""

    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)
            self.experts = nn.ModuleList(mlp(8, 16, 8) for _ in range(4))
            self.register_buffer("load", torch.zeros(4))
            self.eps = 0.1

        def forward(self, x):
            if self.training:
                xg = x * torch.empty_like(x).uniform_(1 - self.eps, 1 + self.eps)
            else:
                xg = x
            pr = self.gate(xg).softmax(-1)
            w, idx = pr.topk(2, -1)
            w = w / w.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            counts = []
            for i, e in enumerate(self.experts):
                sel, k = (idx == i).nonzero(as_tuple=True)
                counts.append(sel.numel())
                if sel.numel() == 0:
                    continue
                out.index_add_(0, sel, e(x[sel]) * w[sel, k].unsqueeze(-1))
            with torch.no_grad():
                self.load.mul_(0.9).add_(torch.tensor(counts, dtype=torch.float), alpha=0.1)
            f = torch.tensor(counts, dtype=torch.float) / idx.numel()
            aux = 4 * (f * pr.mean(0)).sum()
            return out, aux

    moe, head = Moe(), nn.Linear(8, 3)
    opt = torch.optim.AdamW([*moe.parameters(), *head.parameters()], 1e-2)

    def step(x, y):
        h, aux = moe(x)
        loss = F.cross_entropy(head(x + h), y) + 0.01 * aux
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.item(), moe.load.tolist()

    return Script(step, labelled(8, 3), [moe, head])


@script("habits")
def exceptions_and_retries() -> Script:
    """Batches that raise are skipped, and optimizer steps are taken in finally."""
    model = mlp(6, 16, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    skipped = []
    n = [0]

    class Skip(Exception):
        def __init__(self, why, v):
            super().__init__(why)
            self.why, self.v = why, v

    def forward(x, y):
        if n[0] % 7 == 3:
            raise Skip("bad batch", n[0])
        loss = F.cross_entropy(model(x), y)
        if torch.isnan(loss):
            raise Skip("nan", -1)
        return loss

    def step(x, y):
        n[0] += 1
        try:
            loss = forward(x, y)
        except Skip as e:
            skipped.append((e.why, e.v, str(e)))
            return None
        except (RuntimeError, ValueError) as e:
            raise SystemExit(1) from e
        else:
            loss.backward()
        finally:
            if n[0] % 2 == 0:
                opt.step()
                opt.zero_grad()
        return loss.item(), len(skipped)

    return Script(step, labelled(6, 3), [model])
