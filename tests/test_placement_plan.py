"""Decisions from records alone: what is hoisted, staged, moved, left, and the reason for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from optimizations import Options
from optimizations.placement.plan import Plan, plan
from optimizations.placement.residency import Node, Residency
from optimizations.placement.sources import Guard, InputSource, SourceKind

GPU = "cuda:0"


class Graph:
    """Builds records by name; storages are fresh unless shared by `shares`."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
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
        self.nodes[name] = Node(
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
        source = InputSource(SourceKind.ARGUMENT, name, None)
        self.add(name, op="placeholder", source=source, **fields)

    def attribute(self, name: str, guard: Guard | None = Guard.VERSION, **fields: Any) -> None:
        source = InputSource(SourceKind.ATTRIBUTE, f"L['self'].{name}", guard)
        self.add(name, op="placeholder", source=source, **fields)

    def plan(self, *returned: str, differentiable: bool = False, **options: Any) -> Plan:
        residency = Residency(self.nodes, returned, (GPU,), differentiable, len(self.nodes), frozenset(self.inputs))
        return plan(residency, Options(**options))


@pytest.fixture
def graph() -> Graph:
    built = Graph()
    built.argument("x", device=GPU)
    return built


def _reason(decided: Plan, node: str) -> str:
    return next(left.reason for left in decided.left if left.node == node)


def test_constants_and_attributes_are_hoisted_with_their_guards(graph: Graph) -> None:
    graph.attribute("mask")
    graph.add("table")
    graph.add("sum", "mask", "table")
    graph.add("out", "x", "sum", device=GPU)
    decided = graph.plan("out")
    (hoist,) = decided.hoists
    assert (hoist.value, hoist.nodes, hoist.attributes, hoist.form) == ("sum", ("table", "sum"), ("mask",), "kept")
    assert decided.guards == {"mask": Guard.VERSION}
    assert decided.readers == ("out",)
    assert decided.moves == decided.stages == ()


def test_arguments_are_staged_and_what_depends_on_them_moves(graph: Graph) -> None:
    graph.argument("time")
    graph.add("frequencies")
    graph.add("angles", "time", "frequencies")
    graph.add("out", "x", "angles", device=GPU)
    decided = graph.plan("out")
    assert decided.stages == ("time",)
    assert decided.moves == ("angles",)
    assert [hoist.value for hoist in decided.hoists] == ["frequencies"]
    assert decided.readers == ("angles", "out")
    assert decided.left == ()


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"shape": (), "dtype": "float32"}, "literal"),
        ({"shape": (), "dtype": "complex64"}, "kept"),
        ({"shape": (), "dtype": "int64", "exact": True}, "literal"),
        ({"exact": True}, "rebuilt"),
        ({"exact": False}, "kept"),
    ],
)
def test_form_of_a_constant(graph: Graph, fields: dict[str, Any], form: str) -> None:
    graph.add("constant", **fields)
    graph.add("out", "x", "constant", device=GPU)
    assert [hoist.form for hoist in graph.plan("out").hoists] == [form]


def test_an_exact_value_of_an_attribute_is_kept_and_not_rebuilt(graph: Graph) -> None:
    graph.attribute("mask")
    graph.add("negated", "mask", exact=True)
    graph.add("out", "x", "negated", device=GPU)
    assert [hoist.form for hoist in graph.plan("out").hoists] == ["kept"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"random_on_cpu": True}, "draws random numbers on the CPU"),
        ({"opaque": "my::op is a custom operator"}, "my::op is a custom operator"),
        ({"gpu_obstacle": "aten.sort leaves a choice"}, "aten.sort leaves a choice"),
        ({"reads": ("time",)}, "reads values on the host"),
        ({"device": "several devices"}, "its values are on several devices"),
    ],
)
def test_an_operation_that_cannot_move_stays_with_all_it_exchanges_cpu_values_with(
    graph: Graph, fields: dict[str, Any], reason: str
) -> None:
    graph.argument("time")
    graph.add("before", "time")
    graph.add("obstacle", "before", **fields)
    graph.add("after", "obstacle")
    graph.add("out", "x", "after", device=GPU)
    graph.add("other", "x", "time", device=GPU)
    decided = graph.plan("out", "other")
    assert reason in _reason(decided, "obstacle")
    for name in ("before", "after", "out"):
        assert _reason(decided, name).startswith("goes together with obstacle: ")
    # The argument itself is at hand before the call: another reader is no hostage.
    assert decided.readers == ("other",)
    assert decided.stages == ("time",)
    assert all(left.source_line is not None for left in decided.left)


def test_a_random_constant_is_not_hoisted(graph: Graph) -> None:
    graph.add("noise", random_on_cpu=True)
    graph.add("out", "x", "noise", device=GPU)
    decided = graph.plan("out")
    assert decided.hoists == ()
    assert "random numbers" in _reason(decided, "noise")


def test_an_operation_that_depends_on_the_device_may_be_hoisted_but_not_moved(graph: Graph) -> None:
    graph.attribute("scores")
    graph.argument("time")
    graph.add("sorted_scores", "scores", gpu_obstacle="aten.sort leaves a choice")
    graph.add("sorted_time", "time", gpu_obstacle="aten.sort leaves a choice")
    graph.add("out", "x", "sorted_scores", device=GPU)
    graph.add("other", "x", "sorted_time", device=GPU)
    decided = graph.plan("out", "other")
    assert [hoist.value for hoist in decided.hoists] == ["sorted_scores"]
    assert decided.readers == ("out",)
    assert "aten.sort" in _reason(decided, "sorted_time")


def test_memory_that_the_graph_writes_to_is_neither_hoisted_nor_staged(graph: Graph) -> None:
    graph.attribute("counter")
    graph.argument("state")
    graph.add("count", "counter", shares="counter", writes=("counter",))
    graph.add("update", "state", shares="state", writes=("state",))
    graph.add("a", "x", "count", device=GPU)
    graph.add("b", "x", "state", device=GPU)
    decided = graph.plan("a", "b")
    assert decided.readers == ()
    assert "visible outside" in _reason(decided, "count")
    assert "shares memory with something the graph writes to" in _reason(decided, "b")


def test_memory_made_and_written_in_the_graph_is_hoisted_with_its_writers(graph: Graph) -> None:
    graph.add("empty")
    graph.add("fill", "empty", shares="empty", writes=("empty",))
    graph.add("out", "x", "empty", device=GPU)
    (hoist,) = graph.plan("out").hoists
    assert (hoist.value, hoist.nodes) == ("empty", ("empty", "fill"))


def test_a_value_read_before_its_last_write_is_not_hoisted_but_moves(graph: Graph) -> None:
    graph.add("zeros")
    graph.add("early", "x", "zeros", device=GPU)
    graph.add("fill", "zeros", shares="zeros", writes=("zeros",))
    graph.add("late", "x", "fill", device=GPU)
    decided = graph.plan("early", "late")
    assert decided.hoists == ()
    assert decided.moves == ("zeros", "fill")


def test_a_constant_that_an_argument_is_written_into_moves(graph: Graph) -> None:
    graph.argument("time")
    graph.add("zeros")
    graph.add("filled", "zeros", "time", shares="zeros", writes=("zeros",))
    graph.add("out", "x", "filled", device=GPU)
    decided = graph.plan("out")
    assert decided.hoists == ()
    assert decided.moves == ("zeros", "filled")


def test_results_for_the_cpu_are_copied_out_when_they_come_from_the_gpu(graph: Graph) -> None:
    graph.add("loss", "x")
    graph.add("scaled", "loss")
    decided = graph.plan("scaled")
    assert decided.moves == ("loss", "scaled")
    assert decided.cpu_outputs == ("scaled",)


def test_results_that_the_cpu_has_anyway_stay_there(graph: Graph) -> None:
    graph.argument("time")
    graph.add("later", "time")
    graph.add("constant")
    graph.add("out", "x", "later", "constant", device=GPU)
    decided = graph.plan("out", "later", "constant")
    assert decided.readers == ()
    assert "returned" in _reason(decided, "later")
    assert "returned" in _reason(decided, "constant")


def test_cpu_results_that_share_memory_stay(graph: Graph) -> None:
    graph.add("loss", "x")
    graph.add("view", "loss", shares="loss")
    decided = graph.plan("loss", "view")
    assert decided.readers == ()
    assert "share" in _reason(decided, "loss")


def test_operations_that_no_gpu_operation_needs_stay(graph: Graph) -> None:
    graph.argument("time")
    graph.add("later", "time")
    decided = graph.plan()
    assert _reason(decided, "later") == "no GPU operation needs it"


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({"requires_grad": True}, {}, "requires a gradient"),
        ({"tensors": 2}, {}, "is no plain tensor"),
        ({"value_bytes": 100}, {"stage_limit_bytes": 99}, "takes 100 bytes, more than stage_limit_bytes"),
    ],
)
def test_an_argument_that_cannot_be_staged(
    graph: Graph, fields: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    graph.argument("time", **fields)
    graph.add("out", "x", "time", device=GPU)
    decided = graph.plan("out", **options)
    assert decided.readers == ()
    assert reason in _reason(decided, "out")


def test_attributes_that_cannot_be_guarded_or_should_not_be_are_staged(graph: Graph) -> None:
    graph.attribute("unguarded", guard=None)
    graph.attribute("symbolic", static=False, value_bytes=None)
    graph.attribute("mask")
    graph.attribute("scale", guard=Guard.VALUE, shape=())
    for name in ("unguarded", "symbolic", "mask", "scale"):
        graph.add(f"reads_{name}", "x", name, device=GPU)
    assert graph.plan().stages == ("unguarded", "symbolic")
    assert [hoist.value for hoist in graph.plan().hoists] == ["mask", "scale"]
    staged = graph.plan(attributes="stage")
    assert staged.stages == ("unguarded", "symbolic", "mask")
    assert [hoist.value for hoist in staged.hoists] == ["scale"]


def test_tables_too_large_to_hoist_stay_where_they_are(graph: Graph) -> None:
    graph.attribute("table", value_bytes=1000)
    graph.argument("index")
    graph.add("rows", "table", "index")
    graph.add("out", "x", "rows", device=GPU)
    decided = graph.plan("out", hoist_limit_bytes=999)
    assert decided.readers == ()
    assert "more than hoist_limit_bytes" in _reason(decided, "rows")


def test_copies_that_somebody_writes_or_returns_must_stay_copies(graph: Graph) -> None:
    graph.attribute("mask")
    graph.add("read_only", "mask", device=GPU)
    graph.add("written", "mask", device=GPU)
    graph.add("fill", "written", device=GPU, shares="written", writes=("written",))
    graph.add("given_out", "mask", device=GPU)
    graph.add("view", "given_out", device=GPU, shares="given_out")
    decided = graph.plan("view")
    assert decided.snapshots == {"written", "given_out"}


def test_a_copy_from_the_gpu_must_stay_one_if_its_source_is_written_later(graph: Graph) -> None:
    graph.add("kept", "x")
    graph.add("back", "kept", device=GPU)
    graph.add("update", "x", device=GPU, shares="x", writes=("x",))
    assert "kept" in graph.plan("back").snapshots


def test_staged_memory_is_reused_only_without_a_backward(graph: Graph) -> None:
    graph.argument("time")
    graph.add("out", "x", "time", device=GPU)
    assert graph.plan("out").keep_addresses
    assert not graph.plan("out", differentiable=True).keep_addresses


def test_vetoes_keep_a_component_and_only_that(graph: Graph) -> None:
    graph.argument("a")
    graph.argument("b")
    graph.add("first", "x", "a", device=GPU)
    graph.add("second", "x", "b", device=GPU)
    residency = Residency(graph.nodes, (), (GPU,), False, 5, frozenset(graph.inputs))
    decided = plan(residency, Options(), {"first": "has another stride"})
    assert decided.readers == ("second",)
    assert _reason(decided, "first") == "has another stride"
