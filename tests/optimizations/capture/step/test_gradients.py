"""Gradients from before a step, of a step, and as its arguments: where they lie and who may read or write them."""

from __future__ import annotations

import array
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.driver import floats
from simulated_gpu.operators import CpuDevice, CpuGraph
from step_parts import Graph, assert_as_eager, batches, loss_of, network
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations import torch_internals
from optimizations.capture.step.gradients import SMALL, carves
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.records import MemoryRange

Mentions = Callable[..., bool]


def training() -> tuple[Callable[..., Any], torch.nn.Module]:
    """A step that throws gradients away before it computes others."""
    model = network("cpu")

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    return step, model


def gradients_stay(device: CpuDevice, mentions: Mentions | None = None) -> bool:
    """Return whether gradients stay for a graph on this device, whose losses and gradients are eager's."""
    if mentions is not None:
        device.mentions = mentions  # type: ignore[method-assign]
    made: list[Any] = []

    def program(graph: Graph) -> Iterator[Any]:
        step, model = training()
        made.append(graph(step))
        for batch in batches("cpu", 8):
            yield made[-1](*batch)
            yield from (one.grad for one in model.parameters())

    assert assert_as_eager(program, device).replays >= 4 and device.captures == 1
    (recording,) = made[-1]._recorder.recordings.tried
    found = [one.grad for one in recording.gradients.parameters]
    return any(one is not None for one in recording.gradients.stay(found))


class Unknown(CpuDevice):
    """A device that reports nothing of captured graphs, so that any address may be read."""

    def node_count(self) -> int:
        raise CudaCallFailed("cuGraphGetNodes", 1, "not told")


def mentions(graph: CpuGraph, memory: Sequence[MemoryRange]) -> bool:
    """Find every address in a graph, as in structures that PyTorch's kernels leave unset."""
    return bool(memory)


def test_stale_pointers_in_operator_kernels_load_no_gradients() -> None:
    """Operators read only their arguments, and these gradients were not passed."""
    assert not gradients_stay(CpuDevice(), mentions)


def test_pointers_of_unknown_nodes_may_be_read() -> None:
    assert gradients_stay(Unknown(), mentions)


def test_gradient_given_to_a_kernel_of_inductor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator reads it, and the step drops it afterwards."""
    monkeypatch.setattr(torch_internals.PyCodeCache, "modules", [])

    def program(graph: Graph, device: CpuDevice) -> Iterator[torch.Tensor]:
        weight, module = torch.nn.Parameter(torch.ones(4)), SimpleNamespace(kernel=kernel_that_adds(device))
        torch_internals.PyCodeCache.modules.append(module)

        def step(x: torch.Tensor) -> torch.Tensor:
            assert weight.grad is not None
            found = torch.zeros(4)
            module.kernel.run(weight.grad, found)
            weight.grad = None
            (weight * x).sum().backward()  # type: ignore[no-untyped-call]
            return found * 1

        call = graph(step)
        for index in range(12):
            if index % 3 == 0:
                weight.grad = torch.full((4,), float(index))
            yield call(torch.full((4,), index + 1.0))

    device = CpuDevice()
    assert assert_as_eager(lambda graph: program(graph, device), device).replays >= 6


def kernel_that_adds(device: CpuDevice) -> Any:
    """Return a kernel as Inductor's modules have it, which no operator runs: it adds one argument to the other."""

    def add(source: int, target: int) -> list[torch.Tensor]:
        floats(target, 4)[:] = [sum(pair) for pair in zip(floats(source, 4), floats(target, 4), strict=True)]
        return []

    def run(*tensors: torch.Tensor) -> None:
        source, target = [one.data_ptr() for one in tensors]
        if device.capturing_into is None:
            add(source, target)
        else:
            device.capturing_into.operators.append((add, (source, target), {}, []))

    kernel: Any = object.__new__(torch_internals.CachingAutotuner)  # type: ignore[call-overload]
    kernel.fn, kernel.run = SimpleNamespace(__name__="triton_add"), run
    kernel.triton_meta, kernel.mutated_arg_names, kernel.custom_kernel = {"signature": {}}, [], False
    return kernel


def test_equal_names_in_two_functions_have_own_gradients() -> None:
    """Some of which are there before a call, and some not."""

    def scaled(start: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.nn.Parameter]:
        weight = torch.nn.Parameter(torch.full((8,), start))
        return lambda x: (x * weight).square().sum(), weight

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        (one, first), (other, second) = scaled(0.1), scaled(0.2)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = one(x) + other(x)
            loss.backward()
            return loss.detach()

        call = graph(step)
        for index in range(18):
            yield call(torch.full((8,), index + 1.0))
            yield from (first.grad, second.grad)
            if index % 3 == 2:
                first.grad = None
            if index % 5 == 4:
                second.grad = None

    assert assert_as_eager(program).replays >= 8


def test_unused_gradients_of_another_step_are_unchanged() -> None:
    """The program references the recorded gradient: it is restored, and is no longer the parameter's."""

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        mine = torch.optim.SGD(layers[0].parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = layers[0](x).square().mean() + 0 * layers[1].weight.detach().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            mine.step()
            mine.zero_grad()
            return loss.detach()

        call = graph(step)
        held = layers[1].weight.grad = torch.ones(2, 2)
        for index in range(8):
            if index >= 5:
                layers[1].weight.grad = torch.full((2, 2), float(index))
            there = layers[1].weight.grad
            call(torch.randn(2, 2))
            assert layers[1].weight.grad is there
            yield from (there, held, layers[0].weight)

    assert assert_as_eager(program).replays >= 3


class Sharing:
    """A parameter whose gradient lies in memory that an attribute holds as well, while others stand in its place."""

    def __init__(self, use: Callable[[Sharing, torch.Tensor], torch.Tensor], graph: Graph) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.flat = torch.arange(8.0)
        self.step = graph(functools.partial(use, self))

    def gradient(self) -> torch.Tensor:
        assert self.weight.grad is not None
        return self.weight.grad


def reads_both(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    return (one.flat * torch.arange(8)).sum() + (one.gradient() * x).sum()


def adds_and_reads(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    (one.weight * x).sum().backward()  # type: ignore[no-untyped-call]
    return (one.flat * torch.arange(8)).sum() + one.gradient().sum()


def clears_and_adds(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    one.flat.zero_()
    (one.weight * x).sum().backward()  # type: ignore[no-untyped-call]
    return one.gradient().sum()


def writes_without_a_version(one: Sharing, x: torch.Tensor) -> torch.Tensor:
    one.flat.data.fill_(2.0)
    return (one.gradient() * x).sum()


SHARED = [reads_both, adds_and_reads, clears_and_adds, writes_without_a_version]


@pytest.mark.parametrize("use", SHARED)
def test_other_gradient_does_not_show_in_shared_memory(use: Any) -> None:
    def program(graph: Graph) -> Iterator[torch.Tensor]:
        one = Sharing(use, graph)
        for index in range(24):
            one.weight.grad = one.flat[2:6] if index < 6 or index % 3 else torch.full((4,), float(index))
            yield one.step(torch.full((4,), 1.0 + index))
            yield from (one.flat, one.gradient())

    assert_as_eager(program)


# A new pool reserves memory for gradients in one block before anything else is captured.


LARGE, OF_LARGE = 3 * SMALL // 4, 3 * SMALL
"""Elements of float32, and their bytes."""


OPTIONS = [
    ("PYTORCH_ALLOC_CONF", "expandable_segments:True", True),
    ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8,max_split_size_mb:128", False),
    ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2,>:8]", False),
    ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", False),
]


@pytest.mark.parametrize(("name", "options", "is_carved"), OPTIONS)
def test_allocator_options_may_make_reserved_memory_useless(
    name: str, options: str, is_carved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert carves({}) and carves({name: options}) is is_carved
    monkeypatch.setenv(name, options)
    device, weight = CpuDevice(), nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()

    graphed = GraphedStep(step, device=device)
    for _ in range(5):
        graphed(torch.ones(1))
    assert graphed.report().replays == 2
    assert device.rooms == ([OF_LARGE] if is_carved else [])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large, self.unused = nn.Parameter(torch.ones(LARGE)), nn.Parameter(torch.ones(LARGE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.large * x.sum()).mean()


Optimizer = torch.optim.Optimizer


def nothing(optimizer: Optimizer) -> None:
    pass


def stepped(optimizer: Optimizer) -> None:
    optimizer.step()


def dropped(optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def stepped_and_dropped(optimizer: Optimizer) -> None:
    stepped(optimizer)
    dropped(optimizer)


def zeroed(optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


Use = Callable[[Optimizer], None]


@pytest.mark.parametrize(
    ("before", "first", "last", "room"),
    [
        (nothing, dropped, stepped, OF_LARGE),
        (nothing, nothing, stepped_and_dropped, 2 * OF_LARGE),
        (dropped, nothing, nothing, OF_LARGE),
        (nothing, nothing, nothing, 0),
        (nothing, zeroed, stepped, 0),
    ],
    ids=["dropped first", "dropped last", "dropped outside", "added to", "zeroed"],
)
def test_new_pool_reserves_memory_for_gradients(before: Use, first: Use, last: Use, room: int) -> None:
    """`unused` gets no gradient, which is visible only if it had one before the call."""
    device = CpuDevice()

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            first(optimizer)
            loss = model(x)
            loss.backward()
            last(optimizer)
            return loss.detach()

        call = graph(step)
        for index, size in enumerate([2] * 6 + [3] * 6):  # two recordings, in one pool
            before(optimizer)
            yield call(torch.full((size,), 0.1 * index))
        yield model.large

    report = assert_as_eager(program, device)
    assert len(report.recordings) == 2 and report.refusals == () and device.rooms == [room]


# A call that runs uncaptured releases earlier gradients where eager does.


def test_side_stream_may_read_gradients_the_step_releases() -> None:
    """Another thread may reuse a gradient's memory that the side stream has still to read."""
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told: list[Any] = []
    seen = array.array("i", [0, 0])

    class Streams(CpuDevice):
        @contextlib.contextmanager
        def warming_up(self) -> Iterator[None]:
            with super().warming_up():
                yield
                told.clear()

        def may_read(self, tensors: Iterable[torch.Tensor | None]) -> None:
            assert not told
            told.extend([StorageWeakRef(one.untyped_storage()) for one in tensors if one is not None])

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            there = [StorageWeakRef(one.grad.untyped_storage()) for one in model.parameters() if one.grad is not None]
            seen[0] += len(there)
            seen[1] += len([one for one in there if one.cdata in [other.cdata for other in told]])
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = Looks.apply(loss_of(model, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call = GraphedStep(step, device=Streams())
    for args in batches("cpu", 3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        call(*args)
    assert list(seen) == [12, 12]


# Arguments that are gradients, or lie where gradients lie, of steps that write or read them.


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Program:
    """A step that gets an argument next to its batch, and how often its gradients are set to None."""

    def __init__(self, graph: Graph, *, forgets: bool) -> None:
        torch.manual_seed(0)
        self.layer = layer = nn.Linear(3, 3, bias=False)
        layer.weight.grad = torch.zeros(3, 3)

        def step(given: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
            if forgets:
                layer.weight.grad = None
            layer(batch).square().sum().backward()
            return given * 1

        self.step = graph(step)

    def gradient(self) -> torch.Tensor:
        assert self.layer.weight.grad is not None
        return self.layer.weight.grad

    def run(self, choose: Callable[[Program, int, list[torch.Tensor]], torch.Tensor]) -> Iterator[torch.Tensor]:
        kept: list[torch.Tensor] = []
        for index in range(18):
            torch.manual_seed(index)
            given = choose(self, index, kept)
            yield self.step(given, torch.randn(2 if index < 7 else 4, 3))
            yield from (given, self.gradient(), *kept)


def now_and_then(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    return torch.randn(3, 3) if index < 5 or index % 2 else program.gradient()


def the_same_from_then_on(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    """A recording's gradient becomes the argument of calls of another shape, which get their own recording."""
    if index < 7:
        return torch.randn(3, 3)
    if not kept:
        kept.append(program.gradient())
    return kept[0]


def a_view(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    return torch.randn(3, 3) if index < 5 or index % 2 else program.gradient().view(3, 3)


def another_tensor(program: Program, index: int, kept: list[torch.Tensor]) -> torch.Tensor:
    if index % 3 == 0:
        program.layer.weight.grad = torch.full((3, 3), float(index))
    return torch.randn(3, 3) if index < 5 or index % 3 else program.gradient()


@pytest.mark.parametrize("choose", [now_and_then, the_same_from_then_on, a_view, another_tensor])
@pytest.mark.parametrize("forgets", [True, False])
def test_argument_inside_a_gradient_is_used_as_in_eager(
    forgets: bool, choose: Callable[[Program, int, list[torch.Tensor]], torch.Tensor]
) -> None:
    report = assert_as_eager(lambda graph: Program(graph, forgets=forgets).run(choose))
    assert report.replays > 0


Used = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]


def reads_and_drops(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    read = (weight.grad * 3).sum() + (x * WEIGHTS).sum()
    weight.grad = None
    (weight * x).sum().backward()  # type: ignore[no-untyped-call]
    return read


def reads(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return (weight.grad * 3).sum() + (x * WEIGHTS).sum()


def adds(weight: nn.Parameter, x: torch.Tensor) -> torch.Tensor:
    (weight * x).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return (weight.grad * WEIGHTS).sum()


WEIGHTS = torch.arange(1.0, 5.0)


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("use", [reads_and_drops, reads, adds])
def test_argument_may_have_the_address_of_a_gradient(use: Used, others: int) -> None:
    """The old gradient is copied there before a launch, and only the launch reads the argument."""

    def program(graph: Graph) -> Iterator[torch.Tensor]:
        weight = nn.Parameter(torch.ones(4))
        buffers = [torch.full((4,), 1.0 + index) for index in range(3)]
        call = graph(lambda x, *batch: use(weight, x) + sum(one.sum() for one in batch))
        for index in range(24):
            first, second = (0, None) if index < 6 else (index % 3, index // 3 % 4)
            weight.grad = buffers[first]
            free = second is None or second == 3 or second == first
            given = torch.full((4,), float(index)) if free else buffers[second]
            yield call(given, *[torch.full((2,), float(index + one)) for one in range(others)])
            yield from (weight.grad, *buffers)

    assert assert_as_eager(program).replays > 0
