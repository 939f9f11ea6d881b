"""Find out where inputs of a Dynamo graph come from: each call, or an object that stays between calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals
from optimizations.graph.memory import size_bytes

_FROM_NUMPY = re.compile(r"^___from_numpy\((.*)\)$")
_VARIABLE = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")


@dataclass(frozen=True, slots=True)
class InputSource:
    """Describe where one input comes from.

    Attributes:
        text: what the program writes, such as "self.mask".
        is_attribute: a module, a global or a closure holds it: the same object in each call, until the program puts
            another there. Else it is passed with each call.
        is_compared: its bytes are compared in each call, which shows every write, whatever code made it.
    """

    text: str
    is_attribute: bool = False
    is_compared: bool = False


VALUE_GUARD_LIMIT_BYTES = 2**20
"""Up to here comparing costs the host less than sending. What is larger is sent in each call."""


def input_sources(graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, InputSource]:
    """Return the source of each placeholder and of each tensor that `get_attr` reads, by node name."""
    sources: dict[str, InputSource] = {}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=True):
        sources[node.name] = _placeholder_source(node, example)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":  # nothing that Dynamo makes; it is sent in each call
            sources[node.name] = InputSource(str(node.target), is_attribute=True)
    return sources


def _placeholder_source(node: torch.fx.Node, example: Any) -> InputSource:
    source = torch_internals.dynamo_source(node)
    if source is None:
        return InputSource(str(node.target))
    if not stays_between_calls(source):
        return InputSource(as_in_program(source.name))
    # Dynamo notes a tensor's own attributes for tensors only: what has none came as a number or a NumPy array.
    is_compared = _can_be_compared(example, made_per_call="tensor_dict" not in node.meta)
    return InputSource(as_in_program(source.name), is_attribute=True, is_compared=is_compared)


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


def _can_be_compared(example: Any, *, made_per_call: bool) -> bool:
    if not isinstance(example, torch.Tensor) or example.layout is not torch.strided:
        return False
    if example.dim() == 0:
        return True
    if made_per_call and not example.is_contiguous():
        # A new tensor in each call has the strides of what it was made of.
        return False
    size = size_bytes(example)
    return isinstance(size, int) and size <= VALUE_GUARD_LIMIT_BYTES
