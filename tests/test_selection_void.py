"""What makes a verdict void, and measuring begin again; neither goes on for ever."""

from __future__ import annotations

from typing import Any

from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import make, run, selection

from optimizations.capture.trees.containers import managers

__all__ = ["cuda_on_cpu", "make"]


def test_inputs_that_stop_moving_make_the_verdict_void(make: Any) -> None:
    prices, compiled = make(plain=5e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "none"
    prices.plain = 50e-6
    run(compiled, 300)
    assert selection(compiled).kept == "none", "prices are nobody's business; circumstances have not changed"
    run(compiled, 700, moving=False)
    report = selection(compiled)
    assert report.kept == "copy"
    assert report.voided == ("inputs do not move from call to call any more",)


def test_inputs_that_begin_to_move_make_the_verdict_void(make: Any) -> None:
    _, compiled = make(plain=5e-6)
    run(compiled, 400, moving=False)
    run(compiled, 400, moving=False)
    assert selection(compiled).voided == ()
    run(compiled, 400)
    assert selection(compiled).voided == ("inputs move from call to call now",)


def test_another_stream_makes_the_verdict_void(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = make()
    run(compiled, 400)
    cuda_on_cpu.stream = 99
    run(compiled, 400)
    assert selection(compiled).voided == ("the program went on to another stream",)
    assert selection(compiled).state == "decided"


def test_circumstances_that_change_all_the_time_end_with_a_verdict(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    prices, compiled = make()
    for stream in range(12):
        cuda_on_cpu.stream = stream
        run(compiled, 400)
    report = selection(compiled)
    assert (report.state, len(report.voided)) == ("decided", 3)
    timed = prices.timed
    cuda_on_cpu.stream = 50
    run(compiled, 300)
    assert prices.timed == timed


def test_graphs_that_are_recorded_again_are_measured_from_the_beginning(make: Any) -> None:
    """Until a new recording reads in place, its turns would be those of a graph that copies."""
    _, compiled = make(plain=50e-6, copied_byte=1e-7)
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    (manager,) = managers()
    manager.leave_pool()
    states = []
    for _ in range(12):
        run(compiled, 1)
        states.append((selection(compiled).state, selection(compiled).reason))
    assert ("waiting", "its graphs were recorded again while it was measured") in states
    run(compiled, 600)
    report = selection(compiled)
    assert (report.state, report.kept) == ("decided", "indirection")
    times = {one.candidate: one.median_us for one in report.candidates}
    assert times["copy"] > 1.5 * times["indirection"]


def test_a_program_that_records_all_the_time_is_not_measured_for_ever(make: Any) -> None:
    prices, compiled = make()
    for _ in range(25):
        run(compiled, 60)
        (manager,) = managers()
        manager.leave_pool()
    report = selection(compiled)
    assert report.state == "off"
    assert "measuring began 9 times" in report.reason
    timed = prices.timed
    run(compiled, 100)
    assert prices.timed == timed
