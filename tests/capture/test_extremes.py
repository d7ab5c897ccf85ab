"""max() and min() of numbers and tensors: Python asks the tensors which is the greater, and gives one of them back."""

from __future__ import annotations

import pytest
import torch

from moebius import capture, explain, stats


def scaled(x, out):
    return x * max(1e-3, x.norm())


def tensor_first(x, out):
    return max(x.norm(), 1e-3), min(1.0, x.norm(), x.sum())


def of_tensors(x, out):
    return max(x.norm(), x.sum(), x.mean())


def which(x, out):
    greatest = max(0.5, (x * 2).pow(2).mean().sqrt())
    return x - 0.1 * greatest, type(greatest).__name__


def in_a_loop(x, out):
    out.append("begun")
    for i in range(3):
        out.append(max(0.2 * i, x.sum() / (i + 1)))
    return len(out)


def of_a_boolean(x, out):
    return max(True, x.sum()), min(x.sum(), 2)


@pytest.mark.parametrize("step", [scaled, tensor_first, of_tensors, which, in_a_loop, of_a_boolean])
def test_each_call_gives_what_python_gives(step):
    captured = capture(step, backend="eager")
    torch.manual_seed(0)
    for scale in (1.0, 1e-5, 1.0, float("nan"), -1.0, 0.0, 1e-5):
        x, ours, theirs = torch.randn(3).abs() * scale, [], []
        assert repr(captured(x, ours)) == repr(step(x, theirs))
        assert repr(ours) == repr(theirs)
    assert not explain(step, backend="eager")(torch.ones(3), []).breaks


def test_an_optimizer_scaled_by_its_weights_is_one_graph():
    """As transformers' Adafactor does it: a step count in Python, a root mean square that is replaced each step."""

    class Scaled(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if len(state) == 0:
                        state["step"] = 0
                    state["step"] += 1
                    state["rms"] = p.norm() / p.numel() ** 0.5
                    p.sub_(p.grad * max(1e-3, state["rms"]) * min(1e-2, state["step"] ** -0.5))

    def made():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))  # 40 branches
        optimizer = Scaled(model.parameters(), {"lr": 1.0})

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    captured, plain = capture(made(), backend="eager"), made()
    for _ in range(6):
        x = torch.randn(2, 4)
        assert torch.equal(captured(x), plain(x))
    seen = stats(captured)
    assert seen.breaks == 0 and seen.hits == 3  # state appears, then counts are numbers; nothing after that
