"""Read the graph that autograd recorded of a function: leaves, older tensors, and what its backward reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from optimizations import torch_internals

_RAW = "_raw_saved_"
"""How attributes of a node begin that hold what it saved for its backward, not unpacked."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Hold what autograd recorded of a function.

    `leaves`: tensors that collect gradients. `older`: whether it goes on to what was computed before the function ran.
    `saved`: addresses of the storages that its backward reads, if asked for, but what others' hooks save (checkpoints).
    """

    leaves: tuple[torch.Tensor, ...]
    older: bool
    saved: frozenset[int]


def next_number() -> int:
    """Return the lowest number of nodes of autograd that this thread makes from now on."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    return number(node) + 1


def number(node: Any) -> int:
    """Return the number of a node of autograd from its recording; nodes of leaves have the highest number."""
    return int(node._sequence_nr())


def is_of_leaf(node: Any) -> bool:
    """Return whether a node of autograd adds to the gradient of a leaf, its `variable`. A custom function may have a
    `variable` too, but has nodes before it."""
    return not node.next_functions and hasattr(node, "variable")


def results(node: Any) -> Sequence[Any]:
    """Return `shape`, `dtype` and `device` of each tensor that a node of autograd was recorded for."""
    described: Sequence[Any] = node._input_metadata
    return described


def recorded_of(outputs: Iterable[torch.Tensor], since: int, *, saved_too: bool) -> Recorded:
    """Return what autograd recorded for these results of a function that began at `since` (`next_number`).

    With `saved_too` the nodes' saved tensors are looked at. None is computed again for it, as one of a checkpoint would
    be.
    """
    leaves: dict[int, torch.Tensor] = {}
    saved: set[int] = set()
    waiting: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append(output.grad_fn)
        elif output.requires_grad:
            leaves[id(output)] = output
    seen: set[Any] = set()
    older = False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        elif number(node) < since:
            older = True
        else:
            if saved_too:
                with torch_internals.disable_current_modes():  # some do not take saved numbers
                    saved |= set(_saved_by(node))
            waiting += [before for before, _ in node.next_functions]
    return Recorded(tuple(leaves.values()), older, frozenset(saved))


def depending_on(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> list[frozenset[int]]:
    """Return for each of the leaves the indices of the outputs whose backward leads to it."""
    found: dict[int, set[int]] = {}
    for index, output in enumerate(outputs):
        for leaf in recorded_of([output], 0, saved_too=False).leaves:
            found.setdefault(id(leaf), set()).add(index)
    return [frozenset(found.get(id(leaf), ())) for leaf in leaves]


def leads_to_hooks(node: Any) -> bool:
    """Return whether what a node of autograd receives reaches a leaf that has hooks for its gradient."""
    seen: set[Any] = {None}
    waiting = [node]
    while waiting:
        if (node := waiting.pop()) in seen:
            continue
        seen.add(node)
        if is_of_leaf(node):
            if node.variable._backward_hooks:
                return True
        else:
            waiting += [before for before, _ in node.next_functions]
    return False


def _saved_by(node: Any) -> Iterator[int]:
    for name in dir(node):
        if not name.startswith(_RAW):
            continue
        held: Any = None
        with contextlib.suppress(RuntimeError, AttributeError):
            held = getattr(node, name)
        for one in held if isinstance(held, (list, tuple)) else (held,):
            yield from _storage_of(one)


def _storage_of(saved: Any) -> Iterator[int]:
    """Yield the address of a saved tensor's storage without unpacking it: a node returns a tensor with hooks as another
    one, without the attributes that the program gave a parameter, which its own backward may use."""
    with contextlib.suppress(RuntimeError, AttributeError):  # nothing saved, or without memory of its own
        if saved.unpack_hook is None:
            yield saved.data.untyped_storage().data_ptr()


@contextlib.contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Keep `torch.autograd.grad` from calling the gradient hooks of these tensors in the block."""
    held = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    try:
        for tensor, _ in held:
            tensor._backward_hooks = None
        yield
    finally:
        for tensor, hooks in held:
            tensor._backward_hooks = hooks
