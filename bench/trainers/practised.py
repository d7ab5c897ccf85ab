# mypy: ignore-errors
# ruff: noqa: B905, E731, E741, F401
"""Training scripts of public repositories that read, sample and keep in the step: arrays, lists, hooks, tables."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .script import STEPS, Script, images, mlp, rows, script, texts, vectors


def FFT_for_Period(x, k=2):
    xf = torch.fft.rfft(x, dim=1)
    freq = abs(xf).mean(0).mean(-1)
    freq[0] = 0
    _, top = torch.topk(freq, k)
    top = top.detach().cpu().numpy()
    period = x.shape[1] // top
    return period, abs(xf).mean(-1)[:, top]


class TimesBlock(nn.Module):
    def __init__(self, n, seq, pred, k=2):
        super().__init__()
        self.seq_len, self.pred_len, self.k = seq, pred, k
        self.conv = nn.Sequential(nn.Conv2d(n, n, 3, padding=1), nn.GELU(), nn.Conv2d(n, n, 1))

    def forward(self, x):
        B, T, N = x.size()
        periods, pw = FFT_for_Period(x, self.k)
        res = []
        for i in range(self.k):
            period = periods[i]
            if (self.seq_len + self.pred_len) % period != 0:
                length = (((self.seq_len + self.pred_len) // period) + 1) * period
                padding = torch.zeros([x.shape[0], (length - (self.seq_len + self.pred_len)), x.shape[2]])
                out = torch.cat([x, padding], dim=1)
            else:
                length = self.seq_len + self.pred_len
                out = x
            out = out.reshape(B, length // period, period, N).permute(0, 3, 1, 2).contiguous()
            out = self.conv(out)
            out = out.permute(0, 2, 3, 1).reshape(B, -1, N)
            res.append(out[:, : (self.seq_len + self.pred_len), :])
        res = torch.stack(res, dim=-1)
        pw = F.softmax(pw, dim=1)
        pw = pw.unsqueeze(1).unsqueeze(1).repeat(1, T, N, 1)
        return torch.sum(res * pw, -1) + x


@script("time series and speech")
def timesnet():
    """Periods are found by a Fourier transform and read into numpy; the series is folded by each."""
    emb, lin, block, norm, proj = (
        nn.Linear(2, 4),
        nn.Linear(8, 12),
        TimesBlock(4, 8, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 2),
    )
    model = nn.ModuleList([emb, lin, block, norm, proj])
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    crit = nn.MSELoss()
    train_loss = []

    def vali(bx, by):
        total = []
        model.eval()
        with torch.no_grad():
            out = forecast(bx.float())
            total.append(crit(out.detach().cpu(), by.detach().cpu()))
        total = np.average(total)
        model.train()
        return total

    def forecast(x):
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        sd = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x /= sd
        h = emb(x)
        h = lin(h.permute(0, 2, 1)).permute(0, 2, 1)
        h = norm(block(h))
        o = proj(h)
        o = o * (sd[:, 0, :].unsqueeze(1).repeat(1, 12, 1))
        o = o + (means[:, 0, :].unsqueeze(1).repeat(1, 12, 1))
        return o[:, -4:, :]

    def step(bx, by):
        opt.zero_grad()
        out = forecast(bx.float())
        loss = crit(out, by)
        train_loss.append(loss.item())
        loss.backward()
        opt.step()
        if len(train_loss) % 10 == 0:
            v = vali(bx, by)
            print(f"Train {np.average(train_loss):.4f} Vali {v:.4f}")
            return float(v)
        return loss.detach()

    t = torch.arange(12.0)
    b = []
    for i in range(STEPS):
        n = rows(i)
        s = torch.stack([torch.sin(t * (1 + (i % 3))), torch.cos(t / 2)], -1)[None] + 0.3 * torch.randn(n, 12, 2)
        b.append((s[:, :8], s[:, 8:]))
    return Script(step, b, [model])


class LossSecondMoment:
    def __init__(self, T, history=2, uniform_prob=0.001):
        self.T, self.h, self.u = T, history, uniform_prob
        self._loss_history = np.zeros([T, history], dtype=np.float64)
        self._loss_counts = np.zeros([T], dtype=np.int64)

    def weights(self):
        if not self._warmed_up():
            return np.ones([self.T], dtype=np.float64)
        w = np.sqrt(np.mean(self._loss_history**2, axis=-1))
        w /= np.sum(w)
        w *= 1 - self.u
        w += self.u / len(w)
        return w

    def sample(self, n):
        w = self.weights()
        p = w / np.sum(w)
        ind = np.random.choice(len(p), size=(n,), p=p)
        return torch.from_numpy(ind).long(), torch.from_numpy(1 / (len(p) * p[ind])).float()

    def update(self, ts, losses):
        for t, loss in zip(ts.tolist(), losses.tolist()):
            if self._loss_counts[t] == self.h:
                self._loss_history[t, :-1] = self._loss_history[t, 1:]
                self._loss_history[t, -1] = loss
            else:
                self._loss_history[t, self._loss_counts[t]] = loss
                self._loss_counts[t] += 1

    def _warmed_up(self):
        return (self._loss_counts == self.h).all()


class KV:
    def __init__(self):
        self.name2val, self.name2cnt = defaultdict(float), defaultdict(int)

    def logkv(self, key, val):
        self.name2val[key] = val

    def logkv_mean(self, key, val):
        oldval, cnt = self.name2val[key], self.name2cnt[key]
        self.name2val[key] = oldval * cnt / (cnt + 1) + val / (cnt + 1)
        self.name2cnt[key] = cnt + 1

    def dump(self):
        d = self.name2val
        out = d.copy()
        self.name2val.clear()
        self.name2cnt.clear()
        return out


@script("generative")
def guided_diffusion_loop():
    """Timesteps drawn by numpy with weights of past losses, quartiles logged for each row, microbatches, averages."""
    T = 4
    net = mlp(5, 16, 4)
    logger, sampler = KV(), LossSecondMoment(T)
    ac = np.cumprod(1 - np.linspace(1e-3, 0.2, T))

    class Loop:
        def __init__(self):
            self.model, self.step, self.microbatch, self.lr, self.anneal = net, 0, 4, 1e-3, 100
            self.master = list(net.parameters())
            self.opt = torch.optim.AdamW(self.master, lr=self.lr)
            self.ema_rate = [0.9, 0.99]
            self.ema_params = [copy.deepcopy(self.master) for _ in self.ema_rate]

        def losses(self, model, x, t, model_kwargs=None):
            e = torch.randn_like(x)
            a = torch.from_numpy(ac)[t].float()[:, None]
            out = model(torch.cat([a.sqrt() * x + (1 - a).sqrt() * e, t[:, None] / T], 1))
            return {"mse": (out - e).pow(2).mean(1), "loss": (out - e).pow(2).mean(1)}

        def run_step(self, batch):
            for p in self.master:
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
            for i in range(0, batch.shape[0], self.microbatch):
                micro = batch[i : i + self.microbatch]
                t, w = sampler.sample(micro.shape[0])
                compute = functools.partial(self.losses, self.model, micro, t, model_kwargs={})
                losses = compute()
                sampler.update(t, losses["loss"].detach())
                loss = (losses["loss"] * w).mean()
                for key, values in {k: v * w for k, v in losses.items()}.items():
                    logger.logkv_mean(key, values.mean().item())
                    for st, sl in zip(t.cpu().numpy(), values.detach().cpu().numpy()):
                        logger.logkv_mean(f"{key}_q{int(4 * st / T)}", sl)
                loss.backward()
            sq = 0.0
            for p in self.master:
                with torch.no_grad():
                    sq += torch.norm(p, p=2, dtype=torch.float32).item() ** 2
            logger.logkv_mean("param_norm", np.sqrt(sq))
            self.opt.step()
            for rate, params in zip(self.ema_rate, self.ema_params):
                for targ, src in zip(params, self.master):
                    targ.detach().mul_(rate).add_(src, alpha=1 - rate)
            frac = self.step / self.anneal
            for g in self.opt.param_groups:
                g["lr"] = self.lr * (1 - frac)
            logger.logkv("step", self.step)
            self.step += 1
            return loss.detach()

    loop = Loop()

    def step(x):
        loss = loop.run_step(x)
        if loop.step % 10 == 0:
            out = logger.dump()
            return [loss, float(out["loss"])]
        return loss

    return Script(step, vectors(4), [net, *loop.ema_params[0]])


@script("reinforcement learning")
def pymarl_qmix():
    """Recurrent agents over an episode, a monotonic mixer, masks for ended episodes, targets updated by episodes."""
    NA, O, A, H = 2, 4, 3, 8

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.rnn, self.fc2 = nn.Linear(O, H), nn.GRUCell(H, H), nn.Linear(H, A)

        def init_hidden(self):
            return self.fc1.weight.new(1, H).zero_()

        def forward(self, x, h):
            h = self.rnn(F.relu(self.fc1(x)), h.reshape(-1, H))
            return self.fc2(h), h

    class MAC:
        def __init__(self):
            self.agent, self.hidden_states = Agent(), None

        def forward(self, ep, t):
            x = ep["obs"][:, t].reshape(-1, O)
            o, self.hidden_states = self.agent(x, self.hidden_states)
            return o.view(ep.batch_size, NA, -1)

        def init_hidden(self, n):
            self.hidden_states = self.agent.init_hidden().unsqueeze(0).expand(n, NA, -1)

        def parameters(self):
            return self.agent.parameters()

        def load_state(self, other):
            self.agent.load_state_dict(other.agent.state_dict())

    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.wf, self.b1 = nn.Linear(O, 4 * NA), nn.Linear(O, 4), nn.Linear(O, 4)
            self.V = mlp(O, 4, 1)

        def forward(self, q, s):
            bs = q.size(0)
            s = s.reshape(-1, O)
            q = q.view(-1, 1, NA)
            w1 = torch.abs(self.w1(s)).view(-1, NA, 4)
            h = F.elu(torch.bmm(q, w1) + self.b1(s).view(-1, 1, 4))
            wf = torch.abs(self.wf(s)).view(-1, 4, 1)
            return (torch.bmm(h, wf) + self.V(s).view(-1, 1, 1)).view(bs, -1, 1)

    class EpisodeBatch:
        def __init__(self, data, n, L):
            self.data, self.batch_size, self.max_seq_length = SimpleNamespace(transition_data=data), n, L

        def __getitem__(self, item):
            if isinstance(item, str):
                return self.data.transition_data[item]
            raise IndexError

    class Learner:
        def __init__(self):
            self.mac, self.mixer = MAC(), Mixer()
            self.params = list(self.mac.parameters())
            self.last_target_update_episode = 0
            self.params += list(self.mixer.parameters())
            self.target_mixer, self.target_mac = copy.deepcopy(self.mixer), copy.deepcopy(self.mac)
            self.optimiser = torch.optim.RMSprop(params=self.params, lr=5e-4, alpha=0.99, eps=1e-5)
            self.log_stats_t, self.stats = -11, defaultdict(list)

        def train(self, batch, t_env, episode_num):
            rewards, actions = batch["reward"][:, :-1], batch["actions"][:, :-1]
            terminated, mask = batch["terminated"][:, :-1].float(), batch["filled"][:, :-1].float()
            mask[:, 1:] = mask[:, 1:] * (1 - terminated[:, :-1])
            avail = batch["avail"]
            outs = []
            self.mac.init_hidden(batch.batch_size)
            for t in range(batch.max_seq_length):
                outs.append(self.mac.forward(batch, t=t))
            outs = torch.stack(outs, dim=1)
            chosen = torch.gather(outs[:, :-1], dim=3, index=actions).squeeze(3)
            touts = []
            self.target_mac.init_hidden(batch.batch_size)
            for t in range(batch.max_seq_length):
                touts.append(self.target_mac.forward(batch, t=t))
            touts = torch.stack(touts[1:], dim=1)
            touts[avail[:, 1:] == 0] = -9999999
            od = outs.clone().detach()
            od[avail == 0] = -9999999
            cur = od[:, 1:].max(dim=3, keepdim=True)[1]
            tq = torch.gather(touts, 3, cur).squeeze(3)
            chosen = self.mixer(chosen, batch["state"][:, :-1])
            tq = self.target_mixer(tq, batch["state"][:, 1:])
            targets = rewards + 0.99 * (1 - terminated) * tq
            td = chosen - targets.detach()
            mask = mask.expand_as(td)
            masked = td * mask
            loss = (masked**2).sum() / mask.sum()
            self.optimiser.zero_grad()
            loss.backward()
            gn = torch.nn.utils.clip_grad_norm_(self.params, 10)
            self.optimiser.step()
            if (episode_num - self.last_target_update_episode) / 8 >= 1.0:
                self.target_mac.load_state(self.mac)
                self.target_mixer.load_state_dict(self.mixer.state_dict())
                self.last_target_update_episode = episode_num
            if t_env - self.log_stats_t >= 10:
                self.stats["loss"].append((t_env, loss.item()))
                self.stats["grad_norm"].append((t_env, gn))
                me = mask.sum().item()
                self.stats["td"].append((t_env, masked.abs().sum().item() / me))
                self.log_stats_t = t_env
            return loss.detach()

    learner = Learner()

    def step(data, n, L, i):
        return learner.train(EpisodeBatch(data, n, L), i * 3, i)

    b = []
    for i in range(STEPS):
        n, L = rows(i), 5 if i % 2 else 6
        term = torch.zeros(n, L, 1, dtype=torch.uint8)
        term[:, L - 2 :] = torch.randint(2, (n, 2, 1))
        b.append(
            (
                {
                    "obs": torch.randn(n, L, NA, O),
                    "state": torch.randn(n, L, O),
                    "actions": torch.randint(A, (n, L, NA, 1)),
                    "reward": torch.randn(n, L, 1),
                    "terminated": term,
                    "filled": torch.ones(n, L, 1, dtype=torch.long),
                    "avail": torch.randint(2, (n, L, NA, A)) | F.one_hot(torch.zeros(n, L, NA, dtype=torch.long), A),
                },
                n,
                L,
                i,
            )
        )
    return Script(step, b, [learner.mac.agent, learner.mixer, learner.target_mixer])


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


class RouterOutputHook:
    def __init__(self, i, lines):
        self.block_index, self.lines = i, lines

    def __call__(self, module, inputs, output):
        routed = output[1].detach().cpu().flatten()
        ids, counts = np.unique(routed, return_counts=True)
        row = ["0"] * 4
        for e, cnt in zip(ids, counts):
            row[e] = str(cnt)
        self.lines.append(",".join([str(self.block_index)] + row) + "\n")


class NoisyRouter(nn.Module):
    def __init__(self, n, e, k):
        super().__init__()
        self.top_k, self.lin, self.noise = k, nn.Linear(n, e), nn.Linear(n, e)

    def forward(self, x):
        logits = self.lin(x)
        noisy = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        v, idx = noisy.topk(self.top_k, dim=-1)
        z = torch.full_like(noisy, float("-inf"))
        return F.softmax(z.scatter(-1, idx, v), dim=-1), idx


class CapMoE(nn.Module):
    def __init__(self, n, e, k, cf=1.0):
        super().__init__()
        self.router = NoisyRouter(n, e, k)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(n, 4 * n), nn.ReLU(), nn.Linear(4 * n, n), nn.Dropout(0.1)) for _ in range(e)]
        )
        self.top_k, self.capacity_factor, self.num_experts = k, cf, e

    def forward(self, x):
        B, T, _ = x.shape
        g, idx = self.router(x)
        final = torch.zeros_like(x)
        fx, fg = x.view(-1, x.size(-1)), g.view(-1, g.size(-1))
        cap = int((B * T * self.top_k / self.num_experts) * self.capacity_factor)
        updates = torch.zeros_like(fx)
        for i, expert in enumerate(self.experts):
            em = (idx == i).any(dim=-1)
            sel = torch.nonzero(em.view(-1)).squeeze(-1)
            lim = sel[:cap] if sel.numel() > cap else sel
            if lim.numel() > 0:
                o = expert(fx[lim])
                updates.index_add_(0, lim, o * fg[lim, i].unsqueeze(1))
        final += updates.view(B, T, -1)
        return final


class CharMoE(nn.Module):
    def __init__(self, V=20, n=8, L=2, moe=CapMoE):
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, n), nn.Embedding(8, n)
        self.blocks = nn.ModuleList(
            [nn.ModuleList([nn.LayerNorm(n), nn.Linear(n, n), nn.LayerNorm(n), moe(n, 4, 2)]) for _ in range(L)]
        )
        self.f, self.head = nn.LayerNorm(n), nn.Linear(n, V)

    def forward(self, idx, targets=None):
        B, T = idx.shape
        x = self.tok(idx) + self.pos(torch.arange(T))
        for a, b, c, d in self.blocks:
            x = x + b(a(x)).cumsum(1) / T
            x = x + d(c(x))
        logits = self.head(self.f(x))
        if targets is None:
            return logits, None
        B, T, C = logits.shape
        return logits, F.cross_entropy(logits.view(B * T, C), targets.reshape(B * T))


@script("language models")
def makemoe_with_capacity():
    """makeMoE: batches of slices at random places, experts with a capacity, losses estimated every few steps."""
    model = CharMoE()
    data = torch.randint(20, (300,))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def get_batch(n):
        ix = torch.randint(len(data) - 8, (n,))
        return torch.stack([data[i : i + 8] for i in ix]), torch.stack([data[i + 1 : i + 9] for i in ix])

    @torch.no_grad()
    def estimate_loss(n):
        out = {}
        model.eval()
        for split in ["train", "val"]:
            losses = torch.zeros(3)
            for k in range(3):
                X, Y = get_batch(n)
                _, loss = model(X, Y)
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def step(it, n):
        out = None
        if it % 10 == 0:
            out = estimate_loss(n)
            print(f"step {it}: train loss {out['train']:.4f}, val loss {out['val']:.4f}")
        xb, yb = get_batch(n)
        _, loss = model(xb, yb)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return [loss.detach(), out]

    return Script(step, [(i, rows(i)) for i in range(STEPS)], [model], experts=2)


@script("language models")
def makemoe_with_router_hooks():
    """makeMoE's fork: a hook on each router writes counts of experts, found by numpy."""
    model = CharMoE()
    lines = []
    for i, b in enumerate(model.blocks):
        b[3].router.register_forward_hook(RouterOutputHook(i, lines))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        _, loss = model(x[:, :8], y[:, :8])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        return [loss.detach(), lines[-1]]

    return Script(step, texts(8, 20), [model], experts=2)


@script("vision")
def gaussians_densified():
    """Gaussian splatting: points are added and pruned every few steps, the optimizer's state is cut to match."""

    class GS:
        def __init__(self):
            self._xyz = nn.Parameter(torch.randn(12, 2))
            self._op = nn.Parameter(torch.zeros(12, 1))
            self.accum, self.denom = torch.zeros(12, 1), torch.zeros(12, 1)
            self.optimizer = torch.optim.Adam(
                [{"params": [self._xyz], "lr": 1e-2, "name": "xyz"}, {"params": [self._op], "lr": 1e-2, "name": "op"}],
                lr=0.0,
                eps=1e-15,
            )

        def update_learning_rate(self, it):
            for g in self.optimizer.param_groups:
                if g["name"] == "xyz":
                    t = np.clip(it / 60, 0, 1)
                    g["lr"] = float(np.exp(np.log(1e-2) * (1 - t) + np.log(1e-3) * t))
                    return g["lr"]

        def cat(self, d):
            out = {}
            for group in self.optimizer.param_groups:
                ext = d[group["name"]]
                stored = self.optimizer.state.get(group["params"][0], None)
                if stored is not None:
                    stored["exp_avg"] = torch.cat((stored["exp_avg"], torch.zeros_like(ext)), dim=0)
                    stored["exp_avg_sq"] = torch.cat((stored["exp_avg_sq"], torch.zeros_like(ext)), dim=0)
                    del self.optimizer.state[group["params"][0]]
                    group["params"][0] = nn.Parameter(torch.cat((group["params"][0], ext), dim=0).requires_grad_(True))
                    self.optimizer.state[group["params"][0]] = stored
                    out[group["name"]] = group["params"][0]
                else:
                    group["params"][0] = nn.Parameter(torch.cat((group["params"][0], ext), dim=0).requires_grad_(True))
                    out[group["name"]] = group["params"][0]
            return out

        def densify(self):
            grads = self.accum / self.denom
            grads[grads.isnan()] = 0.0
            mask = torch.where(torch.norm(grads, dim=-1) >= grads.median(), True, False)
            t = self.cat({"xyz": self._xyz[mask].detach() + 0.01, "op": self._op[mask].detach()})
            self._xyz, self._op = t["xyz"], t["op"]
            self.accum, self.denom = torch.zeros((self._xyz.shape[0], 1)), torch.zeros((self._xyz.shape[0], 1))

        def forward(self, q):
            w = torch.exp(-(q[:, None] - self._xyz[None]).pow(2).sum(-1)) * torch.sigmoid(self._op)[None, :, 0]
            return w.sum(1)

    gs = GS()
    st = SimpleNamespace(ema=0.0)

    def step(q, y, it):
        gs.update_learning_rate(it)
        out = gs.forward(q)
        loss = 0.8 * (out - y).abs().mean() + 0.2 * (out - y).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            st.ema = 0.4 * loss.item() + 0.6 * st.ema
            gs.accum += torch.norm(gs._xyz.grad, dim=-1, keepdim=True)
            gs.denom += 1
            if it > 5 and it % 15 == 0:
                gs.densify()
            gs.optimizer.step()
            gs.optimizer.zero_grad(set_to_none=True)
        return st.ema

    class Holder(nn.Module):
        def parameters(self):
            return iter([gs._xyz, gs._op])

        def buffers(self):
            return iter([])

    return Script(step, [(torch.randn(rows(i), 2), torch.rand(rows(i)), i) for i in range(STEPS)], [Holder()])


@script("vision")
def open_clip_like():
    """CLIP: accumulated features, the scale of logits clamped after the step, meters in a dict."""
    vis, txt = mlp(6, 16, 8), nn.Embedding(20, 8)
    scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    class CLIP(nn.Module):
        def __init__(self):
            super().__init__()
            self.vis, self.txt, self.logit_scale = vis, txt, scale

        def forward(self, image, text):
            return {
                "image_features": F.normalize(self.vis(image), dim=-1),
                "text_features": F.normalize(self.txt(text).mean(1), dim=-1),
                "logit_scale": self.logit_scale.exp(),
            }

    model = CLIP()
    ex = lambda n, p: p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n
    inc = lambda n, p: not ex(n, p)
    named = list(model.named_parameters())
    opt = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if ex(n, p)], "weight_decay": 0.0},
            {"params": [p for n, p in named if inc(n, p)], "weight_decay": 0.2},
        ],
        lr=1e-3,
    )

    def cosine_lr(optimizer, base_lr, warmup, steps):
        def _lr(step):
            if step < warmup:
                lr = base_lr * (step + 1) / warmup
            else:
                e, es = step - warmup, steps - warmup
                lr = 0.5 * (1 + np.cos(np.pi * e / es)) * base_lr
            for g in optimizer.param_groups:
                g["lr"] = lr
            return lr

        return _lr

    sched = cosine_lr(opt, 1e-3, 10, 100)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.prev_num_logits, self.labels = 0, {}

        def get_ground_truth(self, device, n):
            if self.prev_num_logits != n or device not in self.labels:
                labels = torch.arange(n, device=device, dtype=torch.long)
                self.labels[device] = labels
                self.prev_num_logits = n
            else:
                labels = self.labels[device]
            return labels

        def forward(self, image_features, text_features, logit_scale, output_dict=False):
            li = logit_scale * image_features @ text_features.T
            lt = logit_scale * text_features @ image_features.T
            lab = self.get_ground_truth(image_features.device, li.shape[0])
            total = (F.cross_entropy(li, lab) + F.cross_entropy(lt, lab)) / 2
            return {"contrastive_loss": total} if output_dict else total

    loss_fn = Loss()
    acc = SimpleNamespace(images=[], texts=[], features={})
    losses_m = {}
    st = SimpleNamespace(i=0)

    def step(im, tx):
        i_accum = st.i // 2
        sched(i_accum)
        opt.zero_grad()
        with torch.no_grad():
            out = model(im, tx)
            for f in ("logit_scale", "logit_bias"):
                out.pop(f, None)
            for k, v in out.items():
                if k in acc.features:
                    acc.features[k].append(v)
                else:
                    acc.features[k] = [v]
            acc.images.append(im)
            acc.texts.append(tx)
        st.i += 1
        if st.i % 2 > 0:
            return None
        opt.zero_grad()
        for j in range(2):
            out = model(acc.images[j], acc.texts[j])
            inputs_no = {"logit_scale": out.pop("logit_scale")}
            inputs = {}
            for k, v in acc.features.items():
                inputs[k] = torch.cat(v[:j] + [out[k]] + v[j + 1 :])
            losses = loss_fn(**inputs, **inputs_no, output_dict=True)
            total = sum(losses.values())
            losses["loss"] = total
            total.backward()
        opt.step()
        acc.images, acc.texts, acc.features = [], [], {}
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        for k, v in losses.items():
            if k not in losses_m:
                losses_m[k] = AverageMeter()
            losses_m[k].update(v.item(), len(im))
        return [f"{losses_m['loss'].avg:.4f}", model.logit_scale.item()]

    return Script(step, [(torch.randn(rows(i), 6), torch.randint(20, (rows(i), 5))) for i in range(STEPS)], [model])


@script("graphs")
def graph_moe_with_neighbours():
    """A graph network whose layers are mixtures; neighbours sampled by random.sample in the step, edges from lists."""
    N = 30
    adj = {i: [(i * 7 + k * k + 1) % N for k in range(1 + i % 5)] for i in range(N)}
    feats, labels = torch.randn(N, 6), torch.randint(3, (N,))

    class Conv(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.l, self.r = nn.Linear(i, o), nn.Linear(i, o, bias=False)

        def forward(self, x, ei):
            src, dst = ei
            agg = torch.zeros_like(x).index_add_(0, dst, x[src])
            deg = torch.zeros(x.size(0)).scatter_add_(0, dst, torch.ones_like(dst, dtype=x.dtype)).clamp(min=1)
            return self.l(agg / deg[:, None]) + self.r(x)

    class GMoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(6, 8)
            self.gate = nn.Linear(8, 4)
            self.experts = nn.ModuleList([Conv(8, 8) for _ in range(4)])
            self.out = nn.Linear(8, 3)

        def cv_squared(self, x):
            eps = 1e-10
            if x.shape[0] == 1:
                return torch.tensor([0], dtype=x.dtype)
            return x.float().var() / (x.float().mean() ** 2 + eps)

        def forward(self, x, ei):
            h = F.relu(self.inp(x))
            v, i = self.gate(h).topk(2, dim=1)
            gates = torch.zeros(h.size(0), 4).scatter(1, i, F.softmax(v, 1))
            outs = []
            for k in range(4):
                outs.append(self.experts[k](h, ei).unsqueeze(1))
            y = (gates.unsqueeze(-1) * torch.cat(outs, 1)).mean(1)
            return self.out(F.relu(y)), self.cv_squared(gates.sum(0)) + self.cv_squared((gates > 0).sum(0))

    model = GMoE()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)

    def sample(seeds, k=2):
        nodes, edges = list(seeds), []
        seen = {n: i for i, n in enumerate(nodes)}
        for s in list(seeds):
            neigh = adj[s] if len(adj[s]) <= k else random.sample(adj[s], k)
            for n in neigh:
                if n not in seen:
                    seen[n] = len(nodes)
                    nodes.append(n)
                edges.append((seen[n], seen[s]))
        return torch.tensor(nodes), torch.tensor(edges).t()

    def step(seeds):
        n_id, ei = sample(seeds)
        opt.zero_grad()
        out, aux = model(feats[n_id], ei)
        bs = len(seeds)
        loss = F.cross_entropy(out[:bs], labels[n_id[:bs]]) + 0.01 * aux
        loss.backward()
        opt.step()
        correct = int((out[:bs].argmax(dim=-1) == labels[n_id[:bs]]).sum())
        return [float(loss), correct / bs]

    def full(i):
        return (random.sample(range(N), rows(i)),)

    return Script(step, [full(i) for i in range(STEPS)], [model])
