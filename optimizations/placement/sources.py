"""Where the inputs of a Dynamo graph come from: with each call, or from a module or global that stays between calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals


class SourceKind(StrEnum):
    """How long the object behind an input lives."""

    ATTRIBUTE = "attribute"
    """Held by a module, a global or a closure: the same object in each call, until the program puts another there."""
    ARGUMENT = "argument"
    """Passed with each call."""


class Guard(StrEnum):
    """How one can tell in a later call that an attribute still has the value it had."""

    VALUE = "value"
    """Its bytes: for rank 0, and for NumPy's, which are new tensors in each call and count no versions."""
    VERSION = "version"
    """Its address and version counter."""


@dataclass(frozen=True, slots=True)
class InputSource:
    """Source of one input. `text` is how the program reaches it ("L['self'].mask"); `guard` None: it has no guard."""

    kind: SourceKind
    text: str
    guard: Guard | None


VALUE_GUARD_LIMIT_BYTES = 64 * 1024
"""Comparing so many bytes takes a few microseconds; a larger NumPy array goes over with each call instead."""


def input_sources(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> dict[str, InputSource]:
    """The source of each placeholder and of each tensor that `get_attr` reads, by node name."""
    sources: dict[str, InputSource] = {}
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, example_inputs, strict=True):
        sources[node.name] = _placeholder_source(node, example)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            sources[node.name] = InputSource(SourceKind.ATTRIBUTE, str(node.target), Guard.VERSION)
    return sources


def _placeholder_source(node: torch.fx.Node, example: Any) -> InputSource:
    source = torch_internals.dynamo_source(node)
    if source is None:
        return InputSource(SourceKind.ARGUMENT, str(node.target), None)
    if not stays_between_calls(source):
        return InputSource(SourceKind.ARGUMENT, source.name, None)
    return InputSource(SourceKind.ATTRIBUTE, source.name, _guard(node, example))


def stays_between_calls(source: Any) -> bool:
    """Whether an input with this source of Dynamo's is reached through a module, a global or a closure."""
    kind = source.guard_source
    return (
        kind.is_unspecialized_nn_module()
        or kind.is_specialized_nn_module()
        or torch_internals.is_from_global_source(source)
        or torch_internals.is_from_nonlocal_source(source)
    )


def _guard(node: torch.fx.Node, example: Any) -> Guard | None:
    if not isinstance(example, torch.Tensor):
        return None
    # Dynamo notes a tensor's own attributes for tensors only: what has none came as a number or a NumPy array.
    is_made_per_call = "tensor_dict" not in node.meta
    if example.dim() == 0:
        return Guard.VALUE
    if is_made_per_call:
        small = example.is_contiguous() and example.numel() * example.element_size() <= VALUE_GUARD_LIMIT_BYTES
        return Guard.VALUE if small else None
    return None if example.is_inference() else Guard.VERSION
