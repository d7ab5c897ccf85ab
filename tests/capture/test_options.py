"""Backends, options, what may be captured, and bad input: a clear error that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from moebius import MoebiusError, capture, disable, explain, mark_dynamic, reset, stats
from moebius.api import captured_of
from moebius.errors import NotCapturableError, OptionError, UnsupportedVersionError
from moebius.versions import check_versions


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x, labels=None):
        logits = self.down(torch.nn.functional.silu(self.up(x)))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"logits": logits, "loss": loss}


def train(model, x, labels):
    model.zero_grad()
    loss = model(x, labels=labels)["loss"]
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def data(rows=6):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator), torch.randint(4, (rows,), generator=generator)


def own_backend(gm, example_inputs):
    assert len(example_inputs) == len([n for n in gm.graph.nodes if n.op == "placeholder"])
    return gm.forward


@pytest.mark.share(2)
@pytest.mark.parametrize("backend", ["moebius", "eager", "aot_eager", "inductor", own_backend],
                         ids=lambda backend: getattr(backend, "__name__", backend))
def test_backends_train_as_plain_python_does(backend):
    plain, other = Model(), Model()
    captured = capture(train, backend=backend)
    for rows in (6, 6, 9):
        for model in (plain, other):
            model.zero_grad()
        want, got = train(plain, *data(rows)), captured(other, *data(rows))
        torch.testing.assert_close(got, want)
    assert stats(captured).graphs >= 1


@pytest.mark.parametrize("backend", ["moebius", "aot_eager"])
def test_dynamic_sizes_reach_the_backend(backend):
    captured = capture(lambda m, x: m(x)["logits"] * x.shape[0], backend=backend, dynamic=True)
    model = Model()
    for rows in (5, 7, 9, 11):
        x, _ = data(rows)
        torch.testing.assert_close(captured(model, x), model(x)["logits"] * rows)
    assert stats(captured).graphs == 1


def test_mark_dynamic():
    captured = capture(lambda x: x.sum() * x.shape[0])
    for i, rows in enumerate((5, 7, 9)):
        x = torch.ones(rows, 2)
        if i == 0:
            mark_dynamic(x, 0)
        assert captured(x).item() == rows * rows * 2
    assert stats(captured).graphs == 1
    with pytest.raises(OptionError, match="no dimension 3"):
        mark_dynamic(torch.ones(2), 3)
    with pytest.raises(OptionError, match="not a tensor, but list"):
        mark_dynamic([1], 0)


def test_modules_and_methods_stay_what_they_are():
    model = Model()
    captured = capture(model)
    x, labels = data()
    torch.testing.assert_close(captured(x, labels=labels), model(x, labels=labels))
    assert captured.__wrapped__ is model
    captured.note = 1
    assert dir(captured) == dir(model) and "note" in dir(captured)
    assert list(captured.state_dict()) == list(model.state_dict())
    assert captured.eval() is captured and not model.training
    captured.extra = 3
    assert model.extra == 3
    assert captured.__doc__ == model.__doc__ and captured.forward.__doc__ == model.forward.__doc__
    method = capture(model.forward)
    torch.testing.assert_close(method(x), model(x))

    def documented(x):
        """Doc."""
        return x

    assert capture(documented).__doc__ == "Doc." and capture(documented).__name__ == "documented"
    assert capture(documented).__wrapped__ is documented
    assert capture(fullgraph=True)(documented)(3) == 3


def test_methods_of_captured_classes_bind():
    class Trainer:
        def __init__(self):
            self.scale = 2

        @capture
        def step(self, x, *more, flip=False, **rest):
            return x * self.scale + len(more) + len(rest) - int(flip)

    trainer = Trainer()
    for _ in range(2):
        assert trainer.step(torch.ones(1), 1, 2, flip=True, a=3).item() == 4
        assert trainer.step(torch.ones(1)).item() == 2
    trainer.scale = 5
    assert trainer.step(torch.ones(1)).item() == 5


class CapturedCall:
    @capture
    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (3, "not int"),
        ("name", "not str"),
        (None, None),
        (len, "written in C"),
        (Model, "instance"),
        (torch.nn.functional.linear, "written in C"),
        (CapturedCall(), "CapturedCall.__call__ is captured already"),
    ],
)
def test_what_cannot_be_captured_is_said(target, words):
    if target is None:
        assert callable(capture(None))
        return
    with pytest.raises(NotCapturableError, match=words):
        capture(target)


def test_asynchronous_generators_are_refused():
    async def numbers():
        yield 1

    with pytest.raises(NotCapturableError, match="asynchronous generator"):
        capture(numbers)


@pytest.mark.parametrize(
    "options",
    [
        {"bakend": "eager"},
        {"backend": "nothing"},
        {"backend": 3},
        {"dynamic": "yes"},
        {"fullgraph": 1},
        {"precision": "fp7"},
        {"precision": "fp8", "backend": "eager"},
        {"precision": "grad_down=fp8"},
        {"save": "all"},
        {"mesh": 3},
        {"plan": "ep"},
    ],
    ids=str,
)
def test_bad_options_name_the_choices(options):
    with pytest.raises(OptionError) as caught:
        capture(lambda x: x, **options)
    assert isinstance(caught.value, MoebiusError) and len(str(caught.value)) > 30


def test_reset_starts_cold():
    captured = capture(lambda x: x + 1)
    captured(torch.ones(1))
    captured(torch.ones(1))
    assert stats(captured).hits == 1
    reset()
    assert stats(captured).entries == 0
    assert captured(torch.ones(1)).item() == 2


def test_disable_refuses_what_cannot_be_called():
    with pytest.raises(NotCapturableError):
        disable(3)


def test_the_environment_variable_switches_capture_off():
    code = (
        "import torch, moebius\n"
        "f = moebius.capture(lambda x: x + 1)\n"
        "print(f(torch.ones(1)).item(), moebius.stats(f).misses, moebius.stats(f).graphs)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MOEBIUS_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["2.0", "0", "0"]


def test_explain_reports_the_call():
    model = Model()
    x, labels = data()
    report = explain(train)(model, x, labels)
    torch.testing.assert_close(report.result[0], train(model, x, labels)[0])
    assert len(report.graphs) == 1 and not report.breaks
    assert report.coverage["captured"] > 50
    assert any(g.source == "L['x']" and g.cost_ns for g in report.guards)


def test_costs_of_guards_sum_to_what_all_of_them_take():
    model, (x, labels), step = Model(), data(), capture(train, backend="eager")
    step(model, x, labels)
    ratios = []
    for _ in range(12):  # what else the machine does shows in one of the two
        report = explain(step)(model, x, labels)
        owner = captured_of(step)
        assert owner is not None and report.guards and all(g.cost_ns is not None for g in report.guards)
        calls = [s.guards.program.time_call((model, x, labels)) for s in owner.segments]
        ratios.append(sum(g.cost_ns or 0.0 for g in report.guards) / sum(calls))
        if abs(ratios[-1] - 1) < 0.2:
            break
    else:
        raise AssertionError(ratios)


def test_explain_reports_a_break():
    def printing(model, x, labels):
        loss = train(model, x, labels)[0]
        print(f"{loss:.2f}".upper())
        return loss

    report = explain(printing)(Model(), *data())
    assert len(report.graphs) == 2 and len(report.breaks) == 1  # the second graph prints
    assert report.breaks[0].reason == "attribute of a number"
    assert report.coverage["captured"] > 50 and report.coverage["native"] >= 1
    assert report.breaks[0].reason in report.to_json() and "1 graph break" in str(report)


def test_the_model_can_die():
    import gc
    import weakref

    captured, model = capture(lambda m, x: m(x)["logits"]), Model()
    captured(model, data()[0])
    captured(model, data()[0])
    assert stats(captured).entries == 1
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert stats(captured).entries == 0


@pytest.mark.parametrize(
    ("python", "version", "words"),
    [
        ((3, 10, 2), "2.13.0", "Python 3.11 to 3.15"),
        ((3, 16, 0), "2.13.0", "3.16.0"),
        ((3, 12, 1), "2.9.1+cu126", "2.9.1"),
    ],
)
def test_a_version_that_is_not_supported_is_said(python, version, words):
    with pytest.raises(UnsupportedVersionError, match=words) as caught:
        check_versions(python, version, disabled=False)
    assert "MOEBIUS_DISABLE=1" in str(caught.value)
    check_versions(python, version, disabled=True)


def test_supported_versions_pass():
    for minor in (11, 12, 13, 14, 15):
        check_versions((3, minor, 0), "2.11.0a0+git", disabled=False)
