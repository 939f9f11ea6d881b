"""Compute gradients of tensors without their GPU, as autograd's engine does, but in Python.

AOTAutograd traces a backward graph by differentiating. PyTorch's engine first queries the current stream of each
device of the tensors, which fails without a driver. The rest of the engine is small: it calls the nodes of the
autograd graph, sums gradients that reach the same node, and returns the requested gradients. This module does the
same in the same order, so that the traced graph is equal, node by node.

Note [What the engine does]. A node is ready when all gradients of its results are computed. Of the ready nodes the one
that was recorded last is called first. Only nodes on a path to a requested input are called. Each gradient is reduced
to the shape and cast to the dtype of its tensor. Hooks are not called: AOTAutograd installs only those that record the
source line of a node, and this module records the lines itself.
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
    """Replace `torch.autograd.grad` by `gradients` while the block runs."""
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
    """Return the node that receives the gradient of a tensor; None for a leaf that is not among the `leaves`.

    `get_gradient_edge` is not used, because it applies an operator to the tensor: for a tensor wrapped by `torch.func`
    this would return the node of the wrapped tensor.
    """
    if isinstance(tensor, GradientEdge):
        return tensor.node
    if not tensor.requires_grad:
        raise RuntimeError("one of the tensors does not require grad and does not have a grad_fn")
    return leaves.get(id(tensor)) if tensor.grad_fn is None else tensor.grad_fn


def _from_the_leaves(roots: Sequence[Any]) -> Iterator[Any]:
    """Yield all predecessors of these nodes in topological order."""
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

    A missing gradient is passed as zeros, or as None after `set_materialize_grads(False)`. Returned values beyond the
    number of arguments must be None.
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
    """Return zeros like a result; None for a result without gradients, whose shape autograd does not store."""
    if (tuple(result.shape), result.dtype, result.device.type) == ((), torch.get_default_dtype(), "cpu"):
        return None
    zeros: Tensor = torch.ops.aten.zeros.default(
        list(result.shape), dtype=result.dtype, layout=torch.strided, device=result.device
    )
    return zeros


def _conform(gradient: Tensor, result: Any) -> Tensor:
    """Return a gradient in the shape and dtype of the result that it belongs to."""
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
