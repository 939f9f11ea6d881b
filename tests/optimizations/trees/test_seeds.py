"""Backwards read random state on the host or the GPU, next to forwards with and without graphs."""

from __future__ import annotations

import ast
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import KNOWN, Compiled, Model, nodes, values

from optimizations import torch_internals
from optimizations.in_place.generated import GeneratedCode, read_function
from optimizations.options import Options
from optimizations.trees import readable_seeds, reasons
from optimizations.trees.containers import managers
from optimizations.trees.graphed_function import EncoreMaker
from optimizations.trees.manager import EncoreManager

W = values(0.5)


class HostMemory:
    """Knows which tensors lie on the host: all memory is host memory here."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = torch_internals.cudagraph_trees.StorageWeakRef(storage)
        return tensor

    def __contains__(self, tensor: torch.Tensor) -> bool:
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()


class Forward(Model):
    """Its result is saved as a seed: on the host where it runs without a graph."""

    host: HostMemory

    def __call__(self, inputs: list[Any]) -> list[Any]:
        (saved,) = super().__call__(inputs)
        return [saved if self.cuda.capturing else self.host.add(saved)]


class Backward(Model):
    """Takes a tangent, a seed and W. Notes where the seed lies in each run."""

    host: HostMemory

    def __call__(self, inputs: list[Any]) -> list[Any]:
        on_host = inputs[1] in self.host
        assert on_host == (self.cuda.capturing is None), "an operator of PyTorch would end the process here"
        return super().__call__(inputs)


class Training:
    """A forward and a backward that reads the forward's seed.

    `copied_out`: the seed is a copy outside of graph memory, and an ordinary input of the backward.
    """

    def __init__(self, cuda: CudaOnCpu, host: HostMemory, *, copied_out: bool = False, lean: bool = True) -> None:
        self.host, self.copied_out = host, copied_out
        forward, backward = Forward(cuda), Backward(cuda, code=GeneratedCode(None, seeds=(1,)))
        forward.host = backward.host = host
        static = (2,) if copied_out else (1, 2)
        self.models = forward, backward
        self.forward = Compiled(forward, is_inference=False, lean=lean)
        self.backward = Compiled(backward, is_inference=False, is_backward=True, static_inputs=static, lean=lean)

    def run_forward(self, start: float) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = values(start), values(start + 1)
        (saved,) = self.forward.checked(x, y, W)
        return saved, 2 * x + y * W

    def run_backward(self, start: float, saved: torch.Tensor, expected: torch.Tensor) -> None:
        tangent = values(start + 2)
        (grad,) = self.backward.function([tangent, saved, W])
        assert torch.equal(grad, 2 * tangent + expected * W)

    def step(self, start: float, *, on_host: bool = False) -> None:
        """`on_host`: the seed is copied to the host after the forward."""
        saved, expected = self.run_forward(start)
        seed = saved.clone() if on_host or self.copied_out else saved
        if on_host or saved in self.host:
            self.host.add(seed)
        self.run_backward(start, seed, expected)

    def without_graph(self, which: str, reason: str | None) -> None:
        getattr(self, which).functions[0].without_graph = reason


@pytest.fixture
def host(cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    memory = HostMemory()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda_on_cpu.capturing is not None)
    monkeypatch.setattr(readable_seeds, "is_on_host", lambda seed: seed in memory)
    monkeypatch.setattr(readable_seeds, "to_host", lambda seed: memory.add(seed.clone()))
    return memory


def recorded(cuda: CudaOnCpu, host: HostMemory, *, lean: bool) -> Training:
    """A training whose graphs are recorded and replayed."""
    made = Training(cuda, host, lean=lean)
    for step in range(12):
        made.step(step)
    assert made.models[1].runs[-1] == "captured"
    return made


@pytest.mark.parametrize("lean_on", [True, False])
def test_backward_without_graph_reads_seeds_on_the_host(
    cuda_on_cpu: CudaOnCpu, host: HostMemory, lean_on: bool
) -> None:
    training = recorded(cuda_on_cpu, host, lean=lean_on)
    training.without_graph("backward", "for this test")
    runs = len(training.models[1].runs)
    for step in range(3):
        training.step(step)
    assert training.models[1].runs[runs:] == ["plain"] * 3
    training.without_graph("backward", None)
    training.step(5)
    assert training.models[1].runs[runs + 3 :] == [], "the next one replays its graph"


@pytest.mark.parametrize("lean_on", [True, False])
def test_backward_of_uncaptured_forward_runs_without_graph(
    cuda_on_cpu: CudaOnCpu, host: HostMemory, lean_on: bool
) -> None:
    training = recorded(cuda_on_cpu, host, lean=lean_on)
    recordings = len(nodes())
    training.without_graph("forward", "for this test")
    for step in range(3):
        training.step(step)
    assert training.backward.uncaptured()[reasons.FORWARD_UNCAPTURED] == 3
    training.without_graph("forward", None)
    calls = sum(training.backward.uncaptured().values())
    for step in range(3):
        training.step(step)
    assert sum(training.backward.uncaptured().values()) == calls, "graphs serve them again"
    assert len(nodes()) == recordings


@pytest.mark.parametrize("copied_out", [True, False])
def test_seeds_on_the_host_are_never_captured(cuda_on_cpu: CudaOnCpu, host: HostMemory, copied_out: bool) -> None:
    """This holds also if no forward of this manager put them there, so that nothing is marked."""
    training = Training(cuda_on_cpu, host, copied_out=copied_out)
    for step in range(12):
        training.step(step, on_host=True)
    assert "captured" not in training.models[1].runs
    assert training.backward.uncaptured()[reasons.FORWARD_UNCAPTURED] == 11
    for step in range(12):
        training.step(step)
    runs = list(training.models[1].runs)
    assert "captured" in runs
    recordings = len(nodes())
    for step in range(3):
        training.step(step, on_host=True)
    assert training.models[1].runs == [*runs, *["plain"] * 3]
    assert len(nodes()) == recordings
    said = {one.reason for one in training.backward.functions[0].slow_calls()}
    assert (reasons.FORWARD_UNCAPTURED in said) == copied_out


def test_backward_depends_on_its_own_forward_only(cuda_on_cpu: CudaOnCpu) -> None:
    """A forward without a graph that takes another's result does not let that one's backward run without its graph."""
    first, first_back = Compiled(Model(cuda_on_cpu), is_inference=False), Model(cuda_on_cpu)
    second, second_back = Model(cuda_on_cpu, returns_x=True), Model(cuda_on_cpu)
    settings = {"is_inference": False, "is_backward": True, "static_inputs": (1, 2)}
    back, later_back = Compiled(first_back, **settings), Compiled(second_back, **settings)
    later = Compiled(second, is_inference=False, outputs=2)

    def step(start: float) -> None:
        x, y = values(start), values(start + 1)
        (hidden,) = first.checked(x, y, W)
        out, saved = later.checked(hidden, y, W, mark=False)
        later_back.checked(values(start), out, W, mark=False)
        del out, saved
        back.checked(values(start), hidden, W, mark=False)

    for number in range(8):
        step(number)
    later.functions[0].without_graph = "for this test"
    before = back.uncaptured()
    for number in range(4):
        step(number)
    assert later_back.uncaptured()[reasons.FORWARD_UNCAPTURED] == 4
    assert back.uncaptured() == before


def test_forward_that_saves_only_its_input_is_recognized(cuda_on_cpu: CudaOnCpu) -> None:
    forward = Compiled(Model(cuda_on_cpu, returns_x=True), is_inference=False, outputs=2)
    backward = Compiled(Model(cuda_on_cpu), is_inference=False, is_backward=True, static_inputs=(1, 2))

    def step(start: float) -> None:
        x = values(start)
        _, saved = forward.checked(x, values(1), W)
        assert torch.equal(saved, x)
        backward.checked(values(2), saved, W, mark=False)

    for number in range(6):
        step(number)
    recordings = len(nodes())
    forward.functions[0].without_graph = "for this test"
    for number in range(6):
        step(number)
    assert len(nodes()) == recordings, "recordings for inputs that lie elsewhere in each call would never be replayed"


def test_input_that_a_graph_returns_again_keeps_no_mark(cuda_on_cpu: CudaOnCpu) -> None:
    """A batch stays in its memory. A forward without a graph returned it once, and forwards with one do so later."""
    code = dataclasses.replace(KNOWN, is_partition=True)
    forward = Compiled(Model(cuda_on_cpu, returns_x=True, code=code), is_inference=False, outputs=2, lean=False)
    settings = {"is_inference": False, "is_backward": True, "static_inputs": (1, 2)}
    backward = Compiled(Model(cuda_on_cpu), lean=False, **settings)
    x = values(3)

    def step() -> None:
        saved = forward.checked(x, values(1), W)[1]
        assert saved is x
        backward.checked(values(2), saved, W, mark=False)

    for without_graph in (None, "for this test", None):
        for function in forward.functions:
            function.without_graph = without_graph
        for _ in range(1 if without_graph else 6):
            step()
    assert backward.uncaptured() == {reasons.FORWARD_UNCAPTURED: 1}


def test_live_uncaptured_forward_keeps_others_fast(cuda_on_cpu: CudaOnCpu, host: HostMemory) -> None:
    """An uncaptured forward whose backward never runs does not affect later calls."""
    training = Training(cuda_on_cpu, host)
    for step in range(12):
        training.step(step)
    training.without_graph("forward", "for this test")
    kept = training.run_forward(1)
    training.without_graph("forward", None)
    (one,) = managers()
    assert one.has_uncaptured_forward(kept[:1])
    training.step(2)
    full = sum(one.calls for one in training.backward.functions[0].slow_calls())
    for step in range(4):
        training.step(step)
    assert sum(one.calls for one in training.backward.functions[0].slow_calls()) == full


def test_parameters_and_dead_results_are_not_marked(cuda_on_cpu: CudaOnCpu) -> None:
    """A parameter is saved by every forward, with a graph or without."""
    one = EncoreManager(0)
    parameter, result, in_graph_memory = values(1), values(2), values(3)
    live = torch_internals.cudagraph_trees.StorageWeakRefWrapper(in_graph_memory)
    one.current_node = SimpleNamespace(path_live_weakrefs=lambda: [live])
    one.mark_uncaptured([parameter, result, None, in_graph_memory], [parameter])
    assert not one.has_uncaptured_forward([parameter, in_graph_memory, 3])
    assert one.has_uncaptured_forward([parameter, result[2:]])
    del result
    assert not any(one.has_uncaptured_forward([values(number)]) for number in range(50)), (
        "in the memory of the dead one"
    )


# Random state of memory-efficient attention is found in generated code and moved to the device that reads it.


GPU = torch.device("meta")
"""Stands for the GPU: what lies there is not on the host."""


def test_seeds_are_found_in_inductors_code() -> None:
    """Calls of both operators are compiled, because schemas and generated calls belong to PyTorch."""

    def padded(
        grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, seed: Any, offset: Any
    ) -> tuple[torch.Tensor, ...]:
        kept = [True, True, True, False]
        operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        return tuple(operator(grad, q, k, v, None, out, sums, seed, offset, 0.1, kept, scale=0.5)[:3])

    def ragged(
        grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, seed: Any, offset: Any
    ) -> tuple[torch.Tensor, ...]:
        operator = torch.ops.aten._efficient_attention_backward
        return tuple(operator(grad, q, k, v, None, out, None, None, 8, 8, sums, 0.1, seed, offset, 0, False)[:3])

    mode = torch_internals.FakeTensorMode()
    for program, shape in ((padded, (2, 4, 8, 16)), (ragged, (2, 8, 4, 16))):
        with mode:
            scalars = [torch.empty((), dtype=torch.long) for _ in range(2)]
            inputs = [*(torch.empty(shape) for _ in range(5)), torch.empty(2, 4, 32), *scalars]
            graph = torch.fx.experimental.proxy_tensor.make_fx(program)(*inputs)
        with torch_internals.fresh_cache():
            compiled = torch_internals.compile_fx_inner(graph, inputs)
        functions = [one for one in ast.walk(ast.parse(compiled.source_code)) if isinstance(one, ast.FunctionDef)]
        (call,) = [one for one in functions if one.name == "call"]
        assert read_function(call, {}).seeds == (6, 7), program.__name__


FLASH = """
def call(args):
    grad, q, k, v, out, sums, seed, offset = args
    buf0 = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad, q, k, v, out, sums, None, None, 8, 8, 0.1, False, seed, offset, scale=0.5)
"""
"""Flash attention has arguments of the same name, and reads them on the GPU in every case."""
OWN_SEEDS = """
def call(args):
    grad, q, k, v, out, sums = args
    buf0 = torch.ops.aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.1)
    seed = buf0[2]
    buf1 = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, k, v, None, out, sums, seed, buf0[3], 0.1, [True, True, True, False])
"""
VIEWS_AND_NAMES = """
def partition_0(args):
    grad, q, offset, seed = args
    buf1 = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        grad, q, q, q, None, q, q, reinterpret_tensor(seed, (), (), 0), philox_offset=offset, dropout_p=0.1)
"""


@pytest.mark.parametrize(("source", "seeds"), [(FLASH, ()), (OWN_SEEDS, ()), (VIEWS_AND_NAMES, (2, 3))])
def test_only_passed_seeds_of_efficient_attention_are_found(source: str, seeds: tuple[int, ...]) -> None:
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    assert read_function(definition, {}).seeds == seeds


CALL = "torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(a, a, a, a, None, a, a, seed, offset)"
WHOLE = f"""
class Runner:
    def call(self, args):
        offset, a, seed = args
        return {CALL}
"""
PARTITIONED = f"""
def partition_0(args):
    seed, a, offset = args
    return {CALL}

class Runner:
    def call(self, args):
        offset, a, seed = args
        return self.partitions[0]([seed, a, offset])
"""


class CompiledGraph(SimpleNamespace):
    """As much of a `CompiledFxGraph` as is read. `seen` holds the devices that each function was called with."""

    def __init__(self, source: str, partitions: int) -> None:
        self.seen: list[list[str]] = []
        self.partitions = [self.note for _ in range(partitions)]
        super().__init__(
            source_code=source,
            partition_maps=[None] * partitions,
            current_callable=self.note,
            fx_kwargs={"is_backward": True},
        )

    def note(self, inputs: list[Any]) -> None:
        self.seen.append([one.device.type for one in inputs])

    def recursively_apply_fns(self, functions: list[Any]) -> None:
        self.partitions = [make(run) for make, run in zip(functions, self.partitions, strict=True)]

    def run_all(self) -> None:
        """Call everything with three tensors on the GPU."""
        for run in (self.current_callable, *self.partitions):
            run([torch.empty((), device=GPU) for _ in range(3)])


@pytest.mark.parametrize(
    ("source", "partitions", "graphed", "seen"),
    [
        (WHOLE, 0, False, [["cpu", "meta", "cpu"]]),
        (WHOLE, 0, True, [["meta", "meta", "meta"]]),
        (WHOLE, 1, True, [["cpu", "meta", "cpu"], ["meta", "meta", "meta"]]),
        (PARTITIONED, 1, False, [["meta", "meta", "meta"], ["cpu", "meta", "cpu"]]),
        (PARTITIONED, 1, True, [["meta", "meta", "meta"], ["meta", "meta", "meta"]]),
        (WHOLE.replace("efficient", "flash"), 0, False, [["meta", "meta", "meta"]]),
    ],
)
def test_uncaptured_functions_read_seeds_on_the_host(
    source: str, partitions: int, graphed: bool, seen: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor may leave a backward without graphs whose forward has one, or an operator outside of its partitions."""
    monkeypatch.setattr(readable_seeds, "is_on_host", lambda seed: seed.device.type == "cpu")
    monkeypatch.setattr(readable_seeds, "to_host", lambda seed: torch.zeros_like(seed, device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    graph = CompiledGraph(source, partitions)
    EncoreMaker(Options(), print).compiled(graph, graphed=graphed)
    graph.run_all()
    assert graph.seen == seen
