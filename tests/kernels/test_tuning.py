"""Choosing tile shapes by measurement, with a clock of our own in a GPU's place, and the cache that keeps them."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from moebius.kernels import triton_form  # noqa: E402
from moebius.kernels.contract import Options, Weights  # noqa: E402
from moebius.kernels.routing import sort_rows  # noqa: E402
from moebius.kernels.triton_form import aot, configs, tuning  # noqa: E402
from moebius.kernels.triton_form.launch import Config, Launch, Problem  # noqa: E402

SHAPE = aot.SHAPES["moe"]
EACH = Problem("up", "bfloat16", "none", 2048, 2048, 768)


def arguments(dtype: torch.dtype = torch.bfloat16) -> tuple:
    """forward's, on the meta device: no launch of theirs is ever run here."""
    t, d, n, e, k = SHAPE.tokens, SHAPE.width, SHAPE.narrow, SHAPE.experts, SHAPE.top_k

    def meta(*size: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=of, device="meta")

    return (meta(t, d), Weights(meta(e, 2 * n, d), meta(e, d, n), None, None), meta(t * k, of=torch.int32),
            meta(e + 1, of=torch.int32), meta(t, k, of=torch.float32), k, Options())


def is_config(launch: Launch, config: Config) -> bool:
    blocks = tuple(value for name, value in launch.constants.items() if name.startswith("BLOCK"))
    return (*blocks, launch.warps, launch.stages) == (
        config.block_m, config.block_n, config.block_k, config.warps, config.stages)


def test_the_fastest_of_each_kernel_is_taken() -> None:
    wanted = {name: tuning.TRIED[name][2] for name in ("up", "down", "grad_act", "grad_x", "weight_grad")}

    def seconds_of(launch: Launch) -> float:
        if launch.problem is None:
            return 1.0
        return 0.5 if is_config(launch, wanted[launch.problem.kernel]) else 1.0

    chosen = triton_form.tune(*arguments(), seconds_of=seconds_of)
    assert len(chosen) == 6  # up, down, grad_act, grad_x and two weight gradients
    assert {each.kernel: config for each, config in chosen.items()} == wanted


def test_defaults_stay_where_nothing_is_faster_and_failures_are_passed_over() -> None:
    seen: list[Launch] = []

    def seconds_of(launch: Launch) -> float:
        seen.append(launch)
        default = launch.problem is None or is_config(launch, configs.HALF[launch.problem.kernel][0])
        if not default:
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    chosen = triton_form.tune(*arguments(), seconds_of=seconds_of)
    # a persistent one may be the default but for its grid
    assert all(config == configs.HALF[each.kernel][0] for each, config in chosen.items())
    assert any(not is_config(launch, configs.HALF["up"][0]) for launch in seen if launch.label == "up")


def test_a_default_that_fails_is_an_error() -> None:
    def seconds_of(launch: Launch) -> float:
        raise RuntimeError("no kernel image")

    with pytest.raises(RuntimeError, match="no kernel image"):
        triton_form.tune(*arguments(), seconds_of=seconds_of)


OUTPUTS = {"up": ("h", "a"), "down": ("out",), "grad_x": ("out",), "combine": ("out",), "row_sum": ("out",),
           "grad_act": ("grad_h", "a", "grad_s"), "weight_grad_gathered_left": ("out",),
           "weight_grad_gathered_right": ("out",)}
SMALL = aot.Shape(96, 256, 256, 4, 2)


def real_arguments() -> tuple:
    """As arguments, with data, on the CPU: the launches are run by FakeCard."""
    t, d, n, e, k = SMALL.tokens, SMALL.width, SMALL.narrow, SMALL.experts, SMALL.top_k
    order, offsets = sort_rows(torch.arange(t * k).reshape(t, k) % e, e)
    return (torch.ones(t, d, dtype=torch.bfloat16), Weights(
        torch.ones(e, 2 * n, d, dtype=torch.bfloat16), torch.ones(e, d, n, dtype=torch.bfloat16), None, None),
        order, offsets, torch.ones(t, k), k, Options())


class FakeCard:
    """In a GPU's place: fills what a kernel writes with ones, and says how long that took. A configuration in ``times``
    takes that long a FLOP, any other one second; one in ``wrong`` is broken by that function of the outputs."""

    def __init__(self, times: dict[tuple[str, Config], float], wrong: dict[tuple[str, Config], object]) -> None:
        self.times, self.wrong = times, wrong

    def __call__(self, launch: Launch) -> float:
        outputs = [launch.arguments[name] for name in OUTPUTS[launch.label]]
        for name, output in zip(OUTPUTS[launch.label], outputs, strict=True):
            output.fill_(1 / max(1, output.shape[-1]) if name == "grad_s" else 1)  # its columns are summed
        if launch.problem is None:
            return 1.0

        def taken(among: dict) -> object:
            return next((value for (kernel, config), value in among.items()
                         if kernel == launch.problem.kernel and is_config(launch, config)
                         and launch.constants.get("PERSISTENT", False) == (config.waves > 0)), None)

        if (breaks := taken(self.wrong)) is not None:
            breaks(outputs)
        return (taken(self.times) or 1.0) * launch.flops  # a kernel's panels are launches of their own


def one_element(outputs: list[torch.Tensor]) -> None:
    outputs[-1].reshape(-1)[-1] *= 1.1


def a_tile_of_zeros(outputs: list[torch.Tensor]) -> None:
    outputs[-1][-16:] = 0


def not_a_number(outputs: list[torch.Tensor]) -> None:
    outputs[-1].reshape(-1)[0] = float("nan")


@pytest.mark.parametrize("breaks", [one_element, a_tile_of_zeros, not_a_number])
def test_a_configuration_that_is_wrong_is_refused_and_the_next_one_taken(breaks) -> None:
    """The fastest is wrong, the second is right."""
    wrong, right = tuning.TRIED["weight_grad"][0], tuning.TRIED["weight_grad"][1]
    card = FakeCard({("weight_grad", wrong): 0.2, ("weight_grad", right): 0.5}, {("weight_grad", wrong): breaks})
    with pytest.warns(UserWarning, match=r"weight_grad is wrong with Config\(block_m=128, .* it is off by (\d|inf)"):
        chosen = triton_form.tune(*real_arguments(), seconds_of=card)
    for each, config in chosen.items():
        assert config == (right if each.kernel == "weight_grad" else configs.HALF[each.kernel][1]), each


def test_without_the_comparison_the_wrong_one_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above is of the comparison and of nothing else."""
    wrong = tuning.TRIED["weight_grad"][0]
    monkeypatch.setattr(tuning, "difference", lambda got, want: 0.0)
    chosen = triton_form.tune(*real_arguments(), seconds_of=FakeCard(
        {("weight_grad", wrong): 0.2}, {("weight_grad", wrong): a_tile_of_zeros}))
    assert {config for each, config in chosen.items() if each.kernel == "weight_grad"} == {wrong}


def test_the_default_stays_where_every_other_is_wrong() -> None:
    tried = [("weight_grad", config) for config in tuning.TRIED["weight_grad"]]
    card = FakeCard(dict.fromkeys(tried, 0.5), dict.fromkeys(tried, a_tile_of_zeros))
    with pytest.warns(UserWarning, match="weight_grad is wrong") as found:
        chosen = triton_form.tune(*real_arguments(), seconds_of=card)
    assert len(found) == 2 * len(tried)  # of both weight gradients
    assert all(config == configs.HALF[each.kernel][1] for each, config in chosen.items())


def test_a_neighbouring_number_is_right() -> None:
    other = tuning.TRIED["weight_grad"][0]
    card = FakeCard({("weight_grad", other): 0.5}, {("weight_grad", other): lambda outputs: outputs[0].mul_(1 + 2**-7)})
    chosen = triton_form.tune(*real_arguments(), seconds_of=card)
    assert {config for each, config in chosen.items() if each.kernel == "weight_grad"} == {other}


def test_a_kernel_is_not_blamed_for_another() -> None:
    """weight_grad's is wrong in the same round as grad_act's, which is right and is kept."""
    wrong, right = tuning.TRIED["weight_grad"][0], tuning.TRIED["grad_act"][0]
    card = FakeCard({("weight_grad", wrong): 0.5, ("grad_act", right): 0.5}, {("weight_grad", wrong): a_tile_of_zeros})
    with pytest.warns(UserWarning, match="weight_grad is wrong"):
        chosen = triton_form.tune(*real_arguments(), seconds_of=card)
    assert {config for each, config in chosen.items() if each.kernel == "grad_act"} == {right}


def test_difference() -> None:
    inf, nan = float("inf"), float("nan")
    want = torch.tensor([[1.0, -3.0, 0.0, 2.0] * 16, [0.0] * 64])
    assert tuning.difference(want.clone(), want) == 0

    def changed(row: int, column: int, value: float) -> float:
        got = want.clone()
        got[row, column] = value
        return tuning.difference(got, want)

    mean = (14 / 4) ** 0.5
    assert changed(0, 0, 1.5) == pytest.approx(0.5 / (1 + mean))
    assert changed(0, 2, 0.5) == pytest.approx(0.5 / mean)
    assert changed(1, 0, 1e-9) == inf and changed(0, 0, nan) == inf and changed(0, 0, inf) == inf
    odd = want.clone()
    odd[0, :3] = torch.tensor([nan, inf, -inf])
    assert tuning.difference(odd.clone(), odd) == 0 and tuning.difference(want, odd) == inf
    beside = odd.clone()
    beside[0, 5] = 7.0
    assert 0.5 < tuning.difference(beside, odd) < inf
    short = torch.tensor([[1.0], [1e-6], [-1.0]])
    assert tuning.difference(torch.tensor([[1.0], [2e-6], [-1.0]]), short) < 1e-5
    assert tuning.difference(torch.empty(0, 4), torch.empty(0, 4)) == 0


def test_difference_looks_at_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "AT_ONCE", 100)
    want = torch.ones(7, 64)
    for row in range(7):
        got = want.clone()
        got[row, 63] = 2
        assert tuning.difference(got, want) == pytest.approx(0.5)


def test_other_operands_are_not_tried_with_shapes_for_16_bits() -> None:
    chosen = triton_form.tune(*arguments(torch.float32), seconds_of=lambda launch: 1.0)
    assert all(config == configs.EXACT[each.kernel][0] for each, config in chosen.items())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEBIUS_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_kept_and_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tuning.Cache("H100"), tuning.Cache("H100")
    config = Config(64, 128, 64, 8, 4, 2)
    first.store({EACH: config})
    second.store({Problem("down", "bfloat16", "none", 1, 2, 3): config})  # of another process, meanwhile
    again = tuning.Cache("H100")
    assert again.found == {str(EACH): config, "down/bfloat16/none/1/2/3": config}
    assert [path.name for path in (folder / "cache").iterdir()] == [again.path.name]
    monkeypatch.setattr(tuning, "cache_of", lambda device: again)
    default = Config(16, 16, 16, 4, 2)
    assert tuning.configured(EACH, default, torch.device("cuda")) == config
    other = Problem("up", "float16", "none", 2048, 2048, 768)
    assert tuning.configured(other, default, torch.device("cuda")) == default
    assert tuning.configured(EACH, default, torch.device("cpu")) == default


def test_the_host_code_takes_what_was_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "configured", lambda each, default, device: Config(64, 64, 32, 4, 5))
    monkeypatch.setattr(configs, "configured", tuning.configured)
    for launch in aot.plan(SHAPE):
        assert launch.problem is None or (launch.warps, launch.stages, launch.constants["BLOCK_N"] if "BLOCK_N" in
                                          launch.constants else 64) == (4, 5, 64)


def test_another_card_triton_or_source_begins_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {tuning.cache_path("H100"), tuning.cache_path("H200")}
    monkeypatch.setattr(tuning.triton, "__version__", "9.9")
    paths.add(tuning.cache_path("H100"))
    monkeypatch.setattr(tuning, "source_hash", lambda: "0" * 16)
    paths.add(tuning.cache_path("H100"))
    assert len(paths) == 4


GOOD = dict(block_m=64, block_n=64, block_k=64, warps=4, stages=3, waves=0)


@pytest.mark.parametrize("text", [
    b"", b"{", b"[1, 2]", b'{"up": 3}', b"\xff\xfe\x00", b'{"up": {"block_m": 64}}',
    json.dumps({"up": {**GOOD, "block_m": 63}}).encode(), json.dumps({"up": {**GOOD, "warps": "4"}}).encode(),
    json.dumps({"up": {**GOOD, "warps": True}}).encode(), json.dumps({"up": {**GOOD, "stages": 0}}).encode(),
    json.dumps({"up": {**GOOD, "waves": -1}}).encode(), json.dumps({"up": {**GOOD, "more": 1}}).encode(),
])
def test_a_damaged_cache_is_a_warning_and_is_written_anew(folder: Path, text: bytes) -> None:
    path = tuning.cache_path("H100")
    path.parent.mkdir()
    path.write_bytes(text)
    with pytest.warns(UserWarning, match="measured anew"):
        cache = tuning.Cache("H100")
    assert cache.found == {}
    with pytest.warns(UserWarning, match="measured anew"):
        cache.store({EACH: Config(**GOOD)})
    assert tuning.Cache("H100").found == {str(EACH): Config(**GOOD)}


def test_a_folder_that_cannot_be_written_is_a_warning(folder: Path) -> None:
    (folder / "cache").write_text("a file")
    with pytest.warns(UserWarning, match="tile shapes"):
        cache = tuning.Cache("H100")
        cache.store({EACH: Config(**GOOD)})
    assert cache.found == {str(EACH): Config(**GOOD)}
