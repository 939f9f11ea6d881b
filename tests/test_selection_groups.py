"""Functions that are judged together, and groups that take turns at being measured."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import selection_on_cpu
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from selection_on_cpu import RULES, W, make, pair, run, run_pair, selection
from trees_on_cpu import Model, values

import optimizations
from optimizations.capture.trees.containers import managers
from optimizations.capture.trees.function import forget_recordings
from optimizations.capture.trees.maker import release_recordings
from optimizations.capture.trees.node import EncoreNode
from optimizations.selection import way
from optimizations.selection.decide import Rules
from optimizations.selection.group import Group
from optimizations.selection.member import Member, Standing
from optimizations.selection.series import Series
from optimizations.selection.settings import Settings
from optimizations.selection.store import VerdictStore

__all__ = ["cuda_on_cpu", "make"]


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


@pytest.mark.parametrize(("plain", "kept"), [(5e-6, "none"), (50e-6, "copy")])
def test_two_forwards_and_their_backwards_are_one_iteration(
    make: Any, cuda_on_cpu: CudaOnCpu, plain: float, kept: str
) -> None:
    """A step that sees two views of each image: both forwards, then both backwards, are served in one way."""
    prices, forward = make(model=Model(cuda_on_cpu), digest="d" * 64, plain=plain, is_inference=False)
    _, backward = make(model=Model(cuda_on_cpu), digest="e" * 64, is_inference=False, is_backward=True)
    kept_inputs = []

    def step(number: int) -> None:
        pairs = [(values(number + place), values(2 * number + place)) for place in range(2)]
        kept_inputs.append(pairs)
        del kept_inputs[:-4]
        torch.compiler.cudagraph_mark_step_begin()
        saved = [forward.function([x, y, W]) for x, y in pairs]
        for x, y in reversed(pairs):
            inputs = [*saved.pop(), y, W]
            (gradient,) = backward.function(inputs)
            assert torch.equal(gradient, 2 * (2 * x + y * W) + y * W), number
            del gradient

    for number in range(500):
        step(number)
    one, other = selection(forward), selection(backward)
    assert (one.group, one.state, one.kept) == (other.group, "decided", kept), one
    before = prices.counted()
    assert optimizations.settled(), "that recording is not waited for"
    if kept != "none":
        assert 0 in [one.replays for one in backward.reports], "a recording of the first steps that fits no later one"
    for number in range(10):
        step(number)
    runs, launches, _ = (after - then for after, then in zip(prices.counted(), before, strict=True))
    assert (runs, launches) == ((40, 0) if kept == "none" else (0, 40))


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_measuring_that_begins_in_the_midst_of_a_step_finds_where_steps_begin(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Two forwards with an operator of eager between them: neither reads the other's result in graph memory."""
    forwards = [
        make(model=Model(cuda_on_cpu), digest=digest * 64, plain=50e-6, is_inference=False)[1] for digest in "ab"
    ]
    backwards = [
        make(model=Model(cuda_on_cpu), digest=digest * 64, is_inference=False, is_backward=True)[1] for digest in "cd"
    ]
    asked = [*forwards, *backwards][first]
    rests = Group._rests
    monkeypatch.setattr(
        Group, "_rests", lambda self, member: member.function is not asked.functions[0] or rests(self, member)
    )
    kept_inputs = []
    for step in range(500):
        x, y = values(step), values(step + 1)
        kept_inputs.append((x, y))
        del kept_inputs[:-4]
        torch.compiler.cudagraph_mark_step_begin()
        (one,) = forwards[0].function([x, y, W])
        (other,) = forwards[1].function([one.clone(), y, W])
        expected = 2 * (2 * other + y * W) + one * W
        (gradient,) = backwards[1].function([other, y, W])
        (gradient,) = backwards[0].function([gradient, one, W])
        assert torch.equal(gradient, expected), step
        del one, other, gradient
    found = [selection(function) for function in [*forwards, *backwards]]
    assert {(one.group, one.functions) for one in found} == {(found[0].group, 4)}
    assert {(one.state, one.kept) for one in found} == {("decided", "copy")}


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
    assert optimizations.settled(), "the program may never call the first one again"
    run(first, 5)
    assert selection(first).state == "measuring"
    assert not optimizations.settled(), "it does"


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
        return Standing(None, None, in_place=False, recordings=1, threads=frozenset())

    def so_far(self) -> tuple[int, int]:
        return self.served.count("none"), 1

    def recorded_behind(self, seen: set[Any]) -> Iterator[Any]:
        yield from ()


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
        for _ in range(step % 13):  # each iteration is another than the one before
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
    assert selection(first).state == "decided", selection(first)


def test_a_program_whose_every_fifth_iteration_is_another_one_is_measured_and_not_for_ever(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection_on_cpu, "RULES", Rules(most_calls=200))
    _, first, second = pair(make, cuda_on_cpu)
    for step in range(600):
        x, y = values(step), values(step + 1)
        torch.compiler.cudagraph_mark_step_begin()
        inputs = [*first.function([x, y, W]), y, W]
        second.function(inputs)
        if step % 5 == 4:
            second.function([x, y, W])
    report = selection(first)
    assert (report.state, report.ended_by) == ("decided", "calls"), report
    assert 200 <= report.calls < 250, "those that were measured"
    assert optimizations.settled()


def test_a_function_that_is_let_go_leaves_the_others_to_be_measured_alone(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, first, second = pair(make, cuda_on_cpu, plain=50e-6)
    run_pair(first, second, 60)
    assert (selection(first).state, selection(first).functions) == ("measuring", 2)
    forget_recordings([second.function])
    assert (selection(first).state, selection(first).reason) == ("waiting", "a function of the group is gone")
    run(first, 400)
    assert (selection(first).state, selection(first).functions) == ("decided", 1)


def apart(first: Any, second: Any, iterations: int) -> None:
    """Two functions in one iteration, of which neither reads what the other returns."""
    for step in range(iterations):
        x, y = values(step), values(step + 1)
        torch.compiler.cudagraph_mark_step_begin()
        (one,) = first.function([x, y, W])
        (other,) = second.function([x, y, W])
        assert torch.equal(one, other) and torch.equal(one, 2 * x + y * W), step
        del one, other


@pytest.mark.parametrize("recording_s", [0.01, 100.0])
def test_what_is_recorded_again_behind_a_call_without_a_graph_counts_as_cost(
    make: Any, cuda_on_cpu: CudaOnCpu, recording_s: float
) -> None:
    """The second function's graph goes on from the first one's, which a call without a graph leaves out."""
    _, first = make(model=Model(cuda_on_cpu), digest="d" * 64)
    _, second = make(model=Model(cuda_on_cpu), digest="e" * 64)
    apart(first, second, 2)
    first.functions[0].member.settings.compile_s = 100.0
    for manager in managers():
        for node in manager.nodes():
            node.recording_s = recording_s
    apart(first, second, 600)
    report, recorded = selection(first), len(second.functions[0].recordings())
    if recording_s < 1:
        assert report.state == "decided"
        assert report.excess_s >= recording_s
        assert recorded == 2
    else:
        assert (report.state, report.kept) == ("off", None)
        assert str(report.reason).startswith("behind a call without a graph, graphs of other functions")
        assert recorded == 1
        assert selection(second).state == "decided", "nothing follows it"


def test_what_earlier_groups_left_in_the_tree_does_not_count_as_recorded_again(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each of five functions as many graphs are recorded again as follow it in an iteration."""
    functions = [make(model=Model(cuda_on_cpu), digest=name * 64)[1] for name in "abcde"]
    counted: list[tuple[float, int]] = []
    begin = Series.begin

    def recorded() -> int:
        return sum(len(one.functions[0].recordings()) for one in functions)

    def noted(self: Series, *arguments: Any, behind_s: float, **keywords: Any) -> Any:
        counted.append((behind_s, recorded()))
        return begin(self, *arguments, behind_s=behind_s, **keywords)

    monkeypatch.setattr(Series, "begin", noted)
    monkeypatch.setattr(
        EncoreNode, "recording_s", property(lambda self: 1.0, lambda self, seconds: None), raising=False
    )
    for step in range(2500):
        x, y = values(step), values(step + 1)
        torch.compiler.cudagraph_mark_step_begin()
        results = [one.function([x, y, W])[0] for one in functions]
        assert all(torch.equal(result, 2 * x + y * W) for result in results)
        del results
    assert {selection(one).state for one in functions} == {"decided"}
    ends = [*(at for _, at in counted[1:]), recorded()]
    assert [behind_s for behind_s, _ in counted] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert [end - at for (_, at), end in zip(counted, ends, strict=True)] == [4, 3, 2, 1, 0]


class Unfinished(FakeFunction):
    """A function whose graphs never are as they will stay."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def standing(self) -> Standing:
        self.looks += 1
        return Standing("more calls", None, in_place=False, recordings=1, threads=frozenset())


def grouped(functions: Sequence[FakeFunction], folder: Path) -> list[Member]:
    """These in one group: all others read results of the first."""
    settings = Settings("measure", rules=RULES, store=VerdictStore(folder / "none"))
    members = [Member(one, settings, 0) for one in functions]  # type: ignore[arg-type]
    for member in members[1:]:
        member.reads_results_of(members[:1])
    return members


def test_looks_at_a_large_group_of_which_one_is_called_often_take_no_longer_than_its_calls(
    make: Any, tmp_path: Path
) -> None:
    """Whether measuring may begin is a question to all of its functions."""
    make()
    functions = [Unfinished() for _ in range(200)]
    members = grouped(functions, tmp_path)
    calls = [one.served(lambda inputs: None) for one in members]
    iterations, often = 60, 100
    for _ in range(iterations):
        called_in_turn(calls, 1)
        called_in_turn(calls[:1], often)
    assert members[0].describe().reason == "more calls"
    looks = functions[0].looks
    assert looks >= 3, "it is asked, or measuring would never begin"
    assert sum(one.looks for one in functions) <= iterations * (len(functions) + often) / 2


def test_a_function_that_stands_still_is_asked_again_after_a_while(make: Any, tmp_path: Path) -> None:
    """Of its group the other one is called no more."""
    make()
    one, other = Unfinished(), Unfinished()
    calls = [member.served(lambda inputs: None) for member in grouped([one, other], tmp_path)]
    called_in_turn(calls, 3)
    before = one.looks
    called_in_turn(calls[:1], 3 * 64)
    assert one.looks > before


@pytest.mark.parametrize("others", [1, 20, 200])
def test_a_group_of_which_one_is_called_gets_its_turn_as_soon_as_one_alone(
    make: Any, tmp_path: Path, others: int
) -> None:
    """Whether they are gone, or not called."""
    make()
    holder = FakeFunction()
    (silent,) = grouped([holder], tmp_path)
    assert way.WAY.take(silent.group)
    functions = [FakeFunction() for _ in range(others + 1)]
    members = grouped(functions, tmp_path)
    call = members[0].served(lambda inputs: None)
    called_in_turn([call], 2 * way.PATIENCE)
    assert members[0].describe().state in ("measuring", "off"), "measured, or found to have no order"
    assert members[0].describe().reason != "another group is being measured"


def test_members_that_are_gone_do_not_delay_looks(make: Any, tmp_path: Path) -> None:
    make()
    functions = [Unfinished() for _ in range(200)]
    members = grouped(functions, tmp_path)
    call = members[0].served(lambda inputs: None)
    del functions[1:], members[1:]
    gc.collect()
    called_in_turn([call], 300)
    before = functions[0].looks
    called_in_turn([call], 1000)
    assert functions[0].looks >= before + 10


def called_in_turn(members: list[Any], iterations: int) -> None:
    for _ in range(iterations):
        for call in members:
            call([])


def test_hundreds_of_graphs_are_measured_one_after_another_without_making_way_for_each_other(
    make: Any, tmp_path: Path
) -> None:
    """Each of them asks whether it is its turn in the same iteration of the program."""
    prices, _ = make()
    rules = Rules(most_calls=24)
    settings = Settings("measure", rules=rules, store=VerdictStore(tmp_path / "none"))
    functions = [FakeFunction() for _ in range(500)]
    members = [Member(one, settings, 0) for one in functions]  # type: ignore[arg-type]
    calls = [one.served(lambda inputs: None) for one in members]
    called_in_turn(calls, 40)
    assert prices.timed >= 24, "the first one has had its turns"
    reasons = {one.describe().reason for one in members}
    assert "it was not called while it was to be measured" not in reasons
    called_in_turn(calls[:12], 1200)
    assert {one.describe().state for one in members[:12]} == {"decided"}


def test_hardly_a_call_is_lost_between_one_group_and_the_next(
    make: Any, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait ask every 64 calls only; who is through with measuring wakes who has waited the longest."""
    monkeypatch.setattr(selection_on_cpu, "RULES", Rules(fewest_calls=8, most_calls=60, error=0.3))
    functions = [make(model=Model(cuda_on_cpu), digest=f"{number:064x}")[1] for number in range(6)]
    decided: dict[int, int] = {}
    for step in range(700):
        x, y = values(step), values(-step)
        torch.compiler.cudagraph_mark_step_begin()
        for number, compiled in enumerate(functions):
            compiled.function([x, y, W])
            if selection(compiled).state == "decided":
                decided.setdefault(number, step)
    assert sorted(decided) == list(range(6))
    between = [following - step for step, following in itertools.pairwise(decided.values())]
    most = max(selection(compiled).calls for compiled in functions)
    assert max(between) <= most + 16, "eight calls are left alone, and it is learned how they follow one another"


def test_a_group_that_is_called_now_and_then_does_not_keep_others_waiting(make: Any, tmp_path: Path) -> None:
    """Validation every thousand steps of training."""
    make()
    settings = Settings("measure", rules=Rules(most_calls=100), store=VerdictStore(tmp_path / "none"))
    rare, often = FakeFunction(), FakeFunction()
    one, other = Member(rare, settings, 0), Member(often, settings, 0)  # type: ignore[arg-type]
    rarely, steps = one.served(lambda inputs: None), other.served(lambda inputs: None)
    for _ in range(10):
        rarely([])
    assert one.describe().state == "measuring"
    for _ in range(1000):
        steps([])
    assert other.describe().state == "decided"
    for _ in range(200):
        rarely([])
    assert one.describe().state == "decided"


@pytest.mark.parametrize("when", [2, 30, 400])
def test_a_reset_leaves_nothing_that_waits(make: Any, cuda_on_cpu: CudaOnCpu, when: int) -> None:
    """Compiled code still holds what was recorded before; others are measured at once, and all settles."""
    _, first = make(model=Model(cuda_on_cpu), digest="d" * 64)
    run(first, when)
    before = selection(first).state
    release_recordings()
    assert optimizations.settled()
    assert selection(first).state == ("decided" if before == "decided" else "off")
    _, second = make(model=Model(cuda_on_cpu), digest="e" * 64)
    reasons = set()
    run(second, 1)
    while selection(second).state == "waiting":
        reasons.add(selection(second).reason)
        run(second, 1)
    assert "another group is being measured" not in reasons
    run(second, 400)
    run(first, 800)
    assert [selection(one).state for one in (first, second)] == ["decided", "decided"]
    assert len(first.functions) == 2
    assert optimizations.settled()
