# mypy: ignore-errors
"""Language models: pre-training, fine-tuning, preferences."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from .models import DeepseekExperts, Gpt, MinimindExperts, MixtralExperts, SwitchExperts
from .script import STEPS, Script, rows, script, texts

LANGUAGE, PREFERENCES = "language models", "preferences"


@script(LANGUAGE)
def nanogpt_with_experts() -> Script:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warmup, decay, top, low = 10, 40, 1e-3, 1e-4

    def get_lr(it):
        if it < warmup:
            return top * (it + 1) / (warmup + 1)
        if it > decay:
            return low
        ratio = (it - warmup) / (decay - warmup)
        return low + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (top - low)

    def step(x, y, it):
        lr = get_lr(it)
        for group in optimizer.param_groups:
            group["lr"] = lr
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [model], 2)


@script(LANGUAGE)
def minimind() -> Script:
    model = Gpt(MinimindExperts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    log = []

    def step(x, y, i):
        lr = 5e-4 / 10 + 0.5 * 5e-4 * (1 + math.cos(math.pi * i / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = lr
        _, loss = model(x, y)
        loss = loss + sum(block.ffn.aux_loss for block in model.h)
        loss.backward()
        if (i + 1) % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if i % 10 == 0:
            log.append(f"step {i} loss {loss.item():.3f} lr {optimizer.param_groups[-1]['lr']:.7f}")
        return loss.item()

    return Script(step, [(*b, i) for i, b in enumerate(texts())], [model], 2)


@script(LANGUAGE)
def switch_transformer() -> Script:
    model = Gpt(SwitchExperts)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) ** -0.5, (s + 1) * 10**-1.5))

    def step(x, y):
        optimizer.zero_grad()
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        return float(loss)

    return Script(step, texts(), [model], 2)


@script(LANGUAGE)
def deepseek() -> Script:
    model = Gpt(DeepseekExperts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step(x, y):
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), norm

    return Script(step, texts(), [model], 2)


@script(LANGUAGE)
def accumulated_gradients() -> Script:
    model = Gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(x, y):
        optimizer.zero_grad()
        total = 0.0
        for xs, ys in zip(x.chunk(2), y.chunk(2), strict=True):
            _, loss = model(xs, ys)
            (loss / 2).backward()
            total += loss.item()
        optimizer.step()
        return total / 2

    return Script(step, texts(), [model], 4)


@script(LANGUAGE)
def mixed_precision_with_a_scaler() -> Script:
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=20)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return Script(step, texts(), [model], 2)


@script(LANGUAGE)
def fine_tuning_with_masked_labels() -> Script:
    model = Gpt()
    for p in model.wpe.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
    batches = []
    for x, y in texts():
        y = y.clone()
        y[:, :4] = -1
        batches.append(({"input_ids": x, "labels": y},))

    def step(batch):
        batch = {k: v.to("cpu") for k, v in batch.items()}
        logits, _ = model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item(), "tokens": (batch["labels"] != -1).sum().item()}

    return Script(step, batches, [model], 2)


@script(LANGUAGE)
def distillation() -> Script:
    teacher, model = Gpt(layers=2).eval(), Gpt(MinimindExperts, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y, temperature=2.0, alpha=0.5):
        with torch.no_grad():
            soft, _ = teacher(x)
        logits, ce = model(x, y)
        kl = F.kl_div(
            F.log_softmax(logits / temperature, -1), F.softmax(soft / temperature, -1), reduction="batchmean"
        )
        loss = alpha * ce + (1 - alpha) * kl * temperature**2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, texts(), [model], 3)


@script(LANGUAGE)
def averaged_weights() -> Script:
    model = Gpt()
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x, y):
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(0.99).add_(p, alpha=0.01)
        return loss.item()

    return Script(step, texts(), [model, average], 2)


@script(LANGUAGE)
def label_smoothing_seq2seq() -> Script:
    embed = nn.Embedding(40, 32)
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
    head = nn.Linear(32, 40)
    params = [*embed.parameters(), *model.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(params, lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def step(src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1) - 1)
        out = head(model(embed(src), embed(tgt[:, :-1]), tgt_mask=mask))
        loss = criterion(out.reshape(-1, 40), tgt[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, texts(), [embed, model, head])


def logps(model, tokens):
    logits, _ = model(tokens[:, :-1])
    return F.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]


@script(PREFERENCES)
def dpo() -> Script:
    model = Gpt()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)

    def step(chosen, rejected, beta=0.1):
        policy = logps(model, torch.cat([chosen, rejected])).sum(-1)
        with torch.no_grad():
            ref = logps(reference, torch.cat([chosen, rejected])).sum(-1)
        n = chosen.shape[0]
        margin = (policy[:n] - policy[n:]) - (ref[:n] - ref[n:])
        loss = -F.logsigmoid(beta * margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "accuracy": (margin > 0).float().mean().item()}

    return Script(step, texts(), [model], 4)


@script(PREFERENCES)
def ppo_for_text() -> Script:
    model, value = Gpt(), nn.Linear(40, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *value.parameters()], lr=1e-4)
    batches = [(torch.cat([x, y[:, -1:]], 1), torch.randn(x.shape[0]), torch.randn(x.shape) - 3) for x, y in texts()]

    def step(tokens, reward, old, clip=0.2):
        for _ in range(2):
            logits, _ = model(tokens[:, :-1])
            logp = F.log_softmax(logits, -1).gather(2, tokens[:, 1:, None])[..., 0]
            values = value(logits.detach()).squeeze(-1)
            advantage = reward[:, None] - values.detach()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (logp - old).exp()
            policy = -torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
            loss = policy + 0.5 * F.mse_loss(values, reward[:, None].expand_as(values))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return loss.item()

    return Script(step, batches, [model, value], 4)


@script(PREFERENCES)
def grpo() -> Script:
    model = Gpt(MinimindExperts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = [(torch.cat([x, y[:, -1:]], 1), torch.rand(x.shape[0]), 2 if rows(i) % 2 == 0 else 1)
               for i, (x, y) in enumerate(texts())]  # fmt: skip

    def step(tokens, reward, group):
        grouped = reward.view(-1, group)
        spread = grouped.std(1, correction=0, keepdim=True) + 1e-4
        advantage = ((grouped - grouped.mean(1, keepdim=True)) / spread).view(-1)
        logp = logps(model, tokens)
        mask = (tokens[:, 1:] != 0).float()
        loss = -((logp * advantage[:, None]) * mask).sum() / mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Script(step, batches, [model], 2)


@script(PREFERENCES)
def reward_model() -> Script:
    model, head = Gpt(MixtralExperts), nn.Linear(40, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4)

    def step(good, bad):
        scores = [head(model(tokens)[0][:, -1]).squeeze(-1) for tokens in (good, bad)]
        loss = -F.logsigmoid(scores[0] - scores[1]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Script(step, texts(), [model, head], 4)
