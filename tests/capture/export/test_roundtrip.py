"""A loaded step does what the captured one does, to the last bit, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moebius
from moebius import ExportError, GuardError, capture, load
from moebius.export import operators
from moebius.export.archive import MANIFEST, MEMBERS

from .conftest import batch, make_model, make_training


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_training_step_goes_on_bitwise(tmp_path, kind):
    model, optimizer, scheduler, step = make_training(kind)
    captured = capture(step)
    for i, size in enumerate((30, 33, 36)):
        captured(model, optimizer, scheduler, *batch(size, i))
    captured.export(tmp_path / "step")
    loaded = load(tmp_path / "step")
    assert loaded.arguments == ["tokens", "labels"]
    for i, size in enumerate((30, 41, 12)):
        tokens, labels = batch(size, 10 + i)
        expected = captured(model, optimizer, scheduler, tokens, labels)
        found = loaded(tokens, labels=labels)
        assert torch.equal(found, expected)
    state = loaded.state_dict()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(state[f"model.{name}"], value), name
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(state[f"optimizer.state.model.{name}.{key}"], value), (name, key)
    assert state["optimizer.param_groups[0]['lr']"] == optimizer.param_groups[0]["lr"] != 1e-2
    assert state["scheduler.last_epoch"] == scheduler.last_epoch == 6


def test_in_a_fresh_process_without_capture(training_file, tmp_path):
    tokens, labels = batch(29, 5)
    expected = load(training_file)(tokens, labels)
    torch.save({"tokens": tokens, "labels": labels}, tmp_path / "batch")
    program = f"""
import sys, torch, moebius
step = moebius.load({str(training_file)!r})
batch = torch.load({str(tmp_path / "batch")!r}, weights_only=True)
print(step(**batch).item().hex())
loaded = {{n for n in sys.modules if n.startswith("moebius.")}}
assert not loaded & {{"moebius." + n for n in ("interpreter", "cache.captured", "python", "hook", "trace")}}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert float.fromhex(done.stdout.strip()) == expected.item()


def test_state_is_read_and_written(training_file):
    first, second = load(training_file), load(training_file)
    tokens, labels = batch(30, 7)
    first(tokens, labels)
    expected = first(tokens, labels)
    behind = load(training_file)
    behind(tokens, labels)
    second.load_state_dict({k: v.clone() if torch.is_tensor(v) else v for k, v in behind.state_dict().items()})
    assert torch.equal(second(tokens, labels), expected)
    before = second.state_dict()["model.1.gate_up"].clone()
    wrong = {**second.state_dict(), "model.1.down": torch.zeros(3)}
    with pytest.raises(moebius.LoadError, match="model.1.down"):
        second.load_state_dict(wrong)
    with pytest.raises(moebius.LoadError, match="names differ"):
        second.load_state_dict({})
    assert torch.equal(second.state_dict()["model.1.gate_up"], before)


def test_guards_refuse_other_calls_and_change_nothing(training_file):
    loaded = load(training_file)
    tokens, labels = batch(30)
    before = {k: v.clone() if torch.is_tensor(v) else v for k, v in loaded.state_dict().items()}
    for wrong, about in (
        ((tokens.int(), labels), "tokens"),
        ((tokens, labels[:4]), "shape"),
        ((tokens[:1], labels[:1]), "shape"),
        ((tokens[None], labels), "tokens"),
        ((tokens.tolist(), labels), "tokens"),
        ((None, labels), "tokens"),
    ):
        with pytest.raises(GuardError, match=about):
            loaded(*wrong)
    with pytest.raises(GuardError, match="different tensors"):
        loaded(tokens, tokens)
    with torch.no_grad(), pytest.raises(GuardError, match="grad mode"):
        loaded(tokens, labels)
    with pytest.raises(TypeError, match="without labels"):
        loaded(tokens)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, before[name]) if torch.is_tensor(value) else value == before[name]
    loaded(tokens, labels)


def test_a_count_that_the_graph_depends_on_is_checked(tmp_path):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.count, self.weight = 0, nn.Parameter(torch.ones(3))

        def forward(self, x):
            self.count += 1
            return x * self.weight * (2 if self.count % 4 == 0 else 1)

    def loaded_after(calls):
        captured = capture(Counter())
        for _ in range(calls):
            captured(x)
        captured.export(tmp_path / "f")
        loaded = load(tmp_path / "f")
        assert loaded.state_dict()["module.count"] == calls
        return loaded

    x = torch.ones(3)
    loaded = loaded_after(2)
    assert torch.equal(loaded(x), x)
    with pytest.raises(GuardError, match="count"):
        loaded(x)
    assert loaded.state_dict()["module.count"] == 3
    both = loaded_after(5)  # it went the other way once: from then on both are in the graph
    assert [float(both(x)[0]) for _ in range(4)] == [1, 1, 2, 1]


def test_containers_in_and_out(forward_file):
    loaded = load(forward_file)
    x = torch.randn(5, 4)
    found = loaded(x, 2.0)
    weight = torch.linspace(-1, 1, 12).reshape(4, 3)
    assert torch.equal(found["y"], (x @ weight).relu() * 2.0)
    assert found["sizes"][0] == 5 and torch.equal(found["sizes"][1][0], x.sum()) and found["sizes"][1][1] is None
    with pytest.raises(GuardError, match="scale"):
        loaded(x, 3.0)
    with pytest.raises(GuardError):
        loaded(torch.randn(6, 4), 2.0)


def test_arguments_within_containers(tmp_path):
    def f(batch, extra):
        return batch["x"] + batch["more"][0] * extra[1]

    captured = capture(f)
    captured({"x": torch.ones(3), "more": [torch.ones(3)]}, (None, 2))
    captured.export(tmp_path / "f")
    loaded = load(tmp_path / "f")
    x, y = torch.randn(3), torch.randn(3)
    assert torch.equal(loaded({"x": x, "more": [y]}, (None, 2)), x + y * 2)
    for wrong in ({"x": x}, {"x": x, "more": []}, {"x": x, "more": (y,)}, {"more": [y], "x": y.double()}, [x, y]):
        with pytest.raises(GuardError):
            loaded(wrong, (None, 2))
    with pytest.raises(GuardError):
        loaded({"x": x, "more": [y]}, (None, 3))


def test_inference_of_a_module(tmp_path):
    model = make_model().eval()
    captured = capture(model)
    with torch.no_grad():
        for size in (30, 33, 36):
            captured(batch(size)[0])
        captured.export(tmp_path / "f")
        loaded = load(tmp_path / "f")
        tokens = batch(17)[0]
        assert torch.equal(loaded(tokens), captured(tokens))
        assert torch.equal(loaded.state_dict()["module.1.calls"], model[1].calls)


def test_gradient_accumulation_keeps_gradients(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def micro(model, x):
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    captured = capture(micro)
    x = torch.randn(5, 4)
    captured(model, x), captured(model, x)
    captured.export(tmp_path / "f")
    loaded = load(tmp_path / "f")
    captured(model, x), loaded(x)
    found = loaded.state_dict()["model.weight"].grad
    assert torch.equal(found, model.weight.grad)


def test_file_is_readable_and_has_no_pickle(training_file):
    with zipfile.ZipFile(training_file) as archive:
        assert sorted(archive.namelist()) == sorted((MANIFEST, *MEMBERS))
        assert not any(name.endswith((".pkl", ".pt", ".bin")) for name in archive.namelist())
        text = archive.read("graph.py").decode()
        assert "backward" in text and "experts(" in text and "addcdiv_" in text
        assert b"experts" in archive.read("graph.json") and b"conftest.py:" in archive.read("graph.json")


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be exported
# ----------------------------------------------------------------------------------------------------------------------


class Bag:
    pass


def now_and_then(x, counter, kept):
    counter.calls += 1
    if counter.calls % 3 == 0:
        kept.__setitem__("last", counter.calls) if isinstance(kept, dict) else kept.append(counter.calls)
    return x * 2


def refused(function, *args, match, path):
    captured = capture(function)
    for _ in range(5):
        captured(*args)
    with pytest.raises(ExportError, match=match) as found:
        captured.export(path)
    assert not path.exists() and "m_" not in str(found.value)  # (no code of ours)


def test_refusals_say_why(tmp_path):
    path = tmp_path / "f"
    x = torch.ones(3)
    history = []

    def appends(x):
        history.append(x + 1)
        return x * 2

    def breaks(x):
        y = x * 2
        print("breaks", file=open("/dev/null", "w"))  # noqa: SIM115
        return y + 1

    def user_object(x):
        bag = Bag()
        bag.x = x + 1
        return bag

    def changes_argument(x, d):
        d["y"] = x + 1
        return x * 2

    def takes_object(x, bag):
        return x + bag.x

    never = capture(lambda x: x + 1)
    with pytest.raises(ExportError, match="not captured yet"):
        never.export(path)
    refused(appends, x, match="changes .*list", path=path)
    refused(breaks, x, match="not one graph.*break|not one graph", path=path)
    refused(user_object, x, match="Bag", path=path)
    refused(changes_argument, x, {}, match="changes its argument", path=path)
    counter = Bag()
    counter.calls, line = 0, now_and_then.__code__.co_firstlineno
    for kept in (counter.__dict__, history):
        found = rf"py:{line + 2}: in some calls alone .* outside of the step"
        refused(now_and_then, x, counter, kept, match=found, path=path)
    refused(lambda x: f"{x.sum().item():.2f}", x, match=r"py:\d+: a text made of .*return the tensors", path=path)
    weight = torch.ones(3, requires_grad=True)
    refused(
        lambda x: checkpoint(lambda t: (t * weight).sin(), x, use_reentrant=False),
        x,
        match=r"py:\d+: activation checkpointing .*without it",
        path=path,
    )
    base = torch.ones(6)
    a, b = base[:3], base[3:]
    refused(lambda x: x + a + b, x, match="views of one memory", path=path)
    odd = torch.ones(6)[::2]
    refused(lambda x: x + odd, x, match="strides", path=path)


def test_custom_operator_needs_to_be_allowed(tmp_path):
    @torch.library.custom_op("moebius_test_export::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))

    def f(x):
        return torch.ops.moebius_test_export.twice(x) + 1

    captured = capture(f)
    captured(torch.ones(3))
    captured.export(tmp_path / "f")
    with pytest.raises(moebius.LoadError, match="moebius_test_export::twice"):
        load(tmp_path / "f")
    loaded = load(tmp_path / "f", allow=["moebius_test_export::twice"])
    assert torch.equal(loaded(torch.ones(3)), torch.full((3,), 3.0))


def test_an_operator_that_this_torch_lacks(forward_file, monkeypatch):
    have = dict(operators.functions())
    gone = [n for n in have if have[n] is torch.matmul or n == "operator.matmul"]
    monkeypatch.setattr(operators, "functions", lambda: {n: f for n, f in have.items() if n not in gone})
    with pytest.raises(moebius.LoadError, match="has no operator"):
        load(forward_file)


def test_dropout_follows_the_seed(tmp_path):
    captured = capture(lambda x: F.dropout(x, 0.5, True))
    x = torch.ones(64)
    captured(x)
    captured.export(tmp_path / "f")
    loaded = load(tmp_path / "f")
    torch.manual_seed(3)
    expected = captured(x)
    torch.manual_seed(3)
    assert torch.equal(loaded(x), expected)


def solved(x):
    return torch.linalg.solve_triangular(x.tril() + 9 * torch.eye(4), x, upper=False) + torch.linalg.svdvals(x)


def rotated(x):
    return torch.view_as_real(torch.view_as_complex(x.reshape(4, 2, 2)) * 1j)


def filtered(x):
    return torch.fft.irfft(torch.fft.rfft(x, dim=-1) * 2, n=4) + torch.special.ndtr(x)


def upsampled(x):
    return F.conv_transpose2d(F.pixel_shuffle(x.reshape(1, 4, 2, 2), 2), torch.ones(1, 1, 2, 2))


def made_of_numbers(x):
    return x.type(torch.float64) + torch.tensor([2.0, 1.0, 0.5, 0.0])


@pytest.mark.parametrize("function", [solved, rotated, filtered, upsampled, made_of_numbers])
def test_operators_of_models(tmp_path, function):
    captured = capture(function, backend="eager")
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    captured(x)
    captured.export(tmp_path / "f")
    found, expected = load(tmp_path / "f")(x), function(x)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
