"""Whole programs through `torch.compile(backend="encore")` without a GPU: from Dynamo to CUDAGraph Trees.

Inductor takes CPU programs for CUDA ones, and calls ATen for every operator, so that nothing is compiled by a C++
compiler. A capture of what it made is one kernel of the simulated driver: it runs the function on what lies at the
addresses that it is given, and copies the results to where the capture has them. Placement has nothing to do here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import optimizations
from optimizations import torch_internals
from optimizations.graph.memory import size_bytes
from optimizations.in_place.generated import GeneratedCode, read_generated
from optimizations.trees.graphed_function import EncoreMaker
from simulated_gpu.driver import Function, Node, word
from simulated_gpu.runtime import CudaOnCpu, at_address, played_by_the_cpu, tensor_over

INDUCTOR = {"fallback_by_default": True, "graph_partition": False, "fallback_random": True}
UNWRITTEN = 0x7F
ALL = frozenset(range(1024))
"""A capture has one kernel, and all addresses are parameters of it, as those of products are."""


class Capturable:
    """A function of Inductor's, called with the list of its inputs. `captures` counts."""

    def __init__(self, cuda: CudaOnCpu, model: Callable[[list[Any]], Any]) -> None:
        read = read_generated(model)
        seen = {name: getattr(read, name) for name in ("written", "uncapturable", "is_partition", "hands_results_on")}
        self.code = GeneratedCode(None, products=ALL, **seen)
        self.captures = 0
        self._cuda = cuda
        self._model = model
        self._kernels: dict[str, Function] = {}

    def __call__(self, inputs: list[Any]) -> Any:
        if self._cuda.capturing is None:
            return self._model(inputs)
        given = list(inputs)
        inputs.clear()
        self.captures += 1
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        outputs, owners, same = self._tried_out(given)
        # By the memory that it has in the trial: memory of an input, or memory that the capture takes.
        memory = {place: tensors[index].untyped_storage() for place, index in owners.items()}
        made: dict[int, int] = {}
        results: list[Any] = []
        first: dict[int, int] = {}
        for position, output in enumerate(outputs):
            if position in same:
                output = given[same[position]]
            elif isinstance(output, torch.Tensor) and first.setdefault(id(output), position) != position:
                output = results[first[id(output)]]
            elif isinstance(output, torch.Tensor) and not output.untyped_storage().nbytes():
                output = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype)
            elif isinstance(output, torch.Tensor):
                place = _place(output)
                if place not in memory:
                    # Elements of any width fit in a whole number of times.
                    block = self._cuda.allocate(4 * (output.untyped_storage().nbytes() // 16 + 1))
                    block.view(torch.uint8).fill_(UNWRITTEN)
                    memory[place] = block.untyped_storage()
                    made[place] = len(made)
                output = _like(output, memory[place], output.storage_offset())
            results.append(output)
        copied = [
            (made[_place(one)], one.storage_offset() * one.element_size())
            if isinstance(one, torch.Tensor) and _place(one) in made
            else None
            for one in outputs
        ]
        addresses = [tensor.data_ptr() for tensor in tensors]
        addresses += [storage.data_ptr() for place, storage in memory.items() if place in made]
        kernel = self._kernel([_geometry(value) for value in given], copied, len(addresses))
        self._cuda.driver.add_node(self._cuda.capturing.graph, Node("KERNEL", kernel, list(map(word, addresses))))
        return results

    def _tried_out(self, given: list[Any]) -> tuple[list[Any], dict[int, int], dict[int, int]]:
        """The outputs of a run on copies, which changes nothing. By memory, the tensor input that it is of; and by
        output, the input that it is."""
        storages: dict[int, torch.UntypedStorage] = {}
        copies, owners = [], {}
        for value in given:
            if isinstance(value, torch.Tensor):
                storage = storages.setdefault(_place(value), value.untyped_storage().clone())
                value = _like(value, storage, value.storage_offset())
                if storage.nbytes():
                    owners.setdefault(_place(value), sum(isinstance(one, torch.Tensor) for one in copies))
            copies.append(value)
        random = torch.get_rng_state()
        try:
            outputs = list(self._model(list(copies)))
            inputs = {id(copy): index for index, copy in enumerate(copies) if isinstance(copy, torch.Tensor)}
            same = {place: inputs[id(one)] for place, one in enumerate(outputs) if id(one) in inputs}
            return outputs, owners, same
        finally:
            torch.set_rng_state(random)

    def _kernel(self, geometry: list[Any], copied: list[tuple[int, int] | None], pointers: int) -> Function:
        """Return the kernel; `copied` has, by output, the number of its memory and its offset there in bytes."""
        key = f"{geometry} {copied}"
        if key in self._kernels:
            return self._kernels[key]
        inputs = sum(isinstance(one, tuple) for one in geometry)

        def body(*words: bytes) -> None:
            addresses = [int.from_bytes(pointer, "little") for pointer in words]
            places = iter(addresses)
            arguments = [_at(next(places), *one) if isinstance(one, tuple) else one for one in geometry]
            with torch.no_grad():
                found = self._model(arguments)
            for output, place in zip(found, copied, strict=True):
                if place is not None:
                    number, offset = place
                    ctypes.memmove(addresses[inputs + number] + offset, output.data_ptr(), size_bytes(output))

        kernel = self._kernels[key] = Function(f"function {id(self)}", (8,) * pointers, body)
        self._cuda.driver.add_function(kernel)
        return kernel


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _geometry(value: Any) -> Any:
    return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value


def _like(tensor: torch.Tensor, storage: Any, offset: int) -> torch.Tensor:
    like = tensor_over(storage, *_geometry(tensor), offset)
    return like.conj() if tensor.is_conj() else like


def _at(address: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    if not all(size):
        return torch.empty_strided(size, stride, dtype=dtype)
    last = sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    storage = at_address(address, (last + 1) * dtype.itemsize, torch.uint8).untyped_storage()
    return tensor_over(storage, dtype, size, stride)


CUTS = ("tanh", "exp", "flip", "sum", "cat", "sin", "mean", "relu", "set_")
"""Operators that are left out of graphs by `cut_into_partitions`."""


def cut_into_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Inductor leave some operators out of CUDA graphs, as it does with some custom ones on a GPU.

    What is compiled becomes several graphs then, which pass tensors on to one another.
    """
    scheduler, _ = torch_internals.holder_of("graph_partition")

    def should_partition(_: Any, node: Any) -> str | None:
        schema = getattr(getattr(node.node, "op_overload", None), "_schema", None)
        return None if schema is None or schema.name.split("::")[1] not in CUTS else "an operator that cuts"

    monkeypatch.setattr(scheduler, "should_partition", should_partition)
    monkeypatch.setitem(INDUCTOR, "graph_partition", True)


class CompiledOnCpu:
    """`functions` are those that Inductor made since the beginning."""

    def __init__(self, cuda: CudaOnCpu) -> None:
        self.cuda = cuda
        self.functions: list[Capturable] = []

    @property
    def captures(self) -> list[int]:
        return [function.captures for function in self.functions]


def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledOnCpu]:
    """Compile for the simulated GPU until the generator ends: the fixture's body, for programs of their own."""
    playing = played_by_the_cpu(monkeypatch)
    world = CompiledOnCpu(next(playing))

    make = EncoreMaker.cudagraphify

    def cudagraphify(maker: EncoreMaker, model: Any, *arguments: Any, **keywords: Any) -> Any:
        world.functions.append(Capturable(world.cuda, model))
        return make(maker, world.functions[-1], *arguments, **keywords)

    monkeypatch.setattr(EncoreMaker, "cudagraphify", cudagraphify)
    _take_for_cuda(monkeypatch)
    # A program that marked its steps once has to go on doing so, or its iteration never ends.
    monkeypatch.setattr(torch_internals.cudagraph_trees.MarkStepBox, "mark_step_counter", 0)
    torch_internals.reset_dynamo()
    optimizations.reset()
    with torch_internals.fresh_cache(), torch_internals.inductor_config.patch(INDUCTOR):
        yield world
        torch_internals.reset_dynamo()
        next(playing, None)
    optimizations.reset()


def _take_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Inductor want CUDA graphs of CPU programs."""
    init = torch_internals.CompiledFxGraph.__init__

    def on_a_gpu(graph: Any, *arguments: Any, **keywords: Any) -> None:
        init(graph, *arguments, **keywords)
        graph.device_idxs.add(0)

    monkeypatch.setattr(torch_internals.CompiledFxGraph, "__init__", on_a_gpu)
    monkeypatch.setattr(torch_internals.cudagraph_utils, "check_lowering_disable_cudagraph", lambda mapping: None)


WEIGHT = torch.eye(8) * 2


def program(x: torch.Tensor) -> torch.Tensor:
    """Only calls of a library, so that nothing has to be compiled by a C++ compiler."""
    return torch.mm(x, WEIGHT)


def other_program(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(torch.mm(x, WEIGHT), WEIGHT)


class FakeMaker:
    """Note the functions that graphs are requested of, and run them without graphs."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.calls = 0
        self.managers: list[int] = []

    def cudagraphify(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        self.made.append({**dict(zip(("static_input_idxs",), args, strict=False)), **kwargs})

        def run(inputs: list[Any]) -> Any:
            self.calls += 1
            return model(inputs)

        return run

    def get_manager(self, device_index: int, create_if_none_exists: bool = True) -> Any:
        self.managers.append(device_index)
        return self

    def forward_returns(self, count: int) -> None: ...

    @property
    def directions(self) -> list[str]:
        return [
            "backward" if one["is_backward"] else "inference" if one["is_inference"] else "forward" for one in self.made
        ]


def in_disguise(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMaker]:
    """Run everything from `compile_fx` to `post_compile` as for a GPU, up to the maker of graphs, which is a fake."""
    stock = FakeMaker()
    _take_for_cuda(monkeypatch)
    monkeypatch.setattr(torch_internals.compile_fx, "cudagraphify", stock.cudagraphify)
    monkeypatch.setattr(torch_internals.cudagraph_trees, "get_manager", stock.get_manager)
    torch_internals.reset_dynamo()
    with torch_internals.fresh_cache():
        yield stock
    torch_internals.reset_dynamo()
