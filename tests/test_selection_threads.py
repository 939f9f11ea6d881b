"""Selection where several threads call, and where somebody interrupts: results are right, and nobody waits for ever."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, FakeGraph, cuda_on_cpu
from interrupts import interrupted_at
from selection_on_cpu import SimulatedTimer, make, pair, run, run_pair, selection
from trees_on_cpu import Model, values

import optimizations
from optimizations.capture.trees.function import RecordableFunction
from optimizations.indirection.plan import Choice
from optimizations.selection.caller import MOST_RETURNS
from optimizations.selection.measurement import Measurement
from optimizations.selection.members import Members
from optimizations.selection.validity import WINDOW

__all__ = ["cuda_on_cpu", "make"]

PATIENCE_S = 20.0


def in_a_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# Threads


@pytest.mark.parametrize("moment", ["begin", "end"])
def test_no_thread_waits_for_one_that_waits_for_its_device(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The device may wait for what the other thread has to launch: the other side of a collective."""
    _, compiled = make(model=Model(cuda_on_cpu), digest="d" * 64)
    _, other = make(model=Model(cuda_on_cpu), digest="e" * 64)
    run(compiled, 40)
    assert selection(compiled).state == "measuring"
    launched = []
    original = getattr(SimulatedTimer, moment)

    def wait(self: SimulatedTimer) -> Any:
        if not launched:
            thread = in_a_thread(lambda: run(other, 4))
            thread.join(PATIENCE_S)
            launched.append(not thread.is_alive())
        return original(self)

    monkeypatch.setattr(SimulatedTimer, moment, wait)
    run(compiled, 2)
    assert launched == [True]


def test_how_calls_are_served_does_not_change_in_the_middle_of_another_threads_call(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would point the graph elsewhere after its inputs were copied, or copy them after it was pointed."""
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "copy"
    replaying, go_on = threading.Event(), threading.Event()
    changes: list[bool] = []
    replay, serve = FakeGraph.replay, RecordableFunction.serve

    def slow(self: FakeGraph) -> None:
        replaying.set()
        assert go_on.wait(PATIENCE_S)
        replay(self)

    def noted(self: RecordableFunction, candidate: Any) -> None:
        changes.append(go_on.is_set())
        serve(self, candidate)

    monkeypatch.setattr(FakeGraph, "replay", slow)
    monkeypatch.setattr(RecordableFunction, "serve", noted)
    first = in_a_thread(lambda: run(compiled, 1))
    assert replaying.wait(PATIENCE_S)
    compiled.functions[0].member.pause = 0
    compiled.functions[0].member.group._circumstances._elsewhere = WINDOW - 1
    cuda_on_cpu.stream = 99  # the verdict is void
    second = in_a_thread(lambda: run(compiled, 1))
    time.sleep(0.1)
    assert changes == []
    go_on.set()
    for thread in (first, second):
        thread.join(PATIENCE_S)
    assert changes
    assert all(changes)


@pytest.fixture
def worker() -> Iterator[Callable[..., None]]:
    """Runs calls of a function in a thread that is the same each time."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda compiled, calls, **keywords: pool.submit(run, compiled, calls, **keywords).result()


@pytest.mark.parametrize("calls", [1, 3, 12, 60, 90])
@pytest.mark.parametrize(("plain", "kept"), [(5e-6, "none"), (50e-6, "copy")])
def test_what_is_warmed_up_in_one_thread_and_served_from_another_has_a_verdict(
    make: Any, worker: Callable[..., None], calls: int, plain: float, kept: str
) -> None:
    prices, compiled = make(plain=plain)
    run(compiled, calls)
    assert selection(compiled).state != "decided"
    worker(compiled, 700)
    report = selection(compiled)
    assert (report.state, report.kept, report.source, report.not_stored) == ("decided", kept, "measured", None)
    timed = prices.timed
    run(compiled, 20)
    worker(compiled, 400)
    assert (selection(compiled).voided, prices.timed) == ((), timed), "a verdict holds in any thread"


@pytest.mark.parametrize("calls", [1, WINDOW - 1])
@pytest.mark.parametrize("before", [2, 12, 60])
def test_a_few_calls_of_another_thread_are_not_measured_and_end_nothing(
    make: Any, worker: Callable[..., None], before: int, calls: int
) -> None:
    """Be they looked at or not: while it waits, most are not."""
    prices, compiled = make(plain=5e-6)
    run(compiled, before)
    timed = prices.timed
    worker(compiled, calls)
    assert prices.timed == timed
    run(compiled, 400)
    assert (selection(compiled).state, selection(compiled).kept) == ("decided", "none")
    assert compiled.functions[0].member.group._series.restarts == 0


@pytest.mark.parametrize("before", [3, 60])
def test_threads_that_call_in_turn_end_what_is_being_measured(
    make: Any, worker: Callable[..., None], before: int
) -> None:
    prices, compiled = make(plain=5e-6)
    run(compiled, before)
    for _ in range(2 * MOST_RETURNS):
        worker(compiled, 2)
        run(compiled, 2)
    assert (selection(compiled).state, selection(compiled).reason) == ("off", "several threads call it")
    timed = prices.timed
    run(compiled, 50)
    assert prices.timed == timed
    assert optimizations.settled()


def test_threads_of_which_none_calls_for_long_end_it_too(make: Any) -> None:
    """A server with a thread for each request."""
    _, compiled = make()
    run(compiled, 60)
    with ThreadPoolExecutor(4) as pool:
        meeting = threading.Barrier(4)
        assert len({*pool.map(lambda _: (meeting.wait(PATIENCE_S), threading.get_ident())[1], range(4))}) == 4
        for _ in range(MOST_RETURNS + 1):
            order, calls = iter(range(4)), threading.Condition()
            turn = [0]

            def one(place: int, turn: list[int] = turn, calls: threading.Condition = calls) -> None:
                meeting.wait(PATIENCE_S)  # each thread has one
                with calls:
                    assert calls.wait_for(lambda: turn[0] == place, PATIENCE_S)
                    run(compiled, 1)
                    turn[0] += 1
                    calls.notify_all()

            list(pool.map(one, order))
    assert (selection(compiled).state, selection(compiled).reason) == ("off", "several threads call it")


def test_threads_that_take_over_again_and_again_are_not_measured_for_ever(
    make: Any, worker: Callable[..., None]
) -> None:
    prices, compiled = make()
    for _ in range(12):
        run(compiled, 40)
        worker(compiled, 40)
    report = selection(compiled)
    assert (report.state, report.reason) == ("off", "measuring began 9 times: the program went on to another thread")
    timed = prices.timed
    run(compiled, 100)
    assert prices.timed == timed


def test_a_thread_that_calls_another_function_with_graphs_in_the_same_pool_is_one_of_several(
    make: Any, cuda_on_cpu: CudaOnCpu, worker: Callable[..., None]
) -> None:
    """Both take turns, and what one records depends on what the other has called."""
    _, compiled = make(model=Model(cuda_on_cpu), digest="d" * 64)
    _, other = make(model=Model(cuda_on_cpu), digest="e" * 64)
    run(compiled, 3)
    run(other, 3)
    worker(other, 1)
    run(compiled, 100)
    assert (selection(compiled).state, selection(compiled).reason) == ("off", "several threads call it")


def test_calls_without_a_look_are_never_fewer_than_none(make: Any) -> None:
    """Two threads that count the last one down together."""
    _, compiled = make()
    run(compiled, 400)
    member = compiled.functions[0].member
    member.pause = -1
    run(compiled, 20)
    assert member.pause >= 0


def test_threads_with_functions_of_their_own_are_all_selected_for(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    made = [make(model=Model(cuda_on_cpu), digest=letter * 64)[1] for letter in "abc"]
    turn = threading.Lock()  # the harness captures one graph at a time
    wrong: list[BaseException] = []

    def work(compiled: Any) -> None:
        try:
            for _ in range(250):
                with turn:
                    run(compiled, 10)
        except BaseException as error:
            wrong.append(error)

    threads = [in_a_thread(lambda one=one: work(one)) for one in made]  # type: ignore[misc]
    for thread in threads:
        thread.join()
    assert not wrong
    assert [selection(one).state for one in made] == ["decided"] * 3


# Interrupts


SWITCHING = ("trees/function.py", "trees/node.py", "replay/addresses.py", "appliers/applied.py", "appliers/host.py")


SERVING = ("optimizations/selection/", "capture/trees/", "optimizations/replay/", "appliers/", "recording/session.py")


@pytest.mark.parametrize("choice", [Choice.HOST, Choice.PRELUDE])
@pytest.mark.parametrize("wanted", ["copy", "indirection", "none"])
def test_an_interrupt_anywhere_while_ways_change_leaves_the_graph_with_right_inputs(
    make: Any, choice: Choice, wanted: str
) -> None:
    prices, compiled = make(choice=choice)
    run(compiled, 12)
    function = compiled.functions[0]
    function.member.group._off("this test chooses")
    assert compiled.reports[0].inputs[0].indirect
    line = 0
    while True:
        function.serve("copy" if wanted == "indirection" else "indirection")
        run(compiled, 2)
        with interrupted_at(line, *SWITCHING) as where:
            try:
                function.serve(wanted)
            except KeyboardInterrupt:
                assert where
        run(compiled, 3)
        if not where:
            break
        function.serve(wanted)
        run(compiled, 1)
        before = prices.counted()
        run(compiled, 2)
        runs, launches, copied = (after - then for after, then in zip(prices.counted(), before, strict=True))
        assert (runs > 0, launches > 0, copied > 0) == (wanted == "none", wanted != "none", wanted == "copy"), where
        line += 1
    assert line >= 10


@pytest.mark.parametrize("seed", range(4))
def test_interrupts_anywhere_in_selection_and_replay_leave_results_right_and_end_with_a_verdict(
    make: Any, cuda_on_cpu: CudaOnCpu, seed: int
) -> None:
    """As in a notebook: the cell is interrupted, and the next one goes on."""
    draw = random.Random(seed)
    prices, first, second = pair(make, cuda_on_cpu, plain=draw.choice((5e-6, 50e-6)))
    run_pair(first, second, 40)
    interrupted = 0
    for _ in range(60):
        with interrupted_at(draw.randrange(900), *SERVING) as where:
            try:
                run_pair(first, second, 3)
            except KeyboardInterrupt:
                interrupted += 1
                assert where
    assert interrupted > 10
    run_pair(first, second, 700)
    found = [selection(one) for one in (first, second)]
    assert {one.state for one in found} == {"decided"}, found
    assert len({one.kept for one in found}) == 1
    before = prices.counted()
    run_pair(first, second, 10)
    runs, launches, _ = (after - then for after, then in zip(prices.counted(), before, strict=True))
    assert (runs, launches) == ((20, 0) if found[0].kept == "none" else (0, 20))


# Exceptions


class Failing(Model):
    """Raises in runs without a graph while it is told to."""

    error: BaseException | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if self.cuda.capturing is None and self.error is not None:
            raise self.error
        return super().__call__(inputs)


@pytest.mark.parametrize("state", ["measuring", "decided"])
def test_a_call_without_a_graph_that_runs_out_of_memory_is_the_last_one(
    make: Any, cuda_on_cpu: CudaOnCpu, state: str
) -> None:
    """With its graph the program would have gone on; it does once it calls again."""
    model = Failing(cuda_on_cpu)
    _, compiled = make(model=model, plain=5e-6)
    run(compiled, 60 if state == "measuring" else 400)
    assert selection(compiled).state == state
    model.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        run(compiled, 40)
    model.error = None
    report = selection(compiled)
    assert (report.state, report.reason) == ("off", "memory: a call without a graph ran out of it")
    run(compiled, 4)
    runs = model.runs.count("plain")
    run(compiled, 50)
    assert model.runs.count("plain") == runs, "a graph serves"


def test_a_defect_of_selection_does_not_stand_in_for_the_programs_exception(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Failing(cuda_on_cpu)
    _, compiled = make(model=model)
    run(compiled, 60)
    assert selection(compiled).state == "measuring"

    lose_turn = Measurement.lose_turn

    def broken(self: Measurement) -> None:
        if sys.exc_info()[0] is LookupError:
            raise ZeroDivisionError("a defect")
        lose_turn(self)

    monkeypatch.setattr(Measurement, "lose_turn", broken)
    model.error = LookupError("the program's own")
    with pytest.raises(LookupError, match="the program's own") as caught:
        run(compiled, 40)
    assert caught.value.__context__ is None
    model.error = None
    run(compiled, 10)
    assert selection(compiled).reason == "selection failed: ZeroDivisionError: a defect"


def test_memory_that_runs_short_while_it_is_measured_ends_that(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2**40
    monkeypatch.setattr(cuda_on_cpu.tools, "free_bytes", lambda: free)
    model = Model(cuda_on_cpu)
    _, compiled = make(model=model, plain=5e-6)
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    free = 64
    run(compiled, 12)
    runs = model.runs.count("plain")
    run(compiled, 100)
    assert selection(compiled).reason.startswith("memory:")
    assert model.runs.count("plain") == runs


def test_nothing_of_selections_own_is_in_what_is_timed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be in the times of all candidates, and make a small difference smaller."""
    order: list[str] = []
    counts, end, begin = Members.counts, SimulatedTimer.end, SimulatedTimer.begin

    def counted(self: Members) -> Any:
        order.append("count")
        return counts(self)

    def began(self: SimulatedTimer) -> None:
        order.append("begin")
        begin(self)

    def ended(self: SimulatedTimer) -> Any:
        order.append("end")
        return end(self)

    _, compiled = make()
    run(compiled, 40)
    monkeypatch.setattr(Members, "counts", counted)
    monkeypatch.setattr(SimulatedTimer, "begin", began)
    monkeypatch.setattr(SimulatedTimer, "end", ended)
    run(compiled, 5)
    assert order == ["count", "begin", "end", "count"] * 5


def test_functions_that_read_one_anothers_results_in_turn_are_not_measured_for_ever(
    make: Any, cuda_on_cpu: CudaOnCpu
) -> None:
    """A loop around a graph break: none of them reads nothing of another's."""
    prices, first, second = pair(make, cuda_on_cpu, plain=50e-6)
    w = values(0) * 0 + 0.25

    def step(number: int) -> None:
        x, y = values(number), values(number + 1)
        expected = x
        torch.compiler.cudagraph_mark_step_begin()
        found = [x]
        for _ in range(2):
            for function in (first.function, second.function):
                inputs = [*found, y, w]
                del found
                found = function(inputs)
                expected = 2 * expected + y * w
        assert torch.equal(found[0], expected), number

    for number in range(20):
        step(number)
    members = [one.functions[0].member for one in (first, second)]
    assert all(one.producers & members[0].group.members.serials for one in members), "this program is no such one"
    for number in range(900):
        step(number)
    assert selection(first).state in ("decided", "off"), selection(first)
    timed = prices.timed
    for number in range(30):
        step(number)
    assert prices.timed == timed
