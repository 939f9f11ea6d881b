"""What a recording was made with and Python may change between calls: numbers, and which tensors stand where.

Looked at before every launch, so everything is compared in bulk, in C: what stands in dicts of modules and optimizers
by one call into C++; other numbers by value, all of one set of keys at once; other tensors and objects by identity,
over live views of the dicts and lists they stand in; the memory of tensors by its address. (Of what an optimizer keeps,
the first two and the last two tensors: `load_state_dict` puts other tensors there, and what moves them elsewhere moves
all of them.) Names are looked up only where something differs.
"""

from __future__ import annotations

import functools
import operator
import time
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.signature import PLAIN, exact
from optimizations.capture.step.hooks import Hooks
from optimizations.capture.step.host_state import (
    KEPT_BY_MODULES,
    MODULE_HOOKS,
    ClassCode,
    Computed,
    Container,
    Filled,
    HostState,
    Scope,
    Slots,
    copy_of,
    key_name,
)
from optimizations.capture.step.host_tensors import HostTensors
from optimizations.capture.step.program_code import PARTIALS, data
from optimizations.capture.step.tensor_marks import Look, look, looks
from optimizations.torch_internals.argument_guard import Held, can_be_asked, same_looks, same_values
from optimizations.torch_internals.dict_guard import HeldEntries, can_be_guarded, same_entries

_data_ptrs_equal: Callable[[Sequence[Any], Sequence[int], Sequence[int]], bool] = torch_internals.data_ptrs_equal

LONG = 1000
"""Lists with more members (data, not settings) are compared by their length, and so are tensors of such dicts that no
kernel reads."""
_PLAIN = (dict, OrderedDict, defaultdict, list)
_OBJECTS = (dict, list, torch.nn.Module)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, *PARTIALS)
UNREADABLE = KeyError, IndexError, TypeError, ValueError
"""What reading entries that are gone raises; the last of an empty cell."""


class _Entries:
    """Entries of dicts, lists and cells, compared in bulk: numbers by value, objects by identity."""

    def __init__(self) -> None:
        self._views: list[Iterable[Any]] = []
        self._members: list[Any] = []
        self._owners: list[Any] = []
        self._keys: list[Any] = []
        self._single: list[Any] = []
        self._cells: list[types.CellType] = []
        self._in_cells: list[Any] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._by_keys: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}

    def add(self, owner: Any, watched: Sequence[tuple[Any, Any]], *, may_view: bool, sized: Any) -> None:
        """Look at these entries of `owner` from now on, and at the size of `sized` if it is not None."""
        if isinstance(owner, _Cell) and watched and not _is_number(watched[0][1]):
            self._cells.append(owner.cell)
            self._in_cells.append(watched[0][1])
            return
        readable = _readable(owner)
        if numbers := [(key, value) for key, value in watched if _is_number(value)]:
            keys = tuple([key for key, _ in numbers])
            owners, values = self._by_keys.setdefault(keys, ([], []))
            owners.append(readable)
            values.append(numbers[0][1] if len(numbers) == 1 else tuple([value for _, value in numbers]))
        objects = [(key, value) for key, value in watched if not _is_number(value)]
        if objects and may_view and len(objects) == len(owner):
            self._views.append(owner.values() if isinstance(owner, dict) else owner)
            self._members += [value for _, value in objects]
        else:
            self._owners += [readable] * len(objects)
            self._keys += [key for key, _ in objects]
            self._single += [value for _, value in objects]
        if sized is not None:
            self._sized.append(sized)
            self._sizes.append(len(sized))

    def freeze(self) -> None:
        """Nothing more is added."""
        self.empty = not any((self._views, self._single, self._cells, self._sized, self._by_keys))
        self._numbers = [
            (operator.itemgetter(*keys), owners, values) for keys, (owners, values) in self._by_keys.items()
        ]

    def unchanged(self) -> bool:
        """Whether numbers and sizes are as they were, and the same objects stand in the same places."""
        for getter, owners, values in self._numbers:
            now = list(map(getter, owners))
            if now != values:
                return False
            if not all(map(operator.is_, now, values)) and list(map(exact, now)) != list(map(exact, values)):
                return False
        return list(map(len, self._sized)) == self._sizes and self.objects_stand()

    def objects_stand(self) -> bool:
        """Whether the same objects stand in the same places."""
        if self._views:
            members = list(chain.from_iterable(self._views))
            if len(members) != len(self._members) or not all(map(operator.is_, members, self._members)):
                return False
        if self._owners and not all(map(operator.is_, map(operator.getitem, self._owners, self._keys), self._single)):
            return False
        return not self._cells or all(map(operator.is_, map(_cell_content, self._cells), self._in_cells))

    def other_sizes(self) -> list[int]:
        """The sizes that are not as they were."""
        sizes = map(len, self._sized)
        return [now for now, then in zip(sizes, self._sizes, strict=True) if now != then]


@dataclass(frozen=True, slots=True)
class Rest:
    """What is compared in Python, and addresses.

    Attributes:
        hooks_registered: the number of PyTorch's that shows that hooks are as they were; None where it does not.
        hooks: tells whether they are, whatever that number.
        in_python: tell whether other things are. They may raise what `UNREADABLE` names: something is gone.
        tensors, addresses, indices: for `torch_internals.data_ptrs_equal`.
    """

    hooks_registered: int | None
    hooks: Callable[[], bool]
    in_python: tuple[Callable[[], bool], ...]
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    indices: Sequence[int]


class Watch:
    """Containers, closure cells and addresses of a step, as they were when this was made.

    `ignore`: entries (container, key) that may change. `reads`: whether the graph reads a tensor that belongs to no
    module or optimizer; where it does not, another may take its place that looks like it: Python may ask for its shape,
    or whether there is one. `extra`: tensors that stand in no container.
    `host`: tensors in CPU memory, whose content counts. `hooks_of_tensors`: those of parameters run in the graph, so
    that others are a change.
    """

    def __init__(
        self,
        state: HostState,
        ignore: Callable[[Any, Any], bool],
        reads: Callable[[torch.Tensor], bool],
        extra: Sequence[torch.Tensor],
        *,
        host: HostTensors | None = None,
        hooks_of_tensors: bool = True,
    ) -> None:
        self._named: list[tuple[str, Any, Any, Any]] = []
        self._in_dicts, self._asked, self._others = _Entries(), _Entries(), _Entries()
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        self._without_in_dicts: list[tuple[Any, frozenset[str]]] = []
        self._without_asked: list[tuple[Any, frozenset[str]]] = []
        self._without_others: list[tuple[Any, frozenset[str]]] = []
        self._unread: list[_Unread] = []
        held_in_dicts: list[HeldEntries] = []
        held: list[Held] = []
        for container in state.containers:
            owner, entries, whole = _entries(container, ignore)
            watched = [
                (key, value)
                for key, value in entries
                if _is_watched(value, container)
                and (container.always_read or not isinstance(value, torch.Tensor) or reads(value))
            ]
            readable = _readable(owner)
            self._named += [(f"{container.path}.{key_name(key)}", readable, key, value) for key, value in watched]
            plain = whole and type(owner) in _PLAIN and container.names is None
            counted = isinstance(container.held, (dict, list, set, deque)) and not isinstance(
                container.held, (Scope, Slots)
            )
            may_grow = container.is_attributes and container.names is not None
            sized = container.held if counted and (container.always_read or not may_grow) else None
            if sized is not None and container.is_attributes and not whole:
                sized = None  # entries that are ignored may come and go
            rarely_written = (whole and owner is container.held and _is_a_librarys(container)) or (
                isinstance(container.held, ClassCode) and not data(container.held.kind)
            )
            guarded = rarely_written and can_be_guarded(owner)
            size = None if sized is None else len(sized)
            attributes = isinstance(owner, Slots)
            holder = owner.cell if isinstance(owner, _Cell) else owner.value if attributes else owner
            if len(entries) <= LONG:  # data may be long
                self._unread += [
                    _Unread(readable, key, look(value), _asked_for(holder, key, value, attributes), attributes)
                    for key, value in entries
                    if isinstance(value, torch.Tensor) and not container.always_read and not reads(value)
                ]
            askable = (sized is None or sized is holder) and (
                attributes or can_be_asked(holder, watched, sized=sized is holder)
            )
            entries_of = self._in_dicts if guarded else self._asked if askable else self._others
            absent = frozenset(name for name in container.absent if not ignore(container.held, name))
            if isinstance(owner, Slots) and (empty := absent.intersection(owner.names)):
                self._without_others.append((Filled(owner), empty))
            lacks = bool(absent) and isinstance(owner, dict) and not isinstance(owner, Slots)
            # C++ compares the keys of a dict, which tensors do element by element.
            in_cpp = lacks and can_be_guarded(owner)
            asked = absent if in_cpp else frozenset()
            without = self._without_others
            if guarded and (watched or asked or size is not None):
                held_in_dicts.append(HeldEntries(owner, tuple(watched), size, asked))
                without = self._without_in_dicts
            elif askable and not guarded and (watched or asked or size is not None):
                held.append(Held(holder, tuple(watched), size, attributes, asked))
                without = self._without_asked
            if lacks:
                (without if in_cpp else self._without_others).append((owner.keys(), absent))
            entries_of.add(owner, watched, may_view=plain, sized=sized)
            if isinstance(container.held, set) and len(container.held) <= LONG:
                self._sets.append((container.held, frozenset(container.held)))
        self._hooks_of_modules = [
            (hooks, tuple(hooks.values()))
            for module in state.modules.values()
            for name in MODULE_HOOKS
            if (hooks := vars(module).get(name)) is not None
        ]
        self._in_dicts.freeze()
        self._asked.freeze()
        self._others.freeze()
        self._held_in_dicts = held_in_dicts
        self._guard = Guard(lambda: same_entries(self.held_in_dicts()))
        self._held = held
        self._values = Guard(lambda: same_values(self.held()))
        self.tensors = self._tensors = _with_addresses(state, reads, extra)
        self._indices = list(range(len(self._tensors)))
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._as_then = looks(self._tensors)
        together = tuple(self._tensors)
        self._looks = Guard(lambda: functools.partial(same_looks(together), together))
        self._hooks = Hooks(state.parameters() if hooks_of_tensors else ())
        self._arrays = state.arrays()
        self._bytes = self._array_bytes()
        self._host = host
        others = None if self._others.empty else self._others.unchanged
        contents = self._contents_stand if self._sets or self._without_others else None
        arrays = self._arrays_stand if self._arrays else None
        in_host_memory = host.unchanged if host else None
        # What is compared in Python, where there is such, on the way of every call.
        in_python = (others, contents, arrays, in_host_memory)
        self._in_python: list[Callable[[], bool]] = [one for one in in_python if one]

    def unchanged(self) -> bool:
        """Whether everything is as it was."""
        try:
            if not self._guard.holds():
                if not self._in_dicts.unchanged() or not all(map(_run_as_then, self._hooks_of_modules)):
                    return False
                if not _lack(self._without_in_dicts):
                    return False
                self._guard.was_wrong()
            if not self._values.holds():
                if not self._asked.unchanged() or not _lack(self._without_asked):
                    return False
                self._values.was_wrong()
            if not self._looks.holds():
                if looks(self._tensors) != self._as_then:
                    return False
                self._looks.was_wrong()
            for same in (self._hooks.unchanged, *self._in_python):
                if not same():
                    return False
            if self._unread and not _look_as_then(self._unread):
                return False
            return _data_ptrs_equal(self._tensors, self._addresses, self._indices)
        except UNREADABLE:
            return False

    def held(self) -> list[Held]:
        """What `same_values` is asked about, as it is now."""
        return [_held_now(one) for one in self._held]

    def held_in_dicts(self) -> list[HeldEntries]:
        """What `same_entries` is asked about, as it is now."""
        hooks = [HeldEntries(held, tuple(held.items()), len(held)) for held, _ in self._hooks_of_modules]
        return [*map(_as_now, self._held_in_dicts), *hooks]

    def held_unread(self) -> list[Held]:
        """Where C++ may ask for the looks of tensors that the graph does not read, with those that stand there now."""
        found: dict[int, list[_Unread]] = {}
        for one in self._unread:
            if one.holder is not None:
                found.setdefault(id(one.holder), []).append(one)
        return [
            Held(
                some[0].holder,
                (),
                None,
                some[0].attributes,
                looks=tuple([(one.key, one.owner[one.key]) for one in some]),
            )
            for some in found.values()
        ]

    def rest(self) -> Rest:
        """What `unchanged` looks at apart from what is held, in whichever of the ways above, and looks of `tensors`."""
        in_python = tuple(self._in_python)
        if unread := [one for one in self._unread if one.holder is None]:
            in_python += (functools.partial(_look_as_then, unread),)
        hooks = self._hooks
        return Rest(hooks.registered, hooks.unchanged, in_python, self._tensors, self._addresses, self._indices)

    def in_place(self) -> bool:
        """Whether tensors have the same memory."""
        return _data_ptrs_equal(self._tensors, self._addresses, self._indices)

    def _contents_stand(self) -> bool:
        """Whether sets hold what they held, and no object has got an attribute that the step takes from its class."""
        return all(now == then for now, then in self._sets) and _lack(self._without_others)

    def _arrays_stand(self) -> bool:
        return self._array_bytes() == self._bytes

    def _array_bytes(self) -> list[bytes]:
        return [array.tobytes() for array in self._arrays.values()]

    def host_key(self) -> tuple[Any, ...]:
        """What is different now, with its values: calls for which this is equal may share a recording. () for none."""
        found: list[tuple[Any, ...]] = []
        for name, owner, key, old in self._named:
            try:
                new = owner[key]
            except (KeyError, IndexError):
                new = None
            if new is not old and not (_is_number(new) and _is_number(old) and exact(new) == exact(old)):
                found.append((name, exact(new) if _is_number(new) else id(new)))
        found += [
            ("size", now) for entries in (self._in_dicts, self._asked, self._others) for now in entries.other_sizes()
        ]
        found += [("set", index, frozenset(now)) for index, (now, then) in enumerate(self._sets) if now != then]
        found += [
            ("added", index, added)
            for index, (keys, absent) in enumerate(
                chain(self._without_in_dicts, self._without_asked, self._without_others)
            )
            if (added := tuple(sorted(absent.intersection(keys))))
        ]
        now = looks(self._tensors)
        found += [(index, new) for index, (new, old) in enumerate(zip(now, self._as_then, strict=True)) if new != old]
        found += [
            ("unread", index, new)
            for index, one in enumerate(self._unread)
            if (new := _look_at(one.owner, one.key)) != one.then
        ]
        if hooks := self._hooks.key():
            found.append(("hooks", hooks))
        found += [
            ("hooks of a module", index, tuple(map(id, one[0].values())))
            for index, one in enumerate(self._hooks_of_modules)
            if not _run_as_then(one)
        ]
        found += [
            (name, new)
            for name, new, old in zip(self._arrays, self._array_bytes(), self._bytes, strict=True)
            if new != old
        ]
        found += self._host.differences() if self._host else []
        return tuple(found)

    def differing(self) -> list[str]:
        """The names of what is not as it was."""
        found = []
        for name, owner, key, old in self._named:
            try:
                new = owner[key]
            except UNREADABLE:
                new = None
            if new is not old and not (_is_number(new) and _is_number(old) and exact(new) == exact(old)):
                found.append(name.removeprefix("."))
        without = chain(self._without_in_dicts, self._without_asked, self._without_others)
        found += [name for keys, absent in without for name in absent if not keys.isdisjoint((name,))]
        arrays = zip(self._arrays, self._array_bytes(), self._bytes, strict=True)
        return [*found, *(name for name, new, old in arrays if new != old)]

    def moved(self) -> bool:
        """Whether something else stands in the place of a tensor or object: the recording cannot be used again."""
        try:
            entries = self._in_dicts, self._asked, self._others
            return not (all(one.objects_stand() for one in entries) and self.in_place())
        except UNREADABLE:
            return True

    def __len__(self) -> int:
        return len(self._named)


class Guard:
    """One comparison in C++ of entries, by identity. It may fail where nothing changed.

    A number assigned again is another object; and once a guarded dict was written, C++ looks into all of them. Then the
    comparison is made new, at most once in so many calls, twice as many each time. `make` makes it of what is there.
    """

    def __init__(self, make: Callable[[], Callable[[], bool]]) -> None:
        self._make = make
        self._same = make()
        self._calls = 0
        self._wait = PROBE_EVERY
        self._next = PROBE_EVERY
        self._fastest_ns = 0

    def holds(self) -> bool:
        """Whether all entries hold the very same objects."""
        self._calls += 1
        if self._calls < self._next:
            return self._same()
        began = time.perf_counter_ns()
        same = self._same()
        took_ns = time.perf_counter_ns() - began
        self._next = self._calls + PROBE_EVERY
        self._fastest_ns = min(self._fastest_ns or took_ns, took_ns)
        if same and took_ns > SLOW * self._fastest_ns:
            self.was_wrong()
        return same

    def was_wrong(self) -> None:
        """Take in that nothing had changed when it failed, or took long."""
        if self._calls >= self._wait:
            self._wait = self._calls + 2 * self._wait
            self._same = self._make()


PROBE_EVERY = 64
"""Calls between two measurements of how long the comparison in C++ takes."""
SLOW = 4
"""One that takes this many times the fastest looks into all dicts."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """Where a tensor stands that the graph does not read, and how it looked. Any that looks so may stand there.

    `holder` is what C++ reads as Python reads `owner`, None where it does not; `attributes` as in `Held`.
    """

    owner: Any
    key: Any
    then: Look
    holder: Any
    attributes: bool


def _asked_for(holder: Any, key: Any, tensor: torch.Tensor, attributes: bool) -> Any:
    """The holder, if C++ can be asked how the tensor looks that stands there; else None."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and look(tensor)[-1] is not None
    return holder if plain and (attributes or can_be_asked(holder, [(key, tensor)])) else None


def _look_as_then(unread: Iterable[_Unread]) -> bool:
    return all(_look_at(one.owner, one.key) == one.then for one in unread)


def _look_at(owner: Any, key: Any) -> Look | None:
    """How the tensor looks that stands there; None if there is none."""
    try:
        held = owner[key]
    except UNREADABLE:
        return None
    return look(held) if isinstance(held, torch.Tensor) else None


def _lack(without: Iterable[tuple[Any, frozenset[str]]]) -> bool:
    """Whether dicts, by their keys, lack these."""
    return all(keys.isdisjoint(absent) for keys, absent in without)


def _run_as_then(hooks: tuple[dict[int, Any], tuple[Any, ...]]) -> bool:
    """Whether a dict of hooks holds those it held, in their order. One that was registered again has another key."""
    held, then = hooks
    return len(held) == len(then) and all(map(operator.is_, held.values(), then))


def _as_now(held: HeldEntries) -> HeldEntries:
    return replace(held, entries=tuple([(key, held.dictionary[key]) for key, _ in held.entries]))


def _held_now(held: Held) -> Held:
    holder = held.holder
    values = Slots(holder, ()) if held.attributes else _Cell(holder) if isinstance(holder, types.CellType) else holder
    return replace(held, entries=tuple([(key, values[key]) for key, _ in held.entries]))


def _is_a_librarys(container: Container) -> bool:
    """Whether a dict is one that programs rarely write: of a module, or what an optimizer keeps of a parameter."""
    of_module = isinstance(container.held, dict) and "_parameters" in container.held
    return of_module or container.always_read or (container.is_attributes and container.names is None)


def _with_addresses(
    state: HostState, reads: Callable[[torch.Tensor], bool], extra: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Tensors whose memory is compared: those of modules, those the graph reads, and two of each optimizer's own."""
    by_optimizers: set[int] = set()
    ends: list[torch.Tensor] = []
    for optimizer in state.optimizers.values():
        kept = [value for one in optimizer.state.values() if isinstance(one, dict) for value in one.values()]
        found = [value for value in kept if isinstance(value, torch.Tensor)]
        by_optimizers |= set(map(id, found))
        ends += [*found[:2], *found[-2:]]
    held = {
        id(value)
        for container in state.containers
        if container.always_read and isinstance(container.held, dict)
        for value in container.held.values()
    }
    reached = [
        tensor
        for tensor in state.tensors.values()
        if id(tensor) not in by_optimizers and (id(tensor) in held or reads(tensor))
    ]
    return list({id(tensor): tensor for tensor in [*reached, *ends, *extra]}.values())


_cell_content = operator.attrgetter("cell_contents")


class _Cell:
    """A closure cell with the look of a mapping."""

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: str) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError as error:
            raise KeyError(key) from error


class _Present:
    """The entries that a dict has, read in such a way that it gets no others: a `defaultdict` makes what it lacks."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self._held = held

    def __getitem__(self, key: Any) -> Any:
        if (value := dict.get(self._held, key, _ABSENT)) is _ABSENT:
            raise KeyError(key)
        return value


_ABSENT = object()


def _readable(owner: Any) -> Any:
    """Something that gives the entries of `owner`, and changes nothing."""
    return _Present(owner) if isinstance(owner, dict) and hasattr(type(owner), "__missing__") else owner


def _entries(container: Container, ignore: Callable[[Any, Any], bool]) -> tuple[Any, list[tuple[Any, Any]], bool]:
    """What to look into, its keys and values, and whether these are all of a container's own."""
    held = container.held
    if isinstance(held, types.CellType):
        return _Cell(held), [] if ignore(held, None) else [("cell_contents", container.content())], False
    names = container.names
    if isinstance(held, (Scope, Slots)):
        found = [
            (key, value)
            for key, value in held.content().items()
            if (names is None or key in names) and not ignore(held, key)
        ]
        return held.scope if isinstance(held, Scope) and not isinstance(held, Computed) else held, found, False
    if isinstance(held, dict):
        found = [
            (key, value)
            for key, value in copy_of(held).items()
            if (names is None or key in names) and not ignore(held, key)
        ]
        if container.is_attributes:
            by_name = names is not None
            found = [(key, value) for key, value in found if not _is_own(key, value, by_name=by_name)]
        return held, found, not any(ignore(held, key) for key in held)
    members = list(enumerate(held)) if isinstance(held, (list, deque)) and len(held) <= LONG else []
    left: list[tuple[Any, Any]] = [(index, value) for index, value in members if not ignore(held, index)]
    return held, left, len(left) == len(members)


def _is_number(value: Any) -> bool:
    """Something compared by its value: numbers, strings, and tuples of such."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_number, value)))


def _is_watched(value: Any, container: Container) -> bool:
    """Whether an entry is looked at: of a library's objects only what they do not exchange for themselves, and of its
    modules functions, such as a `forward` that the program gave one."""
    if container.is_attributes and container.names is None:
        if isinstance(value, _FUNCTIONS):
            return isinstance(container.held, dict) and "_parameters" in container.held
        return _is_number(value) or isinstance(value, (torch.Tensor, *_OBJECTS))
    return True


def _is_own(key: Any, value: Any, *, by_name: bool) -> bool:
    """What objects of libraries keep for themselves: containers are looked at on their own, but those that hold a
    module's members and hooks may be exchanged for others.

    `by_name`: the program's code uses what has this name.
    """
    if by_name or key in KEPT_BY_MODULES or key in MODULE_HOOKS:  # as `del` on `nn.Sequential` does it
        return key in _MODULES_OWN
    return key in _MODULES_OWN or (isinstance(key, str) and key.startswith("_") and isinstance(value, (dict, list)))


_MODULES_OWN = frozenset({"_is_full_backward_hook", "_compiled_call_impl"})
