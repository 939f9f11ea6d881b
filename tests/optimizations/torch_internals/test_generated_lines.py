"""Inductor's code: a line leads to the program's, and a kernel that was tuned is not tuned again."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from explain_programs import Towers
from explain_seen import explained

from optimizations import torch_internals
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.torch_internals.generated_modules import line_of, source_line
from optimizations.torch_internals.tuning import tune_once


def program(x: torch.Tensor) -> torch.Tensor:
    y = x @ x
    return y.sin() @ y


def test_kernels_of_a_partition_map_to_the_program(tmp_path: Path) -> None:
    """CUDA graphs are made of partitions, whose lines stock PyTorch drops."""
    seen = explained(tmp_path, "towers")["towers"]
    text, path = seen.source, str(tmp_path / "module.py")
    assert "def partition_0(args):" in text
    torch_internals.PyCodeCache.linemaps[path] = list(zip(*seen.lines, strict=True))
    found = [
        source_line(path, number)
        for number, line in enumerate(text.splitlines(), start=1)
        if ".run(" in line or "extern_kernels." in line
    ]
    forward = [inspect.getsourcefile(Towers), inspect.getsourcelines(Towers.forward)[1]]
    assert found == [f"{forward[0]}:{forward[1] + line} in forward" for line in (1, 2, 3)]


def test_launches_of_generated_code_have_lines_of_the_program() -> None:
    nodes = 0

    class Counting(torch_internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal nodes
            nodes += 1
            return func(*args, **(kwargs or {}))

    with torch_internals.fresh_cache(), torch_internals.inductor_config.patch({"fallback_by_default": True}):
        torch.compiler.reset()
        before = len(torch_internals.PyCodeCache.modules)
        torch.compile(program)(torch.ones(2, 2))
        (module,) = torch_internals.PyCodeCache.modules[before:]
        log = LaunchLog(lambda: nodes, device_type="cpu")
        with Counting(), log.noting(vars(module)):
            module.call([torch.ones(2, 2)])
    torch.compiler.reset()
    first = inspect.getsourcelines(program)[1]
    found = [
        (one.launch.name, source_line(*line_of(*one.launch.place)))
        for one in log.logged
        if one.launch.place is not None
    ]
    assert found == [
        ("aten.mm.default", f"{__file__}:{first + 1} in program"),
        ("aten.sin.default", f"{__file__}:{first + 2} in program"),
        ("aten.mm.default", f"{__file__}:{first + 2} in program"),
    ]


def test_line_of_another_file_has_none() -> None:
    assert source_line(__file__, 3) is None


def test_unexpected_stack_frames_give_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [[{"filename": "a.py"}], [("a.py", 3)], [{"filename": "a.py", "line": "x", "name": "f"}]]
    for answer in answers:
        monkeypatch.setattr(
            torch_internals.PyCodeCache, "stack_frames_for_code", lambda path, line, found=answer: found
        )
        assert source_line("a.py", 1) is None


# A kernel that was tuned is not tuned again where it has another number, and only there.


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
