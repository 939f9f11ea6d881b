"""Call a graph with bound arguments, which one comparison in C++ validates.

Bound tensors are valid as long as the modules hold the same tensor objects. Each call compares this, so a tensor that
was replaced is never passed again. Changes *within* a tensor (its data replaced, its storage resized) need no
comparison, because the tensor itself is passed, as Dynamo's bytecode would pass it. Dynamo's own guards on sizes,
dtypes and so on run before, as always.

Note [Who keeps a weight alive]. A binding references the tensors it passes, and the modules' dictionaries that are
compared. It drops them as soon as any call finds a replaced tensor: in the called binding, and in all others that
reference the same tensor, whether they are called again or not. It also drops them when a root is collected, and at
`reset`. Weak references are not possible: `torch.utils.swap_tensors` refuses tensors that have any.

Note [Models that reference themselves]. Submodules may reference their root (`block.model = [self]`, bound methods). A
binding would then keep the root alive through the submodules' dictionaries. So a full garbage collection first drops
all bindings that were not called since the last one: such a model is collected by the second collection after its last
call, and other models read their parameters again for a few calls.

Note [When to compare in C++ again]. Preparing the comparison takes about as long as reading everything `WORTH` times in
Python. So after a replacement `WORTH` calls read everything, and twice as many each time a comparison was valid for
fewer calls than that. If a program replaces a buffer in each call, no comparison is made after a few attempts: the
binding would keep results of CUDA graphs alive that the program has released. The same rule covers programs that
repeatedly write the same object into `_parameters` or `_modules`, which changes their versions.
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
"""Calls that read everything before a comparison is prepared: a root that is created for one call never gets one."""

WORTH = 32
"""Calls for which a comparison must be valid to be worth preparing."""

PATIENCE = 3
"""After more consecutive comparisons that were not worth it, no more are made if a module replaces tensors other than
parameters. It probably does so in each call: a cache, which may be a result of a CUDA graph."""

State = tuple[ComparedAfterWrites, list[Any], list["InOrder"]]
"""A comparison, the arguments of a call for which it holds, and, once used, the same in the partition's order. This is
one object because threads may share a binding."""

FEW_ARGUMENTS = 32
"""For graphs with at most this many arguments, the generated code passes them on."""


class InOrder:
    """Hold bound arguments in the order of a graph's one partition (`shortcut.Ordered`).

    Attributes:
        arguments: the bound arguments.
        passed: for each argument that a call passes and the partition takes, its position in both.
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
        state: the bound arguments and their comparison; None while nothing is bound.
        served: calls for which the comparison held; the caller counts them.
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
        """Drop all tensors and counts, as before the first call."""
        self.state = None
        self._reads_left = READS_BEFORE
        self._losses = 0

    def release_if_idle(self) -> None:
        """Drop the bound tensors if no call used them since the last `release`. Note [Models that reference ...]."""
        served, self._served_at_collection = self._served_at_collection, self.served
        if self.served == served:
            self.state = None

    def refers_to(self, identities: Set[int]) -> bool:
        """Return whether a tensor with one of these ids is bound."""
        state = self.state
        return state is not None and not identities.isdisjoint(map(id, state[1]))

    def read(self, given: tuple[Any, ...]) -> list[Any]:
        """Read the graph's arguments from the modules, and drop the bound tensors if they differ."""
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
            reason = f"{type(error).__name__}: {error}. This is a defect of Encore"
            warnings.warn(f"parameters are read in each call; comparing them in C++ failed: {reason}.", stacklevel=2)
            self._reads_left = sys.maxsize
            return
        self.served = self._served_at_collection = 0
        self.state = same, arguments.copy(), []


class _ByRoots(dict[Any, BoundRoots]):
    """Map the ids of each choice of roots to the tensors bound for them, while the roots live."""

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
    """Return the function that Dynamo calls in place of `compiled`, with the unbound arguments and the roots.

    If it gets all arguments of the graph, it passes them on, because a backend around this one may call it so. It is a
    plain function because Dynamo wraps it.
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
            state = None  # it would keep replaced weights alive while the current ones are read
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
