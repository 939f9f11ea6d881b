"""Find out where inputs of a Dynamo graph come from: each call, or an object that stays between calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.options import Attributes
from optimizations.placement.fx_editing import attribute

_FROM_NUMPY = re.compile(r"^___from_numpy\((.*)\)$")
_VARIABLE = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


class SourceKind(StrEnum):
    """Say how long the object that is an input lives."""

    ATTRIBUTE = "attribute"
    """Held by a module, a global or a closure: the same object in each call, until the program puts another there."""
    ARGUMENT = "argument"
    """Passed with each call."""


class Guard(StrEnum):
    """Say how a later call checks that an attribute still has its value."""

    VALUE = "value"
    """Its bytes, which show every write, whatever code made it."""
    VERSION = "version"
    """Its address and version counter, which NumPy, collectives and other processes do not count up."""


@dataclass(frozen=True, slots=True)
class InputSource:
    """Hold the source of one input. `text` is what the program writes ("self.mask"); `guard` None: it has no guard."""

    kind: SourceKind
    text: str
    guard: Guard | None


VALUE_GUARD_LIMIT_BYTES = 2**20
"""Up to here comparing costs the host less than sending. What is larger is sent in each call."""


def input_sources(
    graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any], attributes: Attributes = "hoist"
) -> dict[str, InputSource]:
    """Return the source of each placeholder and of each tensor that `get_attr` reads, by node name.

    `attributes` is the option of this name, which says how attributes of rank 1 and more may be guarded.
    """
    sources: dict[str, InputSource] = {}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=True):
        sources[node.name] = _placeholder_source(node, example, attributes)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            guard = _guard(attribute(graph_module, node.target), attributes, made_per_call=False)
            sources[node.name] = InputSource(SourceKind.ATTRIBUTE, str(node.target), guard)
    return sources


def _placeholder_source(node: torch.fx.Node, example: Any, attributes: Attributes) -> InputSource:
    source = torch_internals.dynamo_source(node)
    if source is None:
        return InputSource(SourceKind.ARGUMENT, str(node.target), None)
    if not stays_between_calls(source):
        return InputSource(SourceKind.ARGUMENT, as_in_program(source.name), None)
    # Dynamo notes a tensor's own attributes for tensors only: what has none came as a number or a NumPy array.
    guard = _guard(example, attributes, made_per_call="tensor_dict" not in node.meta)
    return InputSource(SourceKind.ATTRIBUTE, as_in_program(source.name), guard)


def as_in_program(source_name: str) -> str:
    """Turn Dynamo's name of an input, L['self']._modules['text'].mask, into what the program writes: self.text.mask."""
    name = _VARIABLE.sub(r"\1", _FROM_NUMPY.sub(r"\1", source_name))
    return _MEMBER.sub(lambda match: f"[{match[1]}]" if match[1].isdigit() else f".{match[1]}", name)


def stays_between_calls(source: Any) -> bool:
    """Return whether Dynamo reaches an input with this source through a module, a global or a closure."""
    kind = source.guard_source
    return (
        kind.is_unspecialized_nn_module()
        or kind.is_specialized_nn_module()
        or torch_internals.is_from_global_source(source)
        or torch_internals.is_from_nonlocal_source(source)
    )


def _guard(example: Any, attributes: Attributes, *, made_per_call: bool) -> Guard | None:
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return None
    if example.dim() == 0:
        return Guard.VALUE
    if attributes == "stage":
        return None
    if made_per_call:
        # A new tensor in each call, with the strides of what it was made of.
        return Guard.VALUE if example.is_contiguous() and example.nbytes <= VALUE_GUARD_LIMIT_BYTES else None
    if attributes == "trust" and not example.is_inference():
        return Guard.VERSION
    span = span_bytes(example)
    return Guard.VALUE if isinstance(span, int) and span <= VALUE_GUARD_LIMIT_BYTES else None


def span_bytes(tensor: torch.Tensor) -> Any:
    """Return the bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.element_size()
