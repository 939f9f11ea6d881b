"""Turn an `Observation` into plain records of every value's device in an FX graph, and the reasons for it.

Node names stand for nodes, numbers for storages. Nothing here refers to FX, so that planning needs no graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.placement.observe import Observation, TensorFacts, operation_of
from optimizations.placement.sources import InputSource
from optimizations.report import Copy, CopyKind, CpuKind, Size
from optimizations.stack_trace import user_frame
from optimizations.written_operands import tensors_in

CPU = "cpu"
_TRANSFERS = frozenset({"to", "cuda", "copy_", "type_as", "type"})
"""Methods that copy a value to another value's device."""
MIXED = "several devices"


@dataclass(frozen=True, slots=True)
class ResidentNode:
    """Describe one node of a graph.

    Attributes:
        device: the device of its value ("cpu", "cuda:0"), or of its writes if it has none; `MIXED` for several; None
            for a node without tensors.
        operands: nodes it reads, in order, each once.
        storages: memory its value is in. `writes`, `host_reads`: memory it changes, or reads on the host.
        awaited: the program may change the source of its copy to the GPU as soon as it has returned.
        switches: it changes a mode (gradients, autocast) that the calls after it run in.
        tensors: how many tensors its value holds.
        transfers: its purpose is to copy a value to another device.
        static: all sizes are numbers, none of them of a symbolic operand.
        requires_grad: autograd may want a gradient for it.
    """

    name: str
    op: str
    operation: str
    device: str | None
    operands: tuple[str, ...]
    storages: frozenset[int]
    writes: frozenset[int] = frozenset()
    host_reads: frozenset[int] = frozenset()
    tensors: int = 0
    static: bool = True
    requires_grad: bool = False
    random_on_cpu: bool = False
    opaque: str | None = None
    gpu_obstacle: str | None = None
    awaited: bool = True
    switches: bool = False
    transfers: bool = False
    shape: tuple[Size, ...] | None = None
    dtype: str | None = None
    value_bytes: int | None = None
    source: InputSource | None = None
    source_line: str | None = None

    @property
    def is_call(self) -> bool:
        return self.op.startswith("call_")

    @property
    def on_cpu(self) -> bool:
        return self.device == CPU

    @property
    def on_gpu(self) -> bool:
        return self.device not in (None, CPU, MIXED)

    @property
    def reads_nothing(self) -> bool:
        """Return whether it uses numbers and sizes only, no values of tensors."""
        return not self.tensors and not self.writes and not self.host_reads and self.opaque is None


@dataclass(frozen=True, slots=True)
class Residency:
    """Hold all nodes of a graph in order, without its output node.

    Attributes:
        returned: nodes that the graph returns.
        devices: GPUs that values live on.
        differentiable: a backward may follow, for which autograd keeps inputs until an unknown later time.
        node_count: nodes of the graph, all kinds.
    """

    nodes: Mapping[str, ResidentNode]
    returned: tuple[str, ...]
    devices: tuple[str, ...]
    differentiable: bool
    node_count: int
    input_storages: frozenset[int] = field(default=frozenset())

    def kind(self, node: ResidentNode) -> CpuKind:
        """Return the kind of a CPU value's origin, for reports."""
        if node.source is not None:
            return "attribute" if node.source.is_attribute else "argument"
        reads_tensors = any(self.nodes[operand].tensors for operand in node.operands)
        return "computed" if reads_tensors else "constant"

    def cpu_nodes(self) -> Iterator[ResidentNode]:
        """Return the nodes whose value lives on the CPU, in order."""
        return (node for node in self.nodes.values() if node.on_cpu and node.tensors)

    def copies(self) -> Iterator[Copy]:
        """Yield a host-to-device copy for each CPU value that a node on the GPU reads, as the graph is written."""
        for node in self.nodes.values():
            read = [self.nodes[operand] for operand in node.operands] if node.is_call and node.on_gpu else []
            transfers = node.transfers or not any(value.on_gpu for value in read)
            for value in read:
                if value.on_cpu:
                    yield _copy(node, value, transfers)


def _copy(node: ResidentNode, value: ResidentNode, transfers: bool) -> Copy:
    by_value = not transfers and value.shape == ()
    kind: CopyKind = "copy" if transfers else "scalar" if by_value else "implicit"
    blocking = not by_value and node.awaited
    return Copy(node.name, value.name, value.value_bytes, blocking, node.source_line, kind)


def residency(
    graph_module: torch.fx.GraphModule,
    observation: Observation,
    sources: Mapping[str, InputSource],
    requires_grad: Mapping[str, bool],
) -> Residency:
    """Return the records of `graph_module` as observed. `requires_grad` holds that of each placeholder, by name."""
    differentiable = _differentiable(graph_module, any(requires_grad.values()), observation)
    if not differentiable:
        requires_grad = {}
    nodes: dict[str, ResidentNode] = {}
    returned: tuple[str, ...] = ()
    for fx_node in graph_module.graph.nodes:
        if fx_node.op == "output":
            returned = tuple(operand.name for operand in fx_node.all_input_nodes)
        else:
            nodes[fx_node.name] = _node(fx_node, observation, sources, requires_grad, nodes, differentiable)
    devices = {str(facts.device) for all_facts in observation.tensors.values() for facts in all_facts} - {CPU}
    inputs = [node for node in nodes.values() if not node.is_call]
    return Residency(
        nodes,
        returned,
        tuple(sorted(devices)),
        differentiable,
        len(graph_module.graph.nodes),
        frozenset(storage for node in inputs for storage in node.storages),
    )


def source_line(node: torch.fx.Node) -> str | None:
    """Return the user's innermost line of a node as "path:line in function: code"; for an input, its first reader's.

    None where there is no stack trace.
    """
    trace = node.meta.get("stack_trace")
    if trace is None and not node.op.startswith("call_"):
        traces = (user.meta.get("stack_trace") for user in node.users)
        trace = next((found for found in traces if found is not None), None)
    frame = user_frame(trace)
    return None if frame is None else str(frame)


def _node(
    fx_node: torch.fx.Node,
    observation: Observation,
    sources: Mapping[str, InputSource],
    requires_grad: Mapping[str, bool],
    earlier: Mapping[str, ResidentNode],
    differentiable: bool,
) -> ResidentNode:
    name = fx_node.name
    facts = observation.tensors[name]
    effects = observation.effects[name]
    operands = tuple(operand.name for operand in fx_node.all_input_nodes)
    devices = {str(tensor.device) for tensor in facts} | {
        str(observation.storages[storage]) for storage in effects.writes
    }
    symbolic = any(not earlier[operand].tensors for operand in operands) or not all(_is_static(f) for f in facts)
    single = facts[0] if len(facts) == 1 else None
    source = sources.get(name) if facts else None
    return ResidentNode(
        name=name,
        op=fx_node.op,
        operation=source.text if source is not None else operation_of(fx_node),
        device=None if not devices else devices.pop() if len(devices) == 1 else MIXED,
        operands=operands,
        storages=frozenset(tensor.storage for tensor in facts),
        writes=frozenset(effects.writes),
        host_reads=frozenset(effects.host_reads),
        tensors=len(facts),
        static=not symbolic,
        requires_grad=differentiable and _requires_grad(fx_node, facts, requires_grad, earlier),
        random_on_cpu=effects.random_on_cpu,
        opaque=effects.opaque,
        gpu_obstacle=effects.gpu_obstacle,
        awaited=effects.awaited,
        switches=fx_node.op == "call_function" and fx_node.target in _switches(),
        transfers=operation_of(fx_node) in _TRANSFERS,
        shape=tuple(size if isinstance(size, int) else str(size) for size in single.shape) if single else None,
        dtype=str(single.dtype).removeprefix("torch.") if single else None,
        value_bytes=_bytes(facts),
        source=source,
        source_line=source_line(fx_node),
    )


def _is_static(facts: TensorFacts) -> bool:
    return all(isinstance(number, int) for number in (*facts.shape, *facts.stride))


def _bytes(facts: Sequence[TensorFacts]) -> int | None:
    if not facts or not all(_is_static(tensor) for tensor in facts):
        return None
    return sum(torch.Size(tensor.shape).numel() * tensor.dtype.itemsize for tensor in facts)


def _switches() -> tuple[Any, ...]:
    """Return the functions that change a mode for the calls after them."""
    return torch_internals.set_grad_enabled, torch_internals.enter_autocast, torch_internals.exit_autocast


def _requires_grad(
    fx_node: torch.fx.Node,
    facts: Sequence[TensorFacts],
    requires_grad: Mapping[str, bool],
    earlier: Mapping[str, ResidentNode],
) -> bool:
    """Return whether Dynamo noted that it requires a gradient; without a note, whether any operand requires one."""
    if not fx_node.op.startswith("call_"):
        return requires_grad.get(fx_node.name, False) or any(tensor.requires_grad for tensor in facts)
    noted = list(tensors_in(fx_node.meta.get("example_value")))
    if noted:
        return any(tensor.requires_grad for tensor in noted)
    return any(earlier[operand.name].requires_grad for operand in fx_node.all_input_nodes)


def _differentiable(graph_module: torch.fx.GraphModule, inputs_require_grad: bool, observation: Observation) -> bool:
    """Return whether autograd may record this graph: gradients wanted, and enabled around it or by a call in it."""
    enables: Any = torch_internals.set_grad_enabled
    enabled = torch.is_grad_enabled() or any(node.target is enables for node in graph_module.graph.nodes)
    wanted = inputs_require_grad or any(t.requires_grad for facts in observation.tensors.values() for t in facts)
    return wanted and enabled
