"""A kernel that was tuned is not tuned again where it has another number, and only there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimizations import torch_internals
from optimizations.torch_internals.tuning import tune_once

SOURCE = "@triton_heuristics.pointwise(inductor_meta={{'kernel_name': '{name}'}})\ndef {name}(x):\n    x * {factor}\n"


class Tuner(torch_internals.CachingAutotuner):  # type: ignore[misc]
    """PyTorch's, with simulated launchers: `times` by number of warps."""

    def __init__(self, folder: Path, name: str, times: dict[int, float], factor: int = 2) -> None:
        self.filename = str(folder / f"{name}_{factor}.py")
        Path(self.filename).write_text(SOURCE.format(name=name, factor=factor))
        self.inductor_meta = {"kernel_name": name}
        self.fn = SimpleNamespace(__name__=name)
        self.precompile_time_taken_ns = 0
        self.stored: list[int] = []
        self.save_cache_hook = lambda config, taken, **rest: self.stored.append(config.num_warps)
        self.times = times
        self.timed: list[int] = []
        self.launchers = [launcher(warps) for warps in times]

    def benchmark_all_configs(self, *args: Any, **kwargs: Any) -> dict[Any, float]:
        self.timed = [one.config.num_warps for one in self.launchers]
        return {one: self.times[one.config.num_warps] for one in self.launchers}

    @property
    def kept(self) -> int:
        self.autotune_to_one_config()
        assert len(self.launchers) == 1
        assert self.stored == [self.launchers[0].config.num_warps], "PyTorch's own cache has it too"
        return self.stored[0]


class Launcher(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def launcher(warps: int) -> Launcher:
    config = SimpleNamespace(kwargs={"XBLOCK": 64 * warps}, num_warps=warps, num_stages=1)
    return Launcher(config=config, n_regs=1, n_spills=0, shared=0, cache_hash="")


ORIGINAL = torch_internals.CachingAutotuner.autotune_to_one_config


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_internals.CachingAutotuner, "autotune_to_one_config", ORIGINAL)  # put back at the end
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    tune_once()
    tune_once()


def test_kernel_with_another_suffix_reuses_its_tuning(tmp_path: Path) -> None:
    assert Tuner(tmp_path, "triton_poi_fused_relu_5", {4: 1.0, 8: 2.0}).kept == 4
    again = Tuner(tmp_path, "triton_poi_fused_relu_12", {4: 2.0, 8: 1.0})
    assert (again.kept, again.timed) == (4, []), "it is not timed again: that would be load on the GPU"


def test_waiting_process_reuses_the_tuned_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it tunes in its turn, and nowhere else."""
    turns: list[str] = []
    first = Tuner(tmp_path, "triton_poi_fused_relu_5", {4: 1.0, 8: 2.0})

    @contextmanager
    def alone() -> Iterator[None]:
        turns.append("begins")
        if turns == ["begins"]:
            assert first.kept == 4
        yield
        turns.append("ends")

    monkeypatch.setattr(torch_internals.CachingAutotuner, "autotune_to_one_config", ORIGINAL)
    tune_once(alone)
    second = Tuner(tmp_path, "triton_poi_fused_relu_12", {4: 2.0, 8: 1.0})
    assert (second.kept, second.timed, first.timed) == (4, [], [4, 8])
    assert turns == ["begins", "begins", "ends", "ends"]
    assert Tuner(tmp_path, "triton_poi_fused_relu_13", {4: 2.0, 8: 1.0}).kept == 4
    assert turns == ["begins", "begins", "ends", "ends"], "what is known needs no turn"


def test_different_kernel_is_tuned_separately(tmp_path: Path) -> None:
    assert Tuner(tmp_path, "triton_poi_fused_relu_5", {4: 1.0, 8: 2.0}).kept == 4
    assert Tuner(tmp_path, "triton_poi_fused_relu_5", {4: 2.0, 8: 1.0}, factor=3).kept == 8
    assert Tuner(tmp_path, "triton_poi_fused_gelu_5", {4: 2.0, 8: 1.0}).kept == 8


def test_tuning_of_trials_stays_in_their_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as trial:
        trial.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "trial"))
        assert Tuner(tmp_path, "triton_poi_fused_relu_5", {4: 1.0, 8: 2.0}).kept == 4
    assert Tuner(tmp_path, "triton_poi_fused_relu_5", {4: 2.0, 8: 1.0}).kept == 8


@pytest.mark.parametrize("content", [b"", b"{", json.dumps({"kwargs": {"XBLOCK": 1}}).encode()])
def test_invalid_tuning_result_is_ignored(tmp_path: Path, content: bytes) -> None:
    assert Tuner(tmp_path, "triton_poi_fused_relu_5", {4: 1.0, 8: 2.0}).kept == 4
    (file,) = (tmp_path / "inductor" / "tuned").iterdir()
    file.write_bytes(content)
    assert Tuner(tmp_path, "triton_poi_fused_relu_6", {4: 2.0, 8: 1.0}).kept == 8
