"""All modes of a workload share a cache of kernels, while graphs belong to their mode."""

from __future__ import annotations

from pathlib import Path

from suite.measure.modes import MODES
from suite.results.schema import CompileConditions
from suite.worker.compile_cache import CompileCache

COMPILE, GRAPH, UNPARTITIONED = (MODES[name] for name in ("compile", "graph", "graph-unpartitioned"))


def test_compile_conditions_report_cache_and_concurrency(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    assert cache.conditions(1) is CompileConditions.COLD_ALONE
    cache.compiled(COMPILE)
    assert cache.conditions(1) is CompileConditions.KERNELS_ALONE
    assert cache.conditions(2) is CompileConditions.KERNELS_SIDE_BY_SIDE
    assert CompileCache(tmp_path, kept=True).conditions(1) is CompileConditions.KERNELS_ALONE


def test_once_a_mode_has_compiled_the_others_find_its_kernels(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    assert not cache.has_kernels
    cache.compiled(UNPARTITIONED)
    assert cache.has_kernels and not cache.has(GRAPH)


def test_kept_compile_cache_has_kernels_but_no_graphs_or_results(tmp_path: Path) -> None:
    kept = [tmp_path / "inductor" / "ab" / "kernel.py", tmp_path / "rank1" / "inductor" / "cd" / "kernel.py"]
    gone = [tmp_path / "inductor" / "fxgraph" / "x", tmp_path / "rank1" / "inductor" / "aotautograd" / "y"]
    gone.append(tmp_path / "judged" / "real" / "z.json")
    for file in (*kept, *gone):
        file.parent.mkdir(parents=True)
        file.touch()
    CompileCache(tmp_path)
    assert all(file.exists() for file in (*kept, *gone))
    CompileCache(tmp_path, kept=True)
    assert all(file.exists() for file in kept) and not any(file.exists() for file in gone)
