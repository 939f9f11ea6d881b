"""Decide which values are hoisted, staged, evaluated before or after the graph, or left, from records alone.

Placement moves values, not arithmetic. CPU values that depend on constants and attributes only are evaluated once
(*hoisted*). Values that depend on arguments are evaluated before each call of the graph and copied to the GPU
(*staged*). Values that depend on GPU values and are returned to the caller are evaluated after it; see `regions`. All
other CPU operations are between GPU values and stay in the graph: an operation runs on the device that the program
named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from optimizations.byte_units import format_bytes
from optimizations.options import Options
from optimizations.placement.regions import Regions, reached, regions
from optimizations.placement.residency import MIXED, Residency, ResidentNode
from optimizations.placement.sources import VALUE_GUARD_LIMIT_BYTES
from optimizations.report import HoistedForm, Left

INLINE_DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)
"""Rank-0 values of these are exactly a Python number, so that a literal in the graph is the same value."""

GUARDED_LIMIT_BYTES = 4 * VALUE_GUARD_LIMIT_BYTES
"""Most bytes of one graph's attributes that are compared in each call."""


@dataclass(frozen=True, slots=True)
class Hoist:
    """Describe how to compute `value` once from `attributes`: by `nodes`, in order.

    The last node is `value` itself, unless `value` is one of the attributes.
    """

    value: str
    nodes: tuple[str, ...]
    attributes: tuple[str, ...]
    form: HoistedForm


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Hold the decisions of placement. All fields hold node names.

    Attributes:
        device: the GPU that values go to.
        hoists: values that do not depend on the call.
        stages: CPU values that are copied to the GPU in each call: inputs, or values among `before`.
        awaited: staged values and hoisted attributes that the program may change once its own copy has completed.
        before: CPU operations that are evaluated in each call before the graph.
        after: CPU operations that are evaluated after it.
        fed: for each operation, which of its CPU operands will be GPU values.
        snapshots: operations that made a copy by changing the device. The copy must not become an alias, because a
            later operation writes to it or to its source, or the caller gets it.
        keep_addresses: staged values may be overwritten by the next call, because no backward reads them later.
        left: nodes that stay, with reasons.
    """

    device: str
    hoists: tuple[Hoist, ...] = ()
    stages: tuple[str, ...] = ()
    awaited: frozenset[str] = frozenset()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    fed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    snapshots: frozenset[str] = frozenset()
    keep_addresses: bool = True
    left: tuple[Left, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.fed or self.after)


def plan(
    graph: Residency, options: Options, vetoes: Mapping[str, str] | None = None, *, held_bytes: int = 0
) -> PlacementPlan:
    """Return the plan for `graph`, which must have exactly one GPU in `devices`.

    `vetoes` are reasons against single operations and values, from an earlier attempt. `held_bytes` are the bytes that
    other graphs of the process keep on the GPU.
    """
    return _Planner(graph, options, vetoes or {}, held_bytes).plan()


class _Planner:
    def __init__(self, graph: Residency, options: Options, vetoes: Mapping[str, str], held_bytes: int) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.options = options
        self.vetoes = vetoes
        self.held_bytes = held_bytes
        # By storage, in order: the nodes whose values lie in it, and the nodes that write it.
        self.members: dict[int, list[str]] = defaultdict(list)
        self.writers: dict[int, list[str]] = defaultdict(list)
        for node in self.nodes.values():
            for storage in node.storages:
                self.members[storage].append(node.name)
            for storage in node.writes:
                self.writers[storage].append(node.name)
        self.order = {name: position for position, name in enumerate(self.nodes)}
        self.regions: Regions = regions(graph)
        self.attributes = self._hoistable_attributes()
        self.hoistable = self._hoistable()

    def plan(self) -> PlacementPlan:
        wanted = self._wanted()
        how = self._how(wanted)
        fed: dict[str, tuple[str, ...]] = {}
        for name in self._readers():
            values = tuple(value for value in self._cpu_operands(name) if how.get(value) in _HOW)
            if values and self._against_reader(self.nodes[name]) is None:
                fed[name] = values
        values = self._in_order({value for operands in fed.values() for value in operands})
        stages = tuple(value for value in values if how[value] == "stage")
        hoists = tuple(self._hoist(value, how[value]) for value in values if how[value] != "stage")
        after = self._in_order(self.regions.after)
        anything = bool(fed or after)
        return PlacementPlan(
            device=self.graph.devices[0],
            hoists=hoists,
            stages=stages,
            awaited=frozenset(
                value for name, operands in fed.items() for value in operands if self.nodes[name].awaited
            ),
            before=self._before(stages, after) if anything else (),
            after=after,
            fed=fed,
            snapshots=frozenset(name for name in fed if self._must_stay_a_copy(self.nodes[name])),
            keep_addresses=not self.graph.differentiable,
            left=tuple(self._left(fed, how)),
        )

    # What can be fed, and how

    def _hoistable_attributes(self) -> frozenset[str]:
        """Return the attributes whose bytes are compared in each call; the smallest are chosen first."""
        found, compared = set(), 0
        attributes = [node for node in self.nodes.values() if not node.is_call and node.on_cpu and node.tensors == 1]
        for node in sorted(attributes, key=lambda node: node.value_bytes or 0):
            if node.source is None or not node.source.is_compared or not node.static or node.requires_grad:
                continue
            if self._written_by(node.storages):
                continue
            compared += node.value_bytes or 0
            if compared <= GUARDED_LIMIT_BYTES:
                found.add(node.name)
        return frozenset(found)

    def _hoistable(self) -> frozenset[str]:
        """Return CPU operations on constants and attributes alone whose results stay the same from call to call."""
        found = {name for name in self.regions.before if self._could_be_hoisted(self.nodes[name])}
        while True:
            keep = {
                name for name in found if all(o in found or o in self.attributes for o in self.nodes[name].operands)
            }
            keep -= {name for name in keep if not self._memory_settled(self.nodes[name], keep)}
            if keep == found:
                return frozenset(found)
            found = keep

    @staticmethod
    def _could_be_hoisted(node: ResidentNode) -> bool:
        return node.on_cpu and node.static and not node.random_on_cpu and not node.host_reads

    def _memory_settled(self, node: ResidentNode, found: set[str]) -> bool:
        """Return whether all users of its memory are hoisted too, and no other node reads it before the last write."""
        for storage in (node.storages | node.writes) - self.graph.input_storages:
            writers, members = self.writers[storage], set(self.members[storage])
            if not found.issuperset([*members, *writers]):
                return False
            last_write = max((self.order[writer] for writer in writers), default=-1)
            earlier = list(self.nodes.values())[: last_write + 1]
            if any(reader.name not in found and not members.isdisjoint(reader.operands) for reader in earlier):
                return False
        return True

    def _wanted(self) -> list[str]:
        """Return the CPU values that operations on the GPU read."""
        readers = [name for name in self._readers() if self._against_reader(self.nodes[name]) is None]
        return list(self._in_order({value for name in readers for value in self._cpu_operands(name)}))

    def _readers(self) -> tuple[str, ...]:
        return self._in_order(node.name for node in self.nodes.values() if node.is_call and node.on_gpu)

    def _cpu_operands(self, name: str) -> Iterator[str]:
        return (operand for operand in self.nodes[name].operands if self.nodes[operand].device in ("cpu", MIXED))

    def _how(self, wanted: Iterable[str]) -> dict[str, str]:
        """Return for each CPU value "kept", "literal" or "stage", or why it cannot be copied to the GPU.

        Memory is assigned to the smallest values first, so that a large one does not exclude others.
        """
        how: dict[str, str] = {}
        kept = staged = 0
        for value in sorted(wanted, key=lambda value: (self.nodes[value].value_bytes or 0, self.order[value])):
            node = self.nodes[value]
            size = node.value_bytes or 0
            obstacle = self.vetoes.get(f"feed {value}") or self._against_feeding(node)
            if obstacle is not None:
                how[value] = obstacle
                continue
            if value in self.hoistable or value in self.attributes:
                form = self._form(value)
                cost = size if form == "kept" else 0
                in_process = self.held_bytes + kept + staged + cost <= self.options.process_limit_bytes
                in_graph = kept + cost <= self.options.hoist_limit_bytes
                if in_process and in_graph:
                    how[value], kept = form, kept + cost
                    continue
            if staged + size > self.options.stage_limit_bytes:
                how[value] = (
                    f"takes {format_bytes(size)} in each call in addition to {format_bytes(staged)}, "
                    "more than stage_limit_bytes"
                )
            elif self.held_bytes + kept + staged + size > self.options.process_limit_bytes:
                others = self.held_bytes + kept + staged
                how[value] = (
                    f"takes {format_bytes(size)} of the GPU in addition to {format_bytes(others)}, "
                    "more than process_limit_bytes"
                )
            else:
                how[value], staged = "stage", staged + size
        return how

    def _against_feeding(self, node: ResidentNode) -> str | None:
        if node.device == MIXED:
            return "its values are on several devices"
        if node.requires_grad:
            return "requires a gradient, which has to arrive on the CPU"
        if node.tensors != 1 or (not node.is_call and node.source is None):
            return "is not a plain tensor"
        if node.is_call and node.name not in self.regions.before:
            return self.regions.reasons.get(node.name, "depends on GPU values")
        return None

    def _form(self, value: str) -> HoistedForm:
        needed = self._needed_for(value)
        node = self.nodes[value]
        is_constant = all(self.nodes[name].is_call for name in needed) and f"compute {value}" not in self.vetoes
        return "literal" if is_constant and node.shape == () and node.dtype in INLINE_DTYPES else "kept"

    def _against_reader(self, node: ResidentNode) -> str | None:
        """Return why an operation cannot take its CPU operands from the GPU; None if it can."""
        if node.name in self.vetoes:
            return self.vetoes[node.name]
        if node.opaque is not None:
            return node.opaque
        if node.host_reads:
            return "reads values on the host"
        return node.gpu_obstacle or self._against_times(node)

    def _against_times(self, node: ResidentNode) -> str | None:
        """Return why a copy made before the graph may differ from what the operation would read; else None."""
        for operand in self._cpu_operands(node.name):
            for writer in self._written_by(self.nodes[operand].storages):
                if self.order[writer] < self.order[node.name] and writer not in self.regions.before:
                    return f"{writer} ({self.nodes[writer].operation}) writes what it reads, and stays in the graph"
        return None

    def _written_by(self, storages: Iterable[int]) -> list[str]:
        return [writer for storage in storages for writer in self.writers[storage]]

    # The parts of the plan

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(names, key=self.order.__getitem__))

    def _before(self, stages: Iterable[str], after: Iterable[str]) -> tuple[str, ...]:
        """Return the operations to evaluate before the graph: their values are staged, returned, or read after it."""
        wanted = {value for value in stages if self.nodes[value].op != "placeholder"}
        wanted |= {operand for name in after for operand in self.nodes[name].operands}
        wanted |= set(self.graph.returned)

        def evaluated(names: Iterable[str]) -> Iterator[str]:
            return (name for name in names if name in self.regions.before or self.nodes[name].op == "get_attr")

        def needed_by(name: str) -> Iterator[str]:
            return evaluated((*self.regions.precede[name], *self._written_by(self.nodes[name].storages)))

        return self._in_order(reached(evaluated(wanted), needed_by))

    def _hoist(self, value: str, form: str) -> Hoist:
        needed = self._needed_for(value)
        return Hoist(
            value,
            tuple(name for name in needed if self.nodes[name].is_call),
            tuple(name for name in needed if not self.nodes[name].is_call),
            "kept" if form == "kept" else "literal",
        )

    def _needed_for(self, value: str) -> list[str]:
        """Return `value` and everything it is computed from, writers of the same memory included, in order."""

        def needed_by(name: str) -> Iterable[str]:
            node = self.nodes[name]
            return *node.operands, *self._written_by((node.storages | node.writes) - self.graph.input_storages)

        return list(self._in_order(reached([value], needed_by)))

    def _must_stay_a_copy(self, node: ResidentNode) -> bool:
        changes_device = any(
            operand.device != node.device for operand in map(self.nodes.__getitem__, node.operands) if operand.tensors
        )
        if not changes_device or not node.tensors:
            return False
        read = [storage for operand in node.operands for storage in self.nodes[operand].storages]
        writers = self._written_by((*node.storages, *read))
        if any(self.order[writer] > self.order[node.name] for writer in writers):
            return True
        aliases = {name for storage in node.storages for name in self.members[storage]}
        return not aliases.isdisjoint(self.graph.returned)

    def _left(self, fed: Mapping[str, tuple[str, ...]], how: Mapping[str, str]) -> Iterator[Left]:
        reasons = {name: self._against_leaving(node) for name, node in self.nodes.items() if self._stays_inside(node)}
        for name in self._readers():
            for operand in self._cpu_operands(name):
                if operand in fed.get(name, ()):
                    continue
                against = self._against_reader(self.nodes[name])
                if against is None and operand in reasons:
                    against = f"goes together with {operand}: {reasons[operand]}"
                reasons[name] = against or f"{self.nodes[operand].operation} {how.get(operand, 'stays on the CPU')}"
                break
        for node in self.nodes.values():
            if node.device is None and node.host_reads:
                reasons[node.name] = "reads values on the host"
            elif node.name in self.regions.after and node.name in self.vetoes:
                reasons[node.name] = self.vetoes[node.name]
        for name in self._in_order(reasons):
            node = self.nodes[name]
            yield Left(name, node.operation, reasons[name], node.source_line)

    def _stays_inside(self, node: ResidentNode) -> bool:
        """Return whether it is a CPU operation that runs neither before nor after the graph."""
        is_on_cpu = node.is_call and node.device in ("cpu", MIXED)
        return is_on_cpu and node.name not in self.regions.before and node.name not in self.regions.after

    def _against_leaving(self, node: ResidentNode) -> str:
        """Return why a CPU operation stays in the graph."""
        reason = self.vetoes.get(node.name) or self.regions.reasons.get(node.name)
        if reason is None and node.host_reads:
            reason = "reads values on the host"
        return reason or "computes between GPU values, on the device that the program named"


_HOW: tuple[Literal["kept", "literal", "stage"], ...] = ("kept", "literal", "stage")
