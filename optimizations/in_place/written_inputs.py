"""Inputs that a generated function writes and that Inductor does not name as written, read from its source.

Inductor knows of a write by the name of the buffer that is written. Where it leaves a view to an operator (views of
complex tensors, `torch._inductor.config.fallback_by_default`) the view is a buffer of its own, and a write to it is not
taken for one to the input: `x[1].mul_(2)` of a complex `x`. CUDA graphs that believe this write a placeholder, and the
caller's tensor stays as it was. So the views that operators make are followed here, by their schemas.

Note [Memory that is taken over]. `buf1 = arg0_1` gives the memory of a dead input to a result. What is written there is
not the input any more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from optimizations import torch_internals

Memory = frozenset[int]
"""Positions of the inputs whose memory something lies in."""

_NONE: Memory = frozenset()

_VIEWS = frozenset(("view", "to"))
"""Methods of tensors in generated code whose results may lie in the tensor's memory."""


def written_through_views(definition: ast.FunctionDef, inputs: Mapping[str, int]) -> Memory:
    """Positions of inputs that operators write, in a function's syntax tree; `inputs` are the positions by name."""
    writes = _Writes(inputs)
    writes.visit(definition)
    return frozenset(writes.written)


class _Writes(ast.NodeVisitor):
    """Follows the memory of inputs through straight-line code. `written`: the inputs that are written so far."""

    def __init__(self, inputs: Mapping[str, int]) -> None:
        self.written: set[int] = set()
        self._inputs = inputs
        self._memory: dict[str, Memory] = {name: frozenset((position,)) for name, position in inputs.items()}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        value = node.value
        if isinstance(value, ast.Name) and value.id == "args":
            return
        # Note [Memory that is taken over]
        taken_over = isinstance(value, ast.Name) and value.id in self._inputs
        memory = _NONE if taken_over or _is_other_memory(value) else self._memory_of(value)
        for target in node.targets:
            for name in ast.walk(target):
                if isinstance(name, ast.Name):
                    self._memory[name.id] = memory

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        for parameter, value in _given(node):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                self.written |= self._memory_of(value)

    def _memory_of(self, value: ast.expr) -> Memory:
        if isinstance(value, ast.Name):
            return self._memory.get(value.id, _NONE)
        if isinstance(value, ast.Subscript):
            return self._memory_of(value.value)
        if isinstance(value, (ast.List, ast.Tuple)):
            return _NONE.union(*map(self._memory_of, value.elts))
        if isinstance(value, ast.Call):
            if _name(value.func) == "reinterpret_tensor" and value.args:
                return self._memory_of(value.args[0])
            if isinstance(value.func, ast.Attribute) and value.func.attr in _VIEWS:
                return self._memory_of(value.func.value)
            shared = [one for parameter, one in _given(value) if parameter.alias_info is not None]
            return _NONE.union(*map(self._memory_of, shared))
        return _NONE


def _is_other_memory(value: ast.expr) -> bool:
    """Whether it is a dead buffer in another shape, as a result gets it."""
    return isinstance(value, ast.Call) and _name(value.func) == "reinterpret_tensor"


def _given(call: ast.Call) -> Iterator[tuple[Any, ast.expr]]:
    """The parameters of an operator's schema with what a call passes; nothing where no operator is called."""
    operator = _operator(_name(call.func))
    if operator is None:
        return
    parameters = operator._schema.arguments
    by_name = {parameter.name: parameter for parameter in parameters}
    positional = [parameter for parameter in parameters if not parameter.kwarg_only]
    yield from zip(positional, call.args, strict=False)
    yield from ((by_name[one.arg], one.value) for one in call.keywords if one.arg in by_name)


def _operator(name: str) -> Any:
    """`torch.ops.aten.slice.Tensor`, or as generated code shortens it, `aten.slice.Tensor`."""
    parts = name.removeprefix("torch.ops.").split(".")
    if not name.startswith(("torch.ops.", "aten.")) or len(parts) != 3:
        return None
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
    return found if isinstance(found, torch_internals.OpOverload) else None


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""
