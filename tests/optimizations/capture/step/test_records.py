"""Signatures, observed operators, replaced functions and launches, tested on plain records."""

from __future__ import annotations

import collections
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from simulated_gpu.operators import CpuDevice
from torch.overrides import TorchFunctionMode
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from optimizations import torch_internals
from optimizations.capture.device import any_word_in
from optimizations.capture.inputs import copy_all
from optimizations.capture.signature import copies, parts, refused_tensor, replaced, signature
from optimizations.capture.step.audit import Operation, first_difference
from optimizations.capture.step.call import Arguments
from optimizations.capture.step.forbidden_calls import watched
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import Observer, draws, has_own_state, storage
from optimizations.capture.step.recording import given_to_kernels
from optimizations.concurrency.launch_log import LaunchLog
from optimizations.graph.records import CapturedGraph, KernelNode, MemoryRange, OtherNode, Parameter


@dataclass
class Batch:
    x: torch.Tensor
    scale: float


Pair = collections.namedtuple("Pair", "first second")


class Padded(list):  # type: ignore[type-arg]
    """Takes its members apart, and has a number next to them."""

    def __init__(self, first: Any, second: Any, factor: float) -> None:
        super().__init__([first, second])
        self.factor = factor


class Named(tuple):  # type: ignore[type-arg]
    name = ""


class OfOne(Pair):
    """Made of something else than its members."""

    def __new__(cls, first: torch.Tensor) -> OfOne:
        return super().__new__(cls, first, first + 1)


@dataclass
class Unset:
    x: torch.Tensor
    seen: torch.Tensor = field(init=False)


def named() -> Named:
    found = Named([torch.ones(2)])
    found.name = "a name"
    return found


NESTS: dict[str, Any] = {
    "dict": {"x": torch.ones(2), "n": 3, "no number": math.nan, "none": None},
    "one tensor twice": [ONCE := torch.ones(2), (ONCE, {"x": ONCE})],
    "list in tuple": ([torch.ones(2), torch.ones(3)], "name"),
    "dataclass": Batch(torch.ones(2), 0.5),
    "named tuple": Pair(torch.ones(2), None),
    "ordered": collections.OrderedDict(a=torch.ones(1), b=torch.ones(2)),
    "list with a number": Padded(torch.ones(2), torch.ones(3), 2.0),
    "tuple with a name": named(),
    "named tuple with a constructor": OfOne(torch.ones(2)),
    "dataclass with a field that is not set": Unset(torch.ones(2)),
    "a model's": CausalLMOutput(loss=torch.ones(()), logits=torch.ones(2)),
    "tokenizer's": BatchEncoding({"input_ids": torch.ones(2, dtype=torch.int64)}),
}


@pytest.mark.parametrize("name", sorted(NESTS))
def test_nested_arguments_are_flattened_and_rebuilt(name: str) -> None:
    nest = NESTS[name]
    tensors: list[torch.Tensor] = []
    key = signature(nest, tensors)
    assert tensors and hash(key) == hash(signature(nest, []))
    made = {id(tensor): tensor * 2 for tensor in tensors}
    doubled = replaced(nest, iter([made[id(tensor)] for tensor in tensors]))
    assert type(doubled) is type(nest)
    assert copies(nest)
    assert getattr(nest, "name", 0) == getattr(doubled, "name", 0)
    found: list[torch.Tensor] = []
    assert signature(doubled, found) == key
    of_the_call = Arguments((nest,), {}).tensors_of((doubled,), {})
    assert of_the_call is not None and all(one is other for one, other in zip(of_the_call, found, strict=True))
    assert all(torch.equal(new, old * 2) for new, old in zip(found, tensors, strict=True))
    again: list[torch.Tensor] = []
    signature(nest, again)
    assert all(a is b for a, b in zip(again, tensors, strict=True))  # the original is as it was
    assert sum(isinstance(one, torch.Tensor) for _, one, _ in parts(nest, "batch")) == len(tensors)


def test_tensor_next_to_container_entries_is_in_the_signature() -> None:
    one, other = named(), named()
    one.mask = other.mask = torch.ones(2)  # type: ignore[attr-defined]
    assert signature(one, []) == signature(other, [])
    other.mask = torch.ones(2)  # type: ignore[attr-defined]
    assert signature(one, []) != signature(other, [])


def test_unsupported_arguments_are_refused_by_name() -> None:
    def refusal(tensor: torch.Tensor, holds: bool = True) -> str:
        return str(refused_tensor("batch['x']", tensor, lambda _: holds))

    assert "batch['x'] is on cpu" in refusal(torch.ones(2), holds=False)
    assert "requires a gradient" in refusal(torch.ones(2, requires_grad=True))
    assert "not a dense tensor" in refusal(torch.ones(2, 2).to_sparse())
    assert "lazy conjugate" in refusal(torch.ones(2, dtype=torch.complex64).conj())
    assert refused_tensor("x", torch.ones(2), lambda _: True) is None


@pytest.mark.filterwarnings("ignore")  # what PyTorch says of sparse and nested tensors
def test_tensors_without_strides_have_signatures_and_are_refused() -> None:
    compressed, nested = torch.eye(3).to_sparse_csr(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tensor, words in [(compressed, "not a dense tensor"), (nested, "is a nested tensor")]:
        assert signature(tensor, []) == signature(tensor.clone(), []) != signature(torch.ones(2), [])
        assert words in str(refused_tensor("x", tensor, lambda _: True))
        step = GraphedStep(lambda given: given * 2, device=CpuDevice())
        assert step(tensor).layout is tensor.layout
        assert words in step.report().refusals[0].reason


def test_tensors_of_one_dtype_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch copies a list of several dtypes one by one."""
    launches: list[list[torch.dtype]] = []
    stock = torch_internals.foreach_copy_

    def copying(targets: Any, sources: Any, **keywords: Any) -> None:
        launches.append([target.dtype for target in targets])
        stock(targets, sources, **keywords)

    monkeypatch.setattr(torch_internals, "foreach_copy_", copying)
    sources = [torch.ones(2, requires_grad=True), torch.arange(3), torch.ones(3, dtype=torch.int64), torch.zeros(1)]
    sources.append(torch.ones(2, dtype=torch.float64, requires_grad=True))
    targets = [torch.full_like(source, 7, requires_grad=False) for source in sources]
    copy_all(targets, sources)
    assert launches == [[torch.float32] * 2, [torch.int64] * 2]
    assert torch.is_grad_enabled() and not any(target.requires_grad for target in targets)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(targets, sources, strict=True))


def operation(name: str, *arguments: Any, line: str | None = "loop.py:3 in step") -> Operation:
    return Operation(name, arguments, line)


def test_first_difference_of_two_runs_is_reported_with_its_line() -> None:
    run = [operation("aten.mul.Tensor", 1), operation("aten.add_.Tensor", 0.5)]
    assert first_difference(run, list(run)) is None
    other = first_difference(run, [run[0], operation("aten.add_.Tensor", 0.25)])
    assert other is not None and "ran add_(..., 0.25) where the call before has 0.5" in other.reason
    assert other.source_line == "loop.py:3 in step"
    shorter = first_difference(run, run[:1])
    assert shorter is not None and "did not run add_" in shorter.reason
    exchanged = first_difference(run, run[::-1])
    assert exchanged is not None and "ran add_ where the call before has mul" in exchanged.reason


def test_checkpoint_random_state_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own functions differ there from their replacements in a capture."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(8, dtype=torch.uint8).clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: state.clone())
    for capturing in (False, True):
        observer = Observer(CpuDevice(), {}, forbid=capturing)
        with watched(observer, compiled=False), observer:
            torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        assert observer.operations == [] and observer.queries_random_state


def graph_of_kernel(data: bytes, name: str | None = "kernel") -> CapturedGraph:
    node = KernelNode(
        name=name,
        function=1,
        grid=(1, 1, 1),
        block=(1, 1, 1),
        shared_bytes=0,
        parameters=(Parameter(offset=0, size=len(data), data=data),),
    )
    return CapturedGraph(nodes=(node,), edges=())


def test_address_is_found_in_any_kernel_argument() -> None:
    address = 0x7F0012345000
    memory = [MemoryRange(address=address, size_bytes=64)]
    for shift in (0, 4, 8):
        inside = bytes(shift) + (address + 16).to_bytes(8, "little") + bytes(4)
        assert any_word_in(graph_of_kernel(inside), memory)
    assert not any_word_in(graph_of_kernel((address + 64).to_bytes(8, "little")), memory)
    assert not any_word_in(graph_of_kernel((address - 1).to_bytes(8, "little")), memory)
    assert any_word_in(CapturedGraph(nodes=(OtherNode(type_name="GRAPH"),), edges=()), memory), "it is not read"


def test_module_imported_while_watched_retains_no_observer() -> None:
    """PyTorch imports modules of its own in the first capture, which keep `torch.cuda.synchronize` for themselves."""
    observer = Observer(CpuDevice(), {}, forbid=True)
    gone = weakref.ref(observer)
    owners = [(torch.cuda, "synchronize"), (torch, "manual_seed")]
    with watched(observer, compiled=False):
        kept = [vars(owner)[name] for owner, name in owners]
    assert all(function is not vars(owner)[name] for function, (owner, name) in zip(kept, owners, strict=True))
    del observer
    assert gone() is None
    _, seed = kept
    assert seed(3).initial_seed() == 3


_ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "expected"),
    [
        (_ATEN._scaled_dot_product_flash_attention.default, (1, 2, 3), {}, False),
        (_ATEN._scaled_dot_product_flash_attention.default, (1, 2, 3, 0.0, True), {}, False),
        (_ATEN._scaled_dot_product_flash_attention.default, (1, 2, 3, 0.1, True), {}, True),
        (_ATEN._scaled_dot_product_efficient_attention.default, (1, 2, 3, None, True), {"dropout_p": 0.2}, True),
        (_ATEN._scaled_dot_product_efficient_attention.default, (1, 2, 3, None, True, 0), {}, False),
        (_ATEN.native_dropout.default, (1, 0.0, True), {}, True),
        (_ATEN.bernoulli_.float, (1, 0.0), {}, True),
        (_ATEN.add.Tensor, (1, 2), {}, False),
    ],
)
def test_attention_with_dropout_draws_random_numbers(operator: Any, args: Any, kwargs: Any, expected: bool) -> None:
    assert draws(operator, args, kwargs) == expected


def test_dropout_of_cudnns_rnn_leaves_the_generator_as_it_is() -> None:
    """A step with it neither sets a state nor seeds, though it draws and the generator's state stays."""
    assert has_own_state(_ATEN._cudnn_rnn.default)
    assert draws(_ATEN._cudnn_rnn.default, (), {})
    assert not has_own_state(_ATEN.native_dropout.default)


def device_with(on_the_gpu: set[int]) -> Any:
    """Return a device that holds the tensors of these storages only."""
    return SimpleNamespace(holds=lambda tensor: storage(tensor) in on_the_gpu, streams=CpuDevice())


# Python numbers become GPU fills with PyTorch's bits. The replaced functions are invisible to modes, classes of


@pytest.fixture
def everything_on_the_gpu() -> Callable[[], Any]:
    return lambda: watched(Observer(CpuDevice(), {}, forbid=False), compiled=False)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = torch.tensor, torch.as_tensor
    yield
    assert (torch.tensor, torch.as_tensor) == before


def test_number_is_converted_by_a_fill() -> None:
    """Bits, dtypes and errors are PyTorch's."""
    stock = torch.tensor
    observer = Observer(CpuDevice(), {}, forbid=False)
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
    observer = Observer(device_with(on_the_gpu), {}, forbid=False)
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


def test_random_state_of_an_operator_is_not_compared() -> None:
    """As attention's, whose forward returns its seed in CPU memory and whose backward reads it there."""
    x = torch.ones(3)
    on_the_gpu = {storage(x)}
    observer = Observer(device_with(on_the_gpu), {}, forbid=False)
    with observer:
        state = x.sum()
        x.mul_(state)
        state += 1
        x.mul_(state * torch.tensor(2.0))
    without, of_a_number = [one.arguments for one in observer.operations if one.name == "aten.mul_.Tensor"]
    assert 3.0 not in without and of_a_number[-1] == 8.0
    assert not observer.refusals


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


# What kernels were given shows which gradients they read, unless other code added nodes.


@pytest.fixture
def given() -> Iterator[Callable[..., set[int] | None]]:
    """Return what kernels were given that a function launched. It gets a log, and a function that adds nodes."""

    def run_logged(run: Callable[[LaunchLog, Callable[[int], None], dict[str, Any]], None]) -> set[int] | None:
        nodes = 0

        def adding(count: int) -> None:
            nonlocal nodes
            nodes += count

        kernel: Any = object.__new__(torch_internals.CachingAutotuner)  # type: ignore[call-overload]
        kernel.fn, kernel.run = SimpleNamespace(__name__="triton_double"), lambda *arguments, nodes: adding(nodes)
        kernel.triton_meta, kernel.mutated_arg_names, kernel.custom_kernel = {"signature": {}}, [], False
        module, log = {"kernel": kernel}, LaunchLog(lambda: nodes, device_type="cpu", notes_memory=False)
        with log.noting(module, operators=False):
            run(log, adding, module)
            return given_to_kernels(log)

    yield run_logged


X = torch.ones(4)


def operator(log: LaunchLog, adding: Callable[[int], None], name: Any, *arguments: Any) -> None:
    log.operator(name, arguments, {}, lambda: adding(2), [storage(one) for one in arguments if one is X])


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda log, adding, module: operator(log, adding, torch.ops.aten.mul.Tensor, X, X), {X.data_ptr()}),
        (lambda log, adding, module: operator(log, lambda count: None, torch.ops.aten.view.default, X, [4]), set()),
        (lambda log, adding, module: operator(log, adding, torch.ops.aten.sin.default, X.to_sparse()), None),
        (lambda log, adding, module: module["kernel"].run(X[1:], nodes=1), {X.data_ptr()}),
        (lambda log, adding, module: module["kernel"].run(X, nodes=2), None),
        (lambda log, adding, module: adding(1), None),
    ],
    ids=["operator", "operator without a node", "sparse", "kernel", "kernel of two nodes", "other code"],
)
def test_storages_given_to_kernels_are_known(given: Any, run: Any, expected: set[int] | None) -> None:
    assert given(run) == expected
