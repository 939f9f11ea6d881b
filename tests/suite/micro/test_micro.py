"""The indirection microbenchmark: its variables, records and kernel, and its command without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizations.graph.plan import Available, Choice, make_plan
from optimizations.graph.pointers import PointerUse
from optimizations.graph.records import CapturedGraph
from suite.cli import micro as cli_micro
from suite.cli.main import main
from suite.measure import environment
from suite.measure.gpu import NoGpu
from suite.micro.records import (
    COUNTS,
    MICRO_SCHEMA_VERSION,
    VARIANTS,
    MeasuredPoint,
    MicroRun,
    Series,
    read_micro_run,
)
from suite.results.errors import EXIT_WRONG_USE
from tests.optimizations.graph.test_plan import kernel, word
from tests.optimizations.graph.test_updaters import analysis_of


def run_of(*measured: MeasuredPoint) -> MicroRun:
    here = environment.collect("a-run", ("encore", "micro", "indirection"), {"samples": 3})
    return MicroRun(micro_schema_version=MICRO_SCHEMA_VERSION, environment=here, points=list(measured))


def measured_at(count: int) -> MeasuredPoint:
    series = [
        Series(variant=variant, moved=moved, host_us=[] if variant == "ptx" else [5.0 + place, 7.0 + place, 100.0])
        for place, variant in enumerate(VARIANTS)
        for moved in (True, False)
    ]
    return MeasuredPoint(sweep="inputs", inputs=count, series=series)


EVERYTHING = run_of(*map(measured_at, COUNTS))


def test_run_is_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "indirection.json"
    path.write_text(EVERYTHING.model_dump_json())
    assert read_micro_run(path) == EVERYTHING


def test_plan_with_another_node_updater_is_not_the_variant() -> None:
    from suite.micro.indirection import _objection

    graph = CapturedGraph(nodes=(kernel([word(1)]),), edges=())
    plan = make_plan(
        graph, analysis_of(PointerUse(0, 0, 0, 0, 0)), Choice.PRELUDE, Available(against_prelude=lambda: "old")
    )
    assert _objection(plan, "prelude") == "prelude: old"
    assert _objection(plan, "host") is None


def test_command_without_a_gpu_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("suite.measure.gpu.find_gpu", lambda: (_ for _ in ()).throw(NoGpu("no NVIDIA GPU here")))
        with pytest.raises(SystemExit) as ended:
            main(["micro", "indirection"])
    assert (ended.value.code, capsys.readouterr().err) == (EXIT_WRONG_USE, "encore: no NVIDIA GPU here\n")


class FakeBench:
    """Measures what `measured_at` makes up; fails at the third point."""

    def __init__(self, device: int, *, samples: int) -> None:
        self.done = 0

    def measure(self, count: int) -> MeasuredPoint:
        self.done += 1
        if self.done == 3:
            raise RuntimeError("the device is gone")
        return measured_at(count)

    def close(self) -> None: ...


def test_interrupt_keeps_the_points_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from suite.micro import indirection

    monkeypatch.setattr("suite.measure.gpu.find_gpu", lambda: None)
    monkeypatch.setattr(indirection, "Bench", FakeBench)
    with pytest.raises(RuntimeError, match="the device is gone"):
        cli_micro.indirection(samples=5, out=tmp_path)
    assert [one.inputs for one in read_micro_run(tmp_path / "indirection.json").points] == list(COUNTS[:2])
