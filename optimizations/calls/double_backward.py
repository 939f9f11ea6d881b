"""Make AOTAutograd refuse gradients of gradients even if a replayed graph hides that an input was saved.

The backward of a compiled function cannot be differentiated again. AOTAutograd raises an error if a tensor that the
forward saved requires a gradient, which is an input saved unchanged. A replayed forward returns such an input as memory
of the graph, which requires none. The gradient would then have no autograd history, and a loss computed from it (a
gradient penalty) would silently lose a term. So the first call of a forward, which runs without a graph, decides: if it
saves an input, a backward under `create_graph=True` gets tangents that require a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals import wrappers


def refuse_double_backwards(function: Any) -> None:
    """Make an autograd function that AOTAutograd created permanently refuse double differentiation."""
    forward, backward = function.forward, function.backward

    def first_forward(ctx: Any, *arguments: Any) -> Any:
        outputs = forward(ctx, *arguments)
        function.forward = staticmethod(forward)
        if _saves_an_input(wrappers.saved_by(ctx), arguments):
            function.backward = staticmethod(connected_backward)
        return outputs

    def connected_backward(ctx: Any, *tangents: Any) -> Any:
        if torch.is_grad_enabled():  # under create_graph=True
            tangents = tuple(map(_requiring_a_gradient, tangents))
        return backward(ctx, *tangents)

    # Dynamo skips PyTorch's files, but traces this one if a compiled frame calls a backward.
    torch_internals.skip_code(connected_backward.__code__)
    torch_internals.skip_code(_requiring_a_gradient.__code__)
    function.forward = staticmethod(first_forward)


def _saves_an_input(saved: Sequence[torch.Tensor], arguments: Sequence[Any]) -> bool:
    """Return whether a saved tensor shares the memory of an argument that requires a gradient."""
    inputs = {
        _memory(argument) for argument in arguments if isinstance(argument, torch.Tensor) and argument.requires_grad
    }
    return any(tensor.requires_grad or _memory(tensor) in inputs for tensor in saved)


def _memory(tensor: torch.Tensor) -> int:
    """Return the id of a tensor's storage, or the tensor's own if it has none (wrapper subclasses, sparse tensors)."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:
        return id(tensor)


def _requiring_a_gradient(tangent: Any) -> Any:
    if not isinstance(tangent, torch.Tensor) or tangent.requires_grad:
        return tangent
    if not (tangent.is_floating_point() or tangent.is_complex()):
        return tangent
    return tangent.detach().requires_grad_()
