"""Selection: its rules on numbers alone, the race of alternatives, and what is chosen in the calls of a program."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, nodes, values

import optimizations
from optimizations import selection
from optimizations.in_place import budget
from optimizations.in_place.generated import GeneratedCode, read_generated
from optimizations.race import CALLS, Race
from optimizations.report.recordings import SelectionReport
from optimizations.selection import (
    LARGE_RESULT_BYTES,
    copies_cost_more,
    without_graph,
)
from optimizations.trees import graphed_function as measured
from optimizations.trees.containers import free_all
from optimizations.trees.function import TRIED_WITHOUT_GRAPH
from optimizations.trees.graphed_function import release_recordings


@pytest.mark.parametrize(("result_bytes", "is_tiny"), [(LARGE_RESULT_BYTES - 1, True), (LARGE_RESULT_BYTES, False)])
def test_large_results_for_a_later_partition_keep_the_graph(result_bytes: int, is_tiny: bool) -> None:
    assert (without_graph(2, result_bytes) is not None) is is_tiny
    assert (copies_cost_more(2**34, 2, result_bytes) is not None) is is_tiny


@pytest.mark.parametrize(
    ("kernels", "copied_bytes", "pays"),
    [
        (16, 3_243_229_184, False),  # DR-I with stock's copies: 0.81 of no graph
        (69, 182_450_000, True),  # TKE: 1.28
        (28, 38_540_000, True),  # ALNET-128: 1.03
        (257, 340_000, True),  # MMC: 2.75
        (3, 0, True),
        (None, 2**34, True),
    ],
)
def test_graph_is_kept_where_it_was_measured_faster(kernels: int | None, copied_bytes: int, pays: bool) -> None:
    why = copies_cost_more(copied_bytes, kernels)
    assert (why is None) is pays


# A race of alternatives, on events that the test completes.


@dataclass
class Event:
    at_ms: float
    calls: Calls | None = None

    def query(self) -> bool:
        return self.calls is None or not self.calls.are_behind

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


class Calls:
    """Calls of a race on a GPU that takes `ms` milliseconds for each, by alternative."""

    def __init__(self, **ms: float) -> None:
        self.ms, self.race, self.used = ms, Race(list(ms)), list[str]()
        self.now_ms, self.are_behind = 0.0, False

    def run(self, calls: int = 1) -> Calls:
        def call(name: str) -> tuple[str, tuple[Event, Event]]:
            self.used.append(name)
            start, self.now_ms = self.now_ms, self.now_ms + self.ms[name]
            return name, (Event(start, self), Event(self.now_ms, self))

        for _ in range(calls):
            assert self.race.run(call) == self.used[-1]
        return self


def test_race_runs_each_alternative_equally_often() -> None:
    calls = Calls(a=1.0, b=0.5, c=2.0).run(3 * (CALLS + 1))
    assert calls.used == ["a"] * (CALLS + 1) + ["b"] * (CALLS + 1) + ["c"] * (CALLS + 1)
    assert calls.race.winner is None


def test_first_call_of_an_alternative_does_not_count() -> None:
    """It uploads a graph, or loads kernels."""
    calls = Calls(a=1.0, b=1.0)
    for index in range(2 * (CALLS + 1) + 1):
        calls.ms = dict.fromkeys("ab", 1.0 if index % (CALLS + 1) <= CALLS // 2 else 3.0)
        calls.run()
    assert calls.race.median_us == pytest.approx({"a": 2e3, "b": 2e3}), "with it, 1e3"


@pytest.mark.parametrize(("ms", "winner"), [(0.98, "a"), (0.96, "b"), (1.5, "a")])
def test_race_requires_a_gain_of_three_percent(ms: float, winner: str) -> None:
    assert Calls(a=1.0, b=ms).run(2 * (CALLS + 1) + 1).race.winner == winner


def test_race_does_not_synchronize() -> None:
    calls = Calls(a=1.0, b=0.5)
    calls.are_behind = True
    calls.run(2 * (CALLS + 1) + 5)
    assert calls.race.winner is None
    assert calls.used[-5:] == ["a"] * 5, "the first alternative runs until all events have completed"
    calls.are_behind = False
    calls.run()
    assert (calls.race.winner, calls.used[-1]) == ("b", "b")


def test_race_requires_nearly_disjoint_times() -> None:
    """Half of the calls of both take as long as each other."""
    calls = Calls(a=1.0, b=0.9)
    for index in range(2 * (CALLS + 1) + 1):
        calls.ms["a"] = calls.ms["b"] = 0.8 if index % 2 else 1.0
        if len(calls.used) > CALLS and index % 4 == 0:
            calls.ms["b"] = 0.75
        calls.run()
    race = calls.race
    assert race.median_us["b"] < 0.97 * race.median_us["a"]
    assert race.winner == "a"


# Selection in the calls of a program: stock's CUDAGraph Trees on host memory, with Encore's nodes.


W = values(7)
TINY = GeneratedCode(None, kernels=selection.MOST_TINY_KERNELS)
PRODUCTS = GeneratedCode(None, kernels=selection.MOST_TINY_KERNELS + 1, products=frozenset({0, 1}))
"""Code whose inputs are read in place without trials."""

REFUSED = GeneratedCode("it calls a custom operator, mine::add", kernels=selection.MOST_TINY_KERNELS + 1)
"""Code that is not captured again, so that its inputs stay copied."""


def run(compiled: Compiled, calls: int, *, moving: bool = True) -> None:
    """Calls with right results, at ever new addresses or always the same."""
    kept = [(values(1), values(2))]
    for step in range(calls):
        x, y = kept[-1]
        if moving:
            x, y = values(step), values(-3 * step)
            kept.append((x, y))
        else:
            x.fill_(step)
        compiled.checked(x, y, W)


def selection_of(compiled: Compiled) -> SelectionReport:
    found: SelectionReport = compiled.functions[-1].selection()
    return found


def test_tiny_inference_is_never_recorded(cuda_on_cpu: CudaOnCpu) -> None:
    model = Model(cuda_on_cpu, code=TINY)
    compiled = Compiled(model, selection="rule")
    run(compiled, 5)
    assert model.runs == ["plain"] * 5
    assert nodes() == []
    kernels = selection.MOST_TINY_KERNELS
    why = f"launching a graph costs more than launching its kernels ({kernels})"
    assert selection_of(compiled) == SelectionReport("inference", "no graph", why, kernels, None, 0)
    assert compiled.uncaptured() == {f"selection: {why}": 5}
    assert optimizations.settled()


def partition(model: Model, number: int, of: int) -> Any:
    """The model as a partition of a program, as Inductor's generated code has it."""
    names: dict[str, Any] = {f"partition_{index}": None for index in range(of)} | {"model": model}
    found: Any = types.FunctionType(call_model.__code__, names, f"partition_{number}")
    read = read_generated(found)
    found.code = dataclasses.replace(model.code, is_partition=read.is_partition, hands_results_on=read.hands_results_on)
    return found


def call_model(args: list[Any]) -> Any:
    return globals()["model"](args)


@pytest.mark.parametrize(
    ("number", "of", "large_bytes", "is_recorded"),
    [(0, 2, 64, True), (0, 2, 65, False), (1, 2, 64, False), (0, 1, 64, False)],
)
def test_tiny_partition_with_large_results_is_recorded(
    cuda_on_cpu: CudaOnCpu,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    of: int,
    large_bytes: int,
    is_recorded: bool,
) -> None:
    """The partition after it reads them in graph memory."""
    monkeypatch.setattr(selection, "LARGE_RESULT_BYTES", large_bytes)
    model = Model(cuda_on_cpu, code=TINY)
    compiled = Compiled(partition(model, number, of), selection="rule")
    run(compiled, 5)
    assert ("captured" in model.runs) is is_recorded
    assert len(compiled.functions) == 1
    assert (selection_of(compiled).decision == "no graph") is not is_recorded


def test_graph_is_dropped_where_its_copies_cost_more(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "COPY_BYTES_PER_US", 1.0)
    model = Model(cuda_on_cpu, code=REFUSED)
    compiled = Compiled(model, selection="rule")
    run(compiled, 8)
    assert model.runs.count("captured") == 1
    assert model.runs[-4:] == ["plain"] * 4
    found = selection_of(compiled)
    assert found.decision == "no graph"
    saved = REFUSED.kernels * selection.LAUNCH_US
    assert found.why == f"copying its inputs would take 128 us, and the graph saves {saved:.0f} us of launches"
    assert nodes() == [], "its memory is given back"


@pytest.mark.parametrize(
    ("code", "settings"),
    [
        (dataclasses.replace(REFUSED, collective=True), {}),
        (REFUSED, {"is_inference": False}),
        (REFUSED, {"is_inference": False, "is_backward": True}),
    ],
)
def test_collectives_and_training_keep_their_graphs(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, code: GeneratedCode, settings: dict[str, bool]
) -> None:
    monkeypatch.setattr(selection, "COPY_BYTES_PER_US", 1.0)
    compiled = Compiled(Model(cuda_on_cpu, code=code), selection="rule", **settings)
    run(compiled, 8)
    assert selection_of(compiled).decision != "no graph"
    assert cuda_on_cpu.replays > 4


def test_graph_is_not_dropped_while_memory_is_short(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "COPY_BYTES_PER_US", 1.0)
    compiled = Compiled(Model(cuda_on_cpu, code=REFUSED), selection="rule")
    monkeypatch.setattr(type(cuda_on_cpu.tools), "free_bytes", lambda tools: 0)
    run(compiled, 8)
    assert selection_of(compiled).decision != "no graph"


@pytest.mark.parametrize(
    ("update_us", "moving", "decision"), [(2.3, True, "in place"), (1e3, True, "copies"), (1e3, False, "copies")]
)
def test_inputs_are_read_in_place_where_that_is_cheaper(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, update_us: float, moving: bool, decision: str
) -> None:
    monkeypatch.setattr(selection, "NODE_UPDATE_US", update_us)
    monkeypatch.setattr(budget, "FEWEST_REPLAYS", 8)
    compiled = Compiled(Model(cuda_on_cpu, code=PRODUCTS), selection="rule")
    run(compiled, 14, moving=moving)
    assert selection_of(compiled).decision == decision
    (report,) = compiled.reports
    moved = "7 of 7" if moving else "0 of 7"
    for one in report.inputs:
        assert one.indirect is (decision == "in place")
        assert one.indirect or f"it moved in {moved} calls" in one.reasons[0]
    assert report.copied_bytes == (0 if decision == "in place" else 128)
    assert optimizations.settled()


class Prices:
    """Marks of a simulated GPU: time grows by what was done since the mark before."""

    def __init__(self, cuda: CudaOnCpu, model: Model, plain: float, launch: float, copied_byte: float) -> None:
        self.cuda, self.model = cuda, model
        self.prices = plain, launch, copied_byte

    def __call__(self, device_index: int) -> Any:
        done = self.model.runs.count("plain"), self.cuda.replays, sum(node.copied_bytes for node in nodes())
        return Event(sum(count * price for count, price in zip(done, self.prices, strict=True)))


Measure = Callable[..., tuple[Model, Compiled]]


@pytest.fixture
def measure(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Make a measured function, whose calls take what these prices say."""

    def made(plain: float, launch: float, copied_byte: float, **keywords: Any) -> tuple[Model, Compiled]:
        model = Model(cuda_on_cpu, code=keywords.pop("code", PRODUCTS))
        monkeypatch.setattr(measured, "mark", Prices(cuda_on_cpu, model, plain, launch, copied_byte))
        return model, Compiled(model, selection="measure", **keywords)

    return made


@pytest.mark.parametrize(
    ("prices", "decision"),
    [
        ((1.0, 1.0, 0.0), "in place"),
        ((3.0, 1.0, 0.01), "in place"),
        ((0.5, 1.0, 0.0), "no graph"),
        ((3.0, 1.0, -0.005), "copies"),
    ],
)
def test_measured_function_runs_the_fastest_variant(
    measure: Measure, prices: tuple[float, float, float], decision: str
) -> None:
    model, compiled = measure(*prices)
    run(compiled, 3 * (CALLS + 1) + 8)
    found = selection_of(compiled)
    assert found.decision == decision
    assert [name for name, _ in found.median_us] == ["in place", "copies", "no graph"]
    assert found.why.startswith("measured: in place ")
    assert optimizations.settled()
    before = len(model.runs)
    run(compiled, 4)
    assert (len(model.runs) - before == 4) is (decision == "no graph")
    assert all(
        bool(one.copied_bytes) is (decision == "copies") for one in compiled.reports[-1:] if decision != "no graph"
    )


def test_race_ends_after_a_bounded_number_of_calls(measure: Measure) -> None:
    _model, compiled = measure(0.5, 1.0, 0.0)
    run(compiled, 6)
    assert not optimizations.settled()
    run(compiled, 3 * (CALLS + 1) + 1)
    assert optimizations.settled()
    assert compiled.uncaptured()[TRIED_WITHOUT_GRAPH] == CALLS + 2, "one when it has won"


def test_training_is_never_measured_without_a_graph(measure: Measure) -> None:
    _model, compiled = measure(0.1, 1.0, 0.0, is_inference=False)
    run(compiled, 2 * (CALLS + 1) + 8)
    assert [name for name, _ in selection_of(compiled).median_us] == ["in place", "copies"]


def test_function_with_collectives_is_never_measured(measure: Measure) -> None:
    code = GeneratedCode(None, collective=True, products=frozenset({0, 1}))
    _model, compiled = measure(0.1, 1.0, 0.0, code=code)
    run(compiled, 12)
    assert selection_of(compiled).median_us == ()
    assert selection_of(compiled).decision in ("in place", "copies")


def test_measured_decision_outlives_a_reset(measure: Measure) -> None:
    _model, compiled = measure(3.0, 1.0, -0.005)
    run(compiled, 3 * (CALLS + 1) + 8)
    release_recordings()
    free_all()
    run(compiled, 6)
    assert (selection_of(compiled).decision, len(compiled.functions)) == ("copies", 2)
    assert optimizations.settled()
    assert compiled.reports[-1].copied_bytes == 128


def test_referenced_results_stay_valid_during_a_race(measure: Measure) -> None:
    _model, compiled = measure(0.5, 1.0, 0.0)
    held = []
    for step in range(60):
        (result,) = compiled.checked(values(step), values(2 * step), W)
        held.append((result, result.clone()))
        del held[:-3]
        assert all(torch.equal(one, expected) for one, expected in held), step
