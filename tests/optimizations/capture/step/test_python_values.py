"""Python's numbers are filled in on the GPU, with the bits that PyTorch would copy there. Functions stand in for
PyTorch's own to do so, and nobody sees them: no mode, class of tensors, table or thread, and nothing later."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch.overrides import TorchFunctionMode

from optimizations import torch_internals
from optimizations.capture.step.forbidden_calls import Asked, watched
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import Observer, storage


@pytest.fixture
def everything_on_the_gpu() -> Callable[[], Any]:
    return lambda: watched(Observer(lambda tensor: True, {}, forbid=False), Asked(), capturing=True, compiled=False)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    names = [(torch.Tensor, "__setitem__"), (torch.Tensor, "new_tensor"), (torch, "tensor"), (torch, "as_tensor")]
    before = [vars(owner).get(name) for owner, name in names]
    yield
    assert [vars(owner).get(name) for owner, name in names] == before


def test_numbers_become_tensors_by_a_fill() -> None:
    """Bits, dtypes and errors are PyTorch's."""
    stock = torch.tensor
    observer = Observer(lambda tensor: True, {}, forbid=False)
    for data in (1.5, 3, True, 2j, -math.inf, math.nan, [1, 2.5, True], (7,), [True, False], [[1, 2], (3.5, 4)]):
        for keywords in ({}, {"dtype": torch.complex64}, {"dtype": torch.bfloat16} if data != 2j else {}):
            with watched(observer, Asked(), capturing=True, compiled=False):
                found = [torch.tensor(data, device="cpu", **keywords), torch.as_tensor(data, device="cpu", **keywords)]
                found += [torch.ones(2, dtype=torch.complex128).new_tensor(data, **keywords)]
            expected = [stock(data, **keywords)] * 2
            expected += [torch.ones(2, dtype=torch.complex128).new_tensor(data, **keywords)]
            for mine, theirs in zip(found, expected, strict=True):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
                assert mine.untyped_storage().tolist() == theirs.untyped_storage().tolist()
    with watched(observer, Asked(), capturing=True, compiled=False), observer:
        torch.tensor(0.5, device="cpu")
        assert [operation.name for operation in observer.operations] == ["aten.full.default"]
        for data in (numpy.float64(0.5), numpy.ones(2), [[1.0] * 3] * 11, [numpy.int64(1)], [1.0] * 33, []):
            torch.tensor(data, device="cpu")
        assert [operation.name for operation in observer.operations].count("aten.full.default") == 1
        with pytest.raises(RuntimeError, match="overflow"):
            torch.tensor(300, dtype=torch.uint8, device="cpu")
        assert torch.tensor(1e39, dtype=torch.float32, device="cpu").isinf()  # a fill would raise
    with watched(observer, Asked(), capturing=True, compiled=True):
        assert torch.tensor is stock
    assert torch.tensor is stock


ASSIGNED: list[tuple[torch.dtype, Any, Any]] = [
    (torch.float32, (slice(None), 0), 1),
    (torch.float32, (0, 1), 0.1),
    (torch.float32, 2, math.nan),
    (torch.float32, (..., slice(1, None)), -0.0),
    (torch.float32, (None, 1), 1e38),
    (torch.float16, (), 1 / 3),
    (torch.bfloat16, slice(0, 2), 1 / 3),
    (torch.int64, (0, 0), 3.7),
    (torch.uint8, (slice(None), 2), True),
    (torch.bool, 1, 2),
    (torch.complex64, (1, 1), 2j),
    (torch.float64, (torch.tensor([0, 2]), 1), 0.1),
    (torch.float32, torch.tensor([[0, 1]]), 0.1),
    (torch.float32, (torch.tensor([0, 2]), torch.tensor([1, 1], dtype=torch.int32)), 4),
    (torch.float32, torch.tensor([True, False, True]), 0.1),
    (torch.float32, [0, 2], 0.1),
    (torch.float32, True, 0.1),
    (torch.float32, (0, torch.tensor(1)), 0.1),
    (torch.float32, 0, numpy.float64(0.1)),
]


def test_numbers_are_assigned_as_pytorch_does_it(everything_on_the_gpu: Callable[[], Any]) -> None:
    for dtype, index, value in ASSIGNED:
        mine, expected = torch.zeros(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
        expected[index] = value
        with everything_on_the_gpu():
            mine[index] = value
        bits = [one.view(torch.uint8) if dtype != torch.bool else one for one in (mine, expected)]
        assert torch.equal(*bits), (dtype, index, value)


def test_places_in_lists_are_filled_in(everything_on_the_gpu: Callable[[], Any]) -> None:
    x = torch.arange(24.0).view(4, 6)
    y, expected = x.clone(), x.clone()
    expected[[3, 0]] = -1.0
    expected[:, [1]] = x[:, 2:3]
    expected[[0, 1], [-1, 2]] = x[0, :2]
    observer = Observer(lambda tensor: True, {}, forbid=True)
    with watched(observer, Asked(), capturing=True, compiled=False), observer:
        y[[3, 0]] = -1.0
        y[:, [1]] = x[:, 2:3]
        y[[0, 1], [-1, 2]] = x[0, :2]
    assert torch.equal(y, expected)
    for index in ([True, False, True, True], [[0, 1], [1, 2]], [], [0, slice(None)], range(2)):
        y, expected = x.clone(), x.clone()
        expected[index] = 0.5
        with everything_on_the_gpu():
            y[index] = 0.5
        assert torch.equal(y, expected)


class Knows(torch.Tensor):
    """Does something of its own for some methods, which it knows by their identity."""

    own: ClassVar = {torch.Tensor.__getitem__: "got", torch.Tensor.__setitem__: "set", torch.Tensor.new_tensor: "made"}
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in cls.own:
            cls.seen.append(cls.own[func])
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_class_of_tensors_knows_the_methods_by_their_identity(everything_on_the_gpu: Callable[[], Any]) -> None:
    x, plain, chosen = torch.ones(3).as_subclass(Knows), torch.ones(3), torch.tensor([1]).as_subclass(Knows)
    Knows.seen.clear()
    with everything_on_the_gpu():
        x[0] = 1.0
        x[0]
        x.new_tensor(1.0)
        plain[chosen]
        plain[chosen] = 2.0
    assert Knows.seen == ["set", "got", "made", "got", "set"]


def test_errors_of_assignments_are_those_of_pytorch(everything_on_the_gpu: Callable[[], Any]) -> None:
    leaf = torch.zeros(3, requires_grad=True)
    x, places = torch.zeros(3), torch.tensor([0, 1])
    for tensor, index, value in [(leaf, 0, 1.0), (x, 5, 1.0), (x, 0, 2j), (x, 0, 1e39), (x, places, 1e39)]:
        with pytest.raises((RuntimeError, IndexError)) as expected:
            tensor[index] = value
        with (
            everything_on_the_gpu(),
            pytest.raises((RuntimeError, IndexError)) as found,
        ):
            tensor[index] = value
        assert str(found.value) == str(expected.value)


def test_a_number_that_is_assigned_stands_in_the_trace() -> None:
    assign = torch.Tensor.__setitem__
    observer = Observer(lambda tensor: True, {}, forbid=False)
    x = torch.zeros(3, 4)
    with watched(observer, Asked(), capturing=True, compiled=False), observer:
        x[:, 0] = 0.5
        x[0, 1] = 2
        x[torch.arange(2)] = 3
    told = [(one.name, one.arguments[-1]) for one in observer.operations if "fill" in one.name or "full" in one.name]
    assert told[:2] == [("aten.fill_.Scalar", 0.5), ("aten.fill_.Scalar", 2)]
    assert [one.arguments[0] for one in observer.operations if one.name == "aten.full.default"] == [3]
    assert not observer.refusals
    assert torch.Tensor.__setitem__ is assign and "__setitem__" not in vars(torch.Tensor)


@pytest.mark.parametrize("value", [0.5, 7])
def test_a_number_may_be_assigned_by_one_mask_and_not_by_two(value: float) -> None:
    """What lies on `meta` stands for the GPU. PyTorch makes a tensor in CPU memory of the number only on a real one."""

    def traced(*indices: torch.Tensor, number: float | None, **keywords: bool) -> Observer:
        observer = Observer(lambda tensor: tensor.device.type == "meta", {}, forbid=False)
        with observer, observer.by_a_mask(number) if number is not None else contextlib.nullcontext():
            lifted = torch.ops.aten.lift_fresh(scalar)  # as PyTorch does on a GPU
            torch.empty(3, 4, device="meta").index_put_(indices, lifted, **keywords)
        return observer

    mask = torch.empty(3, 4, dtype=torch.bool, device="meta")
    rows, columns = mask[:, 0].clone(), mask[0].clone()
    scalar = torch.tensor(value)
    alone = traced(mask, number=value)
    assert alone.refusals == [] and alone.operations[-1].arguments[-1] == value
    assert storage(scalar) not in alone.outside
    for indices, number, keywords, words in [
        ((mask,), None, {}, "index_put_ reads a CPU tensor"),
        ((rows, columns), value, {}, "index_put_ has a result whose size depends on values"),
        ((mask,), value, {"accumulate": True}, "index_put_ has a result whose size depends on values"),
    ]:
        assert words in traced(*indices, number=number, **keywords).refusals[0].reason


def test_tensors_are_no_sequences_behind_a_step() -> None:
    """Python would take them for some from the first time on that `__getitem__` is one of its own functions."""
    step = GraphedStep(lambda x: x[:, 0] * 2, device=CpuDevice())
    for number in range(6):
        assert torch.equal(step(torch.full((3, 4), float(number))), torch.full((3,), 2.0 * number))
    assert step.report().replays > 0
    assert torch.equal(torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))


def test_tables_filled_in_a_step_know_pytorchs_functions(everything_on_the_gpu: Callable[[], Any]) -> None:
    tables = [torch_internals.torch_obj_rule_map, torch_internals.device_constructors]
    for table in tables:
        table.cache_clear()
    with everything_on_the_gpu():
        for table in tables:
            table()
    for table in tables:
        assert torch.tensor in table() and torch.as_tensor in table()


NOT_AS_FILLED: list[tuple[Any, torch.dtype]] = [
    (2**54 + 2**30 + 1, torch.float32),
    (2**54 + 2**30 + 1, torch.complex64),
    (1 + 0j, torch.float32),
    (1 + 0j, torch.int64),
    (-1, torch.uint64),
    (0.0, torch.uint64),
]


@pytest.mark.parametrize(("number", "dtype"), NOT_AS_FILLED)
def test_numbers_are_rounded_and_refused_as_pytorch_does_it(
    number: Any, dtype: torch.dtype, everything_on_the_gpu: Callable[[], Any]
) -> None:
    like = torch.ones(2)
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: torch.tensor([number, number], dtype=dtype, device="cpu"),
        lambda: torch.as_tensor([number, number], dtype=dtype, device="cpu"),
        lambda: like.new_tensor(number, dtype=dtype),
    ]

    def made(way: Callable[[], torch.Tensor]) -> Any:
        try:
            return way()
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            return type(error), str(error)

    expected = list(map(made, ways))
    with everything_on_the_gpu():
        found = list(map(made, ways))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


REFUSED: list[tuple[torch.Tensor, Any, Any]] = [
    (torch.zeros(3).to_sparse(), 0, 1.0),
    (torch.zeros(3), 0, 2**63),
    (torch.zeros(3), torch.tensor([0]), 2**63),
    (torch.zeros(3), 0, 2**70),
    (torch.zeros(3), [0, 2**70], 1.0),
    (torch.zeros(3), 5, 2j),
    (torch.zeros(3), slice(None, None, -1), 1e39),
    (torch.zeros(3, requires_grad=True).mul(2).unbind()[0], (), 1.0),
]


@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_what_pytorch_refuses_to_assign_it_refuses_itself(place: int, everything_on_the_gpu: Callable[[], Any]) -> None:
    tensor, index, value = REFUSED[place]
    errors = (RuntimeError, IndexError, TypeError, ValueError, OverflowError)
    with pytest.raises(errors) as expected:
        tensor[index] = value
    with everything_on_the_gpu(), pytest.raises(errors) as found:
        tensor[index] = value
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))


@pytest.mark.parametrize("tensor", [torch.ones(2, 2).to_sparse_csr(), torch.zeros(2, names=("a",))])
def test_tensors_that_are_special_make_others_as_pytorch_does_it(
    tensor: torch.Tensor, everything_on_the_gpu: Callable[[], Any]
) -> None:
    with pytest.raises(RuntimeError) as expected:
        tensor.new_tensor(1.0)
    with everything_on_the_gpu(), pytest.raises(RuntimeError) as found:
        tensor.new_tensor(1.0)
    assert str(found.value) == str(expected.value)


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append((func, func in (torch.tensor, torch.as_tensor, torch.Tensor.__setitem__)))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_the_program_calls(everything_on_the_gpu: Callable[[], Any]) -> None:
    def program() -> list[Any]:
        x = torch.zeros(3, 4)
        with Seen() as mode:
            x[:, 0] = 1.0
            x[[0, 1]] = 2.0
            x.new_tensor([1.0, 2.0])
            torch.tensor([1, 2], device="cpu")
            torch.as_tensor(1.0, device="cpu")
        return mode.functions

    expected = program()
    with everything_on_the_gpu():
        assert program() == expected
    assert len(expected) >= 5
    observer = Observer(lambda tensor: True, {}, forbid=True)
    x = torch.zeros(3, 4)
    with watched(observer, Asked(), capturing=True, compiled=False), observer, torch.device("cpu"):  # a mode, too
        x[:, 0] = 0.5
    assert [one.name for one in observer.operations].count("aten.fill_.Scalar") == 1


def test_blocks_of_threads_end_in_another_order_than_they_began() -> None:
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


def test_what_others_put_there_in_the_block_stays() -> None:
    class Owner:
        name = "before"

    with torch_internals.replaced_attribute(Owner, "name", "in the block"):
        Owner.name = "theirs"
        with torch_internals.replaced_attribute(Owner, "name", "inner"):
            assert Owner.name == "inner"
        assert Owner.name == "theirs"
    assert Owner.name == "theirs"


def test_methods_of_the_programs_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may do something else with a number."""
    stock = torch.Tensor.__setitem__

    def twice(tensor: torch.Tensor, index: Any, value: Any) -> None:
        stock(tensor, index, 2 * value)

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[0] = 0.5
        return y

    monkeypatch.setattr(torch.Tensor, "__setitem__", twice)
    graphed = GraphedStep(step, device=CpuDevice())
    with pytest.warns(UserWarning, match="from Python values"):  # PyTorch's own does so here, and not on a GPU
        for number in range(6):
            x = torch.full((3,), float(number))
            assert torch.equal(graphed(x), step(x))
    assert step(torch.zeros(1)).item() == 1.0


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
            y[0] = 0.5
            return y

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
    assert found == [0.5] * 6
