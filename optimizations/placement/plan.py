"""Decides what is hoisted, staged, moved or left, from records alone.

Values that depend on constants and attributes only (*hoistable*) cost nothing in a call, and CPU arguments are at hand
before it starts; so neither ties its readers together. What remains are *units*: the other CPU operations, and the GPU
operations that read CPU values. Units that exchange CPU values, or share CPU memory, form a component, and a component
is moved as a whole or left as a whole: any doubt about one member is a reason to leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from optimizations.options import Options
from optimizations.placement.residency import MIXED, Node, Residency
from optimizations.placement.sources import Guard, SourceKind
from optimizations.report import HoistedForm, Left

INLINE_DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)
"""Rank-0 values of these are exactly a Python number, so that a literal in the graph is the same value."""


@dataclass(frozen=True, slots=True)
class Hoist:
    """`value` is computed by `nodes` (in order, itself the last member or an input) from `attributes`, once."""

    value: str
    nodes: tuple[str, ...]
    attributes: tuple[str, ...]
    form: HoistedForm


@dataclass(frozen=True, slots=True)
class Plan:
    """What placement will do. All fields hold node names.

    Attributes:
        device: the GPU that values go to.
        hoists: values that do not depend on the call.
        guards: how a change of each of the hoists' attributes is noticed.
        stages: CPU inputs that go over with each call.
        moves: CPU operations that will run on the GPU.
        readers: operations whose CPU operands will be GPU values: `moves`, and GPU operations.
        snapshots: readers that made a copy by changing the device; the copy must stay one if the move would make it an
            alias, because somebody later writes to it or to what it was copied from, or the caller gets it.
        cpu_outputs: returned values among `moves`.
        keep_addresses: staged values may be overwritten by the next call, because no backward reads them later.
        left: nodes that stay, with reasons.
    """

    device: str
    hoists: tuple[Hoist, ...] = ()
    guards: Mapping[str, Guard] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    snapshots: frozenset[str] = frozenset()
    cpu_outputs: tuple[str, ...] = ()
    keep_addresses: bool = True
    left: tuple[Left, ...] = ()


@dataclass(frozen=True, slots=True)
class Component:
    """Units that are moved together or not at all. `blocker` is the member that `reason` is about."""

    members: tuple[str, ...]
    blocker: str | None = None
    reason: str | None = None


def plan(graph: Residency, options: Options, vetoes: Mapping[str, str] | None = None) -> Plan:
    """The plan for `graph`, which must have exactly one GPU in `devices`.

    `vetoes` are reasons against single units, and against rebuilding single values, from an earlier attempt.
    """
    return _Planner(graph, options, vetoes or {}).plan()


@dataclass(slots=True)
class _Memory:
    """Who shares, and who writes, the memory of each storage."""

    members: dict[int, list[str]] = field(default_factory=dict)
    writers: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Residency) -> _Memory:
        memory = cls()
        for node in graph.nodes.values():
            for storage in node.storages:
                memory.members.setdefault(storage, []).append(node.name)
            for storage in node.writes:
                memory.writers.setdefault(storage, []).append(node.name)
        return memory

    def written_by(self, storages: Iterable[int]) -> Iterator[str]:
        return (writer for storage in storages for writer in self.writers.get(storage, ()))

    def users(self, storage: int) -> list[str]:
        return self.members.get(storage, []) + self.writers.get(storage, [])


class _Planner:
    def __init__(self, graph: Residency, options: Options, vetoes: Mapping[str, str]) -> None:
        self.graph = graph
        self.nodes = graph.nodes
        self.options = options
        self.vetoes = vetoes
        self.memory = _Memory.of(graph)
        self.order = {name: position for position, name in enumerate(self.nodes)}
        self.fed = {name: self._feed(node) for name, node in self.nodes.items() if not node.is_call and node.on_cpu}
        self.hoistable = self._hoistable()
        self.host_readers = [node for node in self.nodes.values() if node.host_reads]

    def plan(self) -> Plan:
        components = list(self._components())
        resolved = [component for component in components if component.reason is None]
        readers = sorted((name for component in resolved for name in component.members), key=self.order.__getitem__)
        moves = [name for name in readers if self.nodes[name].on_cpu]
        hoists = self._hoists(readers)
        return Plan(
            device=self.graph.devices[0],
            hoists=hoists,
            guards={name: self._guard(name) for hoist in hoists for name in hoist.attributes},
            stages=self._operands_of(readers, {name for name, feed in self.fed.items() if feed == "stage"}),
            moves=tuple(moves),
            readers=tuple(readers),
            snapshots=frozenset(name for name in readers if self._must_stay_a_copy(self.nodes[name])),
            cpu_outputs=tuple(name for name in self.graph.returned if name in moves),
            keep_addresses=not self.graph.differentiable,
            left=tuple(self._left(components)),
        )

    # What can be fed

    def _feed(self, node: Node) -> str:
        """ "hoist" or "stage" for a CPU input, or the reason why it can be neither."""
        if node.tensors != 1 or node.source is None:
            return "is no plain tensor"
        if node.requires_grad:
            return "requires a gradient, which has to arrive on the CPU"
        if any(self.memory.written_by(node.storages)):
            return "shares memory with something the graph writes to"
        source, size = node.source, node.value_bytes
        guarded = source.kind is SourceKind.ATTRIBUTE and source.guard is not None and node.static
        if guarded and not (self.options.attributes == "stage" and node.shape):
            return "hoist" if (size or 0) <= self.options.hoist_limit_bytes else _too_large(size, "hoist_limit_bytes")
        if node.op != "placeholder":
            return "is part of the graph but has no guard"
        return "stage" if (size or 0) <= self.options.stage_limit_bytes else _too_large(size, "stage_limit_bytes")

    def _hoistable(self) -> frozenset[str]:
        """CPU operations on constants and attributes alone whose results stay the same from call to call."""
        found = {name for name, node in self.nodes.items() if node.is_call and self._could_be_hoisted(node)}
        while True:
            keep = {name for name in found if self._operands_hoisted(name, found)}
            keep -= {name for name in keep if not self._memory_settled(self.nodes[name], keep)}
            if keep == found:
                return frozenset(found)
            found = keep

    def _could_be_hoisted(self, node: Node) -> bool:
        known = node.opaque is None and not node.random_on_cpu and not node.host_reads
        return node.on_cpu and known and node.static and not node.requires_grad

    def _operands_hoisted(self, name: str, found: set[str]) -> bool:
        return all(operand in found or self.fed.get(operand) == "hoist" for operand in self.nodes[name].operands)

    def _memory_settled(self, node: Node, found: set[str]) -> bool:
        """Whether all that shares or writes its memory is hoisted too, and nobody else reads before the last write."""
        for storage in (node.storages | node.writes) - self.graph.input_storages:
            if not found.issuperset(self.memory.users(storage)):
                return False
            writers = self.memory.writers.get(storage, [])
            members = set(self.memory.members.get(storage, []))
            last_write = max((self.order[writer] for writer in writers), default=-1)
            earlier = list(self.nodes.values())[: last_write + 1]
            if any(reader.name not in found and not members.isdisjoint(reader.operands) for reader in earlier):
                return False
        return True

    # Components

    def _units(self) -> list[Node]:
        """CPU operations that are not hoistable, and GPU operations with CPU operands."""
        return [
            node
            for node in self.nodes.values()
            if node.is_call
            and node.name not in self.hoistable
            and (node.on_cpu or node.device == MIXED or (node.on_gpu and any(self._cpu_operands(node))))
        ]

    def _cpu_operands(self, node: Node) -> Iterator[Node]:
        return (self.nodes[name] for name in node.operands if self.nodes[name].device in ("cpu", MIXED))

    def _components(self) -> Iterator[Component]:
        units = {node.name: node for node in self._units()}
        parent = {name: name for name in units}

        def root(name: str) -> str:
            while parent[name] != name:
                parent[name] = parent[parent[name]]
                name = parent[name]
            return name

        for node in units.values():
            joined = [operand.name for operand in self._cpu_operands(node) if operand.name in units]
            for storage in (node.storages | node.writes) - self.graph.input_storages:
                joined += [user for user in self.memory.users(storage) if user in units]
            for other in joined:
                parent[root(other)] = root(node.name)
        groups: dict[str, list[str]] = {}
        for name in units:
            groups.setdefault(root(name), []).append(name)
        for members in groups.values():
            yield self._judged(tuple(members))

    def _judged(self, members: tuple[str, ...]) -> Component:
        for name in members:
            reason = self.vetoes.get(name) or self._against(self.nodes[name])
            if reason is not None:
                return Component(members, name, reason)
        on_cpu = [self.nodes[name] for name in members if self.nodes[name].on_cpu]
        reaches_gpu = len(on_cpu) < len(members) or any(self._depends_on_gpu(node) for node in on_cpu)
        return Component(members) if reaches_gpu else Component(members, members[0], "no GPU operation needs it")

    def _against(self, node: Node) -> str | None:
        """Why `node` cannot take its CPU operands from the GPU (and run there), or None."""
        if node.random_on_cpu:
            return "draws random numbers on the CPU; the GPU has another stream of them"
        if node.opaque is not None:
            return node.opaque
        if node.device == MIXED:
            return "its values are on several devices"
        if node.host_reads:
            return "reads values on the host"
        if node.gpu_obstacle is not None:
            return node.gpu_obstacle
        if node.on_cpu and not self.graph.input_storages.isdisjoint(node.writes):
            return "changes CPU memory that is visible outside of the graph"
        return self._against_operands(node) or self._against_moving(node)

    def _against_operands(self, node: Node) -> str | None:
        for operand in self._cpu_operands(node):
            if operand.name in self.fed:
                if self.fed[operand.name] not in ("hoist", "stage"):
                    return f"{operand.operation} {self.fed[operand.name]}"
            elif operand.name in self.hoistable:
                if operand.tensors != 1:
                    return f"{operand.name} holds several tensors"
                if (operand.value_bytes or 0) > self.options.hoist_limit_bytes:
                    return f"{operand.name} {_too_large(operand.value_bytes, 'hoist_limit_bytes')}"
        return None

    def _against_moving(self, node: Node) -> str | None:
        """What speaks against a CPU operation's value no longer being on the CPU."""
        if not node.on_cpu:
            return None
        for reader in self.host_readers:
            if not reader.host_reads.isdisjoint(node.storages):
                return f"{reader.name} ({reader.operation}) reads its value on the host"
        if node.name in self.graph.returned:
            if node.tensors != 1:
                return "is returned as several tensors"
            if not self._depends_on_gpu(node):
                return "its value is returned, and the CPU has it without waiting for the GPU"
            sharing = {name for storage in node.storages for name in self.memory.members[storage]} - {node.name}
            if not sharing.isdisjoint(self.graph.returned) or not self.graph.input_storages.isdisjoint(node.storages):
                return "the caller gets its memory twice: two returned values share it"
        return None

    def _depends_on_gpu(self, node: Node) -> bool:
        pending, seen = [node.name], {node.name}
        while pending:
            for operand in self.nodes[pending.pop()].operands:
                if self.nodes[operand].on_gpu:
                    return True
                if operand not in seen:
                    seen.add(operand)
                    pending.append(operand)
        return False

    # The parts of the plan

    def _operands_of(self, readers: Iterable[str], wanted: Set[str]) -> tuple[str, ...]:
        operands = {operand for reader in readers for operand in self.nodes[reader].operands}
        return tuple(sorted(operands & wanted, key=self.order.__getitem__))

    def _hoists(self, readers: Iterable[str]) -> tuple[Hoist, ...]:
        hoisted_inputs = {name for name, feed in self.fed.items() if feed == "hoist"}
        return tuple(map(self._hoist, self._operands_of(readers, self.hoistable | hoisted_inputs)))

    def _guard(self, attribute: str) -> Guard:
        source = self.nodes[attribute].source
        if source is None or source.guard is None:
            raise AssertionError(f"{attribute} was hoisted without a guard")
        return source.guard

    def _hoist(self, value: str) -> Hoist:
        needed = self._needed_for(value)
        attributes = tuple(name for name in needed if name in self.fed)
        node = self.nodes[value]
        nodes = tuple(name for name in needed if name not in self.fed)
        form: HoistedForm = "kept"
        if not attributes and node.shape == () and node.dtype in INLINE_DTYPES:
            form = "literal"
        elif not attributes and value not in self.vetoes and all(self.nodes[name].exact for name in nodes):
            form = "rebuilt"
        return Hoist(value, nodes, attributes, form)

    def _needed_for(self, value: str) -> list[str]:
        """`value` and everything it is computed from, writers of the same memory included, in order."""
        pending, needed = [value], {value}
        while pending:
            node = self.nodes[pending.pop()]
            storages = (node.storages | node.writes) - self.graph.input_storages
            writers = [writer for storage in storages for writer in self.memory.writers.get(storage, [])]
            for name in (*node.operands, *writers):
                if name not in needed:
                    needed.add(name)
                    pending.append(name)
        return sorted(needed, key=self.order.__getitem__)

    def _must_stay_a_copy(self, node: Node) -> bool:
        changes_device = any(
            operand.device != node.device for operand in map(self.nodes.__getitem__, node.operands) if operand.tensors
        )
        if not changes_device or not node.tensors:
            return False
        read = [storage for operand in node.operands for storage in self.nodes[operand].storages]
        writers = self.memory.written_by((*node.storages, *read))
        if any(self.order[writer] > self.order[node.name] for writer in writers):
            return True
        aliases = {name for storage in node.storages for name in self.memory.members[storage]}
        return node.on_gpu and not aliases.isdisjoint(self.graph.returned)

    def _left(self, components: Iterable[Component]) -> Iterator[Left]:
        for component in components:
            for name in component.members if component.reason is not None else ():
                reason = component.reason or ""
                if name != component.blocker:
                    reason = f"goes together with {component.blocker}: {reason}"
                yield self._leave(name, reason)
        for node in self.nodes.values():
            if node.name in self.graph.returned and node.name in self.hoistable:
                yield self._leave(node.name, "its CPU value is visible outside of the graph: it is returned")
            elif node.host_reads and node.device is None:
                yield self._leave(node.name, "reads values on the host")

    def _leave(self, name: str, reason: str) -> Left:
        node = self.nodes[name]
        return Left(name, node.operation, reason, node.source_line)


def _too_large(size: int | None, option: str) -> str:
    return f"takes {size} bytes, more than {option}"
