"""Compute gradients of tensors whose GPU is not there, as autograd's engine does, but in Python.

AOTAutograd finds a backward graph by differentiating while it traces. PyTorch's engine begins by asking for the current
stream of each device that the tensors are on, which fails without a driver. What else it does is little: it calls the
nodes of the recorded graph, adds up what comes together, and returns the gradients that were asked for. This module
does it in the same order, so that the traced graph is the same, node by node.

Note [What the engine does]. A node is called once everything is there that leads to it, and of those that can be called
the one that was recorded last. Only nodes on the way to an input that was asked for are called. What a node gives is
reduced to the shape and cast to the dtype of the tensor that it is the gradient of. Hooks are not called: in what
AOTAutograd differentiates there are none but those by which it notes the line that a node comes from, and these notes
are taken here.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import GradientEdge

from optimizations import torch_internals
from optimizations.torch_internals import autograd_graph

_TAKES_NOTHING = "encore_takes_nothing"
"""Set on the context of an `autograd.Function` whose backward takes None, and not zeros, for a missing gradient."""


@contextlib.contextmanager
def without_engine() -> Iterator[None]:
    """Answer `torch.autograd.grad` by `gradients` while the block runs."""
    method = FunctionCtx.set_materialize_grads

    def noted(context: Any, value: bool) -> None:  # PyTorch has no way to read it
        method(context, value)
        setattr(context, _TAKES_NOTHING, not value)

    with (
        torch_internals.replaced("engine_run_backward", gradients),
        torch_internals.replaced_attribute(FunctionCtx, FunctionCtx.set_materialize_grads.__name__, noted),
    ):
        yield


def gradients(
    outputs: Sequence[Tensor | GradientEdge],
    output_gradients: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor | GradientEdge] = (),
    allow_unused: bool = False,
    **settings: Any,
) -> tuple[Tensor | None, ...]:
    """Stand in for the engine's `run_backward`: return the gradient of each input, None where no output leads to it.

    Raises:
        NotImplementedError: gradients are to be left in tensors, as `Tensor.backward` does.
        RuntimeError: what the engine would say: something does not require gradients, or is not used and has to be.
    """
    if settings.get("accumulate_grad") or not inputs:
        raise NotImplementedError("gradients that are left in tensors")
    nodes = list(_from_the_leaves([node for node in map(_node, outputs) if node is not None]))
    leaves = {id(node.variable): node for node in nodes if autograd_graph.is_of_leaf(node)}
    asked: dict[Any, list[tuple[int, int]]] = {}
    for place, each in enumerate(inputs):
        if (node := _node(each, leaves)) is not None:
            asked.setdefault(node, []).append((each.output_nr, place))
    called: set[Any] = set()
    for node in nodes:
        if any(earlier in called or earlier in asked for earlier, _ in node.next_functions):
            called.add(node)
    wanted = called | asked.keys()
    missing = Counter(earlier for node in called for earlier, _ in node.next_functions if earlier in wanted)

    found: list[Tensor | None] = [None] * len(inputs)
    given: dict[Any, list[Tensor | None]] = {}
    for output, gradient in zip(outputs, output_gradients, strict=True):
        if gradient is None:
            continue
        if (node := _node(output, leaves)) is None:  # a leaf that nothing else leads to
            for place, each in enumerate(inputs):
                if each is output:
                    found[place] = _sum(found[place], _conform(gradient, output))
        elif node in wanted:
            result = autograd_graph.results(node)[output.output_nr]
            _add(given, node, output.output_nr, _conform(gradient, result))
    order = count()
    ready = [(-autograd_graph.number(node), next(order), node) for node in given if not missing[node]]
    heapq.heapify(ready)
    with torch.set_grad_enabled(create_graph), _lines_noted() as note:
        while ready:
            node = heapq.heappop(ready)[-1]
            incoming = given.pop(node, None) or [None] * len(autograd_graph.results(node))
            for position, place in asked.get(node, ()):
                found[place] = incoming[position]
            if node not in called:
                continue
            with note(node):
                outgoing = _call(node, incoming)
            for (earlier, position), gradient in zip(node.next_functions, outgoing, strict=True):
                if earlier not in wanted:
                    continue
                if gradient is not None:
                    _add(given, earlier, position, gradient)
                missing[earlier] -= 1
                if not missing[earlier]:
                    heapq.heappush(ready, (-autograd_graph.number(earlier), next(order), earlier))
    if not allow_unused and any(gradient is None for gradient in found):
        raise RuntimeError("one of the differentiated tensors appears to not have been used in the graph")
    return tuple(found)


def _node(tensor: Any, leaves: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Return the node that the gradient of a tensor is given to; None for a leaf that is not among the `leaves`.

    It is not looked for by doing something to the tensor, as `get_gradient_edge` does: what `torch.func` has wrapped
    would give the node of what is inside.
    """
    if isinstance(tensor, GradientEdge):
        return tensor.node
    if not tensor.requires_grad:
        raise RuntimeError("one of the tensors does not require grad and does not have a grad_fn")
    return leaves.get(id(tensor)) if tensor.grad_fn is None else tensor.grad_fn


def _from_the_leaves(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield everything that leads to these nodes, each after those that lead to it."""
    seen: set[Any] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(root.next_functions))]
        while path:
            node, rest = path[-1]
            for earlier, _ in rest:
                if earlier is not None and earlier not in seen:
                    seen.add(earlier)
                    path.append((earlier, iter(earlier.next_functions)))
                    break
            else:
                path.pop()
                yield node


def _add(given: dict[Any, list[Tensor | None]], node: Any, position: int, gradient: Tensor) -> None:
    held = given.setdefault(node, [None] * len(autograd_graph.results(node)))
    held[position] = _sum(held[position], gradient)


def _sum(before: Tensor | None, gradient: Tensor) -> Tensor:
    return gradient if before is None else before + gradient


def _call(node: Any, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return what a node gives each of its `next_functions`."""
    if isinstance(node, BackwardCFunction):
        outgoing = _call_function(node, incoming)
    else:
        result = node(*incoming)
        outgoing = list(result) if isinstance(result, tuple) else [result]
    return [
        None if gradient is None or earlier is None else _conform(gradient, autograd_graph.results(earlier)[position])
        for gradient, (earlier, position) in zip(outgoing, node.next_functions, strict=True)
    ]


def _call_function(node: Any, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Call the backward of an `autograd.Function`, which returns a gradient for each argument of the forward.

    It gets zeros for a missing gradient, or None if the function said `set_materialize_grads(False)`. What it returns
    beyond the number of arguments has to be None.
    """
    if not getattr(node, _TAKES_NOTHING, False):
        incoming = [
            _zeros(result) if gradient is None else gradient
            for gradient, result in zip(incoming, autograd_graph.results(node), strict=True)
        ]
    returned = node.apply(*incoming)
    if not isinstance(returned, tuple):
        returned = (returned,)
    needed = node.needs_input_grad
    if len(returned) < len(needed) or any(each is not None for each in returned[len(needed) :]):
        raise RuntimeError(
            f"function {type(node).__name__} returned an incorrect number of gradients (expected {len(needed)}, "
            f"got {len(returned)})"
        )
    of_tensors = iter([each for each, is_needed in zip(returned, needed, strict=False) if is_needed])
    return [None if earlier is None else next(of_tensors) for earlier, _ in node.next_functions]


def _zeros(result: Any) -> Tensor | None:
    """Return zeros like a result; None for one without gradients, of which autograd keeps no shape."""
    if (tuple(result.shape), result.dtype, result.device.type) == ((), torch.get_default_dtype(), "cpu"):
        return None
    zeros: Tensor = torch.ops.aten.zeros.default(
        list(result.shape), dtype=result.dtype, layout=torch.strided, device=result.device
    )
    return zeros


def _conform(gradient: Tensor, result: Any) -> Tensor:
    """Return a gradient in the shape and dtype of what it is the gradient of."""
    if tuple(gradient.shape) != tuple(result.shape):
        gradient = gradient.sum_to_size(result.shape)
    if gradient.dtype == result.dtype:
        return gradient
    if gradient.is_complex() and not result.dtype.is_complex:
        raise RuntimeError("a complex gradient of a tensor that is not complex")
    return gradient.to(result.dtype)


@contextlib.contextmanager
def _lines_noted() -> Iterator[Callable[[Any], contextlib.AbstractContextManager[None]]]:
    """Yield what surrounds the call of a node, so that what is traced in it has the line that the node comes from.

    AOTAutograd registers hooks for it (`setup_stacktrace_preservation_hooks`).
    """
    notes = torch_internals.fx_traceback
    before = notes.format_stack()

    @contextlib.contextmanager
    def note(node: Any) -> Iterator[None]:
        lines = node.metadata.get("traceback_", [])
        notes.set_stack_trace(lines)
        notes.set_grad_fn_seq_nr(autograd_graph.number(node))
        try:
            yield
        finally:
            notes.set_stack_trace([*lines, notes.GRADIENT_ACC_SPECIAL_STACK])
            notes.reset_grad_fn_seq_nr()

    try:
        yield note
    finally:
        notes.set_stack_trace(before)
