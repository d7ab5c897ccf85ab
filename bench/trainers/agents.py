# mypy: ignore-errors
"""Reinforcement learning in cleanrl's style."""

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from .script import STEPS, Script, mlp, rows, script

AGENTS = "reinforcement learning"


def transitions(actions: int | None = 4) -> list[tuple]:
    found = []
    for n in (rows(i) for i in range(STEPS)):
        action = torch.randint(actions, (n,)) if actions else torch.rand(n, 2) * 2 - 1
        found.append((torch.randn(n, 6), torch.randn(n, 6), action, torch.randn(n), torch.rand(n).round()))
    return found


@script(AGENTS)
def dqn() -> Script:
    q = mlp(6, 32, 4)
    target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=2.5e-4)

    def step(obs, new, action, reward, done, global_step):
        with torch.no_grad():
            best, _ = target(new).max(dim=1)
            td = reward.flatten() + 0.99 * best * (1 - done.flatten())
        old = q(obs).gather(1, action[:, None]).squeeze()
        loss = F.mse_loss(td, old)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if global_step % 10 == 0:
            for t, p in zip(target.parameters(), q.parameters(), strict=True):
                t.data.copy_(0.9 * p.data + 0.1 * t.data)
        return loss.item()

    return Script(step, [(*b, i) for i, b in enumerate(transitions())], [q, target])


@script(AGENTS)
def ppo() -> Script:
    actor, critic = mlp(6, 32, 4), mlp(6, 32, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2.5e-4, eps=1e-5)
    rng = np.random.default_rng(0)

    def step(obs, _, action, advantage, done, update):
        optimizer.param_groups[0]["lr"] = (1.0 - update / STEPS) * 2.5e-4
        old = -torch.ones(len(obs)) * 1.4
        returns, clipfracs = advantage + 0.1, []
        indices = np.arange(len(obs))
        for _ in range(2):
            rng.shuffle(indices)
            half = (len(obs) + 1) // 2
            for start in range(0, len(obs), half):
                mb = indices[start : start + half]
                probs = Categorical(logits=actor(obs[mb]))
                logratio = probs.log_prob(action[mb]) - old[mb]
                ratio = logratio.exp()
                with torch.no_grad():
                    clipfracs += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
                adv = advantage[mb]
                loss = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
                v_loss = 0.5 * ((critic(obs[mb]).view(-1) - returns[mb]) ** 2).mean()
                loss = loss - 0.01 * probs.entropy().mean() + v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                optimizer.step()
        return np.mean(clipfracs)

    return Script(step, [(*b, i) for i, b in enumerate(transitions())], [actor, critic])


@script(AGENTS)
def sac() -> Script:
    actor, q1 = mlp(6, 32, 4), mlp(8, 32, 1)
    target, log_alpha = copy.deepcopy(q1), torch.zeros(1, requires_grad=True)
    opt_q, opt_a = torch.optim.Adam(q1.parameters(), lr=1e-3), torch.optim.Adam(actor.parameters(), lr=3e-4)
    opt_alpha = torch.optim.Adam([log_alpha], lr=1e-3)

    def act(obs):
        mean, log_std = actor(obs).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-5, 2).exp())
        x = normal.rsample()
        y = torch.tanh(x)
        return y, (normal.log_prob(x) - torch.log(1 - y.pow(2) + 1e-6)).sum(1, keepdim=True)

    def step(obs, new, action, reward, done):
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            a, logp = act(new)
            td = reward + (1 - done) * 0.99 * (target(torch.cat([new, a], 1)) - alpha * logp).view(-1)
        loss = F.mse_loss(q1(torch.cat([obs, action], 1)).view(-1), td)
        opt_q.zero_grad()
        loss.backward()
        opt_q.step()
        a, logp = act(obs)
        actor_loss = (alpha * logp - q1(torch.cat([obs, a], 1))).mean()
        opt_a.zero_grad()
        actor_loss.backward()
        opt_a.step()
        alpha_loss = (-log_alpha.exp() * (logp.detach() - 2)).mean()
        opt_alpha.zero_grad()
        alpha_loss.backward()
        opt_alpha.step()
        for p, t in zip(q1.parameters(), target.parameters(), strict=True):
            t.data.copy_(0.005 * p.data + 0.995 * t.data)
        return loss.item(), alpha

    return Script(step, transitions(None), [actor, q1, target, log_alpha])


@script(AGENTS)
def reinforce() -> Script:
    policy = mlp(6, 32, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    eps = float(np.finfo(np.float32).eps)

    def step(episode, _, action, rewards, done):
        saved = [Categorical(logits=policy(obs)).log_prob(a) for obs, a in zip(episode, action, strict=True)]
        returns, total = [], 0.0
        for r in rewards.tolist()[::-1]:
            total = r + 0.99 * total
            returns.insert(0, total)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + eps)
        loss = torch.stack([-logp * r for logp, r in zip(saved, returns, strict=True)]).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, transitions(), [policy])
