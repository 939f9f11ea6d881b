"""What the program still holds of gradients is what it is in eager, whoever holds it and how."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network

from optimizations.capture.step import gradient_copies, gradient_holders
from optimizations.capture.step.gradient_holders import Holders, Left, taken_by
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.torch_internals.reference_counts import FEW, TURNS, ReferenceCounts
from tests.optimizations.capture.step.test_gradients_held import BEHIND, ZERO, Alike, Training


@pytest.fixture(scope="module", autouse=True)
def not_the_first_step() -> None:
    """The first one of a process takes a call more until it is recorded, and calls are counted here."""
    training = Alike(BEHIND)
    step = GraphedStep(training.step, device=CpuDevice())
    for batch in batches("cpu", 6):
        step(*batch)


class Buffers(Alike):
    """One with two sets of tensors, each of one gradient's size. `seen` are views of what it holds as storages."""

    def __init__(self, zero: str) -> None:
        super().__init__(zero)
        self.sets = [[torch.zeros_like(one) for one in self.model.parameters()] for _ in range(2)]
        self.held = [tensor for some in self.sets for tensor in some]
        self.storages: list[torch.UntypedStorage] = []

    def assign(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient

    def seen(self) -> list[torch.Tensor]:
        return [*self.gradients(), *self.held, *(torch.empty(0).set_(one) for one in self.storages)]


def in_turn(training: Buffers, index: int) -> None:
    training.assign(training.sets[index % 2])


def another_later(training: Buffers, index: int) -> None:
    training.assign(training.sets[index > 6])


def views_of_another_later(training: Buffers, index: int) -> None:
    training.assign([one.view_as(one) for one in training.sets[index > 6]])


def new_ones_later(training: Buffers, index: int) -> None:
    if index == 0:
        training.assign(training.sets[0])
    if index > 6:
        training.assign([torch.zeros_like(one) for one in training.sets[0]])


def a_view_is_held(training: Buffers, index: int) -> None:
    if index == 6:
        training.held = [one.detach() for one in training.gradients()]
    if index > 6:
        training.assign([torch.zeros_like(one) for one in training.sets[0]])


def a_storage_is_held(training: Buffers, index: int) -> None:
    if index == 6:
        training.storages = [one.untyped_storage() for one in training.gradients()]
    if index > 6:
        training.assign([torch.zeros_like(one) for one in training.sets[0]])


def a_list_of_all(training: Buffers, index: int) -> None:
    training.held += training.gradients()


def a_list_of_all_and_none_in_place(training: Buffers, index: int) -> None:
    training.held += training.gradients()
    training.model.zero_grad()


def the_last_ones(training: Buffers, index: int) -> None:
    training.held = training.gradients()


def clones_take_their_place(training: Buffers, index: int) -> None:
    if index > 6:
        training.held = training.gradients()
        for parameter in training.model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()


def moved_and_held(training: Buffers, index: int) -> None:
    if index % 4 == 3:
        for gradient in training.gradients():
            gradient.data = gradient.data * 0.5
    training.held = [one.detach() for one in training.gradients()]


@pytest.mark.parametrize(
    "change",
    [
        in_turn,
        another_later,
        views_of_another_later,
        new_ones_later,
        a_view_is_held,
        a_storage_is_held,
        a_list_of_all,
        a_list_of_all_and_none_in_place,
        the_last_ones,
        clones_take_their_place,
        moved_and_held,
    ],
)
@pytest.mark.parametrize("zero", [*ZERO, BEHIND])
@pytest.mark.parametrize("signatures", [1, 2])
def test_what_is_held_is_what_it_is_in_eager(
    signatures: int, zero: str, change: Callable[[Buffers, int], None]
) -> None:
    """With two signatures the way of one recording leads over what the other left."""
    mine, theirs = Buffers(zero), Buffers(zero)
    step = GraphedStep(mine.step, device=CpuDevice())
    for index in range(16):
        (batch,) = batches("cpu", 16, 6 + index % signatures)[index]
        change(mine, index)
        change(theirs, index)
        assert torch.equal(step(batch), theirs.step(batch)), index
        found, expected = mine.seen(), theirs.seen()
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), index
        del found, expected  # they hold gradients
    assert step.report().replays >= 6


def test_copies_of_many_held_gradients_take_few_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []
    copy_all, clone = gradient_copies.copy_all, torch.Tensor.clone
    found = []
    for layers in (1, 12):
        training = Training("set to None")
        training.model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(layers)])
        step = GraphedStep(training.step, device=CpuDevice())
        for batch in batches("cpu", 12):
            training.held = training.gradients()
            step(*batch)
        with monkeypatch.context() as patched:
            patched.setattr(gradient_copies, "copy_all", lambda *both: (copies.append(len(both[0])), copy_all(*both)))
            patched.setattr(
                torch.Tensor, "clone", lambda *given, **named: (copies.append(1), clone(*given, **named))[1]
            )
            for batch in batches("cpu", 2):
                training.held = training.gradients()
                step(*batch)
        found.append([number // (2 * layers) for number in copies if number])
        copies.clear()
    assert found[0] == found[1] == [1, 1, 1], "what is held before, what is new, and what is put back"


CLONES: list[int] = []
"""Each parameter has a copy of its gradient."""


@pytest.mark.parametrize(
    "new",
    [
        {8: [0], 9: [0], 14: [0]},
        {8: [2], 9: [2], 14: [2]},
        {8: [2], 9: [2, 3], 14: [2, 3]},
        {8: [2, 3], 9: [2], 14: [2]},
        {8: [0, 2], 9: [0, 2], 14: [1, 3]},
        {8: [1], 9: [2, 3], 10: [0], 12: [2], 13: [2, 3]},
        {5: [2], 7: [3], 8: CLONES, 13: [2], 14: [3, 2]},
        {8: CLONES, 12: [2], 13: [2], 14: CLONES, 16: [0, 2]},
    ],
)
@pytest.mark.parametrize("zero", [*ZERO, BEHIND])
def test_gradient_of_another_parameter_is_assigned_in_place(zero: str, new: dict[int, list[int]]) -> None:
    sides = []
    for _ in range(2):
        training = Buffers(zero)
        training.sets, training.held = [], []
        torch.manual_seed(3)
        training.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))

        def step(batch: dict[str, torch.Tensor], training: Buffers = training) -> torch.Tensor:
            loss = training.step(batch)
            first, _, third, _ = training.model.parameters()
            first.grad = third.grad
            return loss

        sides.append((training, step))
    (mine, own), (theirs, eager) = sides
    step = GraphedStep(own, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 20)):
        for training in (mine, theirs):
            for place, parameter in enumerate(training.model.parameters()):
                if new.get(index) is CLONES:
                    parameter.grad = None if parameter.grad is None else parameter.grad.clone()
                elif place in new.get(index, []):
                    parameter.grad = torch.ones_like(parameter)
        assert torch.equal(step(batch), eager(batch)), index
        found, expected = mine.seen(), theirs.seen()
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), index
        del found, expected  # they hold gradients


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("given", [lambda gradient: gradient, lambda gradient: gradient.view(-1)[1:3]])
@pytest.mark.parametrize("change", [in_turn, another_later, new_ones_later, a_view_is_held, clones_take_their_place])
def test_what_a_step_returns_of_gradients_is_what_eager_returns(
    change: Callable[[Buffers, int], None], given: Callable[[torch.Tensor], torch.Tensor], clears: bool
) -> None:
    """The gradient itself, which the step clears or leaves, or a part of it, where another one stands than before."""
    sides = []
    for _ in range(2):
        training = Buffers("added to")
        first = next(training.model.parameters())

        def step(
            batch: dict[str, torch.Tensor], training: Buffers = training, first: torch.Tensor = first
        ) -> tuple[torch.Tensor, torch.Tensor]:
            loss = training.step(batch)
            assert first.grad is not None
            returned = given(first.grad)
            if clears:
                training.model.zero_grad()
            return loss, returned

        sides.append((training, step))
    (mine, own), (theirs, eager) = sides
    step = GraphedStep(own, device=CpuDevice())
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, (batch,) in enumerate(batches("cpu", 16)):
        for training in (mine, theirs):
            if clears and not training.gradients():
                training.assign([torch.ones_like(one) for one in training.model.parameters()])
            change(training, index)
        results, expected = step(batch), eager(batch)
        assert all(map(torch.equal, results, expected)), index
        earlier.append((results[1], expected[1]))
        assert all(torch.equal(one, other) for one, other in earlier), index
        assert all(map(torch.equal, mine.seen(), theirs.seen())), index


def test_the_report_says_in_how_many_calls_gradients_were_held() -> None:
    training = Buffers(next(iter(ZERO)))
    step = GraphedStep(training.step, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 14)):
        training.held = [*training.held, *training.gradients()] if 8 <= index < 11 else []
        step(batch)
    (recorded,) = step.report().recordings
    assert recorded.gradients_kept == 3 < recorded.replays


@pytest.mark.parametrize("zero", [*ZERO, BEHIND])
def test_gradients_that_two_models_exchange_are_those_of_eager(zero: str) -> None:
    def trainings() -> list[Buffers]:
        return [Buffers(zero), Buffers(zero)]

    mine, theirs = trainings(), trainings()
    steps = [GraphedStep(one.step, device=CpuDevice()) for one in mine]
    for index, (batch,) in enumerate(batches("cpu", 18)):
        for some in (mine, theirs):
            if index % 3 == 2:
                both = list(zip(*(one.model.parameters() for one in some), strict=True))
                for first, second in both:
                    first.grad, second.grad = second.grad, first.grad
        for which in (0, 1):
            given = {**batch, "x": batch["x"] * (which + 1)}
            assert torch.equal(steps[which](given), theirs[which].step(given)), index
            for one, other in zip(mine, theirs, strict=True):
                found, expected = one.seen(), other.seen()
                assert len(found) == len(expected) and all(map(torch.equal, found, expected)), (index, which)
                del found, expected
    assert all(step.report().replays >= 10 for step in steps)


def test_step_that_exchanges_gradients_leaves_held_ones() -> None:
    def run(graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = second(first(x)).square().mean()
            loss.backward()
            first.weight.grad, second.weight.grad = second.weight.grad, first.weight.grad
            return loss.detach()

        call = GraphedStep(step, device=CpuDevice()) if graphed else step
        held = [torch.zeros(8, 8), torch.zeros(8, 8)]
        first.weight.grad, second.weight.grad = held
        found = []
        for index in range(12):
            found += [call(torch.full((2, 8), index + 1.0)), *(one.clone() for one in held)]
        return found

    assert all(map(torch.equal, run(True), run(False)))


def test_what_encore_holds_is_forgotten_with_its_recordings() -> None:
    known = dict(gradient_holders._own)
    training = Alike("set to None")
    step = GraphedStep(training.step, device=CpuDevice())
    for batch in batches("cpu", 8):
        step(*batch)
    assert len(gradient_holders._own) > len(known)
    step.reset()
    del step
    gc.collect()
    assert set(gradient_holders._own) <= set(known)


def test_each_way_to_hold_a_tensor_counts_in_a_number_of_its_own() -> None:
    tensors = [torch.zeros(3) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.zeros(3))
    counts = ReferenceCounts(tensors)
    before = counts.now()
    held = [tensors[0], tensors[1].detach(), tensors[2].untyped_storage()]
    parameter.grad = tensors[3]
    added = (counts.now() - before).reshape(-1, 4).tolist()
    assert added == [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 1, 0, 0]]
    held.clear()
    parameter.grad = None
    assert (counts.now() == before).all()


def _backward(model: torch.nn.Module, loss: torch.Tensor) -> None:
    loss.backward()


def _gradients_of_autograd(model: torch.nn.Module, loss: torch.Tensor) -> None:
    """These are views: what they are views of shares their memory."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


def _parts_of_one_buffer(model: torch.nn.Module, loss: torch.Tensor) -> None:
    parameters = list(model.parameters())
    flat = torch.cat([one.reshape(-1) for one in torch.autograd.grad(loss, parameters)])
    parts = flat.split([one.numel() for one in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def _one_for_two_parameters(model: torch.nn.Module, loss: torch.Tensor) -> None:
    loss.backward()
    first, second, *_ = model
    second.weight.grad = first.weight.grad


LEAVES = [_backward, _gradients_of_autograd, _parts_of_one_buffer, _one_for_two_parameters]


class Ways(Alike):
    """One that leaves gradients in this way, and gives and keeps the first of them where it is to."""

    def __init__(self, leave: Callable[[torch.nn.Module, torch.Tensor], None], zero: str, kind: str) -> None:
        super().__init__("added to")
        self.held = []
        self.last = torch.zeros(8, 8)

        def step(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
            ZERO[zero](self.model)
            loss = self.model(batch["x"]).square().mean()
            leave(self.model, loss)
            first = next(iter(self.model.parameters())).grad
            if kind == "binds one":
                self.last = first
            return (loss.detach(), first) if kind == "returns one" else (loss.detach(),)

        self.step = step


@pytest.mark.parametrize("hold", [list, lambda found: [found[0].view(-1)[1:3]], lambda found: found[-1:]])
@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize("kind", ["plain", "returns one"])
@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("signatures", [1, 2])
def test_each_way_to_leave_gradients_leaves_what_is_held(
    signatures: int,
    leave: Callable[[torch.nn.Module, torch.Tensor], None],
    kind: str,
    zero: str,
    hold: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> None:
    """And other gradients lie in one memory with those that are held where they do so in eager."""
    mine, theirs = Ways(leave, zero, kind), Ways(leave, zero, kind)
    step = GraphedStep(mine.step, device=CpuDevice())
    for index in range(14):
        (batch,) = batches("cpu", 14, 6 + index % signatures)[index]
        for one in (mine, theirs):
            if index in (5, 6, 10):
                one.held += hold(one.gradients())
            if index == 8:
                one.held = [torch.empty(0).set_(some.untyped_storage()) for some in one.gradients()]
        found, expected = step(batch), theirs.step(batch)
        assert all(map(torch.equal, found, expected)), index
        for some, others in [(mine.gradients(), theirs.gradients()), (mine.held, theirs.held)]:
            assert len(some) == len(others) and all(map(torch.equal, some, others)), index


def test_gradient_held_by_a_cycle_is_not_missing_later() -> None:
    """It is not collected while it is counted what Encore holds."""
    tensors = [torch.zeros(3)]
    cycle: list[object] = [tensors[0].detach()]
    cycle.append(cycle)
    del cycle
    _, own = gradient_holders.taken_by(lambda: [[] for _ in range(100_000)], tensors)
    gc.collect()
    assert own._added == {}


def test_moved_data_does_not_hide_who_holds_a_gradient() -> None:
    """The storage lost one holder, and has got another."""
    for way in (torch.Tensor.detach, lambda one: torch.from_dlpack(one.detach()), torch.Tensor.untyped_storage):
        tensor = torch.zeros(3)
        now = ReferenceCounts([tensor]).now
        assert now().all()
        held = way(tensor)
        tensor.data = torch.ones(3)
        assert not now().any(), way
        del held


@pytest.mark.parametrize("zero", ["set to None", BEHIND])
@pytest.mark.parametrize("signatures", [1, 2])
def test_held_gradients_with_moved_data_stay_unchanged(zero: str, signatures: int) -> None:
    mine, theirs = Buffers(zero), Buffers(zero)
    step = GraphedStep(mine.step, device=CpuDevice())
    for index in range(20):
        (batch,) = batches("cpu", 20, 6 + index % signatures)[index]
        for training in (mine, theirs):
            if index in (9, 10, 15):
                for one in training.gradients():
                    training.held.append(one.detach())
                    one.data = one.data * 0.5
            if index == 10:
                training.model.zero_grad()
        assert torch.equal(step(batch), theirs.step(batch)), index
        found, expected = mine.seen(), theirs.seen()
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), index
        del found, expected  # they hold gradients


def test_counts_are_read_of_objects_that_are_held() -> None:
    """No matter what becomes of what made the function, or of the tensor's part in C++."""
    tensor = torch.zeros(3)
    now = ReferenceCounts([tensor]).now
    before, gone = now(), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert (before - now()).tolist() == [1, 0, 0, 0] and gone() is not None


def test_counts_are_compared_for_tensors_of_the_read_storage() -> None:
    """One who holds the storage from before makes up for the tensor that has another."""
    tensor = torch.zeros(3)
    counts = ReferenceCounts([tensor])
    same = counts.compared(counts.now())
    assert same()
    other = tensor.detach()
    assert not same()
    tensor.data = torch.zeros(3)
    assert not same()
    del other


@pytest.mark.parametrize("index", [0, 5, 2 * FEW])
def test_view_of_one_of_many_tensors_is_noticed_in_turn(index: int) -> None:
    tensors = [torch.zeros(3) for _ in range(TURNS * FEW)]
    counts = ReferenceCounts(tensors)
    same = counts.compared(counts.now())
    assert all(same() for _ in range(TURNS))
    view = tensors[index].detach()
    assert [same() for _ in range(TURNS)].count(False) == 1
    del view
    held = tensors[index]
    assert not same() and not same()
    del held
    views = [tensor.detach() for tensor in tensors]
    assert not same()
    del views


class Stand:
    """Says whether gradients are where they were left."""

    said = True

    def stands(self) -> bool:
        return self.said


def test_usual_counts_say_nothing_of_unknown_gradients() -> None:
    gradient, parameter, stand = torch.zeros(3), torch.nn.Parameter(torch.zeros(3)), Stand()
    parameter.grad = gradient
    found = [gradient]
    holders, own = taken_by(lambda: Holders(found), found)
    left = Left(holders, {id(gradient): 1}, weakref.WeakMethod(stand.stands))
    found.clear()
    del gradient
    for _ in range(3):
        assert left.family.unheld(left)
        assert left.family.unheld(None)
        stand.said = False
        assert left.family.unheld(left) and not left.family.unheld(None)
        held = parameter.grad
        assert not left.family.unheld(left)
        parameter.grad = None
        assert not left.family.unheld(left) and not left.family.unheld(None)
        del held
        assert left.family.unheld(left) and left.family.unheld(None)
        parameter.grad = holders.tensors[0]
        stand.said = True
    del own


def test_counts_are_usual_until_encore_holds_others() -> None:
    usual = gradient_holders._Usual(lambda: True, None, gradient_holders._last_change[0])
    assert usual.holds(None)
    gradient_holders._changed()
    assert not usual.holds(None)


def _large(training: Training) -> torch.nn.Module:
    """Its gradients are larger than what a graph copies itself."""
    return torch.nn.Sequential(torch.nn.Linear(8, 2100), torch.nn.Linear(2100, 8))


def _turned_round(training: Training) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for one in model:
        assert isinstance(one, torch.nn.Linear)
        one.weight = torch.nn.Parameter(one.weight.detach().clone().t())
    return model


@pytest.mark.parametrize("make", [_large, _turned_round])
def test_returned_gradient_is_new_where_the_old_one_is_held(
    make: Callable[[Training], torch.nn.Module],
) -> None:
    """It is copied behind the launch, and then what is held gets its content back. Also in a steady replay."""
    sides = []
    for _ in range(2):
        training = Training("set to None")
        torch.manual_seed(2)
        training.model = make(training)

        def step(batch: dict[str, torch.Tensor], training: Training = training) -> tuple[torch.Tensor, torch.Tensor]:
            training.model.zero_grad()
            loss = training.model(batch["x"]).square().mean()
            loss.backward()
            first = next(training.model.parameters()).grad
            assert first is not None
            return loss.detach(), first

        sides.append((training, step))
    (mine, own), (theirs, eager) = sides
    step = GraphedStep(own, device=CpuDevice())
    for index, (batch,) in enumerate(batches("cpu", 24)):
        if index > 4:
            mine.held += mine.gradients()
            theirs.held += theirs.gradients()
        found, expected = step(batch), eager(batch)
        assert all(map(torch.equal, found, expected)), index
        assert all(map(torch.equal, mine.held, theirs.held)), index
        del found, expected
    assert step.report().replays >= 20


@pytest.mark.parametrize("way", [torch.Tensor.conj, lambda one: one._neg_view()])
@pytest.mark.parametrize("zero", ["set to zero", "added to"])
def test_conjugate_and_negative_gradients_equal_eagers(zero: str, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Where others of that kind take their place, and the program holds those or not."""

    def run(graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        weights = [torch.nn.Parameter(torch.randn(3, dtype=torch.complex64)) for _ in range(3)]
        for one in weights:
            one.grad = way(torch.ones_like(one))

        def step(x: torch.Tensor) -> torch.Tensor:
            for one in weights:
                if zero == "set to zero" and one.grad is not None:
                    one.grad.zero_()
            loss = sum(torch.view_as_real(one * x).square().sum() for one in weights)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return loss.detach()

        call = GraphedStep(step, device=CpuDevice()) if graphed else step
        found, held = [], []
        for index in range(14):
            found.append(call(torch.full((3,), index + 1.0)))
            if index > 5:
                for one in weights[: 1 + index % 3]:
                    if index % 4 == 1:
                        held.append(one.grad)
                    one.grad = way(torch.full_like(one, index))
            found += [one.grad.resolve_conj().resolve_neg().clone() for one in weights if one.grad is not None]
            found += [one.resolve_conj().resolve_neg().clone() for one in held if one is not None]
        return found

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize("zero", ["set to None", "added to"])
def test_expanded_gradients_equal_eagers_held_or_not(zero: str) -> None:
    """As the gradient of a sum is: all of its elements are one."""

    def run(graphed: bool) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3)]

        def step(x: torch.Tensor) -> torch.Tensor:
            if zero == "set to None":
                for one in weights:
                    one.grad = None
            loss = sum(one.sum() * x for one in weights)
            assert isinstance(loss, torch.Tensor)
            for one, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                one.grad = gradient if one.grad is None else one.grad * 0.5 + gradient
            return loss.detach()

        call = GraphedStep(step, device=CpuDevice()) if graphed else step
        found, held = [], []
        for one in weights:
            one.grad = torch.zeros(()).expand(2, 3)
        for index in range(14):
            if index > 5:
                held += [one.grad for one in weights[: 1 + index % 3]]
                if zero == "added to":
                    for one in weights:
                        one.grad = torch.full((), float(index)).expand(2, 3)
            elif zero == "added to":
                for one in weights:
                    one.grad = torch.full((), 2.0).expand(2, 3)
            found.append(call(torch.tensor(index + 1.0)))
            found += [one.grad.clone() for one in weights if one.grad is not None]
            found += [one.clone() for one in held if one is not None]
        return found

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize("rows", [slice(0, 0), slice(1, 3)])
def test_gradient_inside_another_stays_there_when_held(rows: slice) -> None:
    """The other fills the memory."""

    def run(graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(4)
        first, second = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4, 4)[rows].clone())

        def step(x: torch.Tensor) -> torch.Tensor:
            first.grad = second.grad = None
            loss = (first * x).sin().mean() + second.sum()
            (gradient,) = torch.autograd.grad(loss, [first])
            first.grad, second.grad = gradient, gradient[rows]
            return loss.detach()

        call = GraphedStep(step, device=CpuDevice()) if graphed else step
        found, held = [], []
        for index in range(14):
            found.append(call(torch.tensor(index + 1.0)))
            assert first.grad is not None and second.grad is not None
            first.grad.mul_(2)
            memory = second.grad.untyped_storage()
            held += [first.grad, torch.empty(0).set_(memory)] if index > 5 else []
            found += [second.grad.clone(), torch.empty(0).set_(memory).clone(), *(one.clone() for one in held)]
            del memory
        return found

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize("calls", [6, 9])
def test_view_of_a_held_gradient_is_written_where_it_lies(calls: int) -> None:
    """The step writes what it finds, and puts another tensor in its place."""

    def run(graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(4)
        weights = [torch.nn.Parameter(torch.randn(2, 3)) for _ in range(2)]

        def step(x: torch.Tensor) -> torch.Tensor:
            for one in weights:
                if one.grad is not None:
                    one.grad.zero_()
            loss = sum((one * x).sin().sum() for one in weights)
            assert isinstance(loss, torch.Tensor)
            for one, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                one.grad = gradient
            return loss.detach()

        call = GraphedStep(step, device=CpuDevice()) if graphed else step
        found, held = [], []
        for index in range(14):
            if index >= calls:
                held += [one.grad for one in weights]
            if index in (calls, calls + 2, calls + 3):
                for one in weights:
                    assert one.grad is not None
                    one.grad = one.grad.view_as(one.grad)
            found.append(call(torch.tensor(index + 1.0)))
            found += [one.clone() for one in [*held, *(one.grad for one in weights)] if one is not None]
        return found

    assert all(map(torch.equal, run(True), run(False)))


@pytest.mark.parametrize(
    ("calls", "shorter", "behind"),
    [(14, {1}, 12), (22, {1, 2, 5, 7, 10, 11, 14, 16, 18, 19, 20}, 17)],
    ids=["at once", "later"],
)
def test_gradients_in_other_memory_get_what_is_added(calls: int, shorter: set[int], behind: int) -> None:
    """The memory where it lay is what another recording left, and the one that adds to it computes the sum there."""

    def run(graphed: bool) -> list[torch.Tensor]:
        model = network("cpu")

        def train(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = loss_of(model, batch)
            loss.backward()
            return loss.detach()

        step: Any = GraphedStep(train, device=CpuDevice()) if graphed else train
        weight = next(model.parameters())
        found = []
        for index, (batch,) in enumerate(batches("cpu", calls)):
            rows = 5 if index in shorter else 6
            if index % 2 == 0:
                model.zero_grad()
            found.append(step({"x": batch["x"][:rows], "y": batch["y"][:rows]}))
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            if index == behind:
                assert weight.grad is not None
                weight.grad.data = torch.ones_like(weight)
        return found

    assert all(map(torch.equal, run(graphed=True), run(graphed=False)))
