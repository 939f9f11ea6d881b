"""Cover what differs between PyTorch versions in the classes of CUDAGraph Trees that Encore subclasses.

This module has the few members that are named or used differently, so that `trees` is written once. `test_surface`
checks that all others are there. It also switches off what newer versions do for results and inputs that Encore
handles itself:

* results that outlive their iteration are cloned (`user_visible_output_idxs`, since 2.14);
* an input made by an earlier graph that moved five times is copied, or ends the graph
  (`cudagraph_managed_input_rerecord_limit`, since 2.15);
* a function without kernels is called instead of captured (`kernel_free_cudagraph`, since 2.14).

`cudagraph_dynamic_shape_rerecord_limit` (2.15) is checked in `cudagraphify_impl`, which Encore does not call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch

from optimizations import torch_internals

_SWITCHED_OFF: Mapping[str, Any] = {
    "kernel_free_cudagraph": False,
    "user_visible_output_idxs": (),
    "cudagraph_managed_input_rerecord_limit": sys.maxsize,
}
"""Parameters of `cudagraph_trees.cudagraphify`, and the values that leave their subject to Encore."""

_PLACES = (
    "non_cudagraph_managed_mutation_hint",
    "skip_cudagraph",
    "num_rerecord",
    "cudagraph_managed_input_rerecord",
    "demoted_cudagraph_managed_idxs",
)
"""Attributes of a manager that map a node and a function to what was decided there; a version has some of them."""


def without_duplicates(cudagraphify: Callable[..., Any]) -> Callable[..., Any]:
    """Return stock's `cudagraphify` with all that Encore does itself switched off, whatever its caller passes."""
    known = inspect.signature(cudagraphify).parameters
    switched_off = {name: value for name, value in _SWITCHED_OFF.items() if name in known}

    @functools.wraps(cudagraphify)
    def call(*arguments: Any, **keywords: Any) -> Any:
        passed = {name: value for name, value in keywords.items() if name not in _SWITCHED_OFF}
        return cudagraphify(*arguments, **passed, **switched_off)

    return call


def forget_places(manager: Any) -> None:
    """Clear what a manager decided for functions at their places in the tree, which is about to be emptied."""
    for name in _PLACES:
        getattr(manager, name, {}).clear()


def compared_inputs(node: Any) -> list[int]:
    """Return the inputs whose addresses a node compares. Since 2.12 `static_input_idxs` may hold other objects too."""
    found: list[int] = getattr(node, "tensor_static_input_idxs", node.static_input_idxs)
    return found


INPUT_COPY_IDXS = property(
    operator.attrgetter("non_static_input_idx"), lambda node, inputs: setattr(node, "non_static_input_idx", inputs)
)
"""The inputs that a node copies, under their name of 2.15. Stock's own list differs from `non_static_input_idx` only in
inputs whose copying is switched off above."""


class InputIndices(list[int]):
    """Hold indices of inputs. Stock looks each input up in such a list, several times in a recording."""

    def __init__(self, indices: Iterable[int]) -> None:
        super().__init__(indices)
        self._known = frozenset(self)

    def __contains__(self, index: object) -> bool:
        is_current = len(self._known) == len(self)  # nothing was added or removed, and nothing stands in it twice
        return index in self._known if is_current else super().__contains__(index)


STATIC_INPUT_IDXS = property(
    operator.attrgetter("_static_inputs"), lambda node, indices: setattr(node, "_static_inputs", InputIndices(indices))
)
"""The inputs at fixed addresses and from earlier graphs that a node reads, as stock assigns them."""


def refuse_derivatives(copied: Iterable[Any]) -> None:
    """Fail as stock's copies do for inputs with a forward-mode derivative.

    A graph computes no derivatives, and reading such an input in place would silently drop its derivative.

    Args:
        copied: the inputs that stock copies.

    Raises:
        NotImplementedError: one of them has a forward-mode derivative.
    """
    forward_mode: Any = torch_internals.forward_ad
    if forward_mode._current_level < 0:
        return
    for value in copied:
        if isinstance(value, torch.Tensor) and forward_mode.unpack_dual(value).tangent is not None:
            torch_internals.foreach_copy_([torch.empty_like(value)], [value])


@functools.cache
def checks_deaths_when_running() -> bool:
    """Return whether `CUDAGraphNode.run` checks after its copies that inputs died; before 2.15 the invariants did."""
    code = torch_internals.cudagraph_trees.CUDAGraphNode.run.__code__
    return "expected_dead_indices_after_graph" in code.co_names


@contextlib.contextmanager
def _timed(name: str, compile_id: Any = None, mode: Any = None, *_: Any, **__: Any) -> Iterator[None]:
    """Time a block as stock does, without an entry in `torch._dynamo.utils.get_compilation_metrics`.

    For each entry PyTorch copies and serializes all its settings, which takes as long as the rest of a recording.
    """
    backward = mode == torch_internals.cudagraph_trees.CompilationMode.BACKWARD
    timed = torch_internals.dynamo_utils.dynamo_timed
    with timed(name, log_pt2_compile_event=True, compile_id=compile_id, is_backward=backward):
        yield


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a stock function with `names` in place of its module's globals of these names, and `_timed` as its timer.

    A method of stock's names what it uses as globals of its module, the class of the nodes for example. A subclass that
    wants another one takes the method's code with its own globals, so that nothing is copied or patched. The other
    globals are those of the module as they are now.

    Raises:
        UnsupportedTorch: the function reads no such global, so this PyTorch is not the one this was written for.
    """
    if not isinstance(function, FunctionType):
        raise torch_internals.UnsupportedTorch(
            f"{function!r} is not a plain Python function, so its globals cannot be bound again"
        )
    unread = sorted(set(names) - set(function.__code__.co_names))
    if unread:
        raise torch_internals.UnsupportedTorch(
            f"{function.__module__}.{function.__qualname__} does not read {', '.join(unread)}: "
            "this PyTorch is not one whose internals Encore knows"
        )
    known = {**function.__globals__, "dynamo_timed_cudagraph": _timed, **names}
    bound = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(bound, function)
