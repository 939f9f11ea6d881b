"""Selection in the calls of a program: what is kept, and what the program sees of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import RULES, SimulatedTimer, W, make, run, run_and_hold, selection
from trees_on_cpu import Compiled, Model, nodes, values

import optimizations
from optimizations.capture import inner_graphs
from optimizations.capture.trees import manager as manager_module
from optimizations.capture.trees.function import SELECTED
from optimizations.indirection.plan import Choice
from optimizations.recording.description import RESTING
from optimizations.selection import member
from optimizations.selection.caller import MOST_RETURNS

__all__ = ["cuda_on_cpu", "make"]


@pytest.mark.parametrize(
    ("prices", "kept", "outcome"),
    [
        ({"plain": 10e-6, "launch": 20e-6}, "none", "same"),
        ({"plain": 10e-6, "launch": 10e-6}, "none", "same"),
        ({"plain": 30e-6, "launch": 10e-6}, "copy", "faster"),
        ({"plain": 30e-6, "launch": 10e-6, "copied_byte": 1e-7}, "indirection", "faster"),
        ({"plain": 20e-6, "launch": 12e-6, "copied_byte": 1e-7}, "indirection", "faster"),
        ({"plain": 16e-6, "launch": 12e-6, "copied_byte": 1e-7}, "none", "same"),
        ({"plain": 30e-6, "launch": 12e-6, "copied_byte": 1e-8}, "indirection", "faster"),
        ({"plain": 10e-6, "launch": 10e-6, "copied_byte": 1e-7}, "none", "same"),
    ],
)
def test_the_fastest_is_kept_and_of_equal_ones_the_simplest(
    make: Any, prices: dict[str, float], kept: str, outcome: str
) -> None:
    _, compiled = make(**prices)
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    assert not optimizations.settled()
    run(compiled, 400)
    report = selection(compiled)
    assert (report.state, report.kept, report.outcome, report.source) == ("decided", kept, outcome, "measured")
    assert optimizations.settled()
    assert [one.candidate for one in report.candidates] == ["none", "copy", "indirection"]
    assert all(one.calls >= 30 and one.median_us > 5 for one in report.candidates)
    assert 0 < report.calls <= 460
    assert report.measuring_s > 0


@pytest.mark.parametrize("kept", ["none", "copy", "indirection"])
def test_after_the_verdict_calls_are_served_by_it_and_nothing_is_timed(
    make: Any, cuda_on_cpu: CudaOnCpu, kept: str
) -> None:
    prices, compiled = make(
        plain=5e-6 if kept == "none" else 50e-6, launch=10e-6, copied_byte=1e-7 if kept == "indirection" else 0
    )
    run(compiled, 400)
    assert selection(compiled).kept == kept
    before = (prices.timed, *prices.counted())
    run(compiled, 20)
    timed, runs, launches, copied = (
        after - then for after, then in zip((prices.timed, *prices.counted()), before, strict=True)
    )
    assert timed == 0
    assert (runs, launches) == ((20, 0) if kept == "none" else (0, 20))
    assert copied == (20 * 2 * W.nbytes if kept == "copy" else 0)
    report = selection(compiled)
    inputs = compiled.reports[0].inputs
    assert (report.kernels, report.input_bytes) == (1, 2 * W.nbytes)
    if kept == "copy":
        assert (report.copied_bytes, report.pointer_bytes) == (2 * W.nbytes, 0)
        assert {one.reasons for one in inputs} == {(RESTING,)}
    else:
        assert (report.copied_bytes, report.pointer_bytes) == (0, 16)
        assert all(one.indirect and not one.reasons for one in inputs)


@pytest.mark.parametrize("late", [1, 7, 30])
def test_times_that_are_known_calls_later_decide_as_well(make: Any, late: int) -> None:
    _, compiled = make(plain=30e-6, copied_byte=1e-7, late=late)
    run(compiled, 500)
    report = selection(compiled)
    assert (report.state, report.kept) == ("decided", "indirection")


def test_every_call_is_made_once_whoever_serves_it(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """`w` counts the calls, as the buffers of a BatchNorm do."""
    prices, compiled = make(model=Model(cuda_on_cpu, writes_w=True), mutated_input_idxs=(2,))
    w = values(0)
    kept = []
    for step in range(400):
        x, y = values(step), values(-step)
        kept.append((x, y))
        del kept[:-4]
        expected = 2 * x + y * w
        before = w.clone()
        assert torch.equal(compiled(x, y, w)[0], expected), step
        assert torch.equal(w, before + 1), step
    report = selection(compiled)
    assert report.state == "decided"
    assert prices.timed >= report.calls > 90


def test_results_held_over_calls_keep_their_values(make: Any) -> None:
    """A caller that keeps results has them whatever served the calls."""
    _, compiled = make(plain=50e-6)
    run_and_hold(compiled, 400)
    assert selection(compiled).state == "decided"


def test_nothing_is_timed_in_a_capture_of_the_users(make: Any) -> None:
    prices, compiled = make()
    run(compiled, 40)
    timed = prices.timed
    assert timed > 0
    prices.may = False
    run(compiled, 50)
    assert prices.timed == timed
    prices.may = True
    run(compiled, 400)
    assert selection(compiled).state == "decided"


def test_a_profiler_sees_the_program_and_not_what_is_being_measured(make: Any) -> None:
    """Each kernel takes longer for it, so that graphs would seem faster than they are."""
    prices, compiled = make(plain=5e-6)
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    before = (prices.timed, *prices.counted())
    with torch.autograd.profiler.profile():
        run(compiled, 50)
    timed, runs, launches, _ = (
        after - then for after, then in zip((prices.timed, *prices.counted()), before, strict=True)
    )
    assert (timed, runs, launches) == (0, 0, 50)
    run(compiled, 400)
    assert selection(compiled).kept == "none"


def profiled(on: bool) -> None:
    sys.setprofile((lambda *_: None) if on else None)


def traced(on: bool) -> None:
    sys.settrace((lambda *_: None) if on else None)


@pytest.mark.parametrize("follow", [profiled, traced])
@pytest.mark.parametrize("first", [0, 60])
def test_what_was_measured_while_python_was_followed_is_not_stored_for_others(
    make: Any, tmp_path: Path, follow: Callable[[bool], None], first: int
) -> None:
    """Each line of Python takes longer then, and one candidate runs more of them than another."""
    _, compiled = make(plain=5e-6)
    run(compiled, first)
    before = sys.getprofile(), sys.gettrace()
    try:
        follow(True)
        run(compiled, 60)
        follow(False)
        run(compiled, 400)
    finally:
        sys.setprofile(before[0])
        sys.settrace(before[1])
    assert selection(compiled).kept == "none"
    assert "traced or profiled" in selection(compiled).not_stored
    assert not list(tmp_path.rglob("*.verdict.json"))


def test_without_selection_nothing_is_reported_and_nothing_timed(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    run(compiled, 20)
    assert compiled.functions[0].selection() is None


def test_where_memory_is_short_no_call_is_tried_without_a_graph(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take what the graph's pool has once more, and the program would run out where stock does not."""
    free = 2**40
    monkeypatch.setattr(cuda_on_cpu.tools, "free_bytes", lambda: free)
    model = Model(cuda_on_cpu)
    prices, compiled = make(model=model, plain=5e-6)
    run(compiled, 6)
    free = 64
    before = model.runs.count("plain")
    run(compiled, 100)
    report = selection(compiled)
    assert report.state == "off"
    assert report.reason.startswith("memory:")
    assert (prices.timed, model.runs.count("plain")) == (0, before)
    assert optimizations.settled()


def test_a_function_that_cannot_be_recorded_is_off(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    model = Model(cuda_on_cpu)
    prices, compiled = make(model=model)
    body = model._body

    def fails(*args: Any) -> Any:
        raise RuntimeError("no capture here")

    original = cuda_on_cpu.allocate
    cuda_on_cpu.allocate = fails  # type: ignore[method-assign]
    try:
        run(compiled, 50)
    finally:
        cuda_on_cpu.allocate = original  # type: ignore[method-assign]
    assert body is not None
    report = selection(compiled)
    assert report.state == "off"
    assert "could not be recorded" in report.reason
    assert prices.timed == 0


def test_exceptions_of_the_program_pass_through_and_their_calls_do_not_count(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    class Interrupted(Model):
        interrupts = 0

        def __call__(self, inputs: list[Any]) -> list[Any]:
            if self.cuda.capturing is None and len(self.runs) in (20, 21):
                self.runs.append("interrupted")
                raise KeyboardInterrupt
            return super().__call__(inputs)

    _, compiled = make(model=Interrupted(cuda_on_cpu))
    with pytest.raises(KeyboardInterrupt):
        run(compiled, 400)
    assert selection(compiled).state == "measuring"
    with pytest.raises(KeyboardInterrupt):
        run(compiled, 400)
    run(compiled, 400)
    report = selection(compiled)
    assert report.state == "decided"
    counted = sum(one.calls for one in report.candidates)
    assert report.calls - 2 * 3 * RULES.block_calls <= counted <= report.calls - 2


def test_a_defect_of_selection_switches_it_off_and_reaches_no_program(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices, compiled = make()
    run(compiled, 50)

    def broken(self: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(SimulatedTimer, "end", broken)
    run(compiled, 20)
    report = selection(compiled)
    assert (report.state, report.reason) == ("off", "selection failed: ZeroDivisionError: a defect")
    timed = prices.timed
    run(compiled, 20)
    assert prices.timed == timed


def test_calls_without_a_graph_say_why(make: Any) -> None:
    _, compiled = make(plain=5e-6)
    run(compiled, 400)
    reasons = {one.reason: one.calls for one in compiled.functions[0].uncaptured()}
    assert reasons.keys() == {SELECTED}


def test_lean_off_is_measured_as_well(make: Any) -> None:
    _, compiled = make(plain=50e-6, copied_byte=1e-7, lean=False)
    run(compiled, 400)
    assert selection(compiled).kept == "indirection"


@pytest.mark.parametrize("choice", [Choice.AUTO, Choice.PRELUDE])
def test_every_applier_goes_back_and_forth_between_copying_and_pointing(make: Any, choice: Choice) -> None:
    _, compiled = make(plain=50e-6, copied_byte=1e-7, choice=choice)
    run(compiled, 400)
    assert selection(compiled).kept == "indirection"
    function = compiled.functions[0]
    for _ in range(3):
        function.serve("copy")
        run(compiled, 3)
        function.serve("indirection")
        run(compiled, 3)
        function.serve("copy")
        run(compiled, 3, moving=False)
        function.serve("none")
        run(compiled, 2)
        function.serve("indirection")
        run(compiled, 3, moving=False)


def test_calls_that_were_not_served_as_they_were_to_be_do_not_count(make: Any) -> None:
    """A result that is held makes the next calls run without a graph, whoever's turn it is."""
    _, compiled = make(plain=1.0)
    run(compiled, 50)
    assert selection(compiled).state == "measuring"
    held = []
    for step in range(12):
        x, y = values(step), values(2 * step)
        torch.compiler.cudagraph_mark_step_begin()
        held.append(compiled.function([x, y, W]))
    reasons = {one.reason for one in compiled.functions[0].uncaptured()}
    assert manager_module.KEPT in reasons
    del held
    run(compiled, 400)
    report = selection(compiled)
    assert report.kept == "copy"
    selector = compiled.functions[0].member.group.selector
    assert max(selector._seconds["copy"] + selector._seconds["indirection"]) < 0.5 < min(selector._seconds["none"])
    assert sum(one.calls for one in report.candidates) < report.calls


@pytest.mark.parametrize("workers", [1, 60])
def test_a_function_that_several_threads_call_is_off(make: Any, workers: int) -> None:
    """One other thread in turn with this one, or another each time. Not all of the first calls are looked at."""
    prices, compiled = make()
    with contextlib.ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(workers)]
        for index in range(60):
            run(compiled, 1)
            pools[index % workers].submit(run, compiled, 1).result()
    run(compiled, 40)
    report = selection(compiled)
    assert (report.state, report.reason) == ("off", "several threads call it")
    assert prices.timed <= MOST_RETURNS


def test_calls_inside_of_a_step_are_not_timed(make: Any) -> None:
    """There graphs rest, and the function runs whoever's turn it is."""
    prices, compiled = make(plain=1.0)
    run(compiled, 50)
    assert selection(compiled).state == "measuring"
    timed = prices.timed
    with inner_graphs.at_rest():
        run(compiled, 30)
    assert prices.timed == timed
    run(compiled, 400)
    selector = compiled.functions[0].member.group.selector
    assert max(selector._seconds["copy"] + selector._seconds["indirection"]) < 0.5 < min(selector._seconds["none"])


def test_a_defect_before_anything_is_recorded_reaches_no_program(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verdict holds for is found out when the function is first called."""

    def broken(*arguments: Any) -> Any:
        raise UnicodeDecodeError("utf-8", b"", 0, 1, "a name that is none")

    monkeypatch.setattr(member, "circumstances", broken)
    _, compiled = make()
    with pytest.warns(UserWarning, match="selection failed: UnicodeDecodeError"):
        run(compiled, 1)
    run(compiled, 40)
    assert selection(compiled) is None
    assert compiled.reports[0].replays > 20


def test_a_defect_in_what_is_told_of_a_recording_costs_the_call_nothing(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, producers: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(member.Member, "reads_results_of", broken)
    _, compiled = make()
    with pytest.warns(UserWarning, match="selection failed: ZeroDivisionError"):
        run(compiled, 3)
    run(compiled, 40)
    (node,) = nodes()
    assert node.in_place, "the recording is looked after all the same"
    assert len(compiled.reports) == 1


def test_whose_turn_it_is_leaves_calls_steady(make: Any) -> None:
    """Two sets of weights have a recording each. If each went the full way once whenever the candidate changes, what
    counts of a block would not be what the program gets after the verdict."""
    _, compiled = make(plain=50e-6)
    weights = [values(7), values(9)]

    def calls(count: int) -> None:
        for step in range(count):
            x, y, w = values(step), values(-step), weights[step % 2]
            assert torch.equal(compiled(x, y, w)[0], 2 * x + y * w), step

    def full_ways() -> int:
        return sum(way.calls for way in compiled.functions[0].full_ways())

    calls(60)
    before = full_ways()
    assert selection(compiled).state == "measuring"
    calls(60)
    assert selection(compiled).state == "measuring"
    assert full_ways() == before
