"""Selection in the calls of a program: stock's CUDAGraph Trees on host memory, times simulated from what really ran.

Note [Simulated times]. A timer here looks at what the harness counted between its beginning and its end: runs of the
plain function, launches of graphs, bytes copied into placeholders. Each has a price. So a candidate has the time of the
one that the test means only if calls were really served by it.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from torch.testing._internal.distributed.fake_pg import FakeStore
from trees_on_cpu import Compiled, Model, nodes, values

import optimizations
from optimizations.capture import inner_graphs
from optimizations.capture.trees import manager as manager_module
from optimizations.capture.trees.containers import managers
from optimizations.capture.trees.function import SELECTED
from optimizations.indirection.plan import Choice
from optimizations.recording.description import RESTING
from optimizations.selection import identity, member, timing, way
from optimizations.selection.decide import Rules
from optimizations.selection.member import Member, Standing
from optimizations.selection.settings import Settings
from optimizations.selection.store import VerdictStore

__all__ = ["cuda_on_cpu"]

W = values(7)
RULES = Rules(most_calls=600)


class Prices:
    """Seconds for what was counted, and the timers that ask for them. Note [Simulated times]."""

    def __init__(self, cuda: CudaOnCpu) -> None:
        self.cuda = cuda
        self.plain, self.launch, self.copied_byte = 10e-6, 10e-6, 0.0
        self.models: list[Model] = []
        self.late = 0
        self.timed = 0
        self.may = True
        self.noise = random.Random(3)

    def counted(self) -> tuple[int, int, int]:
        runs = sum(model.runs.count("plain") for model in self.models)
        return runs, self.cuda.replays, sum(node.copied_bytes for node in nodes())

    def timer_for(self, objective: str, device_index: int) -> Any:
        return SimulatedTimer(self)


class SimulatedTimer:
    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.before = prices.counted()

    def begin(self) -> None:
        assert self.prices.may, "nothing is timed in a capture of the user's"
        self.prices.timed += 1
        self.before = self.prices.counted()

    def end(self) -> Any:
        runs, launches, copied = (
            after - before for before, after in zip(self.before, self.prices.counted(), strict=True)
        )
        prices = self.prices
        seconds = 5e-6 + runs * prices.plain + launches * prices.launch + copied * prices.copied_byte
        return Measured(seconds * prices.noise.gauss(1, 0.003), prices.timed + prices.late, prices)


class Measured:
    """Is known once `Prices.late` more calls were timed."""

    def __init__(self, seconds: float, known_at: int, prices: Prices) -> None:
        self._seconds, self._known_at, self._prices = seconds, known_at, prices

    def seconds(self) -> float | None:
        return self._seconds if self._prices.timed >= self._known_at else None


@pytest.fixture
def make(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Makes prices and a function with selection: `make(plain=..., ...)`, the rest for `Compiled`."""
    monkeypatch.setattr(identity, "_gpu", lambda index: "a GPU that the host plays")
    # The harness has no generated code: functions are told apart by what the test calls them.
    monkeypatch.setattr(member, "graph_digest", lambda generated, integers, extra: getattr(generated, "digest", None))
    monkeypatch.setattr(way.WAY, "_holder", None)
    prices: list[Prices] = []

    def made(
        *, mode: str = "measure", model: Model | None = None, digest: str | None = "a" * 64, **keywords: Any
    ) -> tuple[Prices, Compiled]:
        money = {name: keywords.pop(name) for name in ("plain", "launch", "copied_byte", "late") if name in keywords}
        if not prices:
            prices.append(Prices(cuda_on_cpu))
            monkeypatch.setattr(timing, "timer_for", prices[0].timer_for)
            monkeypatch.setattr(timing, "may_time", lambda: prices[0].may)
        for name, price in money.items():
            setattr(prices[0], name, price)
        chosen = model or Model(cuda_on_cpu)
        chosen.digest = digest  # type: ignore[attr-defined]
        prices[0].models.append(chosen)
        settings = Settings(mode, rules=RULES, store=VerdictStore(tmp_path / "verdicts"))  # type: ignore[arg-type]
        return prices[0], Compiled(chosen, selection=settings, **keywords)

    return made


def run(compiled: Compiled, calls: int, *, moving: bool = True, w: torch.Tensor = W) -> None:
    """Calls with right results, at ever new addresses or always the same."""
    kept = [(values(1), values(2))]
    for step in range(calls):
        x, y = kept[-1]
        if moving:
            x, y = values(step), values(-3 * step)
            kept.append((x, y))
            del kept[:-4]
        else:
            x.fill_(step)
        assert torch.equal(compiled(x, y, w)[0], 2 * x + y * w), step


def selection(compiled: Compiled) -> Any:
    return compiled.functions[-1].selection()


@pytest.mark.parametrize(
    ("prices", "kept", "outcome"),
    [
        ({"plain": 10e-6, "launch": 20e-6}, "none", "same"),
        ({"plain": 10e-6, "launch": 10e-6}, "none", "same"),
        ({"plain": 30e-6, "launch": 10e-6}, "copy", "faster"),
        ({"plain": 30e-6, "launch": 10e-6, "copied_byte": 1e-7}, "indirection", "faster"),
        ({"plain": 10e-6, "launch": 5e-6, "copied_byte": 1e-7}, "indirection", "faster"),
        ({"plain": 10e-6, "launch": 9e-6, "copied_byte": 1e-7}, "indirection", "faster"),
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
    (node,) = nodes()
    before = (prices.timed, *prices.counted(), len(cuda_on_cpu.driver.calls), node.copied_bytes)
    run(compiled, 20)
    timed, runs, launches, copied = (
        after - then for after, then in zip((prices.timed, *prices.counted()), before[:4], strict=True)
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
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(400):
        x, y = values(step), values(2 * step)
        torch.compiler.cudagraph_mark_step_begin()
        (result,) = compiled.function([x, y, W])
        held.append((result, 2 * x + y * W))
        del held[:-3]
        assert all(torch.equal(one, expected) for one, expected in held), step
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


def test_without_selection_nothing_is_reported_and_nothing_timed(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    run(compiled, 20)
    assert compiled.functions[0].selection() is None


def test_a_stored_verdict_costs_nothing(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    prices, compiled = make(plain=5e-6, launch=10e-6)
    run(compiled, 400)
    timed, captures = prices.timed, cuda_on_cpu.captures
    for mode in ("measure", "stored"):
        _, again = make(mode=mode)
        run(again, 30)
        report = selection(again)
        assert (report.state, report.kept, report.source) == ("decided", "none", "stored")
        assert [one.candidate for one in report.candidates] == ["none", "copy", "indirection"]
    assert prices.timed == timed
    assert cuda_on_cpu.captures == captures, "a function that needs no graph is not recorded"


def test_a_stored_copy_is_not_captured_again(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "copy"
    model = Model(cuda_on_cpu)
    _, again = make(mode="stored", model=model)
    run(again, 30)
    assert model.runs == ["plain", "captured"]
    assert again.reports[0].off == "selection found that copying the inputs costs no more"
    assert optimizations.settled()


def test_stored_mode_measures_nothing(make: Any) -> None:
    prices, compiled = make(mode="stored", digest="c" * 64)
    run(compiled, 200)
    report = selection(compiled)
    assert (report.state, report.reason) == ("off", "there is no stored verdict for it")
    assert prices.timed == 0
    assert optimizations.settled()


def test_a_function_without_source_is_measured_and_not_stored(make: Any, tmp_path: Path) -> None:
    _, compiled = make(digest=None)
    run(compiled, 400)
    report = selection(compiled)
    assert report.state == "decided"
    assert report.not_stored == "the source of a function cannot be read"
    assert not (tmp_path / "verdicts").exists()


def test_a_verdict_that_cannot_be_written_holds_all_the_same(make: Any, tmp_path: Path) -> None:
    (tmp_path / "verdicts").write_text("a file where the folder should be")
    _, compiled = make()
    run(compiled, 400)
    report = selection(compiled)
    assert report.state == "decided"
    assert "FileExistsError" in report.not_stored or "NotADirectory" in report.not_stored


@contextlib.contextmanager
def ranks(count: int) -> Iterator[None]:
    """A process group of this many, of which the others are never there."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_alone_decides(make: Any) -> None:
    with ranks(1):
        _, compiled = make()
        run(compiled, 400)
    assert selection(compiled).state == "decided"


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with ranks(2):
        yield


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


def test_ranks_do_not_decide(make: Any, two_ranks: None) -> None:
    prices, compiled = make()
    run(compiled, 200)
    report = selection(compiled)
    assert report.state == "off"
    assert "2 ranks" in report.reason
    assert prices.timed == 0


def test_ranks_take_no_stored_verdict(make: Any) -> None:
    _, compiled = make(plain=5e-6)
    run(compiled, 400)
    with ranks(2):
        _, again = make()
        run(again, 30)
    assert "2 ranks" in selection(again).reason


def test_ranks_that_come_while_it_is_measured_end_it(make: Any) -> None:
    _, compiled = make()
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    with ranks(8):
        run(compiled, 5)
    assert "8 ranks" in selection(compiled).reason


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


def pair(make: Any, cuda: CudaOnCpu, **keywords: Any) -> tuple[Prices, Compiled, Compiled]:
    """Two functions, and the second reads what the first returns."""
    prices, first = make(model=Model(cuda), digest="d" * 64, **keywords)
    _, second = make(model=Model(cuda), digest="e" * 64)
    return prices, first, second


def run_pair(first: Compiled, second: Compiled, calls: int) -> None:
    kept = []
    for step in range(calls):
        x, y = values(step), values(step + 1)
        kept.append((x, y))
        del kept[:-4]
        torch.compiler.cudagraph_mark_step_begin()
        middle = first.function([x, y, W])
        inputs = [*middle, y, W]
        del middle
        (result,) = second.function(inputs)
        between = 2 * x + y * W
        assert torch.equal(result, 2 * between + y * W), step
        del result


@pytest.mark.parametrize(("plain", "kept"), [(5e-6, "none"), (50e-6, "copy")])
def test_functions_that_pass_results_in_graph_memory_are_judged_together(
    make: Any, cuda_on_cpu: CudaOnCpu, plain: float, kept: str
) -> None:
    prices, first, second = pair(make, cuda_on_cpu, plain=plain)
    run_pair(first, second, 500)
    one, other = selection(first), selection(second)
    assert one.group == other.group
    assert one.functions == other.functions == 2
    assert (one.state, one.kept, other.kept) == ("decided", kept, kept)
    before = prices.counted()
    run_pair(first, second, 10)
    runs, launches, _ = (after - then for after, then in zip(prices.counted(), before, strict=True))
    assert (runs, launches) == ((20, 0) if kept == "none" else (0, 20))


@pytest.mark.parametrize(("plain", "kept"), [(5e-6, "none"), (50e-6, "copy")])
def test_a_forward_and_its_backward_are_judged_together(
    make: Any, cuda_on_cpu: CudaOnCpu, plain: float, kept: str
) -> None:
    """The backward is called with what the forward left, after the next step was prepared; gradients are right."""
    _, forward = make(model=Model(cuda_on_cpu), digest="d" * 64, plain=plain, is_inference=False)
    _, backward = make(model=Model(cuda_on_cpu), digest="e" * 64, is_inference=False, is_backward=True)
    kept_inputs = []
    for step in range(500):
        x, y = values(step), values(step + 1)
        kept_inputs.append((x, y))
        del kept_inputs[:-4]
        saved = forward.function([x, y, W])
        inputs = [*saved, y, W]
        del saved
        (gradient,) = backward.function(inputs)
        assert torch.equal(gradient, 2 * (2 * x + y * W) + y * W), step
        del gradient
    one, other = selection(forward), selection(backward)
    assert (one.group, one.state, one.kept, one.direction) == (other.group, "decided", kept, "forward")
    assert other.direction == "backward"
    (manager,) = managers()
    assert manager.uncaptured_forwards == 0, "or steady calls of others would end"


def test_one_group_is_measured_at_a_time(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first = make(model=Model(cuda_on_cpu), digest="d" * 64)
    _, second = make(model=Model(cuda_on_cpu), digest="e" * 64)
    measured: set[tuple[str, str]] = set()
    for _ in range(60):
        run(first, 10)
        run(second, 10)
        measured.add((selection(first).state, selection(second).state))
    assert ("measuring", "measuring") not in measured
    assert measured >= {("measuring", "waiting"), ("decided", "measuring")}
    assert (selection(first).state, selection(second).state) == ("decided", "decided")


def test_a_group_that_is_not_called_any_more_makes_way(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first = make(model=Model(cuda_on_cpu), digest="d" * 64)
    _, second = make(model=Model(cuda_on_cpu), digest="e" * 64)
    run(first, 40)
    assert selection(first).state == "measuring"
    run(second, 20)
    assert selection(second).reason == "another group is being measured"
    for _ in range(way.PATIENCE + 20):
        run(second, 1)
        second.functions[0].member.pause = 0  # in each call it asks whether it is its turn
    run(second, 400)
    assert selection(second).state == "decided"
    assert selection(first).state == "waiting"


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


def test_a_function_that_several_threads_call_is_off(make: Any) -> None:
    prices, compiled = make()
    run(compiled, 3)
    other = threading.Thread(target=run, args=(compiled, 3))
    other.start()
    other.join()
    run(compiled, 40)
    report = selection(compiled)
    assert (report.state, report.reason) == ("off", "several threads call it")
    assert prices.timed == 0


class FakeFunction:
    """A function whose graphs are as they will stay."""

    direction = "inference"

    def __init__(self) -> None:
        self.served: list[str] = []

    def generated(self) -> None:
        """Without a digest, so that nothing is stored."""

    def serve(self, candidate: str) -> None:
        self.served.append(candidate)

    def short_of_memory(self) -> str | None:
        return None

    def standing(self) -> Standing:
        uncaptured = self.served.count("none")
        return Standing(None, None, in_place=False, recordings=1, uncaptured=uncaptured, threads=1)


def test_what_is_left_of_a_group_is_measured_alone(make: Any, tmp_path: Path) -> None:
    """Functions go with the manager of a thread that ends."""
    make()
    settings = Settings("measure", rules=RULES, store=VerdictStore(tmp_path / "none"))
    first, second = FakeFunction(), FakeFunction()
    one, other = Member(first, settings, 0), Member(second, settings, 0)  # type: ignore[arg-type]
    call, another = one.served(lambda inputs: None), other.served(lambda inputs: None)
    other.reads_results_of([one])
    assert one.group is other.group
    for _ in range(10):
        call([])
        another([])
    assert one.describe().state == "measuring"
    del second
    gc.collect()
    call([])
    assert (one.describe().state, one.describe().reason) == ("waiting", "a function of the group is gone")
    for _ in range(5):
        call([])
    assert (one.describe().state, one.describe().functions) == ("measuring", 1)


def test_calls_without_an_order_are_not_measured(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first, second = pair(make, cuda_on_cpu)
    for step in range(900):
        x, y = values(step), values(step + 1)
        torch.compiler.cudagraph_mark_step_begin()
        middle = first.function([x, y, W])
        inputs = [*middle, y, W]
        del middle
        second.function(inputs)
        if step % 2:
            second.function([x, y, W])
    report = selection(first)
    assert report.state == "off", report
    assert report.reason == "its calls never follow one another in one order"


def test_iterations_with_more_calls_than_were_learned_do_not_count(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first, second = pair(make, cuda_on_cpu)
    run_pair(first, second, 60)
    assert selection(first).state == "measuring"
    counted = sum(one.calls for one in selection(first).candidates)
    for step in range(30):
        x, y = values(step), values(step + 1)
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [*first.function([x, y, W]), y, W]
        second.function(inputs)
        second.function([x, y, W])
    assert sum(one.calls for one in selection(first).candidates) <= counted + 1
    run_pair(first, second, 500)
    assert selection(first).state == "decided"


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
