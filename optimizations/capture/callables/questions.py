"""Refuse what the Python of a callable asks of its arguments and weights, or does with them, that a graph cannot do.

A capture has placeholders for the arguments: they are leaves, have no gradients, and nothing computed them. Whether a
parameter has a gradient, and which, is another thing in each call. And hooks that a call registers with an argument or
a parameter would not be registered by a graph.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.step.observer import Observer
from optimizations.capture.step.source_lines import called_by_the_program

_OF_ARGUMENTS = ("grad_fn", "is_leaf")
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


@contextlib.contextmanager
def refused_questions(
    observer: Observer, arguments: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Let the observer note what code asks and does so in the block, which is one run of a callable. Hooks that it
    registers are removed after it."""
    given = set(map(id, arguments))
    all_of_them = given | set(map(id, parameters))
    asked = [("grad", all_of_them), *((name, given) for name in _OF_ARGUMENTS)]
    with contextlib.ExitStack() as stack:
        found: dict[str, Any] = {name: _asked(name, of, observer) for name, of in asked}
        found |= {name: _hooking(name, all_of_them, observer, stack) for name in _HOOKS}
        found["retain_grad"] = _retaining(given, observer)
        for name, value in found.items():
            stack.enter_context(torch_internals.replaced_attribute(torch.Tensor, name, value))
        yield


def _asked(name: str, of: Collection[int], observer: Observer) -> property:
    """Return an attribute of tensors that reports to the observer where it is read, of one of those."""
    stock: Any = inspect.getattr_static(torch.Tensor, name)
    thread = threading.get_ident()

    def read(tensor: torch.Tensor) -> Any:
        if id(tensor) in of and threading.get_ident() == thread and called_by_the_program():
            observer.refuse(
                f"reads the `.{name}` of an argument or a parameter, which is another one in each call",
                "decide that before the call, and pass as an argument what it needs",
            )
        return stock.__get__(tensor)

    return property(read, getattr(stock, "__set__", None), getattr(stock, "__delete__", None))


def _hooking(
    name: str, of: Collection[int], observer: Observer, registered: contextlib.ExitStack
) -> Callable[..., Any]:
    """Return a method that registers hooks with tensors, and reports it to the observer for one of those."""
    stock: Any = inspect.getattr_static(torch.Tensor, name)
    thread = threading.get_ident()

    def register(tensor: torch.Tensor, hook: Any) -> Any:
        if id(tensor) not in of or threading.get_ident() != thread:
            return stock(tensor, hook)
        handle = stock(tensor, hook)
        registered.callback(handle.remove)
        observer.refuse(
            f"calls {name}() of an argument or a parameter, and a graph registers nothing",
            "register it before the call: it runs behind the graph; or, for a hook of its own, call it on what "
            "`argument.view_as(argument)` gives",
        )
        return handle

    return register


def _retaining(of: Collection[int], observer: Observer) -> Callable[[torch.Tensor], None]:
    """Return a `retain_grad` that reports to the observer where it is called on one of those."""
    stock: Any = inspect.getattr_static(torch.Tensor, "retain_grad")
    thread = threading.get_ident()

    def retain_grad(tensor: torch.Tensor) -> None:
        if id(tensor) in of and threading.get_ident() == thread:
            observer.refuse(
                "calls retain_grad() of an argument, of which a graph has a copy", "call it outside, before the call"
            )
        stock(tensor)

    return retain_grad
