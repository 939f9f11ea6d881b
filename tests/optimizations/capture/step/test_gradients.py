"""Gradients from before a step, of a step, and as its arguments: where they lie and who may read or write them."""

from __future__ import annotations

import array
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice, CpuGraph
from step_parts import Graph, assert_as_eager, batches, loss_of, network
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from optimizations.capture.step.gradients import SMALL, bytes_for_gradients, carves
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
        (weight * x.sum()).sum().backward()
        optimizer.step()

    graphed = GraphedStep(step, device=device)
    for size in [1] * 5 + [2] * 5:  # two recordings, in one pool
        graphed(torch.ones(size))
    assert graphed.report().replays == 2 + 3
    assert device.rooms == ([OF_LARGE] if is_carved else [])


def test_room_is_that_of_gradients_the_call_makes() -> None:
    """Not of small ones, nor of those that a call adds to."""
    parameters = [nn.Parameter(torch.ones(size)) for size in (LARGE, LARGE, 3)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    there, missing = [torch.ones(LARGE), None, None], [None] * 3
    for before, made, room in (
        (there, {id(parameters[0])}, OF_LARGE),
        (there, set(), 0),
        (missing, set(), 2 * OF_LARGE),  # the call left none, and all may have been made in it
    ):
        assert bytes_for_gradients(parameters, before, [optimizer], made) == room


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
