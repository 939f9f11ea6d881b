"""Change what Dynamo's generated code loads and passes when it calls a compiled graph.

Dynamo makes the call from the placeholders of the graph it is tracing, each of which notes the source that the bytecode
loads, and it does so after the backend has returned (`OutputGraph.compile_and_call_fx_graph`). While the backend runs,
the graph it was given may therefore be replaced by another one with other placeholders. Guards are made from sources
that were noted during tracing, not from placeholders: they stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx

from optimizations import torch_internals

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""Where a module keeps what Dynamo lifts out of it, in the names of `torch.nn.Module`."""


def tracing_of(graph_module: torch.fx.GraphModule) -> Any | None:
    """Return Dynamo's record of the trace for `graph_module`, or None where its call cannot be changed.

    None stands for a graph that Dynamo does not call itself: a part of one (what DDP's splitting makes), a copy, a
    graph traced by something else, or one whose call is made for a file or for several specializations of a size.
    """
    local = torch_internals.dynamo_thread_state
    output = getattr(getattr(local, "current_tx", None), "output", None)
    if output is None or output.graph is not graph_module.graph:
        return None
    specialized = output.tracing_context.fake_mode.shape_env
    if specialized is None or specialized.specializations:
        return None
    if output.export or output.package is not None or output.current_tracer.parent is not None:
        return None
    return output


def pass_instead(output: Any, kept: Sequence[torch.fx.Node], roots: Sequence[Any]) -> None:
    """Let Dynamo's call pass the arguments of the placeholders `kept` and, after them, what `roots` (sources) load.

    The graph module that the backend was given stays whole and callable with all its arguments.
    """
    graph = torch.fx.Graph()
    for node in kept:
        argument = graph.placeholder(node.name)
        argument.meta["grapharg"] = node.meta["grapharg"]
    for number, source in enumerate(roots):
        argument = graph.placeholder(f"encore_root_{number}")
        argument.meta["grapharg"] = torch_internals.GraphArg(source, None, False, None, is_tensor=False)
    traced = output.graph
    output.graph = graph
    # Dynamo lets go of the examples of the graph it has when it is done, and that is no longer this one.
    for node in traced.find_nodes(op="placeholder"):
        del node.meta["grapharg"]


def held_by_module(source: Any) -> tuple[Any, tuple[str, ...], str, str] | None:
    """Return how a module holds the tensor with this source; None where it is no parameter or buffer of a module.

    Returns the source of the outermost module that can be walked from, the names of the submodules from there, the
    dictionary (`PARAMETERS` or `BUFFERS`) of the last one, and the name in it. Modules of FSDP exchange their
    parameters in each call and are not walked.
    """
    found = _entry(source, PARAMETERS, BUFFERS)
    if found is None:
        return None
    module, dictionary, name = found
    names: list[str] = []
    while isinstance(module, torch_internals.dynamo_source_kinds.UnspecializedNNModuleSource):
        inner = _entry(module.base, MODULES)
        if inner is None:
            return module, tuple(reversed(names)), dictionary, name
        module, _, child = inner
        names.append(child)
    return None


def _entry(source: Any, *dictionaries: str) -> tuple[Any, str, str] | None:
    """Return owner, attribute and key, if the source is an entry of such a dictionary."""
    kinds = torch_internals.dynamo_source_kinds
    if not isinstance(source, kinds.DictGetItemSource) or not isinstance(source.index, str):
        return None
    holder = source.base
    is_held = isinstance(holder, kinds.AttrSource) and holder.member in dictionaries
    return (holder.base, holder.member, source.index) if is_held else None
