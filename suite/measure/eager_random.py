"""Make compiled programs draw eager's random numbers, so that the two can be compared.

With Inductor's `fallback_random` a compiled program calls PyTorch's random operators. Each draws the next numbers of
the device's generator, so the numbers are eager's only if the order of calls is eager's. Inductor does not guarantee
this order: a random operator does not depend on the one before. In inference it moves operators next to their users
(`reorder_for_locality`), and in any program it orders kernels by memory use (`reorder_for_peak_memory`, the default).
DALLE2 then draws the noise of its second network before the last noise of the first one, and its images are unrelated
to eager's. So this module adds a dependency of each random operator on the one before.

Note [Attention that drops]: the kernels of `scaled_dot_product_attention` draw random numbers in different ways, and a
compiled program may run a different kernel. Encoders of transformers 5 pass no mask in eager, where a GPU runs a fused
kernel (cuDNN's on an H200). While Dynamo traces them they pass a mask that masks nothing and is expanded along the
keys. No fused kernel supports this, so compiled code computes attention from single operators (DistilBERT, CamemBERT
and ELECTRA: relative errors of gradients were 0.5 and more). Single operators support any mask, with PyTorch's usual
dropout. So in training both sides of a comparison use them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.fx

from optimizations import torch_internals

SETTING = "post_grad_custom_post_pass"
"""Inductor's setting for a pass of the user's, which is part of the key of its cache."""


class OrderOfDraws(torch_internals.CustomGraphPass):
    """Keep the order of random operators. Compile processes import this class by its name."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        keep_order_of_draws(graph)

    def uuid(self) -> str:
        """Return the pass's part of the key of Inductor's cache."""
        return "encore: draws in order, 1"


@contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Make code that is compiled inside the block draw eager's random numbers, in eager's order."""
    config = torch_internals.inductor_config
    settings = {
        "fallback_random": True,
        "reorder_for_locality": False,  # it runs before the pass, which would keep its order
        SETTING: OrderOfDraws(),
    }
    with config.patch(settings):
        yield


def keep_order_of_draws(graph: torch.fx.Graph) -> None:
    """Make each random operator of a graph depend on the one before."""
    drawn = [node for node in graph.nodes if _draws(node)]
    waits = {after: [tensor] for before, after in pairwise(drawn) if (tensor := _result_of(before)) is not None}
    torch_internals.preserve_node_ordering(graph, waits)


def _draws(node: torch.fx.Node) -> bool:
    tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
    return torch.Tag.nondeterministic_seeded in tags and _dropped_share(node) != 0


def _dropped_share(node: torch.fx.Node) -> Any:
    """Return the dropout rate of an attention operator, which draws nothing at 0; None for other operators."""
    for place, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else parameter.default_value
            return node.kwargs.get(parameter.name, given)
    return None


def _result_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return a result of `node`; of several results a used one, moved right after the node.

    Return None if no result is used, because nothing can depend on it.
    """
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node
    used = next((one for one in node.users if one.target is operator.getitem and one.users), None)
    if used is not None:
        node.append(used)
    return used
