"""Verdicts that were stored serve what is compiled later, and cost nothing."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from interrupts import interrupted_at
from selection_on_cpu import W, make, pair, run, selection
from trees_on_cpu import Compiled, Model, nodes, values

import optimizations
from optimizations.recording.budget import spent_at_once
from optimizations.recording.examination import Examination
from optimizations.recording.session import Stage
from optimizations.selection.served import LOOK_EVERY
from optimizations.selection.validity import ANOTHER_STREAM, MOVES_NOW, RESTS_NOW, WINDOW

__all__ = ["cuda_on_cpu", "make"]


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


@pytest.mark.parametrize("change", ["rests", "stream"])
def test_what_was_not_captured_again_for_a_stored_copy_is_when_that_is_void(
    make: Any, cuda_on_cpu: CudaOnCpu, change: str
) -> None:
    """A verdict may be another program's, with the same function and other inputs: there is more to choose from now."""
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "copy"
    _, again = make(plain=50e-6, copied_byte=1e-7)
    run(again, 30 if change == "rests" else 200)  # the first look is where a stream is learned
    assert (selection(again).kept, selection(again).source) == ("copy", "stored")
    cuda_on_cpu.stream += change == "stream"
    run(again, 900, moving=change == "stream")
    report = selection(again)
    assert report.source == "measured"
    assert report.voided == (RESTS_NOW if change == "rests" else ANOTHER_STREAM,)
    assert [one.candidate for one in report.candidates] == ["none", "copy", "indirection"]
    assert (report.state, report.kept, report.outcome) == ("decided", "indirection", "faster")
    assert again.reports[0].off is None
    assert any(one.indirect for one in again.reports[0].inputs)
    assert optimizations.settled()


def test_a_stored_copy_that_ends_while_moved_weights_are_tried_out_leaves_them_to_that(make: Any) -> None:
    """Both change the addresses in one graph; what copied inputs gain is looked at once weights are followed."""
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    _, again = make(plain=50e-6, copied_byte=1e-7)
    run(again, 30)
    weights = [values(number) for number in range(20, 28)]
    with spent_at_once():
        for w in weights[:2]:
            run(again, 1, w=w)
    (trying,) = [one for one in nodes() if one.fixed_inputs.refused is None and one.fixed_inputs._findings is not None]
    assert not trying.fixed_inputs.following
    group = again.functions[-1].member.group
    group._void("for this test")
    assert trying.session.stage is Stage.DONE and not trying.waiting
    with spent_at_once():
        for number in range(120):
            run(again, 4, w=weights[number % 8])
    assert trying.fixed_inputs.following
    assert selection(again).kept == "indirection"


@pytest.mark.parametrize("later", ["in the same process", "in the next one"])
def test_where_nothing_could_be_read_in_place_that_is_measured_once_it_can(
    make: Any, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """Memory may be short for a moment, and the verdict of that moment is stored."""
    short: list[str | None] = ["memory: this much is needed"]
    monkeypatch.setattr(Examination, "short_of_memory", lambda self, candidates: short[0])
    _, compiled = make(plain=50e-6, copied_byte=1e-7)
    run(compiled, 400)
    report = selection(compiled)
    assert (report.kept, [one.candidate for one in report.candidates]) == ("copy", ["none", "copy"])
    assert optimizations.settled()
    short[0] = None
    if later == "in the next one":
        _, compiled = make(plain=50e-6, copied_byte=1e-7)
    run(compiled, 900)
    report = selection(compiled)
    assert (report.state, report.kept, report.outcome) == ("decided", "indirection", "faster")
    assert [one.candidate for one in report.candidates] == ["none", "copy", "indirection"]
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


def run_apart(first: Compiled, second: Compiled, calls: int, *, moving: bool = True) -> None:
    """The second reads what the first returns, and otherwise the same two tensors in each call."""
    resting, kept = values(11), [(values(1), values(2))]
    for step in range(calls):
        x, y = kept[-1]
        if moving:
            x, y = values(step), values(step + 1)
            kept.append((x, y))
            del kept[:-4]
        else:
            x.fill_(step)
        torch.compiler.cudagraph_mark_step_begin()
        middle = first.function([x, y, W])
        inputs = [*middle, resting, W]
        del middle
        (result,) = second.function(inputs)
        assert torch.equal(result, 2 * (2 * x + y * W) + resting * W), step
        del result


def store_for_either(make: Any, cuda_on_cpu: CudaOnCpu, moving_plain: float, resting_plain: float) -> int:
    """Store verdicts on a pair for inputs that move and for such that rest, by what a call without a graph takes then.

    Gives how many calls were timed.
    """
    for moving, price in ((True, moving_plain), (False, resting_plain)):
        prices, first, second = pair(make, cuda_on_cpu, plain=price)
        run_apart(first, second, 1200, moving=moving)
    timed: int = prices.timed
    return timed


@pytest.mark.parametrize(("plain", "kept"), [(5e-6, "none"), (50e-6, "copy")])
def test_a_stored_verdict_on_several_holds_though_inputs_move_of_the_first_only(
    make: Any, cuda_on_cpu: CudaOnCpu, plain: float, kept: str
) -> None:
    """Whether they move is known of the function that an iteration begins with. A backward's own may well rest."""
    prices, first, second = pair(make, cuda_on_cpu, plain=plain)
    run_apart(first, second, 900)
    assert (selection(first).kept, selection(first).voided) == (kept, ())
    timed = prices.timed
    _, first, second = pair(make, cuda_on_cpu, plain=plain)
    run_apart(first, second, 900)
    for one in (selection(first), selection(second)):
        assert (one.state, one.kept, one.source, one.voided) == ("decided", kept, "stored", ())
    assert prices.timed == timed, "with stored verdicts nothing is measured"


def test_inputs_of_a_later_function_may_begin_to_move_and_stop(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """Without graphs they are where PyTorch's allocator puts them, and that changes for many reasons."""
    prices, first, second = pair(make, cuda_on_cpu, plain=5e-6)
    run_apart(first, second, 900)
    timed = prices.timed
    _, first, second = pair(make, cuda_on_cpu, plain=5e-6)
    fixed, several = values(11), [values(number) for number in range(5)]
    for moves in (False, True, False):
        for step in range(300):
            x, y = values(step), values(step + 1)
            torch.compiler.cudagraph_mark_step_begin()
            first.function([x, y, W])
            middle, own = (several[step % 5], several[step % 3]) if moves else (fixed, fixed)
            (result,) = second.function([middle, own, W])
            assert torch.equal(result, 2 * middle + own * W), step
            del result
    for one in (selection(first), selection(second)):
        assert (one.state, one.kept, one.source, one.voided) == ("decided", "none", "stored", ())
    assert prices.timed == timed


@pytest.mark.parametrize("digits", ["def", "ddd", "dde"])
@pytest.mark.parametrize(("plain", "kept"), [(50e-6, "copy"), (5e-6, "none")])
def test_a_chain_of_three_is_served_by_its_stored_verdict(
    make: Any, cuda_on_cpu: CudaOnCpu, digits: str, plain: float, kept: str
) -> None:
    """Each is joined to the one before when its graph is recorded, and only the first one's inputs move. Functions may
    be alike, as layers are that were compiled one by one."""

    def chain() -> list[Compiled]:
        return [make(model=Model(cuda_on_cpu), digest=digit * 64, plain=plain)[1] for digit in digits]

    def run_chain(functions: list[Compiled], calls: int) -> None:
        resting, kept = values(11), []
        for step in range(calls):
            x, y = values(step), values(step + 1)
            kept.append((x, y))
            del kept[:-4]
            torch.compiler.cudagraph_mark_step_begin()
            results = [x]
            for place, function in enumerate(functions):
                inputs = [*results, y if place == 0 else resting, W]
                results.clear()
                results = function.function(inputs)
            expected = x
            for place in range(3):
                expected = 2 * expected + (y if place == 0 else resting) * W
            assert torch.equal(results[0], expected), step
            del results

    functions = chain()
    run_chain(functions, 1500)
    found = [selection(one) for one in functions]
    assert {(one.state, one.kept, one.group, one.functions) for one in found} == {("decided", kept, found[0].group, 3)}
    again = chain()
    run_chain(again, 900)
    for one in map(selection, again):
        assert (one.state, one.kept, one.source, one.voided) == ("decided", kept, "stored", ())


@pytest.mark.parametrize("plain", [5e-6, 50e-6])
def test_a_stored_verdict_on_several_is_void_where_inputs_of_the_first_rest_now(
    make: Any, cuda_on_cpu: CudaOnCpu, plain: float
) -> None:
    prices, first, second = pair(make, cuda_on_cpu, plain=plain)
    run_apart(first, second, 900)
    timed = prices.timed
    _, first, second = pair(make, cuda_on_cpu, plain=plain)
    run_apart(first, second, 20)
    run_apart(first, second, 900, moving=False)
    one, other = selection(first), selection(second)
    assert prices.timed > timed
    assert (one.group, one.state, one.source) == (other.group, "decided", "measured")
    assert one.voided == other.voided == (RESTS_NOW,)


def test_with_stored_verdicts_only_it_is_told_why_one_was_given_up(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    _, again = make(mode="stored")
    run(again, 200)  # the first look is where a stream is learned
    cuda_on_cpu.stream += 1
    run(again, 2 * LOOK_EVERY + 2 * WINDOW)
    report = selection(again)
    assert (report.state, report.reason) == ("off", f"the stored verdict does not hold: {ANOTHER_STREAM}")
    assert report.voided == (ANOTHER_STREAM,)


def test_stored_verdicts_that_are_given_up_count_for_the_bound(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    _, compiled = make()
    run(compiled, 400)
    prices, again = make()
    timed = []
    for stream in range(1, 7):
        cuda_on_cpu.stream = stream
        run(again, 2 * LOOK_EVERY + 400)
        timed.append(prices.timed)
    assert selection(again).state == "decided"
    assert selection(again).voided == (ANOTHER_STREAM,) * 3
    assert timed[0] < timed[1] < timed[2] < timed[3] == timed[4] == timed[5]


def test_of_functions_that_are_alike_none_is_known_to_lead(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """The file of both would say it of the other one too, whose inputs rest."""

    def both() -> tuple[Compiled, Compiled]:
        second, first = (make(model=Model(cuda_on_cpu), digest="d" * 64, plain=5e-6)[1] for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        second.function([values(1), values(2), W])
        return first, second

    run_apart(*both(), 900)
    first, second = both()
    fixed = values(11)
    for step in range(900):
        x, y = values(step), values(step + 1)
        torch.compiler.cudagraph_mark_step_begin()
        first.function([x, y, W])
        (result,) = second.function([fixed, fixed, W])
        assert torch.equal(result, 2 * fixed + fixed * W), step
        del result
    for one in (selection(first), selection(second)):
        assert (one.state, one.kept, one.source, one.voided) == ("decided", "none", "stored", ())


# One verdict where inputs move, and one where they do not


LOOKED = 2 * LOOK_EVERY + 4 * WINDOW
"""Calls of a function after which it was looked whether its inputs move."""


def test_programs_whose_inputs_move_and_rest_do_not_undo_each_others_verdicts(make: Any) -> None:
    """One serves batches as they come, and one from a buffer of its own. Both run again and again."""
    timed = []
    for process in range(6):
        prices, compiled = make(plain=5e-6 if process % 2 else 50e-6)
        run(compiled, 900, moving=process % 2 == 0)
        timed.append(prices.timed)
        report = selection(compiled)
        assert (report.state, report.kept) == ("decided", "none" if process % 2 else "copy")
        if process > 1:
            assert report.source == "stored"
            assert report.voided in ((), (RESTS_NOW,), (MOVES_NOW,))
    assert 0 < timed[0] < timed[1] == timed[2] == timed[5]


@pytest.mark.parametrize("first", ["moving", "resting"])
@pytest.mark.parametrize("mode", ["measure", "stored"])
def test_a_verdict_for_inputs_that_move_is_there_when_they_do(make: Any, mode: str, first: str) -> None:
    """With stored verdicts only, selection stays on."""
    prices, compiled = make(plain=50e-6)
    run(compiled, 400, moving=first == "moving")
    prices.plain = 5e-6
    run(compiled, 900, moving=first != "moving")
    assert (selection(compiled).kept, selection(compiled).not_stored) == ("none", None)
    timed = prices.timed
    _, again = make(mode=mode)
    for moving in (True, False, True):
        run(again, LOOKED, moving=moving)
        report = selection(again)
        assert (report.state, report.source) == ("decided", "stored")
        assert report.kept == ("copy" if moving == (first == "moving") else "none")
    assert prices.timed == timed
    assert selection(again).voided == (RESTS_NOW, MOVES_NOW)


def test_inputs_that_move_and_rest_in_turn_do_not_change_verdicts_for_ever(make: Any) -> None:
    """Each change records graphs again, or frees them."""
    prices, compiled = make(plain=50e-6)
    run(compiled, 400)
    prices.plain = 5e-6
    run(compiled, 900, moving=False)
    _, again = make()
    kept = []
    for turn in range(8):
        run(again, LOOKED + 1024, moving=turn % 2 == 0)
        kept.append(selection(again).kept)
    assert kept == ["copy", "none", "copy", "none", "none", "none", "none", "none"]
    assert selection(again).voided == (RESTS_NOW, MOVES_NOW, RESTS_NOW)


@pytest.mark.parametrize(("plain", "other_plain"), [(5e-6, 50e-6), (50e-6, 5e-6), (50e-6, 50e-6), (5e-6, 5e-6)])
@pytest.mark.parametrize("mode", ["measure", "stored"])
def test_functions_that_were_judged_together_change_to_the_other_verdict_together(
    make: Any, cuda_on_cpu: CudaOnCpu, plain: float, other_plain: float, mode: str
) -> None:
    """Without graphs they are groups of their own, and only the first one's inputs tell."""
    timed = store_for_either(make, cuda_on_cpu, plain, other_plain)
    prices, first, second = pair(make, cuda_on_cpu, mode=mode)
    for moving, price in ((True, plain), (False, other_plain), (True, plain)):
        run_apart(first, second, LOOKED, moving=moving)
        for one in (selection(first), selection(second)):
            assert (one.state, one.source) == ("decided", "stored"), one
            assert one.kept == ("none" if price == 5e-6 else "copy")
    assert prices.timed == timed


def test_a_verdict_of_another_program_on_one_of_several_leads_to_that_on_all(make: Any, cuda_on_cpu: CudaOnCpu) -> None:
    """The first function alone, whose inputs move, and both together with inputs that rest: each has its verdict."""
    prices, alone = make(model=Model(cuda_on_cpu), digest="d" * 64, plain=50e-6, copied_byte=1e-7)
    run(alone, 600)
    assert selection(alone).kept == "indirection"
    timed = []
    for _ in range(3):
        prices, first, second = pair(make, cuda_on_cpu, plain=50e-6, copied_byte=0.0)
        run_apart(first, second, 1200, moving=False)
        assert (selection(second).state, selection(second).kept) == ("decided", "copy")
        timed.append(prices.timed)
    assert timed[0] == timed[2]


@pytest.mark.parametrize("mode", ["measure", "stored"])
def test_functions_that_were_judged_together_are_served_alike_after_an_interrupt_while_their_verdict_is_given_up(
    make: Any, cuda_on_cpu: CudaOnCpu, mode: str
) -> None:
    timed, found = store_for_either(make, cuda_on_cpu, 5e-6, 50e-6), set()
    for line in itertools.count():
        prices, first, second = pair(make, cuda_on_cpu, mode=mode)
        run_apart(first, second, 3)
        with interrupted_at(line, "optimizations/selection/") as where:
            try:
                first.functions[0].member.group._void(RESTS_NOW)
            except KeyboardInterrupt:
                assert where
        run_apart(first, second, 4, moving=False)
        one, other = selection(first), selection(second)
        assert (one.state, one.kept, one.source) == (other.state, other.kept, other.source), where
        assert (one.state, one.source) == ("decided", "stored"), where
        found.add(one.kept)
        if not where:
            break
    assert found == {"none", "copy"}
    assert (one.kept, prices.timed) == ("copy", timed)


@pytest.mark.parametrize("mode", ["measure", "stored"])
@pytest.mark.parametrize(("plain", "other_plain"), [(5e-6, 50e-6), (50e-6, 5e-6)])
def test_a_function_that_is_first_called_late_is_served_as_those_that_it_was_judged_with(
    make: Any, cuda_on_cpu: CudaOnCpu, mode: str, plain: float, other_plain: float
) -> None:
    """They have gone on to the other verdict by then, and nobody looks whether the first one holds for it."""
    timed = store_for_either(make, cuda_on_cpu, plain, other_plain)
    for changes in (1, 2):
        prices, first, second = pair(make, cuda_on_cpu, mode=mode)
        for change in range(changes):
            run(first, LOOKED, moving=change == 1)
        run_apart(first, second, LOOKED, moving=changes == 2)
        price = plain if changes == 2 else other_plain
        for one in (selection(first), selection(second)):
            assert (one.state, one.source, one.kept) == ("decided", "stored", "none" if price == 5e-6 else "copy"), one
    assert prices.timed == timed


@pytest.mark.parametrize("mode", ["measure", "stored"])
def test_a_function_that_is_first_called_late_is_not_served_by_what_those_before_it_gave_up(
    make: Any, cuda_on_cpu: CudaOnCpu, mode: str
) -> None:
    """Though there is no other verdict."""
    _, first, second = pair(make, cuda_on_cpu, plain=5e-6)
    run_apart(first, second, 1200)
    _, first, second = pair(make, cuda_on_cpu, mode=mode, plain=5e-6)
    run(first, LOOKED, moving=False)
    assert selection(first).voided == (RESTS_NOW,)
    run_apart(first, second, 20, moving=False)
    assert selection(second).source is None
