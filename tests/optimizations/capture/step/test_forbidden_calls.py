"""Python numbers become GPU fills with PyTorch's bits. The replaced functions are invisible to modes, classes of
tensors, tables and other threads, and are restored afterwards."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch.overrides import TorchFunctionMode

from optimizations import torch_internals
from optimizations.capture.step.forbidden_calls import watched
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import Observer, storage


@pytest.fixture
def everything_on_the_gpu() -> Callable[[], Any]:
    return lambda: watched(Observer(lambda tensor: True, {}, forbid=False), compiled=False)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = torch.tensor, torch.as_tensor
    yield
    assert (torch.tensor, torch.as_tensor) == before


def test_number_is_converted_by_a_fill() -> None:
    """Bits, dtypes and errors are PyTorch's."""
    stock = torch.tensor
    observer = Observer(lambda tensor: True, {}, forbid=False)
    for data in (1.5, 3, True, -math.inf, math.nan, 2**54 + 1):
        for keywords in ({}, {"dtype": torch.complex64}, {"dtype": torch.bfloat16}):
            with watched(observer, compiled=False):
                found = [make(data, device="cpu", **keywords) for make in (torch.tensor, torch.as_tensor)]
            for mine in found:
                expected = stock(data, **keywords)
                assert mine.dtype == expected.dtype and mine.shape == expected.shape
                assert mine.untyped_storage().tolist() == expected.untyped_storage().tolist()
    with watched(observer, compiled=False), observer:
        torch.tensor(0.5, device="cpu")
        assert [operation.name for operation in observer.operations] == ["aten.full.default"]
        for data in (numpy.float64(0.5), [1.0], []):
            torch.tensor(data, device="cpu")
        assert [operation.name for operation in observer.operations].count("aten.full.default") == 1
        with pytest.raises(RuntimeError, match="overflow"):
            torch.tensor(300, dtype=torch.uint8, device="cpu")
        assert torch.tensor(1e39, dtype=torch.float32, device="cpu").isinf()  # a fill would raise
    with watched(observer, compiled=True):
        assert torch.tensor is stock


def test_function_tables_filled_in_a_step_hold_originals(everything_on_the_gpu: Callable[[], Any]) -> None:
    tables = [torch_internals.torch_obj_rule_map, torch_internals.device_constructors]
    for table in tables:
        table.cache_clear()
    with everything_on_the_gpu():
        for table in tables:
            table()
    for table in tables:
        assert torch.tensor in table() and torch.as_tensor in table()


def test_assigned_number_is_in_the_trace() -> None:
    """PyTorch gives the fill a tensor in CPU memory that it made of the number."""
    x, other = torch.zeros(3, 4), torch.zeros(4)
    on_the_gpu = {storage(x)}
    observer = Observer(lambda tensor: storage(tensor) in on_the_gpu, {}, forbid=False)
    with observer:
        x[:, 0] = 0.5
        x.mul_(torch.tensor(3.0))
        torch.randn(4).add_(1)
    found = {one.name: one.arguments[-1] for one in observer.operations}
    assert {*observer.outside} <= on_the_gpu
    assert (found["aten.fill_.Tensor"], found["aten.mul_.Tensor"]) == (0.5, 3.0) and not observer.refusals
    for reads in (lambda: x[0].copy_(other), lambda: torch.where(x > 0, x, torch.tensor(1.0))):
        observer.refusals.clear()
        with observer:
            reads()
        assert observer.refusals[0].reason.startswith("copies a CPU tensor")


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_observes_the_programs_calls(everything_on_the_gpu: Callable[[], Any]) -> None:
    with everything_on_the_gpu(), Seen() as mode:
        torch.tensor(1.0, device="cpu")
    assert mode.functions == ["tensor"]


def test_blocks_of_threads_may_end_in_any_order() -> None:
    class Owner:
        pass

    first, second = (torch_internals.replaced_attribute(Owner, "name", value) for value in "ab")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert vars(Owner)["name"] == "b"
    second.__exit__(None, None, None)
    assert "name" not in vars(Owner)

    a, plain, b, plain_too = (torch_internals.replaced_attribute(Owner, "name", value) for value in "apbp")
    for one in (a, plain, b, plain_too):
        one.__enter__()
    for one, there in [(plain_too, "b"), (a, "b"), (plain, "b"), (b, None)]:
        one.__exit__(None, None, None)
        assert vars(Owner).get("name") == there


def test_other_replacements_in_the_block_stay() -> None:
    class Owner:
        name = "before"

    with torch_internals.replaced_attribute(Owner, "name", "in the block"):
        Owner.name = "theirs"
        with torch_internals.replaced_attribute(Owner, "name", "inner"):
            assert Owner.name == "inner"
        assert Owner.name == "theirs"
    assert Owner.name == "theirs"


def test_steps_of_two_threads_are_observed_at_once() -> None:
    """Each waits in its calls for the other one, which then ends first."""
    both, ended = threading.Barrier(2, timeout=30), threading.Event()
    first: list[bool] = [True, False]

    def run(place: int) -> None:
        def wait(x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            if not torch.compiler.is_compiling() and turns[place] == 1:
                both.wait()
                if not first[place]:
                    ended.wait(30)
            return y + torch.tensor(0.5, device="cpu")

        step = GraphedStep(wait, device=CpuDevice())
        for number in range(3):
            turns[place] = number
            found.append(step(torch.full((3,), float(number)))[0].item())
            if first[place] and number == 1:
                ended.set()

    turns, found = [0, 0], list[float]()
    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]
