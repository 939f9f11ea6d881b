"""Steady replays of a step: how little Python they run, what sends a call the full way, and when they are made."""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from graphs_on_cpu import CpuCopy, CpuDevice, CpuGraph
from step_parts import batches, loss_of, training_step
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from optimizations.capture.step import gradient_holders, replaying
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.guard import PROBE_EVERY
from optimizations.capture.step.replaying import MISSED, SOONEST, STOOD_OFTEN, WORTH
from optimizations.torch_internals import argument_guard, tensor_guard, tensor_words
from optimizations.torch_internals.tensor_words import TensorWords

pytestmark = pytest.mark.usefixtures("looked_at")

MOST_CALLS = 47
"""Functions of Python and of C that a steady call may run, with those of the simulated copy nodes and of the count, and
those that look a batch that lies elsewhere up in what the step writes. Fourteen read words of tensors, in three stages
before the launch and three behind it: as many for all tensors as for one."""


def deep_network(layers: int) -> nn.Module:
    torch.manual_seed(5)
    inner = [module for _ in range(layers) for module in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(nn.Linear(8, 16), *inner, nn.Linear(16, 4))


def recorded(step: Callable[..., Any], given: list[tuple[Any, ...]]) -> tuple[GraphedStep, Any]:
    """A step that serves these calls steadily, and its recording."""
    graphed = GraphedStep(step, device=CpuDevice())
    for one in given:
        graphed(*one)
    (recording,) = graphed._recordings
    assert recording.steady.serve is not None, graphed.report()
    return graphed, recording


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The functions that are called in the block, in Python and in C."""
    names: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__qualname__)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def functions_of_a_call(step: Callable[..., Any], moving: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a steady call of this step runs, without what simulates the GPU. `moving`: its batch lies elsewhere."""
    given = batches("cpu", 9)
    with monkeypatch.context() as patched:
        graphed, recording = recorded(step, given)
        patched.setattr(CpuGraph, "replay", lambda graph: None)
        patched.setattr(CpuCopy, "_set", lambda copy, place, tensor: None)
        recording.steady.serve = None  # it has the graph's own replay
        recording.steady.served_otherwise(recording, list(given[0][0].values()), graphed._rates)
        held = graphed(*given[0])  # so that the next result cannot lie where this one does, by chance
        replays = recording.replays
        with counted() as names:
            graphed(*given[1 if moving else 0])
        assert recording.replays == replays + 1
        del held
    return names


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.001, fused=True),
}


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("moving", [True, False])
def test_a_steady_call_runs_as_few_functions_for_many_parameters_as_for_few(
    optimizer: str, moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []
    for layers in (1, 30):
        model = deep_network(layers)
        step = training_step(model, OPTIMIZERS[optimizer](model.parameters()))
        found.append(functions_of_a_call(step, moving, monkeypatch))
    few, many = found
    assert few == many
    assert len(many) <= MOST_CALLS, many


@pytest.mark.parametrize("stay", [True, False])
def test_tensors_are_not_asked_for_one_by_one(stay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ is asked for the looks of the batch and of one tensor for all, and for the addresses of none."""
    looks: list[str] = []
    addresses: list[int] = []
    # Where there are other threads, as in a process of several that run tests, it is made some times more.
    monkeypatch.setattr(gradient_holders, "_has_other_threads", lambda: False)
    add_look, compare = tensor_guard.compare_metadata, replaying.data_ptrs_equal
    for module in (argument_guard, tensor_guard):
        monkeypatch.setattr(module, "compare_metadata", lambda *given: (looks.append(given[1]), add_look(*given)))
    monkeypatch.setattr(
        replaying, "data_ptrs_equal", lambda *given: (addresses.append(len(given[0])), compare(*given))[1]
    )
    given = batches("cpu", 9)
    found = []
    for layers in (1, 30):
        model = deep_network(layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        graphed, recording = recorded(training_step(model, optimizer, None if stay else lambda: None), given)
        recording.steady.serve = None
        looks.clear()
        recording.steady.served_otherwise(recording, list(given[0][0].values()), graphed._rates)
        found.append([*looks])
        replays = recording.replays
        graphed(*given[0])
        assert recording.steady.serve is not None and recording.replays == replays + 1
    assert found[0] == found[1]
    assert len(found[0]) <= 4 and not addresses


def scaled(step: Callable[..., Any], kept: dict[str, torch.Tensor]) -> Callable[..., Any]:
    return lambda batch: step(batch) * len(kept)


def test_tensors_that_are_not_read_take_no_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as averages of the parameters that the program keeps next to them."""
    found = []
    for count in (1, 30):
        model = deep_network(1)
        kept = {str(index): torch.ones(2, 3) for index in range(count)}
        inner = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
        found.append(functions_of_a_call(scaled(inner, kept), False, monkeypatch))
    assert found[0] == found[1]
    assert len(found[0]) <= MOST_CALLS, found[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.scale = 1.5
        self.register_buffer("shift", torch.ones(4))
        self.table = numpy.ones(4, dtype=numpy.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale * float(self.table[0]) + self.shift


class Setting:
    """A step that is served steadily, and everything that a change may concern."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, foreach=True)
        self.factors = {"loss": 2.0}
        self.chosen = {"a", "b"}

        def step(batch: dict[str, torch.Tensor], *others: Any) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch) * self.factors["loss"] * len(self.chosen)
            loss.backward()
            self.optimizer.step()
            return loss.detach()

        self.given = batches("cpu", 9)
        self.graphed, self.recording = recorded(step, self.given)
        self.batch = self.given[0][0]

    def served(self, *arguments: Any, **keywords: Any) -> bool:
        """Whether a steady replay serves a call. If not, nothing was done."""
        replays, before = self.recording.replays, [p.detach().clone() for p in self.model.parameters()]
        served = self.recording.steady.serve(self.recording, arguments, keywords) is not MISSED
        assert self.recording.replays == replays + served
        if not served:
            assert all(map(torch.equal, before, self.model.parameters()))
        return served


Change = Callable[[Setting, pytest.MonkeyPatch], Any]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__] = function
    return function


@change
def a_parameter_is_another(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.inner.bias = nn.Parameter(torch.zeros(4))


@change
def a_parameter_has_other_memory(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.inner.weight.data = made.model.inner.weight.data.clone()


@change
def a_parameter_has_another_look(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.inner.weight.requires_grad_(False)


@change
def a_buffer_is_another(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.shift = torch.zeros(4)


@change
def a_number_of_a_module_changes(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.scale = 2.5


@change
def a_number_in_a_dict_changes(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.factors["loss"] = 3.0


@change
def a_set_changes(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.chosen.add("c")


@change
def an_array_changes(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.table[0] = 2.0


@change
def a_learning_rate_changes(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.optimizer.param_groups[0]["lr"] = 0.5


@change
def state_of_the_optimizer_is_another(made: Setting, patched: pytest.MonkeyPatch) -> None:
    state = made.optimizer.state
    first = next(iter(state))
    state[first] = {name: value.clone() for name, value in state[first].items()}


@change
def a_gradient_is_another(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.inner.bias.grad = torch.ones(4)


@change
def a_hook_of_a_module(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.inner.register_forward_hook(lambda *_: None)


@change
def a_hook_of_a_parameter(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.inner.weight.register_hook(lambda gradient: gradient)


@change
def the_module_is_in_another_mode(made: Setting, patched: pytest.MonkeyPatch) -> None:
    made.model.eval()


@change
def gradients_are_off(made: Setting, patched: pytest.MonkeyPatch) -> None:
    torch.set_grad_enabled(False)


@change
def deterministic_algorithms(made: Setting, patched: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(True)


@change
def another_precision(made: Setting, patched: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("medium")


@change
def another_default_dtype(made: Setting, patched: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def settings() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[True, False], ids=["read", "asked for"])
def tensors_are_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tensors are compared by words of memory, or one by one, as where these are not where they should be."""
    if not request.param:
        monkeypatch.setattr(tensor_words, "can_be_read", lambda: False)
    assert TensorWords([torch.ones(1)]).one_of_each_kind() != [] or not request.param
    return bool(request.param)


@pytest.mark.usefixtures("settings", "tensors_are_read")
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_what_changed_sends_a_call_the_full_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Setting()
    assert made.served(made.batch) and made.served(made.given[1][0])
    CHANGES[name](made, monkeypatch)
    assert not made.served(made.batch)


class Places(nn.Module):
    """Square, so that a parameter can be turned over in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("shift", torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.trained(x)) @ self.shift


TRAINED = "trained.weight", "trained.bias", "apart"
OTHERS = "frozen.weight", "shift", "in a cell", "in a dict", "of a class of its own"
CHANGES_OF_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "memory": lambda tensor: setattr(tensor, "data", tensor.data.clone()),
    "strides": lambda tensor: setattr(tensor, "data", tensor.data.t() if tensor.dim() == 2 else tensor.data[:1]),
    "dtype": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "requires_grad": lambda tensor: tensor.requires_grad_(not tensor.requires_grad),
    "gradient": lambda tensor: setattr(tensor, "grad", torch.ones_like(tensor)),
    "no gradient": lambda tensor: setattr(tensor, "grad", None),
}


OF_ALL = ("memory", "strides", "requires_grad")
"""PyTorch gives no parameter that has a gradient another dtype."""


@pytest.mark.usefixtures("tensors_are_read")
@pytest.mark.parametrize(
    ("place", "change"),
    [(place, change) for place in TRAINED for change in (*OF_ALL, "gradient", "no gradient")]
    + [(place, change) for place in OTHERS for change in (*OF_ALL, "dtype")],
)
def test_each_tensor_is_looked_at_wherever_it_stands(place: str, change: str) -> None:
    """In a module and in an optimizer's list, in a module alone, in such a list alone, in a variable or a dict."""
    torch.manual_seed(1)
    model, apart, variable = Places(), nn.Parameter(torch.ones(8, 8)), torch.ones(8, 8)
    optimizer = torch.optim.SGD([*model.trained.parameters(), apart], lr=0.01, foreach=True)
    by_name = {"in a dict": torch.ones(8, 8), "of a class of its own": torch.ones(8, 8).as_subclass(OfItsOwn)}

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        last = by_name["in a dict"] @ by_name["of a class of its own"].as_subclass(torch.Tensor)
        loss = (model(batch["x"]) @ apart @ variable @ last).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    given = batches("cpu", 9)
    _, recording = recorded(step, given)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **by_name}
    tensors |= {"apart": apart, "in a cell": variable}
    serve = recording.steady.serve
    assert serve(recording, given[0], {}) is not MISSED
    CHANGES_OF_TENSORS[change](tensors[place])
    assert serve(recording, given[0], {}) is MISSED


class OfItsOwn(torch.Tensor):
    pass


@pytest.mark.usefixtures("tensors_are_read")
@pytest.mark.parametrize("place", ["argument", "state"])
def test_a_view_requires_a_gradient_once_what_it_is_a_view_of_does(place: str) -> None:
    """A batch that is part of a larger tensor, or part of a table."""
    torch.manual_seed(1)
    model, table, data = nn.Linear(8, 4), torch.randn(4, 4), torch.randn(40, 8)
    by_name = {"row": table[1]}

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach() * x.sum() + by_name["row"]

    graphed, recording = recorded(step, [(data[4 * index :][:4],) for index in range(9)])
    whole = data.clone()
    given = (whole[4:8],)
    assert recording.steady.serve(recording, given, {}) is not MISSED
    (whole if place == "argument" else table).requires_grad_()
    assert recording.steady.serve(recording, given, {}) is MISSED
    assert graphed(*given).requires_grad


class WithSlots:
    __slots__ = ("tensor",)


class Holder:
    """Places of a tensor whose shape a step asks for, and which it does not read."""

    def __init__(self) -> None:
        self.tensor = torch.ones(2, 3)
        self.by_name = {"tensor": torch.ones(2, 3)}
        self.listed = [torch.ones(2, 3)]
        self.slots = WithSlots()
        self.slots.tensor = torch.ones(2, 3)


UNREAD: dict[str, Callable[[Holder], tuple[Callable[[Any], None], Callable[[], None]]]] = {
    "attribute": lambda held: (lambda value: setattr(held, "tensor", value), lambda: delattr(held, "tensor")),
    "dict": lambda held: (lambda value: held.by_name.update(tensor=value), held.by_name.clear),
    "list": lambda held: (lambda value: held.listed.__setitem__(0, value), held.listed.clear),
    "slots": lambda held: (lambda value: setattr(held.slots, "tensor", value), lambda: delattr(held.slots, "tensor")),
}


ASKS: dict[str, Callable[[Holder], Callable[[torch.Tensor], torch.Tensor]]] = {
    "attribute": lambda held: lambda x: (x * held.tensor.shape[0]).sum(),
    "dict": lambda held: lambda x: (x * held.by_name["tensor"].shape[0]).sum(),
    "list": lambda held: lambda x: (x * held.listed[0].shape[0]).sum(),
    "slots": lambda held: lambda x: (x * held.slots.tensor.shape[0]).sum(),
}


@pytest.mark.parametrize("change", [*OF_ALL[1:], "dtype", "class"])
@pytest.mark.parametrize("place", sorted(UNREAD))
def test_a_tensor_that_is_not_read_is_looked_at_where_it_stays(place: str, change: str) -> None:
    """C++ does not look at all of what stands in a dict that was not written."""
    held, tensor = Holder(), torch.ones(2, 3)
    UNREAD[place](held)[0](tensor)
    given = [(torch.ones(3) * index,) for index in range(9)]
    _, recording = recorded(ASKS[place](held), given)
    serve = recording.steady.serve
    assert recording.watch.unchanged()
    assert all(serve(recording, one, {}) is not MISSED for one in given)
    if change == "class":
        tensor.__class__ = OfItsOwn
    else:
        CHANGES_OF_TENSORS[change](tensor)
    assert serve(recording, given[1], {}) is MISSED
    assert not recording.watch.unchanged()


@pytest.mark.parametrize("place", sorted(UNREAD))
def test_a_tensor_that_is_not_read_may_be_another_that_looks_the_same(place: str) -> None:
    held = Holder()
    given = [(torch.ones(3) * index,) for index in range(9)]
    _, recording = recorded(ASKS[place](held), given)
    serve = recording.steady.serve

    def served() -> bool:
        return serve(recording, given[1], {}) is not MISSED

    put, delete = UNREAD[place](held)
    assert served()
    last = torch.zeros(2, 3)
    put(last)
    gone = weakref.ref(last)
    del last
    assert served()
    put(torch.zeros(2, 3))
    assert served() and gone() is None, "it is not kept"
    others = torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(2, 3).double(), torch.ones(2, 3, requires_grad=True), 3
    for other in others:
        put(other)
        assert not served()
    put(torch.ones(2, 3))
    assert served()
    delete()
    assert not served()


def test_what_is_made_first_of_a_tensor_that_is_not_read_is_let_go() -> None:
    held = Holder()
    given = [(torch.ones(3) * index,) for index in range(9)]
    _, recording = recorded(lambda x: (x * held.tensor.shape[0]).sum(), given)
    assert recording.steady.serve is not None
    gone = weakref.ref(held.tensor)
    held.tensor = torch.ones(2, 3)
    assert gone() is None


def test_arguments_that_look_otherwise_go_the_full_way() -> None:
    made = Setting()
    x, y = made.batch["x"], made.batch["y"]
    assert made.served({"x": x, "y": y}) and made.served({"x": x.clone(), "y": y.clone()})
    for given in ({"y": y, "x": x}, {"x": x[:5], "y": y[:5]}, {"x": x.double(), "y": y}, {"x": x, "y": 3}, {"x": x}):
        assert not made.served(given)
    assert not made.served([x, y]) and not made.served(made.batch, 1) and not made.served(made.batch, more=1)
    assert not made.served()
    with torch.inference_mode():
        assert not made.served(made.batch)
    with BaseTorchFunctionMode():
        assert not made.served(made.batch)
    with torch.autocast("cpu"):
        assert not made.served(made.batch)
    assert made.served(made.batch)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tensors", [True, False])
def test_what_sees_or_transforms_operators_is_seen_by_a_steady_replay(tensors: bool) -> None:
    """As are inference mode, with and without tensors that show it."""
    given = [(torch.ones(3) * index,) if tensors else () for index in range(6)]
    graphed, recording = recorded(lambda *x: (x[0] if tensors else torch.ones(3)).sum(), given)
    seen: list[bool] = []

    def served(x: torch.Tensor) -> torch.Tensor:
        seen.append(recording.steady.serve(recording, given[0], {}) is not MISSED)
        return x

    assert recording.steady.serve(recording, given[0], {}) is not MISSED
    with Watching():
        served(torch.ones(1))
    with torch.inference_mode():
        served(torch.ones(1))
    torch.vmap(served)(torch.ones(1))
    torch.func.grad(served)(torch.tensor(1.0))
    torch.func.functionalize(served)(torch.ones(1))
    assert seen == [False] * 5
    assert recording.steady.serve(recording, given[0], {}) is not MISSED
    replays = recording.replays
    with torch.autograd.forward_ad.dual_level():
        graphed(*given[0])
    assert recording.replays == replays


def test_inputs_in_memory_that_the_step_writes_go_the_full_way() -> None:
    weights = torch.zeros(6, 8)

    def step(x: torch.Tensor) -> torch.Tensor:
        weights.add_(1)
        return (x * 2).sum()

    given = [(torch.ones(6, 8) * index,) for index in range(6)]
    graphed, recording = recorded(step, given)
    assert recording.steady.serve(recording, given[0], {}) is not MISSED
    replays = recording.replays
    assert recording.steady.serve(recording, (weights,), {}) is MISSED and recording.replays == replays
    assert graphed(weights).item() == 2 * weights.sum().item()


def test_a_tensor_that_is_passed_twice_goes_the_full_way() -> None:
    step = lambda x, y: (x + 2 * y).sum()  # noqa: E731
    given = [(torch.ones(3) * index, torch.ones(3)) for index in range(6)]
    graphed, recording = recorded(step, given)
    assert recording.steady.serve(recording, given[0], {}) is not MISSED
    assert recording.steady.serve(recording, (given[0][0],) * 2, {}) is MISSED
    assert graphed(given[1][0], given[1][0]).item() == 9


@pytest.mark.parametrize(
    "results",
    [
        lambda x: x.sum(),
        lambda x: {"sum": x.sum(), "most": x.max()},
        lambda x: [x.sum(), x.max()],
        lambda x: (x.sum(), (x.max(), 3)),
        lambda x: {"sum": x.sum(), "input": x},
        lambda x: (lambda s: [s, s])(x.sum()),
    ],
)
def test_results_are_those_of_the_call_and_stay(results: Callable[[torch.Tensor], Any]) -> None:
    given = [(torch.arange(4.0) + index,) for index in range(9)]
    graphed = GraphedStep(results, device=CpuDevice())
    assert [graphed(*one) for one in given] == [results(*one) for one in given]
    assert graphed.report().replays == 6


def test_a_call_that_ends_before_its_launch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, interrupts = CpuGraph.replay, [False]

    def replay(graph: CpuGraph) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt
        stock(graph)

    monkeypatch.setattr(CpuGraph, "replay", replay)
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: x.sum(), given)
    for index in (5, 2, 5):
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            graphed(*given[index])
        interrupts[0] = False
        for other in (3, 5, index, index):
            assert graphed(*given[other]).item() == 3 * other
    assert recording.steady.serve is not None


@pytest.mark.parametrize("reads", [True, False])
def test_where_a_copy_reads_and_writes_is_unknown_until_it_was_set(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, _ = recorded(lambda x: x.sum(), given)
    assert graphed(*given[5]).item() == 15
    stock = CpuCopy._set

    def interrupted(copy: CpuCopy, place: int, address: int) -> None:
        stock(copy, place, address)
        if place == reads:
            raise KeyboardInterrupt

    kept = graphed(*given[5])  # so that the next result lies elsewhere
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(CpuCopy, "_set", interrupted)
        graphed(*given[2])
    assert graphed(*given[5]).item() == kept.item() == 15


def test_a_result_that_lies_where_the_one_before_lay_takes_no_setting() -> None:
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: x.sum(), given)
    (memory,) = recording.outputs._memory
    place = torch.zeros(())
    memory.allocate = lambda: place
    recording.steady.serve = None  # it has the memory's own
    recording.steady.served_otherwise(recording, list(given[0]), graphed._rates)
    graphed(*given[1])
    before = CpuCopy.settings
    assert graphed(*given[1]).item() == 3 and CpuCopy.settings == before
    place = torch.zeros(())
    assert graphed(*given[1]).item() == 3 and CpuCopy.settings == before + 1
    assert graphed(*given[2]).item() == 6 and CpuCopy.settings == before + 2


def test_a_dict_that_was_written_costs_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What C++ compares is then made again, with what is there now."""
    made: list[int] = []
    stock = replaying.same_call
    monkeypatch.setattr(replaying, "same_call", lambda *args, **kw: (made.append(1), stock(*args, **kw))[1])
    monkeypatch.setattr(replaying, "_time_ns", lambda compare: (compare(), 100 if slow else 1)[1])
    model, slow = deep_network(2), False
    step = training_step(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True))
    given = batches("cpu", 9)
    graphed, recording = recorded(step, given)
    serve, at_first = recording.steady.serve, len(made)

    def replayed(calls: int) -> int:
        for _ in range(calls):
            graphed(*given[0])
        return len(made) - at_first

    assert replayed(2 * PROBE_EVERY) == 0
    slow = True
    assert [replayed(PROBE_EVERY) for _ in range(8)] == [1, 1, 2, 2, 2, 2, 3, 3]
    assert recording.steady.serve is serve, "calls are served all the time"
    model[0].weight = nn.Parameter(torch.zeros(16, 8))
    assert serve(recording, given[0], {}) is MISSED


def test_a_list_that_is_filled_again_in_each_call_is_asked_for_its_entries() -> None:
    """Read as words it is another one each time; what stands in it is the same."""
    kept = [torch.ones(3), torch.ones(3) * 2]
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: (x * kept[0] * kept[1]).sum(), given)
    others = [kept.copy() for _ in range(50)]  # so that arrays move
    made = []
    for index in range(12):
        same = [*kept]
        kept.clear()
        kept += [*same, *others[index]]
        del kept[2:]
        assert graphed(*given[1]).item() == 6
        made.append(recording.steady.serve)
    assert made[-1] is not None and made[-1] is made[-4], "it serves these calls"
    kept[1] = torch.ones(3) * 3
    assert graphed(*given[1]).item() == 9


def test_a_step_that_nobody_holds_is_freed_at_once() -> None:
    graphed, recording = recorded(lambda x: x.sum(), [(torch.ones(3) * index,) for index in range(6)])
    graph = weakref.ref(recording.graph)
    gc.collect()
    gc.disable()
    try:
        del graphed, recording
        assert graph() is None
    finally:
        gc.enable()


def test_a_number_that_is_another_object_of_the_same_value_is_steady_again() -> None:
    held = {"scale": float("2.5")}
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: (x * held["scale"]).sum(), given)
    held["scale"] = float("2.5")
    first = recording.steady.serve
    assert first(recording, given[0], {}) is MISSED
    assert graphed(*given[1]).item() == 7.5
    assert recording.steady.serve is first, "one call may be another than those around it"
    assert graphed(*given[1]).item() == 7.5
    for _ in range(SOONEST):  # and not only after as many calls as one is worth that served for long
        assert recording.steady.serve is None
        assert graphed(*given[1]).item() == 7.5
    assert recording.steady.serve not in (None, first)
    assert recording.steady.serve(recording, given[0], {}) is not MISSED
    held["scale"] = 3.0
    assert graphed(*given[1]).item() == 9


@pytest.mark.parametrize("made", [float, complex, lambda text: (1, (float(text),))])
@pytest.mark.parametrize("key", ["scale", (1, "scale"), None], ids=["attribute", "entry", "argument"])
def test_what_is_no_number_is_the_same_in_each_call(made: Callable[[str], Any], key: Any) -> None:
    """It does not equal itself, and one that is made anew is another object."""
    held = {"other": 1, key: made("nan")}

    def step(x: torch.Tensor, given: Any = None) -> torch.Tensor:
        value = held[key] if given is None else given
        return x.sum() if repr(value).count("nan") else x.sum() * 2

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(9):
        value = made("nan")
        held[key], given = (value, ()) if key is not None else (None, (value,))
        assert graphed(torch.full((2,), float(index)), *given).item() == 2 * index
    assert len(graphed.report().recordings) == 1 and graphed.report().replays >= 9 - 4
    value = made("3")
    held[key], given = (value, ()) if key is not None else (None, (value,))
    assert graphed(torch.ones(2), *given).item() == 4


def test_a_state_that_is_another_in_each_call_is_looked_at_in_the_full_way() -> None:
    """Making a steady replay looks at everything, so it is made again after twice the calls each time."""
    held = {"scale": float("2.5")}
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: (x * held["scale"]).sum(), given)
    made = 0
    for _ in range(300):
        held["scale"] = float("2.5")
        before = recording.steady.serve
        assert graphed(*given[1]).item() == 7.5
        made += recording.steady.serve is not None and recording.steady.serve is not before
    assert 4 < made <= math.log2(300)


def test_one_that_served_for_long_is_made_again_at_once() -> None:
    held = {"scale": float("2.5")}
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: (x * held["scale"]).sum(), given)
    for calls in (WORTH + 2, WORTH + 2, 1):
        for _ in range(calls):
            assert graphed(*given[1]).item() == 7.5
        served = recording.steady.serve
        held["scale"] = float("2.5")
        assert [graphed(*given[1]).item() for _ in range(2)] == [7.5, 7.5]
        assert recording.steady.serve is not served
        assert (recording.steady.serve is not None) is (calls > WORTH)


def test_a_call_that_is_another_one_now_and_then_costs_no_other_its_steady_replay() -> None:
    held = {"scale": float("2.5")}
    usual = held["scale"]
    given = [(torch.ones(3) * index,) for index in range(6)]
    graphed, recording = recorded(lambda x: (x * held["scale"]).sum(), given)
    first = recording.steady.serve
    for _ in range(6):
        held["scale"] = float("2.5")
        assert graphed(*given[1]).item() == 7.5
        held["scale"] = usual
        assert all(graphed(*given[2]).item() == 15 for _ in range(5))
        assert recording.steady.serve is first


def test_gradients_that_stand_again_are_only_looked_at() -> None:
    """A steady replay that was made while others stood there puts its own there in each call."""
    model = deep_network(2)
    given = batches("cpu", 6)
    graphed, recording = recorded(training_step(model, torch.optim.SGD(model.parameters(), lr=0.1)), given)

    def puts() -> bool:
        serve: Any = recording.steady.serve
        return dict(zip(serve.__code__.co_freevars, serve.__closure__, strict=True))["leave"].cell_contents is not None

    lay: list[int] = []
    for times in (1, 2):
        for _ in range(2 * SOONEST**times + 1):  # until one is made again
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            graphed(*given[0])
        assert recording.steady.serve is not None and puts()
        lay = lay or [parameter.grad.data_ptr() for parameter in model.parameters()]  # who holds them changes the way
        for _ in range(STOOD_OFTEN * times - 1):
            graphed(*given[1])
        assert puts()
        for _ in range(2):
            graphed(*given[1])
        assert not puts()
        assert [parameter.grad.data_ptr() for parameter in model.parameters()] == lay
        for parameter in model.parameters():
            parameter.grad = None
        serve: Any = recording.steady.serve
        assert serve(recording, given[0], {}) is MISSED


class Masked(nn.Module):
    """Layers that each keep the mask of the last call, as BERT's do."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        for layer in self.layers:
            layer.mask = mask
            x = layer(x * layer.mask)
        return x.sum()


MASKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda mask: mask[:1],
    "dtype": lambda mask: mask.float(),
    "nothing": lambda mask: None,
    "no tensor": lambda mask: "mask",
}


@pytest.mark.parametrize("index", [0, 1, 4])
@pytest.mark.parametrize("name", MASKS)
def test_what_was_bound_to_many_attributes_is_looked_at_in_each(name: str, index: int) -> None:
    """One tensor stands in all of them, as a rule. Where another kind of object stands in one, it is seen."""
    torch.manual_seed(3)
    model = Masked(5)
    given = [(torch.randn(3, 4),) for _ in range(8)]
    graphed, recording = recorded(lambda x: model(x).detach(), given)
    steady = recording.steady.serve
    for one in given:
        assert steady(recording, one, {}) is not MISSED
        assert all(torch.equal(layer.mask, one[0] > 0) for layer in model.layers)
    layer = model.layers[index]
    layer.mask = layer.mask.clone()  # another one of its kind
    assert steady(recording, given[0], {}) is not MISSED
    layer.mask = MASKS[name](layer.mask)
    assert steady(recording, given[1], {}) is MISSED
    expected = Masked(5)
    expected.load_state_dict(model.state_dict())
    torch.testing.assert_close(graphed(*given[1]), expected(*given[1]).detach())
    assert all(torch.equal(layer.mask, given[1][0] > 0) for layer in model.layers)


def test_one_tensor_in_many_attributes_is_looked_at_once() -> None:
    looks = []
    for layers in (2, 12):
        model = Masked(layers)
        given = [(torch.randn(3, 4),) for _ in range(8)]
        graphed, _ = recorded(lambda x, model=model: model(x).detach(), given)
        with counted() as names:
            graphed(*given[1])
        looks.append(names.count("BoundResults._fits"))
    assert looks == [1, 1]
