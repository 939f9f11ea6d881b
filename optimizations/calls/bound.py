"""Call a graph some of whose arguments are bound: one comparison in C++, and the list of arguments is complete.

What is bound is valid as long as the modules hold the same tensor objects. That is compared in each call, so a tensor
that was exchanged is never passed again. What happens *within* a tensor (its data exchanged, its storage resized) needs
no comparison, since the tensor itself is passed, as Dynamo's bytecode would pass it. Dynamo's own guards on sizes,
dtypes and so on run before, as they always do.

Note [Who keeps a weight alive]. A binding references the tensors it passes, and the modules' dictionaries that are
compared. It drops them as soon as any call finds a tensor exchanged: in the binding called, and in all others that
reference the same tensor, whether they are called again or not. It also drops them when a root is collected, and at
`reset`. There are no weak references to tensors instead: `torch.utils.swap_tensors` refuses tensors that have any.

Note [Models that reference themselves]. Submodules may reference their root (`block.model = [self]`, bound methods). A
binding would then keep the root alive by the submodules' dictionaries. So a full garbage collection first drops all
that is bound and was not called since the last one: such a model is collected by the second collection after its last
call, and another model reads its parameters again for a few calls.

Note [When to compare in C++ again]. Making the comparison takes about as long as reading everything `WORTH` times in
Python. So after an exchange `WORTH` calls read everything, and twice as many each time a comparison served fewer calls
than that. For a program that replaces a buffer in each call no comparison is made after a few attempts: what is bound
would keep results of CUDA graphs alive that the program has dropped. The same rule serves a program that writes the
same object into `_parameters` or `_modules` again and again, which changes their versions.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch

from optimizations.calls.binding import Binding, fetch
from optimizations.calls.shortcut import ordered_of
from optimizations.torch_internals.dictionary_writes import ComparedAfterWrites, writes_left
from optimizations.torch_internals.identity_guard import Exchanged, NotGuarded, same_tensors
from optimizations.torch_internals.wrappers import taking_a_list
from optimizations.weak_registry import WeakRegistry

READS_BEFORE = 2
"""Calls that read everything before a comparison is made: a root that is made for one call never gets one."""

WORTH = 32
"""Calls that a comparison has to serve to be worth making."""

PATIENCE = 3
"""After more comparisons in a row that were not, a module that exchanges other tensors than parameters is taken to do
so in each call (a cache, which may be a result of a CUDA graph), and no comparison is made any more."""

State = tuple[ComparedAfterWrites, list[Any], list["InOrder"]]
"""A comparison, the arguments that a call has if it holds, and, once used, the same in another order; one object, since
threads may share a binding."""

FEW_ARGUMENTS = 32
"""Of a graph with no more arguments than that, they are passed on by the generated code."""


class InOrder:
    """Hold bound arguments in the order of a graph's one partition (`shortcut.Ordered`).

    Attributes:
        arguments: as they are bound.
        passed: for each argument that a call passes and the partition takes: its place among these, and in a call.
    """

    __slots__ = ("arguments", "passed")

    def __init__(self, bound: list[Any], order: Sequence[int], passed: Sequence[int]) -> None:
        self.arguments = [bound[position] for position in order]
        given = {position: place for place, position in enumerate(passed)}
        self.passed = [(place, given[position]) for place, position in enumerate(order) if position in given]


_all: WeakRegistry[BoundRoots] = WeakRegistry()


class BoundRoots:
    """Keep the arguments of one compiled graph's last call with one choice of its root modules.

    Attributes:
        state: None while nothing is bound.
        served: calls that the comparison let through; the caller counts.
        alive: weak references to the roots.
    """

    def __init__(self, binding: Binding) -> None:
        self.state: State | None = None
        self.served = 0
        self.alive: tuple[weakref.ref[Any], ...] = ()
        self._binding = binding
        self._reads_left = READS_BEFORE
        self._losses = 0
        self._served_at_collection = 0
        _all.add(self)

    def release(self) -> None:
        """Drop all tensors, as if the roots had never been seen."""
        self.state = None
        self._reads_left = READS_BEFORE
        self._losses = 0

    def release_if_idle(self) -> None:
        """Drop what is bound if no call used it since this was called last. Note [Models that reference themselves]."""
        served, self._served_at_collection = self._served_at_collection, self.served
        if self.served == served:
            self.state = None

    def refers_to(self, identities: Set[int]) -> bool:
        """Return whether a tensor with one of these identities is bound."""
        state = self.state
        return state is not None and not identities.isdisjoint(map(id, state[1]))

    def read(self, given: tuple[Any, ...]) -> list[Any]:
        """Return the arguments of the graph as the modules hold them now, and drop what was bound if it differs."""
        binding = self._binding
        arguments: list[Any] = [None] * binding.arguments
        roots = given[len(binding.passed) :]
        for root, held in zip(roots, binding.roots, strict=True):
            fetch(root, held, arguments)
        state = self.state
        if state is not None:
            self._exchanged(state[1], arguments)
        elif self._reads_left > 0:
            self._reads_left -= 1
        else:
            self._make_comparison(roots, arguments)
        for position, argument in zip(binding.passed, given, strict=False):
            arguments[position] = argument
        return arguments

    def _exchanged(self, before: list[Any], now: list[Any]) -> None:
        self.give_up()
        exchanged = [old for old, new in zip(before, now, strict=True) if old is not new]
        if self._losses > PATIENCE and not all(isinstance(old, torch.nn.Parameter) for old in exchanged):
            self._reads_left = sys.maxsize
        gone = set(map(id, exchanged))
        for roots in _all.alive():
            if roots.refers_to(gone):
                roots.give_up()

    def give_up(self) -> None:
        """Drop the comparison. Note [When to compare in C++ again]."""
        self._losses = 0 if self.served >= WORTH else self._losses + 1
        self._reads_left = WORTH << self._losses
        self.served = self._served_at_collection = 0
        self.state = None

    def _make_comparison(self, roots: tuple[Any, ...], arguments: list[Any]) -> None:
        try:
            same = same_tensors(zip(roots, self._binding.roots, strict=True), arguments)
        except Exchanged:
            return
        except NotGuarded:
            self._reads_left = sys.maxsize
            return
        except Exception as error:
            said = f"{type(error).__name__}: {error}. This is a defect of Encore"
            warnings.warn(f"parameters are read in each call; comparing them in C++ failed: {said}.", stacklevel=2)
            self._reads_left = sys.maxsize
            return
        self.served = self._served_at_collection = 0
        self.state = same, arguments.copy(), []


class _ByRoots(dict[Any, BoundRoots]):
    """Map the identities of each choice of roots to the tensors bound for them, for as long as the roots live."""

    def add(self, key: Any, binding: Binding, roots: Iterable[Any]) -> BoundRoots:
        this = weakref.ref(self)

        def forget(_: Any) -> None:
            roots_of = this()
            if roots_of is not None:
                roots_of.pop(key, None)

        made = self[key] = BoundRoots(binding)
        made.alive = tuple(weakref.ref(root, forget) for root in roots)
        return made


def bound(compiled: Callable[..., Any], binding: Binding) -> Callable[..., Any]:
    """Return the function Dynamo calls in place of `compiled`: with the arguments still passed, and the roots.

    Called with all arguments of the graph it passes them on: that is how a backend around this one may call it. A plain
    function: Dynamo wraps it and calls it by that.
    """
    number, passed = binding.given, binding.passed
    compiled_of_list = taking_a_list(compiled)
    ordered: Any = ordered_of(compiled_of_list) if binding.arguments > FEW_ARGUMENTS else None
    first_root, only_root = len(passed), len(binding.roots) == 1
    by_roots = _ByRoots()

    def run(*given: Any) -> Any:
        if len(given) != number:
            return compiled(*given)
        key = id(given[-1]) if only_root else tuple(map(id, given[first_root:]))
        roots = by_roots.get(key)
        if roots is None:
            roots = by_roots.add(key, binding, given[first_root:])
        state = roots.state
        if state is None or (state[0].seen != writes_left() and not state[0].holds()):
            state = None  # it would keep weights alive that the program exchanged, while the graph looks for these
            return compiled_of_list(roots.read(given))
        roots.served += 1
        if ordered is not None and ordered.ready:
            in_order = state[2]
            if not in_order:
                in_order.append(InOrder(state[1], ordered.order.arguments, passed))
            values = in_order[0].arguments.copy()
            for place, position in in_order[0].passed:
                values[place] = given[position]
            return ordered.call(values)
        arguments = state[1].copy()
        for position, argument in zip(passed, given, strict=False):
            arguments[position] = argument
        return compiled_of_list(arguments)

    return run


def release_bindings() -> None:
    """Drop all tensors that are bound in this process. The next calls read them from their modules."""
    for roots in _all.alive():
        roots.release()


_FULL_COLLECTION = 2


def _before_a_collection(phase: str, collection: dict[str, int]) -> None:
    """Release idle bindings before each full collection. Note [Models that reference themselves]."""
    if phase == "start" and collection["generation"] == _FULL_COLLECTION:
        for roots in _all.alive():
            roots.release_if_idle()


gc.callbacks.append(_before_a_collection)
