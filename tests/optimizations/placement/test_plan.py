"""Decisions on values: what a run on fake tensors finds, and what is hoisted, staged, evaluated or kept, and why."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import torch
import torch.fx
from simulated_gpu.placement import fake_cuda, graphs_of, traced
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimizations import Options, torch_internals
from optimizations.placement import place
from optimizations.placement.observe import CannotObserve, Effects, Observation, observe
from optimizations.placement.plan import PlacementPlan, plan
from optimizations.placement.residency import Residency, ResidentNode
from optimizations.placement.sources import VALUE_GUARD_LIMIT_BYTES, InputSource, input_sources

GPU = "cuda:0"


class Graph:
    """Builds records by name; storages are fresh unless shared by `shares`."""

    def __init__(self) -> None:
        self.nodes: dict[str, ResidentNode] = {}
        self.inputs: set[int] = set()
        self.next_storage = 0

    def add(
        self,
        name: str,
        *operands: str,
        device: str | None = "cpu",
        op: str = "call_function",
        shares: str | None = None,
        writes: Iterable[str] = (),
        reads: Iterable[str] = (),
        **fields: Any,
    ) -> None:
        storages = frozenset((self.next_storage,)) if shares is None else self.nodes[shares].storages
        self.next_storage += 1
        fields.setdefault("tensors", 1)
        fields.setdefault("shape", (3,))
        fields.setdefault("dtype", "float32")
        fields.setdefault("value_bytes", 12)
        self.nodes[name] = ResidentNode(
            name=name,
            op=op,
            operation=name,
            device=device,
            operands=operands,
            storages=storages if fields["tensors"] else frozenset(),
            writes=frozenset(storage for other in writes for storage in self.nodes[other].storages),
            host_reads=frozenset(storage for other in reads for storage in self.nodes[other].storages),
            source_line=f"program.py:1 in forward: {name}",
            **fields,
        )
        if op == "placeholder":
            self.inputs |= storages

    def argument(self, name: str, **fields: Any) -> None:
        source = InputSource(name)
        self.add(name, op="placeholder", source=source, **fields)

    def attribute(self, name: str, is_compared: bool = True, **fields: Any) -> None:
        source = InputSource(f"self.{name}", is_attribute=True, is_compared=is_compared)
        self.add(name, op="placeholder", source=source, **fields)

    def plan(self, *returned: str, held_bytes: int = 0, **options: Any) -> PlacementPlan:
        residency = Residency(self.nodes, returned, (GPU,), False, len(self.nodes), frozenset(self.inputs))
        return plan(residency, Options(**options), None, held_bytes=held_bytes)


@pytest.fixture
def graph() -> Graph:
    built = Graph()
    built.argument("x", device=GPU)
    return built


def _reason(decided: PlacementPlan, node: str) -> str:
    return next(left.reason for left in decided.left if left.node == node)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"shape": (), "dtype": "float32"}, "literal"),
        ({"shape": (), "dtype": "complex64"}, "kept"),
        ({"shape": (), "dtype": "int64"}, "literal"),
        ({}, "kept"),
    ],
)
def test_constant_is_hoisted_in_its_form(graph: Graph, fields: dict[str, Any], form: str) -> None:
    graph.add("constant", **fields)
    graph.add("out", "x", "constant", device=GPU)
    assert [hoist.form for hoist in graph.plan("out").hoists] == [form]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"opaque": "my::op is a custom operator"}, "my::op is a custom operator"),
        ({"reads": ("time",)}, "reads values on the host"),
        ({"device": "several devices"}, "its values are on several devices"),
        ({"requires_grad": True}, "requires a gradient"),
    ],
)
def test_unmovable_operation_keeps_its_dependents(graph: Graph, fields: dict[str, Any], reason: str) -> None:
    graph.argument("time")
    graph.add("earlier", "time")
    graph.add("obstacle", "earlier", **fields)
    graph.add("later", "obstacle")
    graph.add("out", "x", "later", device=GPU)
    graph.add("other", "x", "earlier", device=GPU)
    decided = graph.plan("out", "other")
    assert reason in _reason(decided, "obstacle")
    assert _reason(decided, "later").startswith(("goes together with obstacle: ", "computes between GPU values"))
    assert "goes together with" in _reason(decided, "out")
    # What comes before it is no hostage.
    assert decided.fed == {"other": ("earlier",)}
    assert (decided.before, decided.stages) == (("earlier",), ("earlier",))
    assert all(left.source_line is not None for left in decided.left)


def test_memory_made_and_written_in_the_graph_is_hoisted(graph: Graph) -> None:
    graph.add("empty")
    graph.add("fill", "empty", shares="empty", writes=("empty",))
    graph.add("out", "x", "empty", device=GPU)
    (hoist,) = graph.plan("out").hoists
    assert (hoist.value, hoist.nodes) == ("empty", ("empty", "fill"))


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({"requires_grad": True}, {}, "requires a gradient"),
        ({"tensors": 2}, {}, "is not a plain tensor"),
        ({"value_bytes": 100}, {"stage_limit_bytes": 99}, "takes 100 B in each call in addition to 0 B"),
        ({"value_bytes": 100}, {"process_limit_bytes": 99}, "more than process_limit_bytes"),
    ],
)
def test_unstageable_argument_is_kept(
    graph: Graph, fields: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    graph.argument("time", **fields)
    graph.add("out", "x", "time", device=GPU)
    decided = graph.plan("out", **options)
    assert decided.fed == {}
    assert reason in _reason(decided, "out")


def test_attributes_without_a_guard_are_staged(graph: Graph) -> None:
    graph.attribute("unguarded", is_compared=False)
    graph.attribute("symbolic", static=False, value_bytes=None)
    graph.attribute("mask")
    for name in ("unguarded", "symbolic", "mask"):
        graph.add(f"reads_{name}", "x", name, device=GPU)
    assert graph.plan().stages == ("unguarded", "symbolic")
    assert [hoist.value for hoist in graph.plan().hoists] == ["mask"]


def test_streamed_cpu_weights_do_not_all_stay_on_the_gpu(graph: Graph) -> None:
    """Each is small enough by itself; in sum they are kept, then staged, then left, the smallest first."""
    for number in range(8):
        graph.attribute(f"weight{number}", value_bytes=100 + number)
        graph.add(f"out{number}", "x", f"weight{number}", device=GPU)
    decided = graph.plan(hoist_limit_bytes=350, stage_limit_bytes=220)
    assert [hoist.value for hoist in decided.hoists] == ["weight0", "weight1", "weight2"]
    assert decided.stages == ("weight3", "weight4")
    assert [left.node for left in decided.left] == ["out5", "out6", "out7"]
    assert all("stage_limit_bytes" in left.reason for left in decided.left)


def test_graphs_of_one_process_share_a_limit(graph: Graph) -> None:
    graph.attribute("weight", value_bytes=100)
    graph.add("out", "x", "weight", device=GPU)
    assert graph.plan(process_limit_bytes=1000, held_bytes=900).hoists
    decided = graph.plan(process_limit_bytes=1000, held_bytes=901)
    assert decided.fed == {}
    assert "takes 100 B of the GPU in addition to 901 B, more than process_limit_bytes" in _reason(decided, "out")


# A run on fake tensors finds effects of the operators that a Python call runs.


def _observed(
    target: Any, *operands: Any, method: bool = False, devices: str = "", **keywords: Any
) -> tuple[Observation, Effects]:
    """One call on tensors like `operands`; a letter of `devices` per tensor says where it is ("g" or "c")."""
    graph = torch.fx.Graph()
    arguments, inputs = [], []
    where = iter(devices + "c" * len(operands))
    mode = torch_internals.FakeTensorMode()
    for position, operand in enumerate(operands):
        if isinstance(operand, torch.Tensor):
            arguments.append(graph.placeholder(f"input_{position}"))
            inputs.append(fake_cuda(operand, mode) if next(where) == "g" else operand)
        else:
            arguments.append(operand)
    create = graph.call_method if method else graph.call_function
    call = create(target, tuple(arguments), keywords)
    call.name = "call"
    graph.output((call,))
    observation = observe(torch.fx.GraphModule(torch.nn.Module(), graph), inputs)
    return observation, observation.effects["call"]


def _storages(observation: Observation, name: str) -> set[int]:
    return {facts.storage for facts in observation.tensors[name]}


@pytest.mark.parametrize(
    ("target", "operands", "random"),
    [
        (torch.rand, (3,), True),
        (torch.bernoulli, (torch.ones(3),), True),
        (torch.nn.functional.dropout, (torch.ones(3), 0.5, True), True),
        (torch.nn.functional.dropout, (torch.ones(3), 0.5, False), False),
        (torch.ones, (3,), False),
    ],
)
def test_random_numbers_on_the_cpu_are_found(target: Any, operands: tuple[Any, ...], random: bool) -> None:
    assert _observed(target, *operands)[1].random_on_cpu is random


@pytest.mark.parametrize(
    ("target", "operands"),
    [
        ("item", (torch.tensor(2),)),
        ("nonzero", (torch.ones(3),)),
        (operator.getitem, (torch.ones(3), torch.ones(3, dtype=torch.bool))),
        (torch.unique, (torch.ones(3),)),
        (torch.repeat_interleave, (torch.ones(3, dtype=torch.int64),)),
    ],
)
def test_host_reads_are_found_or_the_graph_is_unchanged(target: Any, operands: tuple[Any, ...]) -> None:
    """PyTorch refuses such calls without symbols for unknown sizes; with them the effect is noted."""
    try:
        observation, effects = _observed(target, *operands, method=isinstance(target, str))
    except CannotObserve as error:
        assert error.node == "call"
    else:
        assert effects.host_reads >= _storages(observation, f"input_{len(operands) - 1}")


@pytest.mark.parametrize(
    ("target", "operands", "devices", "obstacle"),
    [
        (operator.add, (torch.ones(3), torch.tensor(1.0)), "gc", None),
        (operator.getitem, (torch.ones(3), torch.tensor([1, 0])), "gc", None),
        ("copy_", (torch.ones(3), torch.ones(3)), "gc", None),
        ("index_put_", (torch.ones(3), (torch.tensor([1]),), torch.tensor(1.0)), "g", None),
        (torch.histogram, (torch.ones(3), torch.ones(3)), "cc", "has no kernel for the GPU"),
    ],
)
def test_obstacles_keep_operands_on_the_cpu(
    target: Any, operands: tuple[Any, ...], devices: str, obstacle: str | None
) -> None:
    _, effects = _observed(target, *operands, method=isinstance(target, str), devices=devices)
    if obstacle is None:
        assert effects.gpu_obstacle is None
    else:
        assert obstacle in (effects.gpu_obstacle or "")


def test_operators_that_run_graphs_are_opaque_and_may_write() -> None:
    def program(x: torch.Tensor, mask: torch.Tensor) -> Any:
        def body(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.sin(x) * mask

        return torch.utils.checkpoint.checkpoint(body, x, mask, use_reentrant=False)

    import torch.utils.checkpoint

    ((graph_module, inputs),) = graphs_of(program, torch.ones(3, requires_grad=True), torch.ones(3))
    observation = observe(graph_module, inputs)
    (opaque,) = [effects for effects in observation.effects.values() if effects.opaque]
    assert "runs its own graph" in (opaque.opaque or "")
    assert opaque.writes


def _cuda_synchronize() -> None:
    """Stands for PyTorch's."""


def _wait(graph: torch.fx.Graph) -> None:
    graph.call_function(_cuda_synchronize)


def _wait_for_stream(graph: torch.fx.Graph) -> None:
    graph.call_method("synchronize", (graph.call_function(torch.cuda.current_stream),))


def _choose_stream(graph: torch.fx.Graph) -> None:
    graph.call_function(torch.ops.streams.fork, (1, 2, []))


def _wait_for_event(graph: torch.fx.Graph) -> None:
    graph.call_function(torch.ops.streams.wait_event.default, (1, 2))


@pytest.mark.parametrize("ordering", [_wait, _wait_for_stream, _choose_stream, _wait_for_event])
def test_graphs_with_waits_or_streams_are_unchanged(ordering: Callable[[torch.fx.Graph], None]) -> None:
    """Work moved after the graph would follow the wait: the copy would be read before it is complete."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    copy = graph.call_method("to", (x, "cpu"), {"non_blocking": True})
    ordering(graph)
    graph.output((graph.call_function(operator.mul, (copy, 2)),))
    with torch_internals.FakeTensorMode():
        inputs = [torch.ones(3, device="cuda:0")]
    placement = place(torch.fx.GraphModule(torch.nn.Module(), graph), inputs)
    assert placement.feeds is None
    assert "orders the host's work and the GPU's" in (placement.report.untouched or "")


def test_failed_run_restores_global_modes() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch_internals.set_grad_enabled, (False,))
    graph.call_function(torch_internals.enter_autocast, ("cpu", torch.bfloat16, True, None))
    graph.call_function(_without_flash_attention)
    graph.output((graph.call_function(operator.matmul, (x, x)),))
    with pytest.raises(CannotObserve):
        observe(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.ones(2, 3)])
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.backends.cuda.flash_sdp_enabled()


def _without_flash_attention() -> None:
    torch.backends.cuda.enable_flash_sdp(False)


def test_cpu_attention_stays_where_the_graph_chooses_its_kernel() -> None:
    def program(x: torch.Tensor, heads: torch.Tensor, chosen: bool) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH) if chosen else contextlib.nullcontext():
            scores = functional.scaled_dot_product_attention(heads, heads, heads)
        return x * scores.to(x.device)

    heads = torch.ones(1, 1, 2, 3)
    for chosen in (True, False):
        placement = traced(program, heads, heads, chosen, on_cpu=(1, 2)).placement
        assert placement.report.before == (() if chosen else ("scores",))
        assert chosen is any("a kernel that the graph chooses" in left.reason for left in placement.report.left)


# Dynamo's sources show which inputs persist between calls, and how changes of each are noticed.


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.ones(3)
        self.scalar = numpy.float64(2.0)
        self.array = numpy.ones(3)
        self.strided = numpy.ones(6)[::2]
        self.large = numpy.ones(VALUE_GUARD_LIMIT_BYTES // 8 + 1)
        self.listed = [torch.ones(3)]
        self.large_tensor = torch.ones(VALUE_GUARD_LIMIT_BYTES // 4 + 1)
        self.gaps = torch.ones(VALUE_GUARD_LIMIT_BYTES // 4, 2)[::2, :1]
        self.zero_rank = torch.tensor(1.0)
        self.parameter = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))


def _source(program: Any, *args: Any) -> InputSource:
    """The source of the only input."""
    ((graph_module, inputs),) = graphs_of(program, *args)
    (source,) = input_sources(graph_module, inputs).values()
    return source


@pytest.mark.parametrize(
    ("attribute", "is_compared"),
    [
        ("tensor", True),
        ("parameter", True),
        ("buffer", True),
        ("large_tensor", False),
        ("gaps", False),
        ("zero_rank", True),
        ("scalar", True),
        ("array", True),
        ("strided", False),
        ("large", False),
    ],
)
def test_attributes_of_modules(attribute: str, is_compared: bool) -> None:
    class Reader(Holder):
        def forward(self) -> Any:
            return torch.as_tensor(getattr(self, attribute)) * 2

    assert _source(Reader()) == InputSource(f"self.{attribute}", is_attribute=True, is_compared=is_compared)
