"""Bind arguments of a graph: Encore keeps them from an earlier call, and Dynamo's bytecode does not load them.

Dynamo lifts parameters and buffers out of modules and loads each of them in every call. With a binding the bytecode
loads only the module (the *root*), and `calls.bound` fills in its parameters and buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx

from optimizations import torch_internals
from optimizations.report import BindingReport
from optimizations.torch_internals.dynamo_call import PARAMETERS, held_by_module, pass_instead, tracing_of
from optimizations.torch_internals.identity_guard import HeldTensors


@dataclass(frozen=True, slots=True)
class Binding:
    """Describe which arguments a call passes, and which are bound.

    Attributes:
        arguments: number of arguments that the compiled graph takes.
        passed: positions among them that a call still passes, in order.
        roots: the tensors of each root; indices are positions among the graph's arguments. A call passes the roots
            after the other arguments, in this order.
    """

    arguments: int
    passed: tuple[int, ...]
    roots: tuple[HeldTensors, ...]

    @property
    def given(self) -> int:
        """Return the number of arguments of a call."""
        return len(self.passed) + len(self.roots)


def bind(graph_module: torch.fx.GraphModule) -> tuple[Binding | None, BindingReport]:
    """Remove parameters and buffers of modules from the call that Dynamo is about to generate for a graph.

    A backend calls this while it compiles the graph. Returns None if nothing is removed, with the reason in the report.
    """
    output = tracing_of(graph_module)
    if output is None:
        return None, BindingReport(0, "Dynamo does not call this graph as it is")
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    held: set[int] = set()
    roots: dict[Any, HeldTensors] = {}
    for position, node in enumerate(placeholders):
        found = held_by_module(torch_internals.dynamo_source(node))
        if found is not None and torch_internals.static_input_type(node) is not None:
            root, modules, dictionary, name = found
            module = roots.setdefault(root, HeldTensors())
            for inner in modules:
                module = module.modules.setdefault(inner, HeldTensors())
            (module.parameters if dictionary == PARAMETERS else module.buffers)[name] = position
            held.add(position)
    if len(held) <= len(roots):
        return None, BindingReport(0, "loading the modules would cost as much as loading what they hold")
    kept = tuple(position for position in range(len(placeholders)) if position not in held)
    pass_instead(output, [placeholders[position] for position in kept], list(roots))
    return Binding(len(placeholders), kept, tuple(roots.values())), BindingReport(len(held), None)


def fetch(module: Any, held: HeldTensors, into: list[Any]) -> None:
    """Read a module's current tensors, as Dynamo's bytecode would, into their positions in `into`."""
    for name, position in held.parameters.items():
        into[position] = module._parameters[name]
    for name, position in held.buffers.items():
        into[position] = module._buffers[name]
    for name, inner in held.modules.items():
        fetch(module._modules[name], inner, into)
