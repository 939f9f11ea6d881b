"""Decisions from records alone: what is hoisted, staged, evaluated before or after the graph or kept, and why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from optimizations import Options
from optimizations.placement.plan import PlacementPlan, plan
from optimizations.placement.residency import Residency, ResidentNode
from optimizations.placement.sources import InputSource

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

    def residency(self, *returned: str, differentiable: bool = False) -> Residency:
        return Residency(self.nodes, returned, (GPU,), differentiable, len(self.nodes), frozenset(self.inputs))

    def plan(
        self,
        *returned: str,
        differentiable: bool = False,
        vetoes: dict[str, str] | None = None,
        held_bytes: int = 0,
        **options: Any,
    ) -> PlacementPlan:
        residency = self.residency(*returned, differentiable=differentiable)
        return plan(residency, Options(**options), vetoes, held_bytes=held_bytes)


@pytest.fixture
def graph() -> Graph:
    built = Graph()
    built.argument("x", device=GPU)
    return built


def _reason(decided: PlacementPlan, node: str) -> str:
    return next(left.reason for left in decided.left if left.node == node)


def test_constants_and_attributes_are_hoisted_with_their_guards(graph: Graph) -> None:
    graph.attribute("mask")
    graph.add("table")
    graph.add("sum", "mask", "table")
    graph.add("out", "x", "sum", device=GPU)
    decided = graph.plan("out")
    (hoist,) = decided.hoists
    assert (hoist.value, hoist.nodes, hoist.attributes, hoist.form) == ("sum", ("table", "sum"), ("mask",), "kept")
    assert decided.fed == {"out": ("sum",)}
    assert decided.stages == decided.before == decided.after == ()


def test_argument_dependents_are_evaluated_and_staged(graph: Graph) -> None:
    graph.argument("time")
    graph.add("frequencies")
    graph.add("angles", "time", "frequencies")
    graph.add("out", "x", "angles", device=GPU)
    decided = graph.plan("out")
    assert decided.before == ("frequencies", "angles")
    assert decided.stages == ("angles",)
    assert decided.hoists == decided.left == ()
    assert decided.fed == {"out": ("angles",)}


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


def test_operations_of_any_kind_run_on_the_cpu_before_the_graph(graph: Graph) -> None:
    """Without a kernel for the GPU, with a choice among equal elements: what runs where it ran gives what it gave."""
    graph.argument("time")
    graph.add("sorted", "time", gpu_obstacle="has no kernel for the GPU")
    graph.add("out", "x", "sorted", device=GPU)
    decided = graph.plan("out")
    assert (decided.before, decided.stages, decided.left) == (("sorted",), ("sorted",), ())


def test_random_numbers_are_drawn_in_order_before_the_graph(graph: Graph) -> None:
    graph.add("first", random_on_cpu=True)
    graph.add("second", random_on_cpu=True)
    graph.add("out", "x", "second", device=GPU)
    decided = graph.plan("out")
    assert decided.hoists == ()
    assert decided.before == ("first", "second")
    assert decided.stages == ("second",)


def test_memory_that_outlives_the_call_is_written_in_the_graph(graph: Graph) -> None:
    graph.attribute("counter")
    graph.argument("state")
    graph.add("count", "counter", shares="counter", writes=("counter",))
    graph.add("update", "state", shares="state", writes=("state",))
    graph.add("a", "x", "count", device=GPU)
    graph.add("b", "x", "state", device=GPU)
    decided = graph.plan("a", "b")
    assert decided.fed == {}
    assert "visible outside" in _reason(decided, "count")
    assert "writes what it reads, and stays in the graph" in _reason(decided, "b")


def test_memory_made_and_written_in_the_graph_is_hoisted(graph: Graph) -> None:
    graph.add("empty")
    graph.add("fill", "empty", shares="empty", writes=("empty",))
    graph.add("out", "x", "empty", device=GPU)
    (hoist,) = graph.plan("out").hoists
    assert (hoist.value, hoist.nodes) == ("empty", ("empty", "fill"))


def test_cpu_results_are_computed_after_the_graph(graph: Graph) -> None:
    graph.argument("time")
    graph.add("scale", "time")
    graph.add("loss", "x")
    graph.add("scaled", "loss", "scale")
    decided = graph.plan("scaled")
    assert decided.after == ("loss", "scaled")
    assert decided.before == ("scale",)
    assert decided.left == ()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"opaque": "my::op is a custom operator"}, "custom operator"),
        ({"reads": ("loss",)}, "reads values on the host"),
        ({"writes": ("state",)}, "visible outside"),
    ],
)
def test_results_not_computable_after_the_graph_stay(graph: Graph, fields: dict[str, Any], reason: str) -> None:
    graph.argument("state")
    graph.add("loss", "x")
    graph.add("result", "loss", **fields)
    decided = graph.plan("result")
    assert decided.after == ()
    assert reason in _reason(decided, "result")


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
