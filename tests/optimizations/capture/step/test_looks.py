"""What changes how a tensor looks, and leaves it the same object at the same address: eager goes by its look."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from graphs_on_cpu import CpuDevice, CpuGraph
from step_parts import batches, loss_of
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.replaying import MISSED

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, foreach=True, capturable=False),
}
CALLS, CHANGED_BEFORE = 12, (6, 8)


class OfItsOwn(torch.Tensor):
    pass


class Training:
    """A step of five layers. `zero` is what becomes of gradients: added to, set to None or zero, or None outside."""

    def __init__(
        self, zero: str, optimizer: str | None, inside: Callable[[Training], None] = lambda made: None
    ) -> None:
        torch.manual_seed(3)
        sizes = (8, 16), (16, 16), (16, 16), (16, 16), (16, 4)
        self.model = nn.Sequential(*[nn.Linear(*size) for size in sizes])
        self.model.register_buffer("shift", torch.randn(16, 16) * 0.2)
        self.turned = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.table = numpy.ones(4, dtype=numpy.int32)
        self.zero, self.inside = zero, inside
        self.optimizer = None if optimizer is None else OPTIMIZERS[optimizer](self.model.parameters())

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.zero in ("to None", "to zero"):
            self.clear(to_none=self.zero == "to None")
        x = self.model[1](self.model[0](batch["x"])) @ self.model.shift
        loss = loss_of(self.model[2:], {"x": x, "y": batch["y"]})  # type: ignore[index]
        loss = loss * float(self.table.reshape(-1)[1]) * self.table.ndim
        loss = loss + 0.01 * (self.turned.imag.square().sum() + (self.turned @ self.turned).real.sum())
        loss.backward()
        self.inside(self)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss.detach()

    def clear(self, *, to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none=to_none)
        self.turned.grad = None

    def in_a_flat_buffer(self) -> None:
        parameters = list(self.model.parameters())
        flat = torch.zeros(sum(one.numel() for one in parameters))
        for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
            parameter.grad = part.view_as(parameter)

    @property
    def weight(self) -> Any:
        """One in the middle."""
        return self.model[2].weight

    def state(self) -> list[Any]:
        found: list[Any] = []
        for one in (*self.model.parameters(), self.turned):
            gradient = one.grad
            found.append(one.detach().resolve_conj().clone())
            if gradient is not None:
                found.append((type(gradient), gradient.stride(), gradient.requires_grad, gradient.is_conj()))
                found.append(gradient.detach().resolve_conj().clone())
        kept = [] if self.optimizer is None else self.optimizer.state.values()
        return [*found, *(one.clone() for held in kept for one in held.values() if isinstance(one, torch.Tensor))]


Change = Callable[[Training], Any]


def history(made: Training, change: Change, *, graphed: bool, flat: bool = False) -> tuple[list[Any], Any]:
    """Losses and states of all calls, up to the first that raises; and the step's report."""
    step: Any = GraphedStep(made.step, device=CpuDevice()) if graphed else made.step
    found: list[Any] = []
    if flat:
        made.in_a_flat_buffer()
    for index, batch in enumerate(batches("cpu", CALLS)):
        if index in CHANGED_BEFORE:
            change(made)
        if made.zero == "outside":
            made.clear()
        try:
            found.append([step(*batch), *made.state()])
        except RuntimeError as error:
            found.append([str(error)])
            break
    return found, step.report() if graphed else None


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and mine.shape == theirs.shape and torch.equal(mine, theirs)
    return bool(mine == theirs)


def assert_as_in_eager(make: Callable[[], Training], change: Change, *, flat: bool = False) -> Any:
    expected, _ = history(make(), change, graphed=False, flat=flat)
    found, report = history(make(), change, graphed=True, flat=flat)
    assert len(found) == len(expected)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(mine) == len(theirs) and all(map(same, mine, theirs)), index
    return report


def other_memory(gradient: torch.Tensor) -> None:
    gradient.untyped_storage().resize_(1 << 16)


def gone_and_back(gradient: torch.Tensor) -> None:
    size = gradient.untyped_storage().nbytes()
    gradient.untyped_storage().resize_(0)
    gradient.untyped_storage().resize_(size)
    gradient.zero_()


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "t_": lambda gradient: gradient.t_(),
    "data transposed": lambda gradient: setattr(gradient, "data", gradient.data.t()),
    "requires_grad_": lambda gradient: gradient.requires_grad_(),
    "fewer rows": lambda gradient: setattr(gradient, "data", gradient.data[:4]),
    "dtype": lambda gradient: setattr(gradient, "data", gradient.data.view(torch.int32)),
    "class": lambda gradient: setattr(gradient, "__class__", OfItsOwn),
    "resize_": lambda gradient: gradient.resize_(8, 16),
    "elsewhere, transposed": lambda gradient: setattr(gradient, "data", torch.full((16, 16), 0.1).t()),
    "other memory": other_memory,
    "memory gone and back": gone_and_back,
}


def changed_gradient(change: Callable[[Any], Any]) -> Change:
    def of(made: Training) -> None:
        with torch.no_grad():
            change(made.weight.grad)

    return of


@pytest.mark.filterwarnings("ignore:.*runs some of its calls without a CUDA graph")  # zero_grad sets requires_grad
@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
@pytest.mark.parametrize("change", sorted(GRADIENTS))
@pytest.mark.parametrize("zero", ["added to", "to None", "to zero", "outside"])
def test_a_gradient_that_looks_otherwise_is_what_it_is_in_eager(zero: str, change: str, optimizer: str | None) -> None:
    """Also one that an earlier call handed out, where it is None before the next."""
    report = assert_as_in_eager(lambda: Training(zero, optimizer), changed_gradient(GRADIENTS[change]))
    assert report.replays >= 3


@pytest.mark.parametrize("change", sorted(set(GRADIENTS) - {"other memory", "memory gone and back"}))
@pytest.mark.parametrize("zero", ["added to", "to zero"])
def test_so_is_a_gradient_that_is_a_part_of_a_flat_buffer(zero: str, change: str) -> None:
    assert_as_in_eager(lambda: Training(zero, "sgd"), changed_gradient(GRADIENTS[change]), flat=True)


@pytest.mark.parametrize("zero", ["added to", "outside"])
def test_gradients_of_several_signatures_change_their_looks(zero: str) -> None:
    found: list[list[Any]] = []
    for graphed in (False, True):
        made = Training(zero, "sgd")
        step: Any = GraphedStep(made.step, device=CpuDevice()) if graphed else made.step
        found.append([])
        for index in range(24):
            (batch,) = batches("cpu", 1, 6 + index % 2)[0]
            if index in (14, 17):
                made.weight.grad.t_()
            if zero == "outside":
                made.clear()
            found[-1].append([step(batch), *made.state()])
    assert all(all(map(same, *pair)) for pair in zip(*found, strict=True))
    assert step.report().replays >= 12


def halved(made: Training) -> None:
    for one in made.model.parameters():
        one.grad.data = one.grad.data * 0.5  # type: ignore[union-attr]


INSIDE: dict[str, Change] = {
    "data": halved,
    "t_": lambda made: made.weight.grad.t_(),
    "requires_grad_": lambda made: made.weight.grad.requires_grad_(not made.weight.grad.requires_grad),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("inside", sorted(INSIDE))
@pytest.mark.parametrize("zero", ["added to", "to None", "outside"])
def test_a_step_that_changes_a_gradient_itself_is_refused_where_it_found_it(zero: str, inside: str) -> None:
    """The graph would go on with the memory and the look from before the change."""
    report = assert_as_in_eager(lambda: Training(zero, "sgd", INSIDE[inside]), lambda made: None)
    if zero == "added to":
        assert report.replays == 0 and ".grad itself" in str(report.refusals[0])
    else:
        assert report.replays == CALLS - 3


OTHERS: dict[str, Change] = {
    "a parameter stands for conjugates": lambda made: setattr(made.turned, "data", made.turned.data.conj()),
    "a gradient stands for conjugates": lambda made: setattr(made.turned.grad, "data", made.turned.grad.data.conj()),
    "a buffer is transposed": lambda made: made.model.shift.t_(),
    "a parameter is transposed": lambda made: setattr(made.weight, "data", made.weight.data.t()),
    "an array has another shape": lambda made: setattr(made.table, "shape", (2, 2)),
    "an array has another dtype": lambda made: setattr(made.table, "dtype", numpy.int16),
}


@pytest.mark.parametrize("other", sorted(OTHERS))
@pytest.mark.parametrize("zero", ["added to", "to None"])
def test_what_else_looks_otherwise_is_what_it_is_in_eager(zero: str, other: str) -> None:
    assert_as_in_eager(lambda: Training(zero, "sgd"), OTHERS[other])


def first_tensor(state: dict[str, Any]) -> torch.Tensor:
    return next(one for name, one in state.items() if isinstance(one, torch.Tensor) and name != "step")


STATES: dict[str, Callable[[Any], Any]] = {
    "data": lambda kept: setattr(kept, "data", torch.zeros_like(kept)),
    "set_": lambda kept: kept.set_(torch.zeros_like(kept)),
    "t_": lambda kept: kept.t_(),
    "data transposed": lambda kept: setattr(kept, "data", kept.data.t()),
    "resize_": lambda kept: kept.resize_(8, 16),
}


def trained(optimizer: str) -> tuple[Training, GraphedStep, list[Any]]:
    made = Training("to None", optimizer)
    step = GraphedStep(made.step, device=CpuDevice())
    given = batches("cpu", CALLS)
    for batch in given[:6]:
        step(*batch)
    assert step.report().replays == 3
    return made, step, given


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("change", sorted(STATES))
def test_a_state_of_an_optimizer_that_was_moved_alone_is_an_error_behind_the_launch(
    change: str, optimizer: str
) -> None:
    made, step, given = trained(optimizer)
    assert made.optimizer is not None
    kept = first_tensor(made.optimizer.state[made.weight])
    STATES[change](kept)
    with pytest.raises(RuntimeError, match=r"optimizer\.state\[.*2\.weight\]\['.*'\] lies elsewhere .* call reset\(\)"):
        step(*given[6])
    assert step.report().dropped_recordings == 1 and not step.report().recordings
    if change == "resize_":
        return
    # From then on calls are those of eager, from what is there now.
    theirs = Training("to None", optimizer)
    with torch.no_grad():
        for one, its in zip(theirs.model.parameters(), made.model.parameters(), strict=True):
            one.copy_(its)
        theirs.turned.copy_(made.turned)
    assert theirs.optimizer is not None
    theirs.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    for batch in given[7:]:
        assert torch.equal(step(*batch), theirs.step(*batch))
        assert all(map(same, made.state(), theirs.state()))
    assert step.report().replays == CALLS - 3


def test_a_state_whose_memory_was_given_back_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is left out here: it would write there."""
    with monkeypatch.context() as patched:
        patched.setattr(CpuGraph, "replay", lambda graph: None)
        made, step, given = trained("sgd")
        assert made.optimizer is not None
        first_tensor(made.optimizer.state[made.weight]).untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"memory of .*2\.weight\]\['.*'\] was given back .* has written there"):
            step(*given[6])
    assert step.report().dropped_recordings == 1 and not step.report().recordings


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_states_that_are_moved_together_or_put_anew_are_noticed_before_the_launch(optimizer: str) -> None:
    def moved(made: Training) -> None:
        assert made.optimizer is not None
        for held in made.optimizer.state.values():
            for one in held.values():
                if isinstance(one, torch.Tensor):
                    one.data = one.data * 0.5

    def put_anew(made: Training) -> None:
        assert made.optimizer is not None
        held = made.optimizer.state[made.weight]
        for name, one in held.items():
            if isinstance(one, torch.Tensor) and one.ndim:
                held[name] = one * 0.5

    for change in (moved, put_anew):
        assert assert_as_in_eager(lambda: Training("to None", optimizer), change).replays == CALLS - 3


def test_all_recordings_that_know_a_moved_state_are_dropped_with_one_error() -> None:
    made = Training("to None", "sgd")
    step = GraphedStep(made.step, device=CpuDevice())
    for index in range(12):
        step(*batches("cpu", 1, 6 + index % 2)[0])
    assert len(step.report().recordings) == 2
    assert made.optimizer is not None
    kept = made.optimizer.state[made.weight]["momentum_buffer"]
    kept.data = kept.data.clone()
    with pytest.raises(RuntimeError, match="behind its launch"):
        step(*batches("cpu", 1, 6)[0])
    assert step.report().dropped_recordings == 2
    for index in range(4):
        step(*batches("cpu", 1, 6 + index % 2)[0])


def test_memory_of_a_state_is_kept_for_the_launch_that_finds_that_it_was_moved() -> None:
    """Nothing else gets the memory that the graph writes."""
    made, step, given = trained("sgd")
    assert made.optimizer is not None
    kept = made.optimizer.state[made.weight]["momentum_buffer"]
    address = kept.data_ptr()
    kept.data = kept.data.clone()
    others = [torch.full((16, 16), 3.0) for _ in range(64)]
    assert all(one.data_ptr() != address for one in others)
    with pytest.raises(RuntimeError, match="behind its launch"):
        step(*given[6])
    assert all(bool((one == 3).all()) for one in others)


@pytest.mark.parametrize("change", ["t_", "requires_grad_", "fewer rows", "class"])
@pytest.mark.parametrize("zero", ["added to", "outside"])
def test_a_steady_replay_looks_at_gradients_that_it_finds_and_those_that_it_hands_out(zero: str, change: str) -> None:
    made = Training(zero, None)
    step = GraphedStep(made.step, device=CpuDevice())
    given = batches("cpu", 9)

    def cleared() -> None:
        if zero == "outside":
            made.clear()

    for batch in given:
        cleared()
        step(*batch)
    (recording,) = step._recordings
    serve: Any = recording.steady.serve
    cleared()
    assert serve(recording, given[0], {}) is not MISSED
    gradient = made.weight.grad
    GRADIENTS[change](gradient)
    cleared()
    assert serve(recording, given[0], {}) is MISSED


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("signatures", [1, 2])
def test_states_that_no_graph_reads_may_be_moved_such_as_those_of_a_frozen_layer(
    signatures: int, optimizer: str
) -> None:
    found: list[list[Any]] = []
    for graphed in (False, True):
        made = Training("to None", optimizer)
        step: Any = GraphedStep(made.step, device=CpuDevice()) if graphed else made.step
        assert made.optimizer is not None
        found.append([])
        for index in range(30):
            (batch,) = batches("cpu", 1, 6 + index % signatures)[0]
            if index == 2:
                made.weight.requires_grad_(False)
                made.weight.grad = None
            if index > 2 and index % 5 == 4:
                for kept in made.optimizer.state[made.weight].values():
                    kept.data = kept.data.clone()
            found[-1].append([step(batch), *made.state()])
    assert all(all(map(same, *pair)) for pair in zip(*found, strict=True))
    assert step.report().dropped_recordings == 0 and len(step.report().recordings) == signatures
