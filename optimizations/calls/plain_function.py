"""Forward and backward of AOTAutograd's autograd function, for trained graphs that need nothing special of it.

AOTAutograd puts an `autograd.Function` around a compiled forward and its backward. Its two methods serve any graph:
sizes that differ from call to call, random states, aliases, subclasses of tensors and so on, and look for each of them
in every call. For a graph that has none of these, what is left is little: save what the backward reads, mark results
without gradients, bring tangents to the strides that the backward was compiled for. That is what stands here. The class
stays PyTorch's, as do its attributes that others read (compiled autograd); what is met seldom goes to its own methods,
before anything was done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals.wrappers import Plain, plain_function


def lead_straight(function: Any, *, autocast_off: bool) -> Callable[..., Any]:
    """Give an autograd function the methods of this module if its graph needs no more. Returns what to call: `apply`.

    Its `compiled_fw` takes a list, as Inductor's do. `autocast_off`: as at compile time; the caller switches it off for
    forwards.
    """
    plain = plain_function(function)
    if plain is not None:
        function.forward = staticmethod(_forward(function, plain))
        function.backward = staticmethod(_backward(function, plain, function.backward, autocast_off=autocast_off))
    return _apply(function)


def _apply(function: Any) -> Callable[..., Any]:
    """As `torch.autograd.Function.apply`, which looks through all arguments for what functorch left behind.

    Dynamo's guards compare the keys of tensors, and those of such a wrapper are others. So arguments that held none in
    the first call hold none later.
    """
    stock, straight = function.apply, super(torch.autograd.Function, function).apply
    transformed, unwrapped = torch_internals.are_functorch_transforms_active, torch_internals.unwrap_dead_wrappers
    looked = False

    def apply(*arguments: Any) -> Any:
        nonlocal looked
        if transformed():
            return stock(*arguments)
        if not looked:
            if any(one is not other for one, other in zip(arguments, unwrapped(arguments), strict=True)):
                return stock(*arguments)
            looked = True
        return straight(*arguments)

    return apply


def _forward(function: Any, plain: Plain) -> Callable[..., Any]:
    checked, unchecked, returned = plain.saved_with_check, plain.saved_without_check, plain.returned
    without_gradient = plain.without_gradient

    def forward(ctx: Any, *arguments: Any) -> tuple[Any, ...]:
        outputs = function.compiled_fw([*arguments])
        if not isinstance(outputs, (list, tuple)):
            outputs = [outputs]
        # Detached for the reason that PyTorch gives in its Note [Detaching saved tensors in AOTAutograd].
        ctx.save_for_backward(*[one.detach() if one._is_view() else one for one in outputs[checked]])
        ctx._tensors_no_vc_check = [one.detach() if one._is_view() else one for one in outputs[unchecked]]
        ctx.symints, ctx.opaque_objects = [], []
        if without_gradient:
            ctx.mark_non_differentiable(*[outputs[place] for place in without_gradient])
        ctx._materialize_non_diff_grads = False
        return tuple(outputs[:returned])

    return forward


def _backward(function: Any, plain: Plain, stock: Callable[..., Any], *, autocast_off: bool) -> Callable[..., Any]:
    tangents_of, count, sets_determinism = plain.tangents, plain.returned, plain.compiled_for_nondeterminism
    grad_enabled, deterministic = torch.is_grad_enabled, torch.are_deterministic_algorithms_enabled
    keeps_graph, transforms = torch_internals.graph_task_keeps_graph, torch_internals.functorch_level
    coerced, without_autocast = torch_internals.coerce_to_expected_memory_format, torch_internals.DisableAutocast

    def backward(ctx: Any, *tangents: Any) -> Any:
        compiled = function.compiled_bw
        if (
            compiled is None  # it is compiled now
            or not getattr(compiled, "_boxed_call", False)
            or grad_enabled()  # under create_graph=True
            or keeps_graph()  # under retain_graph=True
            or transforms() is not None
            or (sets_determinism and deterministic())
            or len(tangents) != count
        ):
            return stock(ctx, *tangents)
        given: list[Any] = []
        for place, memory_format in tangents_of:
            tangent = tangents[place]
            if type(tangent) is not torch.Tensor:
                return stock(ctx, *tangents)
            given.append(coerced(tangent, memory_format))
        arguments = [*ctx.saved_tensors, *ctx._tensors_no_vc_check, *given]
        given.clear()  # the backward lets go of a copy as soon as it has read it
        ctx.maybe_clear_saved_tensors()
        if autocast_off:
            with without_autocast():
                outputs = compiled(arguments)
        else:
            outputs = compiled(arguments)
        return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)

    # Dynamo looks into no file of PyTorch's, but into this one, where a compiled frame calls a backward.
    torch_internals.skip_code(backward.__code__)
    return backward
