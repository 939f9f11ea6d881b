"""A whole recording on the simulated driver: captured twice, planned, proven, carried out, and followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from simulated_cuda import SimulatedDriver, SimulatedGraph, SimulatedTools, fails
from simulated_work import COUNT, Captured, Work, aligned, counter_noise

from optimizations.captured.graph import MemoryRange
from optimizations.captured.placeholders import size_bytes
from optimizations.captured.recapture import Recaptured
from optimizations.indirection.plan import Choice
from optimizations.recording.description import CopiedOrNot, describe
from optimizations.recording.session import IndirectRecording, Outcome, RecordedInputs
from optimizations.recording.trial import RecordedState
from optimizations.report.recordings import RecordingReport

X, Y, W = 0, 1, 2


def values(start: float) -> torch.Tensor:
    return aligned(COUNT).copy_(torch.arange(COUNT) + start)


@dataclass
class Recorded:
    work: Work
    tools: SimulatedTools
    graph: SimulatedGraph
    captured: Captured
    outcome: Outcome
    caller: dict[int, torch.Tensor]
    stock: dict[int, torch.Tensor]
    report: RecordingReport

    def replay(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What a node does: follow, copy the copied inputs, launch."""
        inputs: list[Any] = [x, y, self.work.w]
        if self.outcome.follower is not None:
            self.outcome.follower.follow(inputs)
        for index, placeholder in self.outcome.held.items():
            placeholder.fill(inputs[index])
        for index, placeholder in self.stock.items():
            placeholder.copy_(inputs[index])
        self.graph.replay()
        if self.outcome.follower is not None:
            self.outcome.follower.launched()
        return self.captured.out.clone()


def record(
    work: Work,
    choice: Choice = Choice.HOST,
    *,
    tools: SimulatedTools | None = None,
    recapture: Any = None,
    x: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
) -> Recorded:
    """Record `work` as a node does, on inputs of a caller."""
    tools = tools or SimulatedTools(work.driver)
    caller = {X: values(1) if x is None else x, Y: values(100) if y is None else y}
    mutated = {Y} if work.writes_y else set()
    arguments = [caller[X], caller[Y], work.w]
    recording = IndirectRecording(choice, caller, mutated, arguments, recapture or work.recapture, tools)
    outside = recording.outside
    stock = {index: torch.empty_like(one) for index, one in caller.items() if index not in outside}
    for index, placeholder in stock.items():
        placeholder.copy_(caller[index])
    inputs = [outside.get(index, stock.get(index, value)) for index, value in enumerate(arguments)]
    graph, captured = work.record(inputs)
    written = [work.w] if work.writes_parameter else []
    destroyed = [one.view(torch.uint8) for one in (*written, *stock.values())]
    recorded = RecordedInputs(
        again=inputs,
        memory={
            index: MemoryRange(address=inputs[index].data_ptr(), size_bytes=size_bytes(inputs[index]))
            for index in recording.candidates
        },
        owned=captured.owned,
        state=RecordedState(destroyed, written, [captured.out]),
    )
    outcome = recording.complete(graph, recorded, len(inputs))
    described = [CopiedOrNot(index, "xy"[index], COUNT * 4, index in mutated, None) for index in caller]
    return Recorded(work, tools, graph, captured, outcome, caller, stock, describe(outcome, described, "inference"))


def assert_follows(recorded: Recorded) -> None:
    """Replays on inputs at ever new addresses give what the function computes, and nothing is copied for it."""
    kept: list[torch.Tensor] = []
    for step in range(6):
        x, y = values(step * 3.5), values(-step)
        kept += [x, y]
        expected = 2 * x + y
        assert torch.equal(recorded.replay(x, y), expected), step
    recorded.work.driver.check_node_memory()
    if recorded.outcome.follower is not None:
        assert recorded.outcome.follower.moves >= len(kept) // 2
        assert recorded.outcome.follower.stand_in_bytes == 0


def reasons(recorded: Recorded, index: int) -> str:
    return "; ".join(next(one.reasons for one in recorded.report.inputs if one.index == index))


@pytest.fixture
def driver() -> SimulatedDriver:
    return SimulatedDriver()


@pytest.mark.parametrize("choice", [Choice.AUTO, Choice.HOST, Choice.PRELUDE])
def test_all_inputs_are_read_in_place(driver: SimulatedDriver, choice: Choice) -> None:
    recorded = record(Work(driver), choice)
    assert recorded.outcome.follower is not None
    assert recorded.outcome.follower.indices == [X, Y]
    assert not recorded.outcome.held, "their placeholders are free"
    assert recorded.graph.instantiations == 1
    assert (recorded.report.copied_bytes, recorded.report.pointer_bytes) == (0, 16)
    applier = "prelude" if choice is Choice.PRELUDE else "host"
    assert [(one.nodes, one.pointers, one.appliers) for one in recorded.report.inputs] == [(1, 1, (applier,))] * 2
    assert_follows(recorded)
    assert list(driver.executables) == [recorded.graph.executable], "the trial's graphs are destroyed"


def test_nothing_is_set_while_nothing_moves(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver))
    x, y = values(7), values(8)
    recorded.replay(x, y)
    follower = recorded.outcome.follower
    assert follower is not None
    driver.calls.clear()
    before = (follower.moves, follower.pointer_bytes)
    x.fill_(3.0)
    assert torch.equal(recorded.replay(x, y), 2 * x + y), "new data at the old address"
    assert driver.calls == []
    assert (follower.moves, follower.pointer_bytes) == before


def test_a_hidden_pointer_costs_its_input_alone(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver, hides_y=True))
    assert recorded.outcome.follower is not None
    assert recorded.outcome.follower.indices == [X]
    assert list(recorded.outcome.held) == [Y]
    assert "no use of its address was found" in reasons(recorded, Y)
    assert recorded.report.copied_bytes == COUNT * 4
    assert_follows(recorded)


def test_a_pointer_that_is_hidden_beside_a_visible_one_is_found_by_the_outcome(driver: SimulatedDriver) -> None:
    """y is used twice: once by a parameter, once through device memory, where no search of parameters finds it."""
    recorded = record(Work(driver, hides_y=True, writes_y=True))
    assert recorded.outcome.follower is not None
    assert recorded.outcome.follower.indices == [X]
    assert "differs by up to" in reasons(recorded, Y)


@pytest.mark.parametrize("data", [torch.float32, torch.int32])
def test_a_graph_that_does_nothing_is_not_taken_for_right(
    driver: SimulatedDriver, monkeypatch: pytest.MonkeyPatch, data: torch.dtype
) -> None:
    """What the run before it left in memory must not be taken for its outcome."""
    launch = SimulatedDriver.launch

    def all_but_the_last(self: SimulatedDriver, executable: int) -> None:
        if executable != max(self.executables):
            launch(self, executable)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDriver, "launch", all_but_the_last)
        recorded = record(Work(driver), x=values(1).view(data), y=values(100).view(data))
    assert recorded.outcome.follower is None
    assert "differs by up to" in reasons(recorded, X)


def test_a_prelude_that_does_not_work_is_replaced_by_host_updates(driver: SimulatedDriver) -> None:
    driver.functions[driver.prelude_function].body = lambda *_: None
    recorded = record(Work(driver), Choice.PRELUDE)
    assert [one.appliers for one in recorded.report.inputs] == [("host",), ("host",)]
    assert "the proof failed" in recorded.report.fallbacks[0]
    assert not any(node.updatable for node in driver.nodes.values() if node.original is None)
    assert_follows(recorded)


def test_a_kernel_whose_ptx_cannot_be_assembled_takes_another_applier(driver: SimulatedDriver) -> None:
    tools = SimulatedTools(driver)
    tools.rewritten["double"] = lambda node: driver.handle()
    tools.broken_ptx["double"] = "ptxas ran out of registers"
    recorded = record(Work(driver), Choice.PTX, tools=tools)
    assert [one.appliers for one in recorded.report.inputs] == [("prelude",), ("prelude",)]
    assert any("ptxas ran out of registers" in fallback for fallback in recorded.report.fallbacks)
    assert_follows(recorded)


def test_no_memory_for_the_scout_leaves_all_to_stock(driver: SimulatedDriver) -> None:
    def recapture(inputs: Sequence[Any]) -> Recaptured:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    recorded = record(Work(driver), recapture=recapture)
    assert recorded.outcome.follower is None
    assert sorted(recorded.stock) == [X, Y]
    assert "out of memory" in str(recorded.report.off)
    assert "out of memory" in reasons(recorded, X)
    assert_follows(recorded)


@pytest.mark.parametrize(
    "call", ["cuGraphGetNodes", "cuGraphClone", "cuGraphInstantiate", "cuGraphExecKernelNodeSetParams", "cuGraphLaunch"]
)
def test_a_call_that_fails_before_the_graph_is_changed_costs_only_indirection(
    driver: SimulatedDriver, call: str
) -> None:
    work = Work(driver)

    def recapture(inputs: Sequence[Any]) -> Recaptured:
        scout = work.recapture(inputs)
        driver.failing.add(call)
        return scout

    recorded = record(work, recapture=recapture)
    driver.failing.clear()
    assert call in str(recorded.report.off)
    assert recorded.outcome.follower is None
    assert sorted(recorded.outcome.held) == [X, Y]
    assert_follows(recorded)


def test_an_input_that_an_output_aliases_is_left_to_stock(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver, returns_x=True))
    assert list(recorded.stock) == [X]
    assert recorded.outcome.follower is not None
    assert recorded.outcome.follower.indices == [Y]
    assert "an output shares its memory" in reasons(recorded, X)
    assert_follows(recorded)


def test_padding_is_told_from_pointers_by_a_control_capture(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver, padding=lambda capture: (0x1111 * (capture + 1)).to_bytes(8, "little")))
    assert len(recorded.work.captures) == 3
    assert recorded.outcome.follower is not None
    assert_follows(recorded)


def test_padding_that_happened_to_be_the_same_once_more_is_told_by_a_repeat(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver, padding=lambda capture: (7 if capture == 0 else 8).to_bytes(8, "little")))
    assert len(recorded.work.captures) == 4, "the scout, the recording, a control and a repeat of the scout"
    assert recorded.outcome.follower is not None
    assert_follows(recorded)


def test_nothing_is_repeated_where_an_input_was_given_up(driver: SimulatedDriver) -> None:
    """Its place in the scout is gone, and a capture elsewhere would make padding of what depends on it."""
    work = Work(driver, returns_x=True, padding=lambda capture: (7 if capture == 0 else 8).to_bytes(8, "little"))
    recorded = record(work)
    assert len(recorded.work.captures) == 3
    assert recorded.outcome.follower is None
    assert_follows(recorded)


@pytest.mark.parametrize("choice", [Choice.HOST, Choice.PRELUDE])
def test_after_a_call_that_never_launched_the_graph_reads_what_the_next_one_passes(
    driver: SimulatedDriver, choice: Choice
) -> None:
    recorded = record(Work(driver), choice)
    follower = recorded.outcome.follower
    assert follower is not None
    recorded.replay(values(1), values(2))
    x, y = values(3), values(4)
    follower.follow([x, y, recorded.work.w])  # interrupted before its launch
    assert torch.equal(recorded.replay(x, y), 2 * x + y)
    assert torch.equal(recorded.replay(x, y), 2 * x + y)


def test_a_word_that_moves_with_the_addresses_for_no_known_reason_forbids_all(driver: SimulatedDriver) -> None:
    """The value of both captures at the scout's addresses differs from that of both at the recording's."""
    recorded = record(Work(driver, padding=lambda capture: (7 if capture in (0, 3) else 8).to_bytes(8, "little")))
    assert len(recorded.work.captures) == 4
    assert recorded.outcome.follower is None
    assert "no input explains it" in reasons(recorded, X)
    assert sorted(recorded.outcome.held) == [X, Y]
    assert_follows(recorded)


def test_what_runs_destroy_is_put_back(driver: SimulatedDriver) -> None:
    work = Work(driver, writes_parameter=True)
    work.w.fill_(5.0)
    recorded = record(work)
    assert recorded.outcome.proof_runs > 0
    assert torch.equal(work.w, torch.full((COUNT,), 5.0)), "the proof ran the graph, and the parameter does not show it"
    recorded.replay(values(1), values(2))
    assert torch.equal(work.w, torch.full((COUNT,), 6.0))


def test_a_mutated_input_is_written_where_the_caller_has_it(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver, writes_y=True))
    assert recorded.outcome.follower is not None
    assert recorded.outcome.follower.mutated == (Y,)
    assert torch.equal(recorded.caller[Y], values(100)), "the proof did not touch the caller's tensor"
    for start in (3, 30):
        x, y = values(start), values(start + 1)
        expected = 2 * x + y
        assert torch.equal(recorded.replay(x, y), expected)
        assert torch.equal(y, torch.zeros(COUNT))


def test_a_mutated_input_keeps_its_placeholder_out_of_the_pool_even_if_it_is_copied(driver: SimulatedDriver) -> None:
    def recapture(inputs: Sequence[Any]) -> Recaptured:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    recorded = record(Work(driver, writes_y=True), recapture=recapture)
    assert list(recorded.stock) == [X]
    assert list(recorded.outcome.held) == [Y]
    assert torch.equal(recorded.outcome.held[Y].tensor, values(100))


def test_a_function_that_does_not_repeat_itself_is_judged_by_its_own_spread(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver, noise=counter_noise(0.5)))
    assert recorded.outcome.follower is not None
    assert recorded.outcome.follower.indices == [X, Y]
    hidden = record(Work(SimulatedDriver(), noise=counter_noise(0.5), hides_y=True, writes_y=True))
    assert hidden.outcome.follower is not None
    assert hidden.outcome.follower.indices == [X]


def test_values_that_look_like_poison_prove_nothing(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver), x=torch.zeros(COUNT, dtype=torch.int32))
    assert "would not show" in reasons(recorded, X)
    assert recorded.outcome.follower is not None
    assert recorded.outcome.follower.indices == [Y]


def test_a_misaligned_input_is_copied_for_that_call_alone(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver))
    follower = recorded.outcome.follower
    assert follower is not None
    x, y = aligned(COUNT, offset=1).copy_(torch.arange(COUNT)), values(4)
    assert torch.equal(recorded.replay(x, y), 2 * x + y)
    assert follower.stand_in_bytes == COUNT * 4
    x = values(9)
    assert torch.equal(recorded.replay(x, y), 2 * x + y)
    assert follower.stand_in_bytes == COUNT * 4


def test_inputs_that_share_memory_stay_correct(driver: SimulatedDriver) -> None:
    recorded = record(Work(driver))
    follower = recorded.outcome.follower
    assert follower is not None
    shared = aligned(1024).copy_(torch.arange(1024))
    for first, second in ((0, 0), (0, 64), (64, 0), (0, 4), (128, 128)):
        x, y = shared[first : first + COUNT], shared[second : second + COUNT]
        assert torch.equal(recorded.replay(x, y), 2 * x + y)
    assert follower.stand_in_bytes == COUNT * 4, "only the one at 16 bytes was copied, for the sake of its kernel"


def test_what_lies_in_the_graphs_own_memory_can_be_passed_back_in(driver: SimulatedDriver) -> None:
    """The graph overwrites it before it reads it, so it is copied first."""
    recorded = record(Work(driver))
    recorded.replay(values(2), values(1))
    x, y = values(3), recorded.captured.pool[:COUNT]
    expected = 2 * x + y.clone()
    assert torch.equal(recorded.replay(x, y), expected)


def test_a_failure_while_the_recorded_graph_is_changed_is_no_secret(driver: SimulatedDriver) -> None:
    work = Work(driver)
    graphs: list[SimulatedGraph] = []
    stock = SimulatedGraph.instantiate

    def instantiate_then_fail(graph: SimulatedGraph) -> None:
        stock(graph)
        graphs.append(graph)
        driver.failing.add("cuGraphUpload")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedGraph, "instantiate", instantiate_then_fail)
        with pytest.raises(RuntimeError, match="cuGraphUpload failed"):
            record(work, Choice.PRELUDE)
    assert len(graphs) == 1


def test_fails_restores() -> None:
    driver = SimulatedDriver()
    with fails(driver, "cuGraphClone"):
        assert "cuGraphClone" in driver.failing
    assert not driver.failing
