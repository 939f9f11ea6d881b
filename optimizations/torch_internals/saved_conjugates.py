"""Save conjugates and negatives for a backward as tensors of their own, and not as lazy views.

Operators on complex tensors need conjugates backward. `aten._conj` and `aten._neg_view` copy nothing: they return the
memory with a flag. AOTAutograd's partitioner saves the flagged tensor. But a graph keeps only the memory of a result,
so the forward of a complex multiplication would have no graph. So the forward computes what the flag stands for.

`torch._inductor.compile_fx.partition_fn(joint, inputs, num_fwd_outputs=, ...)` returns the graphs of forward and
backward. The forward's results from `num_fwd_outputs` on are saved; the backward's placeholders have their names.
Checked on PyTorch 2.11.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals

_COMPUTED = {
    torch_internals.conj_operator: torch.ops.aten.conj_physical.default,
    torch_internals.neg_operator: torch.ops.aten.neg.default,
}
"""The operators that compute conjugates and negatives, by those that return them as lazy views."""


def saving_without_flags(partition: Callable[..., Any]) -> Callable[..., Any]:
    """Return `partition_fn`, whose forwards save no flagged tensor."""

    @functools.wraps(partition)
    def partition_fn(*arguments: Any, **settings: Any) -> Any:
        forward, backward = partition(*arguments, **settings)
        (output,) = forward.graph.find_nodes(op="output")
        placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
        returned = list(output.args[0])
        for place, node in enumerate(returned):
            computed = _COMPUTED.get(getattr(node, "target", None))
            if place < settings["num_fwd_outputs"] or computed is None or node.name not in placeholders:
                continue
            with forward.graph.inserting_after(node):
                returned[place] = forward.graph.call_function(computed, node.args)
            for one in (returned[place], placeholders[node.name]):
                one.meta = {**node.meta, "val": computed(node.args[0].meta["val"]), "tensor_meta": None}
        output.args = (type(output.args[0])(returned),)
        forward.recompile()
        return forward, backward

    return partition_fn
