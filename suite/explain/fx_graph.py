"""What one FX graph, as Dynamo hands it to a backend, keeps on the CPU and brings to the GPU in each call.

Reads nodes only: nothing is lowered, run or changed. The value of each node (a fake tensor) tells where it lives.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

import torch

from models.instance import tensors_of
from optimizations import torch_internals
from optimizations.placement.sources import stays_between_calls
from suite.explain.records import Copy, CpuKind, CpuNode, FxGraph, NonStaticInput
from suite.source_line import user_line

_TRANSFERS = frozenset({"to", "cuda", "copy_", "type_as", "type"})
"""Methods whose business is to bring a value to where another one is."""
_WITH_NON_BLOCKING = frozenset({"to", "cuda", "copy_"})
"""Those among them that may be told so by position."""

_FROM_NUMPY = re.compile(r"^___from_numpy\((.*)\)$")
_VARIABLE = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


def read_fx_graph(graph_module: torch.fx.GraphModule, index: int) -> FxGraph:
    """The record of the graph that Dynamo made as number `index`, without lowerings."""
    nodes = list(graph_module.graph.nodes)
    inputs = [_input(node) for node in nodes if _is_non_static_input(node)]
    return FxGraph(
        index=index,
        operations=sum(node.op.startswith("call_") for node in nodes),
        cpu_nodes=[cpu_node for node in nodes for cpu_node in _cpu_nodes(node)],
        copies=[copy for node in nodes for copy in _copies(node)],
        non_static_inputs=inputs,
        non_static_input_bytes=sum(entry.input_bytes or 0 for entry in inputs),
        stock_captures=None,
        lowerings=[],
    )


def _cpu_nodes(node: torch.fx.Node) -> Iterator[CpuNode]:
    if node.op == "output":
        returned = (argument for argument in node.all_input_nodes if _lives_on(argument, "cpu"))
        yield from (_cpu_node(argument, "output") for argument in returned)
    elif _lives_on(node, "cpu"):
        yield _cpu_node(node, _kind(node))


def _kind(node: torch.fx.Node) -> CpuKind:
    if node.op == "placeholder":
        source = torch_internals.dynamo_source(node)
        return "attribute" if source is not None and stays_between_calls(source) else "argument"
    return "computed" if any(_tensors(argument) for argument in node.all_input_nodes) else "constant"


def _cpu_node(node: torch.fx.Node, kind: CpuKind) -> CpuNode:
    tensor = _tensors(node)[0]
    return CpuNode(
        node=node.name,
        operation=_operation(node),
        kind=kind,
        shape=_shape(tensor),
        dtype=_dtype(tensor),
        source_line=line_of(node),
    )


def _copies(node: torch.fx.Node) -> Iterator[Copy]:
    """A copy for each CPU tensor that an operation on the GPU takes."""
    if not node.op.startswith("call_") or _takes_member(node) or not _lives_on(node, "cuda"):
        return
    transfers = _target_name(node) in _TRANSFERS or not any(_lives_on(source, "cuda") for source in _sources(node))
    for source in _sources(node):
        if not _lives_on(source, "cpu"):
            continue
        tensors = _tensors(source)
        passed_by_value = not transfers and all(tensor.dim() == 0 for tensor in tensors)
        yield Copy(
            node=node.name,
            kind="copy" if transfers else "scalar" if passed_by_value else "implicit",
            copied_bytes=_bytes(tensors),
            blocking=not passed_by_value and not _is_asynchronous(node),
            source_line=line_of(node),
        )


def _takes_member(node: torch.fx.Node) -> bool:
    """Whether the node picks one of several results, which computes nothing."""
    several = node.args[0] if node.args else None
    return (
        node.target is operator.getitem
        and isinstance(several, torch.fx.Node)
        and not isinstance(several.meta.get("example_value"), torch.Tensor)
    )


def _is_asynchronous(node: torch.fx.Node) -> bool:
    return node.kwargs.get("non_blocking") is True or (
        _target_name(node) in _WITH_NON_BLOCKING and any(flag is True for flag in node.args[1:])
    )


def _is_non_static_input(node: torch.fx.Node) -> bool:
    if node.op != "placeholder" or not _lives_on(node, "cuda"):
        return False
    return torch_internals.static_input_type(node) is None


def _input(node: torch.fx.Node) -> NonStaticInput:
    tensors = _tensors(node)
    return NonStaticInput(
        node=node.name, shape=_shape(tensors[0]), dtype=_dtype(tensors[0]), input_bytes=_bytes(tensors)
    )


def _sources(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [source for source in node.all_input_nodes if _tensors(source)]


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    return list(tensors_of(node.meta.get("example_value")))


def _lives_on(node: torch.fx.Node, device_type: str) -> bool:
    return any(tensor.device.type == device_type for tensor in _tensors(node))


def _operation(node: torch.fx.Node) -> str:
    """What the node does; for an input, where the program has it ("self.mask")."""
    source = torch_internals.dynamo_source(node)
    return _target_name(node) if source is None else _as_in_program(source.name)


def _as_in_program(source_name: str) -> str:
    """Dynamo's name of an input, L['self']._modules['text'].mask, as the program would write it: self.text.mask."""
    name = _VARIABLE.sub(r"\1", _FROM_NUMPY.sub(r"\1", source_name))
    return _MEMBER.sub(lambda match: f"[{match[1]}]" if match[1].isdigit() else f".{match[1]}", name)


def _target_name(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def line_of(node: torch.fx.Node) -> str | None:
    """The user's line that made the node; for an input, the first line that reads it."""
    if node.op != "placeholder":
        return user_line(node.meta.get("stack_trace"))
    lines = (user_line(user.meta.get("stack_trace")) for user in node.users)
    return next((line for line in lines if line is not None), None)


def _shape(tensor: torch.Tensor) -> list[int] | None:
    """Sizes; None where one depends on the call."""
    return [int(size) for size in tensor.shape] if _is_static(tensor) else None


def _bytes(tensors: list[torch.Tensor]) -> int | None:
    if not all(_is_static(tensor) for tensor in tensors):
        return None
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_static(tensor: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in tensor.shape)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
