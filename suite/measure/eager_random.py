"""Make compiled programs draw the random numbers that eager draws, so that the two can be compared.

With Inductor's `fallback_random` a compiled program calls PyTorch's own random operators. Each takes the next numbers
of the device's generator, so it gets eager's numbers only if all are called in eager's order. Inductor does not see to
that: a call has no inputs that would tie it to the one before. In inference it moves operators next to their users
(`reorder_for_locality`), and in any program it orders kernels by the memory they need (`reorder_for_peak_memory`, the
default). DALLE2 draws the noise of its second network before the last of the first one then, and its pictures have
nothing to do with eager's. Here each call is made to wait for the one before.

Note [Attention that drops]: the kernels of `scaled_dot_product_attention` draw other numbers, each in its own way, and
a compiled program may run a different one. Encoders of transformers 5 pass no mask in eager, where a GPU runs a
fused kernel (cuDNN's on an H200). While Dynamo traces them they pass a mask that hides nothing, and is expanded along
the keys. No fused kernel takes that, so compiled code computes attention from single operators (DistilBERT, CamemBERT
and ELECTRA: their gradients were off by half and more). Single operators take any mask, and their dropout is the usual
one. So both sides of a comparison are kept to them while they train.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimizations import torch_internals
from optimizations.torch_internals.cpu_results import SETTING, pass_after


@contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Make what is compiled inside the block draw eager's random numbers, in eager's order."""
    config = torch_internals.inductor_config
    settings = {
        "fallback_random": True,
        "reorder_for_locality": False,  # it runs before the pass, which would keep its order
        SETTING: pass_after(getattr(config, SETTING), "encore: draws in order, 1", keep_order_of_draws),
    }
    with config.patch(settings):
        yield


@contextmanager
def attention_that_drops_alike() -> Iterator[None]:
    """Make attention drop the same elements in eager and in what is compiled in the block, with a mask or without."""
    with sdpa_kernel(SDPBackend.MATH):
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
    """Return the share that attention is asked to drop; None of other operators. It draws nothing where that is 0."""
    for place, parameter in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else parameter.default_value
            return node.kwargs.get(parameter.name, given)
    return None


def _result_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return a tensor that is there once `node` has run; of several results a used one, moved right after it.

    None where no result is used: nothing can wait for it.
    """
    if isinstance(node.meta.get("val"), torch.Tensor):
        return node
    used = next((one for one in node.users if one.target is operator.getitem and one.users), None)
    if used is not None:
        node.append(used)
    return used
