"""Choosing tile shapes by measurement, with a clock of our own in a GPU's place, and the cache that keeps them."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from moebius.kernels import triton_form  # noqa: E402
from moebius.kernels.contract import Options, Weights  # noqa: E402
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
