"""Calls of a trained graph that avoid wrappers: around AOTAutograd's `autograd.Function`, and inside of it.

The function itself stays PyTorch's, and compiles the backward when it is first needed; `plain_function` has its methods
for graphs that need little of them. What is avoided here lies in front of it (`RuntimeWrapper`), and between it and
what launches: it looks up `compiled_fw` and `compiled_bw` in each call, which then are functions that lead straight
to the one that Inductor made. `shortcut.LAYERS` says what each wrapper does; the same holds here, with these
differences: versions of inputs that the graph writes are counted up, inputs that never need gradients are detached,
gradients are on, and views are tracked as the wrapper has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.calls import plain_function
from optimizations.torch_internals import wrappers


def straight_to(
    function: Any,
    full: Callable[[list[Any]], Any],
    *,
    full_calls: int,
    written: Sequence[int],
    detached: Sequence[int],
    autocast_off: bool,
) -> Callable[[list[Any]], Any]:
    """The function called in place of `full`, AOTAutograd's wrapper around an autograd function.

    Args:
        function: the autograd function; `wrappers.graph_inside` finds a graph in its `compiled_fw`.
        full_calls: calls that go the full way first.
        written: inputs whose versions are counted up, since the graph writes them.
        detached: inputs that never need gradients.
        autocast_off: whether autocast was on at compile time, and is off in the call.
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
                apply = plain_function.lead_straight(function, autocast_off=autocast_off)
        if written:
            increment_version([arguments[index] for index in written])
        for index in detached:
            if isinstance(arguments[index], torch.Tensor):
                arguments[index] = arguments[index].detach()
        replayed, with_grad = view_replay(), grad_enabled()
        try:  # Note [Guards and interrupts] in `torch_internals.apart`
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
    """Let the autograd function call Inductor's function directly. Returns whether this is settled for good."""
    stock = getattr(function, attribute)
    if stock is None:
        return False  # not compiled yet
    graph = wrappers.graph_inside(stock)
    if graph is not None:
        straight: Any = _straight(graph, stock)
        if keep_dynamo_out:  # a backward may be called outside of what Dynamo keeps out of
            straight = _kept_out_of(straight)
        straight._boxed_call = True
        setattr(function, attribute, straight)
    return True


def _kept_out_of(straight: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo does not look into, called without more ado where Dynamo looks into nothing anyway.

    So it is in autograd's threads, and where no compiled frame is under way.
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
