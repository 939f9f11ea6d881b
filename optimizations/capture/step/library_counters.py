"""Attributes of libraries' objects that change between calls, and that no call reads, such as counters.

Note [Counters of libraries]. Of an object of an installed library all attributes count, because its code is not
followed. A trainer or an accelerator that a step is given counts its calls, though, and each call would be another one.
So for attributes that were seen to change, the calls that are observed, and the one that is captured, tell whether they
are read: meanwhile the classes of these objects ask a function of ours for each attribute, by `__getattribute__`, and
are as they were behind it. What none of these calls read is not compared with that recording. Other calls do what they
did as long as all that they read is the same, so they do not read it either. What a call binds or deletes counts as
read: a graph would not do that again.

Code that Dynamo compiled reads attributes in C, and what it compiles while a class asks for its attributes would be
other code. So where the step reaches compiled code, all is compared. Where a library compiles code that the step does
not reach, the classes are as they were from then on, and all counts as read. A class that answers for itself, or whose
code names `__getattribute__` and the like, or that a library made in C, is left as it is: what it asks of `object` is
not seen. An attribute that begins and ends with two underscores may lead to all others (`__dict__`, `__getstate__`),
and a dict of attributes that also stands elsewhere may be read there. Three ways to read are not seen: a bound
`__getattribute__` that was taken before the call, `object.__getattribute__` in other code of a library, and a dict of
attributes that stands where the step does not lead (a variable of a library's module, of which each object has it).
Of what code outside of the class binds by `object.__setattr__`, only that is seen which was another before the call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.signature import exact
from optimizations.capture.step.host_state import Container, HostState
from optimizations.capture.step.program_code import code_of
from optimizations.capture.step.program_code import names as names_in
from optimizations.capture.step.watched_entries import is_number
from optimizations.report.steps import Refusal

_ASKS = ("__getattribute__", "__setattr__", "__delattr__")
_ASK_OBJECT = frozenset({*_ASKS, "getattr_static"})
"""By these, code may ask `object` for attributes."""
_HARMLESS = frozenset({"__class__", "__doc__", "__module__"})
"""Attributes of these names lead to no others."""
_ONE_AT_A_TIME = threading.Lock()
_watched: dict[int, set[str]] = {}
"""By the identity of an object: names that were asked for since."""

READS_COUNTERS = Refusal(
    "reads in some calls, and not in others, what changes in an object of a library",
    "pass the step what it needs of that object",
)

_HAVE_CODE = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)

UnreadNames = Mapping[int, frozenset[str]]
"""Attributes by the identity of the dict that they stand in."""


def _asked(kind: type, asks: str) -> Any:
    """One of `_ASKS` for a class that is watched. Of its subclasses, others among their bases may answer behind it."""

    def ask(owner: Any, name: str, *value: Any) -> Any:
        if (names := _watched.get(id(owner))) is not None:
            names.add(name)
        return getattr(super(kind, owner), asks)(name, *value)

    return ask


class LibraryCounters:
    """Of one step: attributes of libraries' objects that were others from call to call."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[weakref.ref[Any], dict[str, Hashable]]] = {}
        self._changing: dict[int, set[str]] = {}
        self._read: dict[int, set[str]] = {}
        self._unread: dict[int, set[str]] = {}

    def never_read(self) -> UnreadNames:
        """What some call did not read, and none that was watched did: calls are not told apart by it."""
        return {key: frozenset(names - self._read.get(key, set())) for key, names in self._unread.items()}

    def look(self, state: HostState) -> None:
        """Before a call that reaches `state`: find what is not as it was before the last one."""
        for key in [key for key, (owner_of, _) in self._last.items() if owner_of() is None]:
            self._forget(key)
        for container in _of_libraries(state):
            key, owner = id(container.held), container.owner
            held = {name: _token(value) for name, value in list(container.held.items())}
            last = self._last.get(key)
            if last is None or last[0]() is not owner:
                self._forget(key)
            else:
                changed = {name for name, token in held.items() if last[1].get(name, token) != token}
                if changed:
                    self._changing.setdefault(key, set()).update(changed)
            self._last[key] = weakref.ref(owner), held

    def _forget(self, key: int) -> None:
        for kept in (self._last, self._changing, self._read, self._unread):
            kept.pop(key, None)

    @contextlib.contextmanager
    def reading(self, state: HostState) -> Iterator[dict[int, frozenset[str]]]:
        """A call in the block is watched. What it did not read of those attributes is in the dict behind it."""
        unread: dict[int, frozenset[str]] = {}
        suspects = [one for one in _of_libraries(state) if self._changing.get(id(one.held))]
        if not suspects or state.compiled or not _ONE_AT_A_TIME.acquire(blocking=False):
            yield unread
            return
        try:
            with _asking({type(one.owner) for one in suspects}) as asking:
                suspects = [one for one in suspects if type(one.owner) in asking]
                _watched.update({id(one.owner): set() for one in suspects})
                yield unread
            for one in suspects:
                key, names = id(one.held), _watched[id(one.owner)]
                changing = self._changing[key]
                read = changing if any(map(_leads_to_all, names)) else changing & names
                unread[key] = frozenset(changing - read)
                self._read.setdefault(key, set()).update(read)
                self._unread.setdefault(key, set()).update(unread[key])
        finally:
            _watched.clear()
            _ONE_AT_A_TIME.release()


def leave_out(state: HostState, unread: UnreadNames) -> None:
    """Let a recording that is made of `state` not compare these."""
    for container in _of_libraries(state):
        container.unread = unread.get(id(container.held), frozenset())


def in_both(one: UnreadNames | None, other: UnreadNames) -> UnreadNames:
    """What neither of two calls read. None: there was no other call."""
    if one is None:
        return other
    return {key: names & other[key] for key, names in one.items() if key in other}


def was_read(left_out: UnreadNames, unread: UnreadNames) -> bool:
    """Whether a call that is to read none of what was left out read some, or was not watched."""
    return any(names and not names <= unread.get(key, frozenset()) for key, names in left_out.items())


def _of_libraries(state: HostState) -> list[Container]:
    """Attributes of such objects that stand nowhere else: in no other container, nor in a class, as where all objects
    of one have them in common. Without objects that do not tell when they are gone."""
    times = Counter(id(container.held) for container in state.containers)
    found = [one for one in state.containers if one.owner is not None and times[id(one.held)] == 1]
    kinds = {type(one.owner) for one in found}
    in_classes = {
        id(value)
        for kind in kinds
        for base in kind.__mro__
        for value in list(vars(base).values())
        if type(value) is dict
    }
    return [one for one in found if id(one.held) not in in_classes and type(one.owner).__weakrefoffset__]


@contextlib.contextmanager
def _asking(kinds: set[type]) -> Iterator[set[type]]:
    """Classes that can be made to ask us, and are in the block, or until code is compiled."""
    made: dict[type, dict[str, Any]] = {}

    def undo() -> None:
        while made:
            kind, asked = made.popitem()
            for name, ask in asked.items():
                if vars(kind).get(name) is ask:  # the program may have put another there
                    type.__delattr__(kind, name)

    def compiles(arguments: Any) -> None:
        undo()
        for names in list(_watched.values()):
            names.add("__dict__")

    # Absent until something is compiled for the first time, which such a call does not count for.
    handler: Any = torch_internals.compilation_callbacks if "torch._dynamo.callback" in sys.modules else None
    try:
        # All are looked at before one is changed: another one may inherit it.
        for kind in [one for one in kinds if _can_ask(one)]:
            with contextlib.suppress(TypeError):  # a class of C
                for name in _ASKS:
                    type.__setattr__(kind, name, ask := _asked(kind, name))
                    made.setdefault(kind, {})[name] = ask
        if handler is not None:
            handler.register_start_callback(compiles)
        yield set(made)
    finally:
        undo()
        if handler is not None:
            with contextlib.suppress(ValueError):  # `torch.compiler.reset` forgets all of them
                handler.remove_start_callback(compiles)


def _can_ask(kind: type) -> bool:
    bases = [base for base in kind.__mro__ if base is not object]
    if any(name in vars(base) for base in bases for name in _ASKS):
        return False
    members = [one for base in bases for one in list(vars(base).values()) if issubclass(type(one), _HAVE_CODE)]
    functions = [inspect.unwrap(code) for code in map(code_of, members) if isinstance(code, types.FunctionType)]
    return all(_ASK_OBJECT.isdisjoint(names_in(one.__code__)) for one in functions if hasattr(one, "__code__"))


def _token(value: Any) -> Hashable:
    """What tells a value from another one, which may stand in its place: of tensors nothing."""
    return exact(value) if is_number(value) else None if isinstance(value, torch.Tensor) else id(value)


def _leads_to_all(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _HARMLESS
