"""What makes a verdict void, and measuring begin again; neither goes on for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import W, make, run, selection
from trees_on_cpu import Model, values

from optimizations.capture.trees.containers import managers
from optimizations.selection.served import LONGEST_LOOK_EVERY, LOOK_EVERY
from optimizations.selection.validity import WINDOW

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


def test_inputs_that_always_moved_make_no_verdict_void_where_an_iteration_has_several_calls(
    make: Any, cuda_on_cpu: CudaOnCpu
) -> None:
    """Pictures of two sizes in turn, each with a head of its own: the same function comes first, and an iteration is
    over when both heads were called. At its beginning the first picture always lies in the same place."""
    _, body = make(model=Model(cuda_on_cpu), digest="b" * 64, plain=50e-6)
    heads = [make(model=Model(cuda_on_cpu), digest=digest * 64)[1] for digest in "cd"]
    places = [(values(1), values(2)), (values(3), values(4))]
    for step in range(1200):
        x, y = places[step % 2]
        torch.compiler.cudagraph_mark_step_begin()
        middle = body.function([x, y, W])
        inputs = [*middle, y, W]
        del middle
        (result,) = heads[step % 2].function(inputs)
        assert torch.equal(result, 2 * (2 * x + y * W) + y * W), step
        del result
    report = selection(body)
    assert (report.functions, report.state, report.voided) == (3, "decided", ())


def test_another_stream_makes_the_verdict_void(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = make()
    run(compiled, 400)
    cuda_on_cpu.stream = 99
    run(compiled, 400)
    assert selection(compiled).voided == ("the program went on to another stream",)
    assert selection(compiled).state == "decided"


@pytest.mark.parametrize("after", [0, 3, 60, 132])
@pytest.mark.parametrize("change", ["stream", "rests"])
def test_a_change_is_noticed_within_so_many_calls(make: Any, cuda_on_cpu: CudaOnCpu, change: str, after: int) -> None:
    """Whenever it comes: in a look, or right behind one."""
    _, compiled = make()
    run(compiled, 400 + after)
    assert selection(compiled).state == "decided"
    cuda_on_cpu.stream += change == "stream"
    run(compiled, 2 * LOOK_EVERY + 2 * WINDOW, moving=change == "stream")  # the first look may be over
    assert len(selection(compiled).voided) == 1


@pytest.mark.parametrize("change", ["stream", "rests"])
def test_looks_become_rare_and_a_late_change_is_noticed_too(make: Any, cuda_on_cpu: CudaOnCpu, change: str) -> None:
    _, compiled = make()
    run(compiled, 400)
    assert selection(compiled).state == "decided"
    looks = 0
    circumstances = compiled.functions[0].member.group._circumstances
    look = circumstances.look

    def counted(*arguments: Any) -> bool:
        nonlocal looks
        looks += 1
        return bool(look(*arguments))

    circumstances.look = counted
    run(compiled, 4 * LONGEST_LOOK_EVERY)
    assert 4 * WINDOW <= looks <= 6 * WINDOW, "128 calls, 256, 512, 1024 and 1024"
    assert selection(compiled).voided == ()
    cuda_on_cpu.stream += change == "stream"
    run(compiled, LONGEST_LOOK_EVERY + 2 * WINDOW, moving=change == "stream")
    assert len(selection(compiled).voided) == 1


def test_streams_that_take_turns_change_nothing(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """Two pipelines: each iteration is on another stream than the one before, now as when it was measured."""
    prices, compiled = make(plain=50e-6)
    for step in range(900):
        cuda_on_cpu.stream = 1 + step % 2
        run(compiled, 1)
    report = selection(compiled)
    assert (report.state, report.kept, report.voided) == ("decided", "copy", ())
    timed = prices.timed
    _, again = make(plain=50e-6)
    for step in range(300):
        cuda_on_cpu.stream = 1 + step % 2
        run(again, 1)
    assert (selection(again).source, prices.timed) == ("stored", timed)


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
    assert report.calls > 0, "what it took is told, though there is no verdict"
    timed = prices.timed
    run(compiled, 100)
    assert prices.timed == timed


def test_a_new_shape_has_a_verdict_of_its_own(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """Inductor's function takes sizes as integers; each has a graph, and a price of its own here."""

    class Sized(Model):
        def __call__(self, inputs: list[Any]) -> list[Any]:
            size = inputs.pop()
            if size == 2 and self.cuda.capturing is None:
                self.runs += ["plain"] * 9  # ten times as dear without a graph
            return super().__call__(inputs)

    _, compiled = make(model=Sized(cuda_on_cpu), plain=5e-6)

    def call(size: int, calls: int) -> None:
        for step in range(calls):
            x, y = values(step), values(-step)
            torch.compiler.cudagraph_mark_step_begin()
            (result,) = compiled.function([x, y, W, size])
            assert torch.equal(result, 2 * x + y * W), step

    call(1, 460)
    (first,) = compiled.functions
    assert first.selection().kept == "none"
    call(2, 460)
    first, second = compiled.functions
    assert (first.selection().kept, second.selection().kept) == ("none", "copy")
    assert first.selection().group != second.selection().group
    assert first.selection().voided == second.selection().voided == ()
    call(1, 20)
    assert first.selection().kept == "none"
