"""Host time by layer: what the command measures on a CPU, with Inductor replaced by running the FX graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import optimizations
from optimizations import torch_internals
from optimizations.report.recordings import FullWay
from suite.cli.main import app, main
from suite.measure.modes import MODES
from suite.micro import host
from suite.micro.host import Case, measure
from suite.micro.host_cost import CALL, ENTRY, GRAPH, NONE, FullCalls, HostCost, HostRun, Judged, LayerTime, table
from suite.results.errors import EXIT_WRONG_USE


@pytest.fixture(autouse=True)
def inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Running:
        @staticmethod
        def compile_fx(
            graph_module: torch.fx.GraphModule, inputs: Sequence[Any], **settings: Any
        ) -> Callable[..., Any]:
            return graph_module.forward

    monkeypatch.setattr(torch_internals, "compile_fx", Running, raising=False)
    monkeypatch.setattr(host, "SETTLING", 4)
    yield
    optimizations.reset()
    torch_internals.reset_dynamo()


def case(parameters: int, lean: bool | None = True) -> Case:
    return Case(host.synthetic(parameters), MODES["indirection"], lean, device="cpu", calls=100)


def test_times_are_nested_and_bound_parameters_cost_little() -> None:
    before = {True: float("inf"), False: float("inf")}
    # The fastest and not the medians, and in turns: other work on the machine may take the caches away for a while.
    for _ in range(30):
        for lean in before:
            cost = measure(case(150, lean))
            assert (cost.parameters, cost.buffers, cost.lean) == (150, 0, lean)
            assert len(cost.issue_us) == len(cost.whole_us) == 100
            assert all(whole >= issue > 0 for issue, whole in zip(cost.issue_us, cost.whole_us, strict=True))
            assert cost.without_guards_us
            assert cost.floor_us == []
            call, entry = cost.layer_us(CALL), cost.layer_us(ENTRY)
            assert call is not None
            assert entry is not None
            assert call > entry > 0
            assert {layer.layer: layer.calls for layer in cost.layers} == {CALL: 1, ENTRY: 1}
            fastest = {layer.layer: layer.fastest_us for layer in cost.layers}
            before[lean] = min(before[lean], fastest[CALL] - fastest[ENTRY])
            assert all(layer.fastest_us <= layer.host_us for layer in cost.layers)
        if before[True] < 0.9 * before[False]:
            break
    assert before[True] < 0.9 * before[False]


def test_every_parameter_is_an_argument_of_the_graph() -> None:
    torch_internals.reset_dynamo()
    counts = []

    def backend(graph_module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        counts.append(len(inputs))
        return graph_module.forward

    for parameters in (0, 1, 6):
        module = host.Parameters(parameters)
        x = torch.ones(3)
        assert torch.equal(torch.compile(module, backend=backend)(x), x + 1)
        assert sum(1 for _ in module.parameters()) == parameters
    assert counts == [1, 2, 7]


def test_layers_that_run_several_times_are_counted_per_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = host._Clocks(time.perf_counter_ns)
    twice = clocks.around(GRAPH, lambda: None)
    for index in range(3):
        clocks.begin()
        for _ in range(2 if index else 0):
            twice()
        clocks.on = False
        twice()
    assert clocks.calls == {GRAPH: 4}
    assert len(clocks.spent[GRAPH]) == 3
    assert clocks.spent[GRAPH][0] == 0


def test_inside_time_runs_from_wait_to_wait() -> None:
    now, events = [0], []

    def wait() -> None:
        events.append("wait")
        now[0] += 1000

    inside = host._Clocks(lambda: now[0], wait)

    def graph() -> str:
        events.append("graph")
        now[0] += 20_000
        return "result"

    timed = inside.around(GRAPH, graph)

    def step(index: int) -> None:
        now[0] += 500_000
        for _ in range(index):
            assert timed() == "result"

    inside.take(3, step, wait)
    assert inside.of(GRAPH) == [0, 21_000, 42_000]
    call = ["wait", "graph", "wait"]
    assert events == ["wait", *["wait", *call], *["wait", *call, *call]], "and before each iteration"
    assert timed() == "result" and events[-1] == "graph", "none is waited for elsewhere"
    other = host._Clocks(lambda: now[0], wait)
    other.take(2, lambda index: None, wait)
    assert other.of(GRAPH) == []


def test_a_graphs_function_is_timed_without_a_wait_before_it_too() -> None:
    now, events = [0], []
    clocks = host._Clocks(lambda: now[0], lambda: events.append("wait"), waits_before=False)
    timed = clocks.around(GRAPH, lambda: events.append("graph"))
    clocks.take(2, lambda index: timed(), lambda: events.append("before"))
    assert events == ["before", "graph", "wait"] * 2


def test_the_command_records_each_case_and_prints_it(tmp_path: Path) -> None:
    arguments = ["micro", "host", "parameters-2", "EOS", "--device", "cpu", "--size", "tiny", "--calls", "3"]
    done = CliRunner().invoke(app, [*arguments, "--modes", "eager,indirection", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    run = HostRun.model_validate_json((tmp_path / "host.json").read_text())
    assert [(cost.program, cost.mode, cost.lean) for cost in run.costs] == [
        (program, mode, lean)
        for program in ("parameters-2", "EOS")
        for mode, lean in (("eager", None), ("indirection", True), ("indirection", False))
    ]
    assert (run.device, run.size) == ("cpu", "tiny")
    assert "parameters-2" in done.output


def test_the_table_shows_what_lies_between_the_layers() -> None:
    times = ((CALL, 48.0), (ENTRY, 30.0), (GRAPH, 21.5))
    cost = HostCost(
        program="P", mode="graph", lean=None, parameters=2, buffers=1, issue_us=[50.0], whole_us=[60.0],
        without_guards_us=[], floor_us=[40.0],
        layers=[LayerTime(layer=name, host_us=us, fastest_us=us, calls=1) for name, us in times],
        whole_by_stream_us=[58.0], whole_by_event_us=[59.0], inside_us=[31.0], inside_behind_idle_us=[35.5],
        judged=(Judged(kept="none", median_us={"none": 25.0, "copy": 30.04}),),
    )  # fmt: skip
    run = HostRun.model_construct(device="cuda", size="full", costs=[cost])
    cells = [str(next(iter(column.cells))) for column in table(run).columns]
    times = ["60.0", "60.0", "50.0", "40.0", "1.50", "18.0", "8.5", "21.5", "58.0", "59.0", "31.0", "35.5"]
    assert cells == ["P", "graph", "", "3", *times, NONE, "none (none 25.0, copy 30.0)"]


def test_ways_to_wait_alternate_and_end_the_time_of_calls() -> None:
    now, waited = [0], []

    def wait(name: str, us: int) -> Callable[[], None]:
        def waiting() -> None:
            waited.append(name)
            now[0] += 1000 * us

        return waiting

    def step(index: int) -> None:
        now[0] += 7000

    waits = [wait("device", 3), wait("stream", 2), wait("event", 1)]
    issue, whole = host._sample(step, 2, lambda: now[0], waits)
    assert (issue, whole) == ([7.0, 7.0], [[10.0, 10.0], [9.0, 9.0], [8.0, 8.0]])
    assert waited == ["device", "device", "device", "stream", "device", "event"] * 2


def test_what_selection_found_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        SimpleNamespace(decision="copies", median_us=(("no graph", 48.0),)),
        SimpleNamespace(decision=None, median_us=()),
    ]
    monkeypatch.setattr(optimizations, "report", lambda: [SimpleNamespace(selection=found)])
    assert host._judged() == (Judged(kept="copy", median_us={"none": 48.0}),)


def cost_of(whole_us: list[float], **ways: Any) -> HostCost:
    return HostCost(
        program="P", mode="indirection", lean=True, parameters=0, buffers=0, issue_us=whole_us, whole_us=whole_us,
        without_guards_us=[], floor_us=[], layers=[], **ways,
    )  # fmt: skip


def test_drifting_times_are_marked_and_single_outliers_are_not() -> None:
    assert not cost_of([50.0] * 19 + [500.0] + [55.0] * 20).uneven
    assert cost_of([50.0] * 60 + [80.0] * 140).uneven
    run = HostRun.model_construct(device="cuda", size="full", costs=[cost_of([50.0] * 60 + [80.0] * 140)])
    cells = [str(next(iter(column.cells))) for column in table(run).columns]
    assert cells[4:6] == ["~80.0", "50.0"]


def test_table_counts_fast_calls_and_names_the_first_slow_reason() -> None:
    ways = {
        "replays": 200,
        "steady_replays": 150,
        "full_calls": [FullCalls(reason=reason, calls=25) for reason in ("the first", "the second")],
    }
    run = HostRun.model_construct(device="cuda", size="full", costs=[cost_of([1.0], **ways)])
    assert [str(next(iter(column.cells))) for column in table(run).columns][-2] == "75% (the first)"


def test_counts_are_those_of_the_sampled_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = (({"a": 3}, (10, 4)), ({"a": 3, "b": 2}, (30, 22)))
    reports = iter(
        SimpleNamespace(
            full_ways=[FullWay("inference", reason, calls) for reason, calls in ways.items()],
            recordings=[SimpleNamespace(replays=replays, steady_replays=steady)],
        )
        for ways, (replays, steady) in counted
    )
    monkeypatch.setattr(optimizations, "report", lambda: [next(reports)])
    before = host._Ways.now()
    ways = host._Ways.now().since(before)
    assert (ways.replays, ways.steady_replays, dict(ways.full_calls)) == (20, 18, {"b": 2})


@pytest.mark.parametrize("name", ["parameters-", "parameters-01", "NOPE"])
def test_unknown_program_is_refused_before_measuring(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["micro", "host", "parameters-2", name, "--device", "cpu"])
    assert ended.value.code == EXIT_WRONG_USE
    assert name in capsys.readouterr().err
