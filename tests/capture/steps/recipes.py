"""The grammar of training steps as people write them: parts of a step in the order in which they stand.

Written as in `templates`, whose expressions stand in the places here. Every part leaves `h` (hidden states), `loss` and
what it makes where the comparison looks.
"""

from __future__ import annotations

from .templates import Table

OPTIMIZERS = (
    "torch.optim.AdamW(net.parameters(), lr=0.05)",
    "torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)",
    "torch.optim.SGD(groups(net), lr=0.05, weight_decay=0.1, foreach=False)",
    "torch.optim.Adam(groups(net), lr=torch.tensor(0.05))",
    "torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.02, fused=True)",
    "torch.optim.AdamW(net.named_parameters(), lr=0.02, amsgrad=True, maximize=True)",
    "torch.optim.Adagrad(net.parameters(), lr=0.05)",
    "torch.optim.Adadelta(net.parameters(), lr=0.5)",
    "torch.optim.Adamax(net.parameters(), lr=0.05)",
    "torch.optim.NAdam(net.parameters(), lr=0.05, decoupled_weight_decay=True)",
    "torch.optim.RAdam(net.parameters(), lr=0.05)",
    "torch.optim.RMSprop(groups(net), lr=0.01, momentum=0.5, centered=True)",
    "torch.optim.Rprop(net.parameters(), lr=0.01)",
    "torch.optim.ASGD(net.parameters(), lr=0.05, t0=1)",
    "torch.optim.Adafactor(net.parameters(), lr=0.05)",
    "torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.02)",
    "Lion(net.parameters(), lr=0.02)",
)
SCHEDULERS = (
    "lr.StepLR(opt, 2)",
    "lr.OneCycleLR(opt, 0.1, total_steps=20, cycle_momentum=bool({'momentum', 'betas'} & {*opt.defaults}))",
    "lr.OneCycleLR(opt, 0.1, total_steps=3, cycle_momentum=False)",
    "lr.ReduceLROnPlateau(opt, factor=0.5, patience=0)",
    "lr.LambdaLR(opt, lambda n: 1 / (1 + n))",
    "lr.MultiplicativeLR(opt, lambda n: 0.9)",
    "lr.MultiStepLR(opt, [1, 3])",
    "lr.ConstantLR(opt, 0.5, 2)",
    "lr.LinearLR(opt, 0.1, total_iters=3)",
    "lr.ExponentialLR(opt, 0.9)",
    "lr.CosineAnnealingLR(opt, 4)",
    "lr.CosineAnnealingWarmRestarts(opt, 2)",
    "lr.PolynomialLR(opt, 4, 2.0)",
    "lr.CyclicLR(opt, 0.01, 0.1, step_size_up=2, cycle_momentum=False)",
    "lr.SequentialLR(opt, [lr.LinearLR(opt, 0.1, total_iters=2), lr.CosineAnnealingLR(opt, 4)], [2])",
    "lr.ChainedScheduler([lr.ConstantLR(opt, 0.5, 2), lr.ExponentialLR(opt, 0.9)])",
    "swa.SWALR(opt, 0.02, anneal_epochs=2)",
)
AVERAGES = (
    "swa.AveragedModel(net)",
    "swa.AveragedModel(net, use_buffers=True)",
    "swa.AveragedModel(net, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))",
    "swa.AveragedModel(net, avg_fn=swa.get_ema_avg_fn(0.9), use_buffers=True)",
    "swa.AveragedModel(net, avg_fn=lambda mean, p, n: mean + (p - mean) / (n + 1))",
)
# What the net gets before its optimizer is made.
PARTS: tuple[tuple[int, str], ...] = (
    (5, "pass"),
    (1, "nn.utils.parametrizations.weight_norm(net.lin)"),
    (1, "nn.utils.parametrizations.spectral_norm(net.layers[0][0])"),
    (1, "nn.utils.parametrize.register_parametrization(net.layers[0][0], 'weight', Symmetric())"),
    (1, "net.layers.append(nn.BatchNorm1d(D, momentum=None))"),
    (2, "net.layers.insert(0, nn.BatchNorm1d(D))"),
    (1, "net.layers[0] = Cast(torch.bfloat16)"),
    (1, "net.layers.append(Cast(torch.float64))"),
    (1, "net.layers[1] = net.layers[0]"),
    (1, "net.layers[1][0].weight = net.layers[0][0].weight"),
    (1, "net.layers.append(Attention())"),
    (1, "net.layers.append(nn.Sequential(nn.Dropout(0.5), nn.GELU()))"),
    (1, "net.table.weight.requires_grad_(False)"),
    (1, "net.block.requires_grad_(False)"),
    (1, "net.extra = nn.ParameterDict({'a': nn.Parameter(torch.ones(D)), 'b': nn.Parameter(torch.zeros(D))})"),
    (1, "handles.append(net.lin.register_full_backward_hook(lambda m, into, out: norms.append(out[0].norm().item())))"),
    (1, "handles.append(net.block.register_full_backward_pre_hook(lambda m, out: (out[0] * 2,)))"),
    (
        1,
        "handles.append(net.free.register_post_accumulate_grad_hook(lambda p: print(p.grad.clamp_(-1, "
        "1).sum().item())))",
    ),
    (1, "handles.append(net.lin.bias.register_hook(lambda g: norms.append(g.norm())))"),
)

# The parts of a step. Each starts at the margin of the function's body.
PARTS_OF_STEP: Table = {
    "before": (
        (8, "state['n'] += 1"),
        (3, "net.train()"),
        (1, "net.train(state['n'] % 2 == 0)"),
        (1, "if x.shape[0] < 4:\n    metrics.skipped += 1\n    return None"),
        (1, "if not x.isfinite().all():\n    return 'skipped'"),
        (1, "if state['n'] == <n>:\n    net.block.requires_grad_(False)\nelse:\n    net.block.requires_grad_(True)"),
        (1, "if state['n'] == 2:\n    for q in net.table.parameters():\n        q.requires_grad_(False)"),
        (1, "for group in opt.param_groups:\n    group['lr'] = 0.1 * (1 + state['n']) ** -0.5\nstate['n'] += 1"),
        (1, "opt.param_groups[0]['lr'] = 0.02 if state['n'] < 2 else 0.01\nstate['n'] += 1"),
        (1, "old = [q.detach().clone() for q in net.lin.parameters()]\nbox.last = old"),
        (1, "old = {k: v.clone() for k, v in net.state_dict().items()}\nbox.keep(old)"),
        (1, "teacher = copy.deepcopy(net.lin)\nx = x + teacher(x).detach()"),
        (1, "start = time.perf_counter()"),
        (1, "x = x.clone().requires_grad_()"),
        (1, "x, y = x.to(net.mean.dtype), y.to(torch.long, non_blocking=True)"),
        (1, "x, y = prepare({'x': x, 'y': y}).values()"),
    ),
    "zero": (
        (5, "opt.zero_grad()"),
        (2, "opt.zero_grad(set_to_none=False)"),
        (1, "net.zero_grad()"),
        (1, "for q in net.parameters():\n    q.grad = None"),
        (1, "for q in net.parameters():\n    if q.grad is not None:\n        q.grad.detach_().zero_()"),
        (1, "if state['n'] % 2 == 0:\n    opt.zero_grad()"),
        (1, "pass"),
    ),
    "forward": (
        (5, "h = net(x)"),
        (1, "h = net(x, scale=<f>)"),
        (2, "with torch.autocast('cpu', torch.bfloat16):\n    h = net(x)\nh = h.to(x.dtype)"),
        (1, "h = checkpoint(net, x, use_reentrant=False)"),
        (1, "h = checkpoint(net.block, net.lin(x), use_reentrant=True)"),
        (1, "h = torch.utils.checkpoint.checkpoint_sequential(net.layers, 2, x, use_reentrant=False)"),
        (1, "h = functional_call(net, dict(net.named_parameters()), (x,))"),
        (
            1,
            "h = functional_call(net, {k: p * 0.9 for k, p in net.named_parameters()}, (x,), {'scale': <f>}, "
            "tie_weights=<c>)",
        ),
        (1, "with torch.no_grad():\n    target = average(x)\nh = net(x) - 0.1 * target"),
        (1, "net.eval()\nwith torch.no_grad():\n    base = net(x)\nnet.train()\nh = net(x) - base"),
        (1, "with torch.inference_mode():\n    base = net.lin(x).mean().item()\nh = net(x) * (1 + base)"),
        (1, "h = net(x)\nh = torch.vmap(net.norm)(h)"),
        (1, "h = x\nfor layer in net.layers:\n    h = checkpoint(layer, h, use_reentrant=False)"),
        (1, "with torch.autograd.graph.save_on_cpu():\n    h = net(x)"),
        (
            1,
            "with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.shape, t * 1), lambda kept: kept[1]):\n"
            "    h = net(x)",
        ),
        (1, "outs = [layer(net.lin(x)) for layer in net.layers]\nh = torch.stack(outs).mean(0)"),
        (1, "h, aux = net(x), net.block(x).pow(2).mean()\nmetrics.aux = aux.item()"),
        (1, "h = nn.utils.stateless._functional_call(net, dict(net.named_buffers()), (x,))"),
        (1, "h = F.normalize(net(x), dim=-1)"),
        (1, "h = Positive.apply(net(x).clone())"),
        (1, "a, b = Several.apply(net(x), net.free)\nh = a * 2 if <c> else a + b"),
        (1, "h = trainer.forward(x)"),
        (1, "with net_in_eval(net):\n    h = net(x)"),
        (1, "h = net(x)\ndel x\nx = h"),
    ),
    "loss": (
        (4, "loss = h.pow(2).mean()"),
        (3, "loss = F.cross_entropy(net.head(h), y % 8)"),
        (1, "loss = F.cross_entropy(net.head(h), y % 8, label_smoothing=0.1, reduction='none')[<m>].sum()"),
        (1, "loss = F.mse_loss(h, x.detach()) + 1e-2 * sum(q.abs().sum() for q in net.layers.parameters())"),
        (1, "loss = <s> + h.mean()"),
        (1, "losses = {'a': h.mean(), 'b': net.free.sum() * <f>}\nloss = sum(losses.values())"),
        (
            1,
            "x = x.detach().requires_grad_()\ngrad, = torch.autograd.grad(net.lin(x).tanh().sum(), x, "
            "create_graph=True)\nloss = h.mean() + (grad.norm(2, dim=-1) - 1).pow(2).mean()",
        ),
        (
            1,
            "found = torch.autograd.grad(h.sum(), list(net.parameters()), create_graph=True, allow_unused=True)\n"
            "loss = h.mean() + sum(g.pow(2).sum() for g in found if g is not None)",
        ),
        (
            1,
            "grads = torch.func.grad(lambda w: F.linear(x, w).tanh().sum())(net.head.weight)\n"
            "loss = h.sum() + grads.sum()",
        ),
        (
            1,
            "per = torch.func.vmap(torch.func.grad(lambda w, t: (t * w).tanh().sum()), in_dims=(None, 0))"
            "(net.free, x.detach())\nbox.last = per\nloss = h.sum() * per.mean().item()",
        ),
        (1, "loss = h.sum() * scale"),
        (1, "loss = trainer.loss(h, y)"),
        (1, "h.retain_grad() if h.requires_grad else None\nloss = h.std()"),
        (
            1,
            "kl = F.kl_div(h.log_softmax(-1), x.detach().softmax(-1), reduction='batchmean')\n"
            "loss = kl * (kl.detach() > 0)",
        ),
        (1, "loss = torch.where(h.isfinite(), h, 0.0).sum()"),
    ),
    "check": (
        (8, "pass"),
        (1, "if not torch.isfinite(loss):\n    metrics.skipped += 1\n    return metrics"),
        (1, "if loss.item() > 2:\n    log.append('large')"),
        (1, "if math.isnan(loss.item()):\n    raise FloatingPointError(f'loss at {state[\"n\"]}')"),
        (1, "assert torch.isfinite(loss), 'not finite'"),
        (1, "best = min(metrics.best, loss.item())\nmetrics.best = best"),
        (1, "if loss.item() < metrics.best:\n    metrics.best, box.last = loss.item(), net.free.detach().clone()"),
        (1, "print(f'{loss.item():.5f}')"),
    ),
    "backward": (
        (6, "loss.backward()"),
        (1, "(loss / 2).backward(retain_graph=True)\n(loss / 2).backward()"),
        (1, "loss.backward(inputs=list(net.lin.parameters()))"),
        (1, "loss.backward(inputs=[net.free, net.lin.weight])"),
        (1, "torch.autograd.backward([loss, net.free.sum()])"),
        (1, "torch.autograd.backward(loss, torch.tensor(2.0, dtype=loss.dtype))"),
        (
            1,
            "found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)\n"
            "for q, g in zip(net.parameters(), found):\n    q.grad = g",
        ),
        (
            1,
            "found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)\n"
            "torch._foreach_add_(list(net.parameters()), found, alpha=-0.01) if not <c> else None",
        ),
        (1, "scaler.scale(loss).backward()"),
        (2, "scaler.scale(loss).backward()\nscaler.unscale_(opt)"),
        (
            2,
            "opt.zero_grad()\nfor part, target in zip(x.split(2), y.split(2)):\n"
            "    l = F.cross_entropy(net.head(net(part)), target % 8) / 2\n    l.backward()\n"
            "    metrics.losses.append(l.detach())",
        ),
        (
            1,
            "for iteration in range(2):\n    with no_sync() if iteration == 0 else contextlib.nullcontext():\n"
            "        (net.lin(x).pow(2).mean() / 2).backward()",
        ),
        (
            1,
            "handle = net.free.register_hook(lambda g: (handle.remove(), g * 2)[1])\n"
            "(loss + net.free.sum()).backward()",
        ),
        (1, "if h.requires_grad:\n    h.register_hook(lambda g: g / (g.norm() + 1e-6))\n(loss + h.sum()).backward()"),
        (
            1,
            "if h.requires_grad:\n    h.register_hook(lambda g: norms.append(g.norm().item()))\n"
            "(loss + h.sum()).backward()",
        ),
        (
            1,
            "handle = torch.autograd.graph.register_multi_grad_hook([net.free, net.lin.bias], "
            "lambda grads: norms.append(len(grads)))\n(loss + net.free.sum()).backward()\nhandle.remove()",
        ),
        (
            1,
            "with torch.no_grad():\n    noise = [torch.randn_like(q) * 0.01 for q in net.parameters()]\n"
            "    for q, e in zip(net.parameters(), noise):\n        q.add_(e)\nnet(x).sum().backward()\n"
            "with torch.no_grad():\n    for q, e in zip(net.parameters(), noise):\n        q.sub_(e)",
        ),
        (1, "trainer.backward(loss)"),
        (1, "try:\n    loss.backward()\nexcept RuntimeError as error:\n    log.append(str(error)[:30])"),
        (1, "loss.backward(torch.ones_like(loss) * <number>)"),
        (1, "if loss.requires_grad:\n    loss.backward()"),
        (1, "loss.backward(create_graph=True)"),
    ),
    "gradients": (
        (4, "pass"),
        (3, "metrics.norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)"),
        (
            1,
            "metrics.norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type=float('inf'), "
            "foreach=False).item()",
        ),
        (1, "nn.utils.clip_grad_value_(net.parameters(), 0.1)"),
        (
            1,
            "total = nn.utils.get_total_norm([q.grad for q in net.parameters() if q.grad is not None])\n"
            "nn.utils.clip_grads_with_norm_(net.parameters(), 0.5, total)",
        ),
        (1, "for q in net.parameters():\n    nn.utils.clip_grad_norm_(q, 0.1)"),
        (
            1,
            "for name, q in net.named_parameters():\n    if q.grad is not None:\n"
            "        metrics.norms[name] = q.grad.norm().item()",
        ),
        (1, "for q in net.parameters():\n    if q.grad is not None:\n        q.grad.nan_to_num_(0.0)"),
        (1, "for q in net.parameters():\n    if q.grad is not None:\n        q.grad /= 2"),
        (
            1,
            "for q in net.parameters():\n    if q.grad is not None:\n"
            "        q.grad.add_(torch.randn_like(q.grad), alpha=0.01)",
        ),
        (1, "flat = nn.utils.parameters_to_vector(net.layers.parameters())\nbox.last = flat.detach()"),
        (1, "torch._foreach_mul_([q.grad for q in net.parameters() if q.grad is not None], 0.5)"),
        (
            1,
            "norm = torch.stack([q.grad.norm() for q in net.parameters() if q.grad is not None]).norm()\n"
            "if norm > 1:\n    for q in net.parameters():\n        if q.grad is not None:\n"
            "            q.grad.mul_(1 / norm)",
        ),
        (1, "if any(q.grad is not None and not q.grad.isfinite().all() for q in net.parameters()):\n    return 'bad'"),
        (1, "net.table.weight.grad = None"),
    ),
    "step": (
        (6, "opt.step()"),
        (2, "scaler.step(opt)\nscaler.update()"),
        (1, "opt.step(lambda: loss)"),
        (1, "if state['n'] % 2:\n    opt.step()\n    opt.zero_grad()"),
        (
            1,
            "with torch.no_grad():\n    for q in net.parameters():\n        if q.grad is not None:\n"
            "            q -= 0.01 * q.grad",
        ),
        (1, "for q in net.parameters():\n    if q.grad is not None:\n        q.data.add_(q.grad.data, alpha=-0.01)"),
        (
            1,
            "vector = nn.utils.parameters_to_vector(net.layers.parameters())\n"
            "nn.utils.vector_to_parameters(vector * 0.99, net.layers.parameters())",
        ),
        (1, "opt.step()\nwith torch.no_grad():\n    net.lin.bias.clamp_(-0.1, 0.1)"),
        (1, "opt.step()\nopt.zero_grad(set_to_none=True)\ndel loss\nloss = h.sum()"),
        (1, "trainer.update()"),
        (
            1,
            "other.zero_grad()\nfake = disc(h.detach())\nreal = disc(x.detach())\n"
            "(F.softplus(-real).mean() + F.softplus(fake).mean()).backward()\nother.step()\nopt.step()",
        ),
        (
            1,
            "for q in disc.parameters():\n    q.requires_grad_(False)\nF.softplus(-disc(net(x))).mean().backward()\n"
            "opt.step()\nfor q in disc.parameters():\n    q.requires_grad_(True)",
        ),
        (1, "opt.step()\nother.step()"),
        (1, "for o in (opt, other):\n    o.step()\n    o.zero_grad()"),
    ),
    "schedule": (
        (3, "pass"),
        (5, "tick(loss)"),
        (1, "if state['n'] % 2 == 0:\n    tick(loss)"),
        (1, "for group in opt.param_groups:\n    group['lr'] *= 0.9"),
        (1, "metrics.rates.append(opt.param_groups[0]['lr'])\ntick(loss)"),
        (1, "tick(loss)\nmetrics.rates.append(sched.get_last_lr())"),
        (1, "tick(loss)\nprint(sched.get_last_lr()[0])"),
        (1, "metrics.rates = sched.state_dict().get('_last_lr')\ntick(loss)"),
    ),
    "average": (
        (4, "pass"),
        (3, "average.update_parameters(net)"),
        (1, "if state['n'] > 1:\n    average.update_parameters(net)"),
        (
            2,
            "with torch.no_grad():\n    for mean, q in zip(average.module.parameters(), net.parameters()):\n"
            "        mean.lerp_(q, 0.1)",
        ),
        (
            1,
            "for mean, q in zip(average.module.parameters(), net.parameters()):\n"
            "    mean.data = 0.9 * mean.data + 0.1 * q.data",
        ),
        (
            1,
            "with torch.no_grad():\n    torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 0.1)",
        ),
        (1, "average.module.load_state_dict(net.state_dict())"),
        (1, "for k, v in net.state_dict().items():\n    average.module.state_dict()[k].copy_(v)"),
    ),
    "after": (
        (3, "metrics.losses.append(loss.item())"),
        (2, "metrics.losses.append(loss.detach())"),
        (1, "metrics.update(loss=loss.item(), norm=<f>)"),
        (1, "metrics.total += loss.detach()"),
        (1, "metrics.total = metrics.total + loss.item()"),
        (1, "window.append(loss.item())\nmetrics.best = sum(window) / len(window)"),
        (1, "metrics.named['loss'].append(loss.item())"),
        (1, "metrics.named['acc'].append((net.head(h).argmax(-1) == y).float().mean().item())"),
        (1, "counter.update(y.tolist())"),
        (1, "counter['steps'] += 1"),
        (1, "state['loss'] = state.get('loss', 0.0) * 0.9 + 0.1 * loss.item()"),
        (1, "history[state['n']] = loss.item()"),
        (1, "metrics = dataclasses.replace(metrics, best=loss.item())"),
        (1, "saved = {'net': net.state_dict(), 'opt': opt.state_dict()}\nbox.last = sorted(saved)"),
        (1, "box.last = copy.deepcopy(net.state_dict())"),
        (1, "box.last = {k: v.detach().cpu().clone() for k, v in net.state_dict().items()}"),
        (1, "if state['n'] == 2:\n    net.load_state_dict(average.module.state_dict())"),
        (1, "state['state'] = len(opt.state)"),
        (1, "net.eval()\nwith torch.no_grad():\n    metrics.best = F.mse_loss(net(x), x).item()\nnet.train()"),
        (1, "log.append([g['lr'] for g in opt.param_groups])"),
        (1, "log.append(sum(p.numel() for p in net.parameters() if p.requires_grad))"),
        (1, "if <c>:\n    broken()"),
        (1, "del h, loss\nh = loss = None"),
        (1, "trainer.log(loss)"),
        (1, "box.keep(net.block.load.clone())\nnet.block.load.zero_()"),
    ),
}

ENDS: tuple[tuple[int, str], ...] = (
    (4, "loss"),
    (3, "loss.item() if loss is not None else None"),
    (2, "metrics"),
    (2, "{'loss': loss, 'h': h, 'lr': opt.param_groups[0]['lr']}"),
    (1, "(h, loss, net.free.grad)"),
    (1, "h"),
    (1, "None"),
    (1, "loss.detach() if loss is not None else 0"),
)

# Between two calls, beside those of `templates`.
CHANGES: tuple[tuple[int, str], ...] = (
    (3, "net.eval()"),
    (2, "net.train()"),
    (2, "net.stats.eval()\nnet.layers.train()"),
    (1, "for m in net.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.eval()"),
    (1, "for m in net.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.momentum = 0.5"),
    (1, "for m in net.modules():\n    if isinstance(m, nn.BatchNorm1d):\n        m.reset_running_stats()"),
    (2, "net.block.requires_grad_(not net.block.router.weight.requires_grad)"),
    (1, "net.requires_grad_(False)\nnet.free.requires_grad_()"),
    (2, "net.requires_grad_(True)"),
    (1, "for q in disc.parameters():\n    q.requires_grad_(not q.requires_grad)"),
    (1, "opt.zero_grad(set_to_none=False)"),
    (1, "opt.zero_grad()"),
    (1, "opt.state.clear()"),
    (1, "opt.load_state_dict(copy.deepcopy(opt.state_dict()))"),
    (1, "opt.param_groups[0]['params'].pop()"),
    (1, "opt.param_groups[0]['lr'] = torch.tensor(0.01)"),
    (1, "opt.param_groups[-1]['weight_decay'] = 0.3"),
    (1, "opt.add_param_group({'params': list(disc.parameters()), 'lr': 0.01})"),
    (1, "opt.param_groups.reverse()"),
    (1, "opt = torch.optim.AdamW(net.parameters(), lr=0.01)\nsched = lr.StepLR(opt, 1)"),
    (1, "opt.register_step_post_hook(lambda o, args, kwargs: log.append('stepped'))"),
    (1, "opt.register_step_pre_hook(lambda o, args, kwargs: norms.append(net.free.detach().sum().item()))"),
    (1, "sched = lr.ReduceLROnPlateau(opt, patience=1)"),
    (1, "sched.load_state_dict(sched.state_dict())"),
    (1, "sched.last_epoch = 0"),
    (1, "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=2)"),
    (1, "scaler.update(4.0)"),
    (1, "scaler = torch.amp.GradScaler('cpu', enabled=False)"),
    (2, "scale = float('inf')"),
    (1, "scale = float('nan')"),
    (2, "scale = 1.0"),
    (1, "average = copy.deepcopy(average)"),
    (1, "average = swa.AveragedModel(net, use_buffers=True)"),
    (1, "average.n_averaged.zero_()"),
    (1, "net = copy.deepcopy(net)"),
    (1, "net.load_state_dict(average.module.state_dict())"),
    (1, "net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)"),
    (1, "for q in net.parameters():\n    q.grad = None if q.grad is None else q.grad.clone()"),
    (1, "for q in net.parameters():\n    q.grad = torch.zeros_like(q)"),
    (1, "net.free.grad = torch.full_like(net.free, float('inf'))"),
    (1, "nn.utils.parametrize.remove_parametrizations(net.lin, 'weight')"),
    (1, "nn.utils.remove_weight_norm(net.layers[1][0])"),
    (1, "nn.utils.parametrizations.weight_norm(net.layers[0][0])"),
    (1, "nn.utils.weight_norm(net.layers[1][0])"),
    (1, "net.layers.append(nn.LazyLinear(D))"),
    (1, "net.apply(lambda m: m.reset_parameters() if isinstance(m, nn.Linear) else None)"),
    (1, "net.layers.append(Cast(torch.bfloat16))"),
    (1, "net.layers[0].to(torch.bfloat16).to(net.mean.dtype)"),
    (1, "net.head.weight = net.table.weight"),
    (1, "metrics = Metrics()"),
    (1, "metrics.losses.clear()\nmetrics.best = 0.5"),
    (1, "metrics.total = torch.zeros(())"),
    (1, "trainer.every = 1"),
    (1, "trainer.clip = None"),
    (1, "trainer.net = net.lin"),
    (
        1,
        "class Louder(Trainer):\n    def log(self, loss):\n        print('loud')\n        super().log(loss)\n"
        "trainer.__class__ = Louder",
    ),
    (1, "counter.clear()"),
    (1, "handles.append(net.lin.register_full_backward_hook(lambda m, into, out: norms.append(len(out))))"),
    (1, "handles.append(net.free.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.sum().item())))"),
    (
        1,
        "handles.append(net.norm.register_forward_hook(lambda m, args, out: "
        "norms.append(out.detach().norm().item())))",
    ),
    (1, "disc = nn.Sequential(nn.Linear(D, 1))\nother = torch.optim.SGD(disc.parameters(), lr=0.1)"),
)
