"""Gradients of tensors whose GPU is not there: what autograd's engine does, written in Python.

AOTAutograd finds a backward graph by differentiating while it traces. PyTorch's engine begins by asking for the current
stream of each device that the tensors are on, which fails without a driver. What else it does is little: it calls the
nodes of the recorded graph, adds up what comes together, and hands out the gradients that were asked for. This module
does it in the same order, so that the traced graph is the same, node by node.

Note [What the engine does]. A node is called once everything is there that leads to it, and of those that can be
called the one that was recorded last. Only nodes on the way to an input that was asked for are called. What a node
gives is reduced to the shape and cast to the dtype of the tensor that it is the gradient of. Hooks are not called: in
what AOTAutograd differentiates there are none but those by which it notes the line that a node comes from, and these
notes are taken here.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from optimizations import torch_internals
from optimizations.torch_internals import autograd_graph


def gradients(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor] = (),
    *_: Any,
    **settings: Any,
) -> tuple[Tensor | None, ...]:
    """In place of the engine's `run_backward`: the gradient of each of the inputs; None where no output leads to it.

    Raises:
        NotImplementedError: gradients are to be left in tensors, as `Tensor.backward` does.
    """
    if settings.get("accumulate_grad") or not inputs:
        raise NotImplementedError("gradients that are left in tensors")
    roots = [get_gradient_edge(output) for output in outputs]
    asked: dict[Any, list[tuple[int, int]]] = {}
    for place, edge in enumerate(map(get_gradient_edge, inputs)):
        asked.setdefault(edge.node, []).append((edge.output_nr, place))
    called: set[Any] = set()
    for node in _from_the_leaves([root.node for root in roots]):
        if any(earlier in called or earlier in asked for earlier, _ in node.next_functions):
            called.add(node)
    wanted = called | asked.keys()
    missing = Counter(earlier for node in called for earlier, _ in node.next_functions if earlier in wanted)

    found: list[Tensor | None] = [None] * len(inputs)
    given: dict[Any, list[Tensor | None]] = {}
    for root, gradient in zip(roots, output_gradients, strict=True):
        if root.node in wanted and gradient is not None:
            _add(given, root.node, root.output_nr, _conform(gradient, root.node, root.output_nr))
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
    return tuple(found)


def _from_the_leaves(roots: Sequence[Any]) -> Iterator[Any]:
    """Everything that leads to these nodes, each behind those that lead to it."""
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
    before = held[position]
    held[position] = gradient if before is None else before + gradient


def _call(node: Any, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What a node gives each of its `next_functions`."""
    if isinstance(node, BackwardCFunction):
        outgoing = _call_function(node, incoming)
    else:
        result = node(*incoming)
        outgoing = list(result) if isinstance(result, tuple) else [result]
    return [
        None if gradient is None or earlier is None else _conform(gradient, earlier, position)
        for gradient, (earlier, position) in zip(outgoing, node.next_functions, strict=True)
    ]


def _call_function(node: Any, incoming: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The backward of an `autograd.Function`: given zeros where there is no gradient, it returns one per argument."""
    whole = [
        torch.zeros(result.shape, dtype=result.dtype, device=result.device) if gradient is None else gradient
        for gradient, result in zip(incoming, autograd_graph.results(node), strict=True)
    ]
    returned = node.apply(*whole)
    if not isinstance(returned, tuple):
        returned = (returned,)
    of_tensors = iter([each for each, needed in zip(returned, node.needs_input_grad, strict=False) if needed])
    return [None if earlier is None else next(of_tensors) for earlier, _ in node.next_functions]


def _conform(gradient: Tensor, node: Any, position: int) -> Tensor:
    """A gradient in the shape and dtype of what it is the gradient of."""
    result = autograd_graph.results(node)[position]
    if tuple(gradient.shape) != tuple(result.shape):
        gradient = gradient.sum_to_size(result.shape)
    return gradient if gradient.dtype == result.dtype else gradient.to(result.dtype)


@contextlib.contextmanager
def _lines_noted() -> Iterator[Callable[[Any], contextlib.AbstractContextManager[None]]]:
    """Yields what surrounds the call of a node, so that what is traced in it has the line that the node comes from.

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
