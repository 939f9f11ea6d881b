"""Decides, once per recording, who replaces which pointer and what replay does when an input moves.

Pure: pointer uses, what is available and the user's option go in, an immutable `Plan` comes out. There are three
appliers:

* `host`: the node's parameters are set from the host (kernel, memcpy and memset nodes); one driver call per node that
  uses a moved input;
* `prelude`: the kernel node is made device-updatable, and a kernel at the start of the graph writes its parameters from
  the pointer table;
* `ptx`: the node launches a variant of its Triton kernel that reads the pointer from the pointer table itself.

For `prelude` and `ptx` replay writes the pointer table, in one step, whatever the number of nodes.

Note [The rule of auto]. What the ways cost was measured with `encore micro indirection` on an H200 (recorded in
results/recorded/micro-indirection): a host update takes a driver call per consuming node, and only when an input moved;
a rewritten kernel takes a little in every replay, per kernel; the prelude a few microseconds in every replay, however
many nodes there are; and the table one driver call when an input moved. So up to `AUTO_HOST_NODES` consuming nodes
`auto` takes `host`; beyond, `ptx` for up to `AUTO_PTX_NODES` nodes if all but `AUTO_HOST_NODES` others can have it
(those get `host`); in all other graphs `prelude`, for which `ptx` and then `host` stand in. It is a rule, not a
measurement of the graph at hand.

Note [One applier per node]. A device-updatable node must not be updated from the host as well, so all uses of a node
get the same applier. Where none takes them all, inputs are given up (copied, with the reason) until one does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from optimizations.captured.difference import format_path
from optimizations.captured.graph import WORD_BYTES, CapturedGraph, KernelNode, NodePath
from optimizations.indirection.pointers import Analysis, PointerUse, Reason, ReasonCode, UseKind
from optimizations.indirection.tensor_map import TENSOR_MAP_BYTES

AUTO_HOST_NODES = 4
"""Up to how many nodes `auto` updates from the host; see Note [The rule of auto]."""

AUTO_PTX_NODES = 16
"""Up to how many kernels `auto` exchanges for rewritten ones."""

ALIGNMENT_BYTES = 16
"""What kernels chosen for a placeholder may rely on: the widest access is 16 bytes, and Inductor guards no more."""

TENSOR_MAP_ALIGNMENT_BYTES = 32
"""What `cuTensorMapEncodeTiled` asks of an address at most (32 with 32-byte interleave, else 16)."""


class Applier(StrEnum):
    """Who replaces the pointers of a node."""

    HOST = "host"
    PRELUDE = "prelude"
    PTX = "ptx"


class Choice(StrEnum):
    """The user's option. All but `off` name the applier tried first; the others stand in where it cannot."""

    AUTO = "auto"
    HOST = "host"
    PRELUDE = "prelude"
    PTX = "ptx"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Available:
    """What can be used here.

    `off` holds the reason for each applier that cannot be used at all. `ptx` holds, for each kernel node whose PTX is
    at hand, a refusal (or None) per parameter.
    """

    off: Mapping[Applier, str]
    ptx: Mapping[NodePath, Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the pointer table, `offset_bytes` from its start.

    It holds the address of `input` plus `delta`, or, where `tensor_map` is not None, those 128 bytes with that address
    put in.
    """

    offset_bytes: int
    input: int
    delta: int
    tensor_map: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return WORD_BYTES if self.tensor_map is None else TENSOR_MAP_BYTES


@dataclass(frozen=True, slots=True)
class HostNode:
    """A node set from the host when one of its inputs moved; all its uses are written at once."""

    node: NodePath
    uses: tuple[PointerUse, ...]


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """The prelude writes `slot` at `buffer_offset` bytes into the node's parameter buffer."""

    buffer_offset: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class PreludeNode:
    """A kernel node that is made device-updatable."""

    node: NodePath
    updates: tuple[ParameterUpdate, ...]


@dataclass(frozen=True, slots=True)
class PtxNode:
    """A kernel node that launches the rewritten kernel: each parameter listed takes the address of its slot."""

    node: NodePath
    parameters: tuple[tuple[int, Slot], ...]


@dataclass(frozen=True, slots=True)
class InputPlan:
    """What replay does for one input.

    With reasons it is copied. Else, if it moved to an address that is a multiple of `alignment_bytes`, replay writes
    `slots` and sets `host_nodes`; at any other address it is copied for this call.
    """

    input: int
    reasons: tuple[Reason, ...]
    alignment_bytes: int
    slots: tuple[Slot, ...]
    host_nodes: tuple[HostNode, ...]

    @property
    def indirect(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, slots=True)
class Plan:
    """The patch plan of a recording. `fallbacks` says, node by node, why an applier tried earlier was not taken."""

    choice: Choice
    inputs: tuple[InputPlan, ...]
    slots: tuple[Slot, ...]
    host_nodes: tuple[HostNode, ...]
    prelude_nodes: tuple[PreludeNode, ...]
    ptx_nodes: tuple[PtxNode, ...]
    fallbacks: tuple[tuple[NodePath, str], ...]

    @property
    def table_bytes(self) -> int:
        """Size of the pointer table."""
        return sum(slot.size_bytes for slot in self.slots)

    def summary(self) -> dict[str, Any]:
        """What the report shows of the plan, as JSON values."""
        return {
            "choice": self.choice.value,
            "nodes": {
                Applier.HOST.value: len(self.host_nodes),
                Applier.PRELUDE.value: len(self.prelude_nodes),
                Applier.PTX.value: len(self.ptx_nodes),
            },
            "table_bytes": self.table_bytes,
            "inputs": [
                {
                    "input": one.input,
                    "indirect": one.indirect,
                    "slots": len(one.slots),
                    "host_nodes": len(one.host_nodes),
                    "reasons": [{"code": reason.code.value, "message": reason.message} for reason in one.reasons],
                }
                for one in self.inputs
            ],
            "fallbacks": [{"node": format_path(node), "reason": reason} for node, reason in self.fallbacks],
        }


def make_plan(graph: CapturedGraph, analysis: Analysis, choice: Choice, available: Available) -> Plan:
    """The patch plan for `graph`.

    Args:
        graph: the captured graph that will be replayed; the first of the two that were analysed.
        analysis: what `find_pointer_uses` found.
        choice: the user's option.
        available: which appliers can be used, and on which nodes.
    """
    against = {verdict.input: list(verdict.reasons) for verdict in analysis.verdicts}
    if choice is Choice.OFF:
        for reasons in against.values():
            reasons.append(Reason(ReasonCode.OFF, "indirection is switched off"))
    while True:
        uses = _uses_by_node(analysis, against)
        assigned = {
            node: _assign(node, found, order, available) for node, found, order in _orders(uses, choice, available)
        }
        given_up = {index: reason for assignment in assigned.values() for index, reason in assignment.given_up.items()}
        if not given_up:
            return _lay_out(graph, analysis, choice, against, uses, assigned)
        for index, message in given_up.items():
            against[index].append(Reason(ReasonCode.NO_APPLIER, message))


@dataclass(frozen=True, slots=True)
class _Assignment:
    """The applier of one node, what spoke against those before it, and inputs to copy where there is none."""

    applier: Applier | None
    fallbacks: tuple[str, ...]
    given_up: Mapping[int, str]


def _uses_by_node(analysis: Analysis, against: Mapping[int, Sequence[Reason]]) -> dict[NodePath, list[PointerUse]]:
    """The uses of inputs that have no reason against them."""
    uses = defaultdict(list)
    for use in analysis.uses:
        if not against[use.input]:
            uses[use.node].append(use)
    return dict(uses)


def _orders(
    uses: Mapping[NodePath, Sequence[PointerUse]], choice: Choice, available: Available
) -> Iterable[tuple[NodePath, Sequence[PointerUse], tuple[Applier, ...]]]:
    """Each node with its uses and the appliers to try on it, best first. Note [The rule of auto]."""
    order = {
        Choice.HOST: (Applier.HOST,),
        Choice.PRELUDE: (Applier.PRELUDE, Applier.HOST),
        Choice.PTX: (Applier.PTX, Applier.PRELUDE, Applier.HOST),
        Choice.AUTO: (Applier.PRELUDE, Applier.PTX, Applier.HOST),
        Choice.OFF: (),
    }[choice]
    if choice is Choice.AUTO:
        if len(uses) <= AUTO_HOST_NODES:
            order = (Applier.HOST, Applier.PTX, Applier.PRELUDE)
            without_ptx = []
        else:
            without_ptx = [node for node, found in uses.items() if any(_refusals(Applier.PTX, found, available))]
        if (
            len(uses) > AUTO_HOST_NODES
            and len(without_ptx) <= AUTO_HOST_NODES
            and len(uses) - len(without_ptx) <= AUTO_PTX_NODES
        ):
            order = (Applier.PTX, Applier.HOST, Applier.PRELUDE)
    for node, found in uses.items():
        yield node, found, order


def _assign(node: NodePath, uses: Sequence[PointerUse], order: Sequence[Applier], available: Available) -> _Assignment:
    """The first applier that takes every use; if there is none, the inputs of uses that no applier takes are given up.

    Such uses exist then: `ptx` alone answers use by use, the others take all uses of a kernel node or none.
    """
    refusals: dict[Applier, list[str | None]] = {}
    for applier in order:
        refusals[applier] = _refusals(applier, uses, available)
        if not any(refusals[applier]):
            passed = tuple(
                f"{earlier}: {next(refusal for refusal in refusals[earlier] if refusal)}"
                for earlier in order[: order.index(applier)]
            )
            return _Assignment(applier, passed, {})
    given_up = {}
    for index, use in enumerate(uses):
        answers = [(applier, found[index]) for applier, found in refusals.items()]
        if all(answer for _, answer in answers):
            said = "; ".join(f"{applier}: {answer}" for applier, answer in answers)
            given_up[use.input] = f"node {format_path(node)}: {said}"
    return _Assignment(None, (), given_up)


def _refusals(applier: Applier, uses: Sequence[PointerUse], available: Available) -> list[str | None]:
    return [_refusal(applier, use, available) for use in uses]


def _refusal(applier: Applier, use: PointerUse, available: Available) -> str | None:
    """Why the applier cannot replace this pointer; None if it can."""
    if applier in available.off:
        return available.off[applier]
    if len(use.node) > 1:
        return "the node is in a child graph, whose nodes cannot be updated one by one"
    in_kernel = use.kind in (UseKind.PARAMETER, UseKind.TENSOR_MAP)
    if applier is Applier.PRELUDE and not in_kernel:
        return "only kernel nodes can be updated from the device"
    if applier is Applier.PTX:
        if use.kind is not UseKind.PARAMETER:
            return "only pointer parameters of kernels can be dereferenced"
        if use.node not in available.ptx:
            return "no PTX of this kernel is at hand"
        if use.byte_offset:
            return f"the pointer lies {use.byte_offset} bytes into parameter {use.parameter}"
        refusals = available.ptx[use.node]
        if use.parameter >= len(refusals):
            return f"its PTX has {len(refusals)} parameters only, so it is of another kernel"
        return refusals[use.parameter]
    return None


def _lay_out(
    graph: CapturedGraph,
    analysis: Analysis,
    choice: Choice,
    against: Mapping[int, Sequence[Reason]],
    uses: Mapping[NodePath, Sequence[PointerUse]],
    assigned: Mapping[NodePath, _Assignment],
) -> Plan:
    """Slots for everything updated through the table, and the nodes of each applier."""
    table = _Table()
    kernels = {path: node for path, node in graph.walk() if isinstance(node, KernelNode)}
    host_nodes, prelude_nodes, ptx_nodes = [], [], []
    for node, found in uses.items():
        match assigned[node].applier:
            case Applier.HOST:
                host_nodes.append(HostNode(node, tuple(found)))
            case Applier.PRELUDE:
                updates = []
                for use in found:
                    parameter = kernels[node].parameters[use.parameter]
                    window = parameter.data[use.byte_offset : use.byte_offset + TENSOR_MAP_BYTES]
                    tensor_map = window if use.kind is UseKind.TENSOR_MAP else None
                    slot = table.slot(use.input, use.delta, tensor_map)
                    updates.append(ParameterUpdate(parameter.offset + use.byte_offset, slot))
                prelude_nodes.append(PreludeNode(node, tuple(updates)))
            case Applier.PTX:
                parameters = tuple((use.parameter, table.slot(use.input, use.delta, None)) for use in found)
                ptx_nodes.append(PtxNode(node, parameters))
    inputs = []
    for verdict in analysis.verdicts:
        index = verdict.input
        maps = any(use.kind is UseKind.TENSOR_MAP for use in verdict.uses)
        inputs.append(
            InputPlan(
                index,
                tuple(against[index]),
                TENSOR_MAP_ALIGNMENT_BYTES if maps else ALIGNMENT_BYTES,
                tuple(slot for slot in table.slots if slot.input == index),
                tuple(node for node in host_nodes if any(use.input == index for use in node.uses)),
            )
        )
    return Plan(
        choice,
        tuple(inputs),
        tuple(table.slots),
        tuple(host_nodes),
        tuple(prelude_nodes),
        tuple(ptx_nodes),
        tuple((node, reason) for node, assignment in assigned.items() for reason in assignment.fallbacks),
    )


class _Table:
    """Slots in order, one for each distinct content."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self._end_bytes = 0
        self._known: dict[tuple[int, int, bytes | None], Slot] = {}

    def slot(self, index: int, delta: int, tensor_map: bytes | None) -> Slot:
        key = (index, delta, tensor_map)
        if key not in self._known:
            slot = self._known[key] = Slot(self._end_bytes, index, delta, tensor_map)
            self.slots.append(slot)
            self._end_bytes += slot.size_bytes
        return self._known[key]
