"""Call trained graphs without the wrappers around and inside of AOTAutograd's `autograd.Function`.

The function remains PyTorch's, and compiles the backward when it is first needed. For a simple graph, its methods are
replaced by those of this module. This skips the wrapper around it (`RuntimeWrapper`) and the wrappers between it and
the launch: it looks up `compiled_fw` and `compiled_bw` in each call, which are replaced by functions that directly call
Inductor's. The conditions in `shortcut` for each wrapper hold here too, with these differences: versions of written
inputs are incremented, inputs that never need gradients are detached, gradients are enabled, and views are tracked as
in the wrapper.

Note [Plain functions]. AOTAutograd wraps a compiled forward and its backward in an `autograd.Function`. Its two methods
support any graph, and check in every call for symbolic sizes, random states, aliases, tensor subclasses and so on. For
a graph that has none of these, little work is left: save the tensors that the backward reads, mark results without
gradients, and restride tangents to the strides that the backward was compiled for. This module does that. The class
remains PyTorch's, as do its attributes that compiled autograd reads. In rare cases its own methods are called, before
anything was done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.torch_internals import wrappers
from optimizations.torch_internals.wrappers import Plain, plain_function


def lead_straight(function: Any, *, autocast_off: bool) -> Callable[..., Any]:
    """Give an autograd function the methods of this module if its graph is simple enough; return its `apply`.

    Its `compiled_fw` takes a list, as Inductor's functions do. `autocast_off`: as at compile time; the caller disables
    autocast for forwards.
    """
    plain = plain_function(function)
    if plain is not None:
        function.forward = staticmethod(_forward(function, plain))
        function.backward = staticmethod(_backward(function, plain, function.backward, autocast_off=autocast_off))
    return _apply(function)


def _apply(function: Any) -> Callable[..., Any]:
    """Return an `apply` that searches arguments for functorch's dead wrappers only until a call has none.

    Such a wrapper has other dispatch keys, and Dynamo's guards compare these. So if no argument of the first call was
    one, no later argument is.
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
        given.clear()  # the backward releases a copy as soon as it has read it
        ctx.maybe_clear_saved_tensors()
        if autocast_off:
            with without_autocast():
                outputs = compiled(arguments)
        else:
            outputs = compiled(arguments)
        return tuple(outputs) if isinstance(outputs, (list, tuple)) else (outputs,)

    # Dynamo skips PyTorch's files, but traces this one if a compiled frame calls a backward.
    torch_internals.skip_code(backward.__code__)
    return backward


def straight_to(
    function: Any,
    full: Callable[[list[Any]], Any],
    *,
    full_calls: int,
    written: Sequence[int],
    detached: Sequence[int],
    autocast_off: bool,
) -> Callable[[list[Any]], Any]:
    """Return the function called in place of `full`, AOTAutograd's wrapper around an autograd function.

    Args:
        function: the autograd function; `wrappers.graph_inside` finds a graph in its `compiled_fw`.
        full_calls: calls that take the slow path first.
        written: inputs whose versions are incremented, because the graph writes them.
        detached: inputs that never need gradients.
        autocast_off: whether autocast was enabled at compile time, and is disabled in the call.
    """
    profiler, debug = torch_internals.autograd_profiler, torch_internals.inductor_debug
    grad_enabled, set_grad_enabled = torch.is_grad_enabled, torch_internals.set_grad_enabled
    view_replay, set_view_replay = torch_internals.is_view_replay_enabled, torch_internals.set_view_replay_enabled
    without_autocast, increment_version = torch_internals.DisableAutocast, torch.autograd.graph.increment_version
    apply: Callable[..., Any] | None = None
    waiting = [("compiled_fw", False), ("compiled_bw", True)]

    def run(arguments: list[Any]) -> Any:
        nonlocal full_calls, apply
        if full_calls or profiler._is_profiler_enabled or debug.RECORD_GRAPH_EXECUTION:
            full_calls = max(0, full_calls - 1)
            return full(arguments)
        if waiting or apply is None:
            waiting[:] = [one for one in waiting if not _led_straight(function, *one)]
            if apply is None:
                apply = lead_straight(function, autocast_off=autocast_off)
        if written:
            increment_version([arguments[index] for index in written])
        for index in detached:
            if isinstance(arguments[index], torch.Tensor):
                arguments[index] = arguments[index].detach()
        replayed, with_grad = view_replay(), grad_enabled()
        try:  # Note [Guards and interrupts] in `trees.liveness`
            set_view_replay(True)
            try:
                if not with_grad:
                    set_grad_enabled(True)
                if autocast_off:
                    with without_autocast():
                        outputs = apply(*arguments)
                else:
                    outputs = apply(*arguments)
            finally:
                if not with_grad:
                    set_grad_enabled(False)
        finally:
            set_view_replay(replayed)
        return list(outputs) if isinstance(outputs, tuple) else outputs

    return run


def _led_straight(function: Any, attribute: str, keep_dynamo_out: bool) -> bool:
    """Make the autograd function call Inductor's function directly; return whether this is final."""
    stock = getattr(function, attribute)
    if stock is None:
        return False  # not compiled yet
    graph = wrappers.graph_inside(stock)
    if graph is not None:
        straight: Any = _straight(graph, stock)
        if keep_dynamo_out:  # a backward may be called where Dynamo traces
            straight = _kept_out_of(straight)
        straight._boxed_call = True
        setattr(function, attribute, straight)
    return True


def _kept_out_of(straight: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo does not trace, and that calls `straight` directly if Dynamo is not active.

    Dynamo is not active in autograd's threads, and outside of compiled frames.
    """
    dynamo_looks = torch_internals.eval_frame_callback
    kept_out: Callable[..., Any] = torch.compiler.disable(straight, reason="as PyTorch does around compiled backwards")

    def run(arguments: list[Any]) -> Any:
        return straight(arguments) if dynamo_looks() is None else kept_out(arguments)

    torch_internals.skip_code(run.__code__)  # this frame alone, without a wrapper
    return run


def _straight(graph: Any, full: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    profiler, debug = torch_internals.autograd_profiler, torch_internals.inductor_debug

    def run(arguments: list[Any]) -> Any:
        if profiler._is_profiler_enabled or debug.RECORD_GRAPH_EXECUTION:
            return full(arguments)
        return graph.current_callable(arguments)

    return run
