"""Save the base of a lazy conjugate or negative for a backward, and take the view of it in the backward.

Operators on complex tensors need conjugates backward. `aten._conj` and `aten._neg_view` copy nothing: they return the
memory with a flag. AOTAutograd's partitioner saves the flagged tensor. But a graph keeps only the memory of a result,
so the forward of a complex multiplication would have no graph. Here the forward returns the tensor without the flag,
which has the same memory and geometry, and the backward begins with the view.

`torch._inductor.compile_fx.partition_fn(joint, inputs, num_fwd_outputs=, ...)` returns the graphs of forward and
backward. The forward's results from `num_fwd_outputs` on are saved; the backward's placeholders have their names.
Checked on PyTorch 2.11.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals

_VIEWS = (torch_internals.conj_operator, torch_internals.neg_operator)

_NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"
"""The partitioner sets this mark on saved tensors that it puts after the others."""


def saving_without_flags(partition: Callable[..., Any]) -> Callable[..., Any]:
    """Return `partition_fn`, whose forwards save no flagged tensor."""

    @functools.wraps(partition)
    def partition_fn(*arguments: Any, **settings: Any) -> Any:
        forward, backward = partition(*arguments, **settings)
        _save_without_flags(forward, backward, settings["num_fwd_outputs"])
        return forward, backward

    return partition_fn


def _save_without_flags(forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, results: int) -> None:
    """Change the graphs of a forward with so many results, and of its backward."""
    (output,) = forward.graph.find_nodes(op="output")
    returned = output.args[0]
    saved = list(returned[results:])
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    first = next(node for node in backward.graph.nodes if node.op != "placeholder")
    for node in returned[results:]:
        plain = _without_flag(node)
        placeholder = placeholders.get(node.name) if plain is not None else None
        if plain is None or placeholder is None or saved.count(node) != 1:
            continue
        of = placeholders[plain.name] if plain in saved and plain.name in placeholders else placeholder
        with backward.graph.inserting_before(first):
            view = backward.graph.call_function(node.target, (of,))
        view.meta = dict(placeholder.meta)
        placeholder.replace_all_uses_with(view, delete_user_cb=functools.partial(operator.is_not, view))
        if of is placeholder:
            saved[saved.index(node)] = plain
            placeholder.meta = {**placeholder.meta, "val": plain.meta["val"]}
            placeholder.meta.pop("tensor_meta", None)
        else:  # it is saved as well
            saved.remove(node)
            backward.graph.erase_node(placeholder)
    if saved != list(returned[results:]):
        output.args = (type(returned)((*returned[:results], *saved)),)
        forward.graph.eliminate_dead_code()
        forward.recompile()
        backward.recompile()


def _without_flag(node: Any) -> torch.fx.Node | None:
    """Return the base of a flagged view; None for other nodes, and for saved tensors with an order of their own."""
    if not isinstance(node, torch.fx.Node) or node.target not in _VIEWS:
        return None
    plain = node.args[0]
    assert isinstance(plain, torch.fx.Node)
    value = plain.meta.get("val")
    flagged = not isinstance(value, torch.Tensor) or value.is_conj() or value.is_neg()
    return None if flagged or _NO_VERSION_CHECK in node.meta or _NO_VERSION_CHECK in plain.meta else plain
