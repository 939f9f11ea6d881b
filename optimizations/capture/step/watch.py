"""What a recording was made with and Python may change between calls: numbers, and which tensors stand where.

Looked at before every launch, so everything is compared in bulk, in C: what stands in dicts of modules and optimizers
by one call into C++; other numbers by value, all of one set of keys at once; other tensors and objects by identity,
over live views of the dicts and lists they stand in; the memory of tensors by its address. (Of what an optimizer keeps,
a steady replay compares the first two and the last two tensors before the launch, and all others that the graph reads
behind it. See `optimizer_states`.) Names are looked up only where something differs.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from optimizations.capture.signature import exact
from optimizations.capture.step.compared_entries import Entries
from optimizations.capture.step.guard import Guard
from optimizations.capture.step.hooks import Hooks
from optimizations.capture.step.host_state import (
    MODULE_HOOKS,
    ClassCode,
    Container,
    Filled,
    HostState,
    Scope,
    Slots,
    key_name,
)
from optimizations.capture.step.host_tensors import HostTensors
from optimizations.capture.step.known_tensors import KnownTensors
from optimizations.capture.step.optimizer_states import OptimizerStates
from optimizations.capture.step.program_code import data
from optimizations.capture.step.tensor_marks import look, looks
from optimizations.capture.step.unread_tensors import Unread, asked_for, look_as_then, look_at
from optimizations.capture.step.watched_entries import (
    LONG,
    UNREADABLE,
    Cell,
    as_readable,
    is_number,
    is_watched,
    own_entries,
)
from optimizations.torch_internals.argument_guard import Held, can_be_asked, is_empty_set, same_values
from optimizations.torch_internals.dict_guard import HeldEntries, can_be_guarded, same_entries

_PLAIN = (dict, OrderedDict, defaultdict, list)
_NONE: Mapping[int, Collection[str]] = types.MappingProxyType({})


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
        self._in_dicts, self._asked, self._others = Entries(), Entries(), Entries()
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        self._sets_in_python: list[tuple[set[Any], frozenset[Any]]] = []
        self._without_in_dicts: list[tuple[Any, frozenset[str]]] = []
        self._without_asked: list[tuple[Any, frozenset[str]]] = []
        self._without_others: list[tuple[Any, frozenset[str]]] = []
        self._still_there: list[tuple[Any, frozenset[str]]] = []
        self._unread: list[Unread] = []
        held_in_dicts: list[HeldEntries] = []
        held: list[Held] = []
        for container in state.containers:
            owner, entries, whole = own_entries(container, ignore)
            watched = [
                (key, value)
                for key, value in entries
                if is_watched(value, container)
                and key not in container.unread
                and (container.always_read or not isinstance(value, torch.Tensor) or reads(value))
            ]
            readable = as_readable(owner)
            self._named += [(f"{container.path}.{key_name(key)}", readable, key, value) for key, value in watched]
            plain = whole and type(owner) in _PLAIN and container.names is None
            counted = isinstance(container.held, (dict, list, set, deque)) and not isinstance(
                container.held, (Scope, Slots)
            )
            may_grow = container.is_attributes and container.names is not None
            sized = container.held if counted and (container.always_read or not may_grow) else None
            if sized is not None and container.is_attributes and not whole:
                sized = None  # entries that are ignored may come and go
            rarely_written = (
                whole and not container.unread and owner is container.held and _is_a_librarys(container)
            ) or (isinstance(container.held, ClassCode) and not data(container.held.kind))
            guarded = rarely_written and can_be_guarded(owner)
            if isinstance(container.held, set) and len(container.held) <= LONG:
                self._sets.append((container.held, frozenset(container.held)))
                if not is_empty_set(container.held):
                    self._sets_in_python.append(self._sets[-1])
                    sized = None
            size = None if sized is None else len(sized)
            attributes = isinstance(owner, Slots)
            holder = owner.cell if isinstance(owner, Cell) else owner.value if attributes else owner
            if len(entries) <= LONG:  # data may be long
                self._unread += [
                    Unread(readable, key, look(value), asked_for(holder, key, value, attributes), attributes)
                    for key, value in entries
                    if isinstance(value, torch.Tensor) and not container.always_read and not reads(value)
                ]
            askable = (sized is None or sized is holder) and (
                attributes or can_be_asked(holder, watched, sized=sized is holder)
            )
            entries_of = self._in_dicts if guarded else self._asked if askable else self._others
            absent = frozenset(name for name in container.absent if not ignore(container.held, name))
            if container.owner is not None and (there := container.unread.intersection(owner)):
                self._still_there.append((owner.keys(), there))
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
        self._hooks_of_modules = [
            (hooks, tuple(hooks.values()))
            for module in state.modules.values()
            for name in MODULE_HOOKS
            if (hooks := vars(module).get(name)) is not None and not ignore(vars(module), name)
        ]
        self._in_dicts.freeze()
        self._asked.freeze()
        self._others.freeze()
        self._held_in_dicts = held_in_dicts
        self._guard = Guard(lambda: same_entries(self.held_in_dicts()))
        self._held = held
        self._values = Guard(lambda: same_values(self.held()))
        by_optimizers = _of_optimizers(state)
        self._known = KnownTensors(_with_addresses(state, reads, extra, by_optimizers))
        self.tensors = self._known.tensors
        known = set(map(id, self.tensors))
        named = {path: one for kept in by_optimizers for path, one in kept.items()}
        self.states = OptimizerStates({path: one for path, one in named.items() if id(one) not in known and reads(one)})
        self._hooks = Hooks(state.parameters() if hooks_of_tensors else ())
        self._arrays = state.arrays()
        self._bytes = self._array_bytes()
        self._host = host
        others = None if self._others.empty else self._others.unchanged
        in_contents = self._sets_in_python or self._without_others or self._still_there
        contents = self._contents_stand if in_contents else None
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
            if not self._known.look():
                return False
            for same in (self._hooks.unchanged, *self._in_python):
                if not same():
                    return False
            if self._unread and not look_as_then(self._unread):
                return False
            if not self.states.stand():
                return False
            return self._known.lie()
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
        found: dict[int, list[Unread]] = {}
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
        """What `unchanged` looks at apart from what is held, in whichever of the ways above, looks of `tensors`, and
        `states`."""
        in_python = tuple(self._in_python)
        if unread := [one for one in self._unread if one.holder is None]:
            in_python += (functools.partial(look_as_then, unread),)
        hooks = self._hooks
        known = self._known
        return Rest(hooks.registered, hooks.unchanged, in_python, known.tensors, known.addresses, known.indices)

    def in_place(self) -> bool:
        """Whether tensors have the same memory."""
        return self._known.lie()

    def _contents_stand(self) -> bool:
        """Whether sets hold what they held, and no object has got an attribute that the step takes from its class, nor
        lost one that may be any."""
        for (
            now,
            then,
        ) in self._sets_in_python:  # on the way of every call, where a generator costs another frame of Python
            if now != then:
                return False
        for keys, names in self._still_there:
            if not keys >= names:
                return False
        return not self._without_others or _lack(self._without_others)

    def _arrays_stand(self) -> bool:
        return self._array_bytes() == self._bytes

    def _array_bytes(self) -> list[tuple[Any, ...]]:
        return [(array.shape, array.dtype, array.tobytes()) for array in self._arrays.values()]

    def host_key(self, but: Mapping[int, Collection[str]] = _NONE) -> tuple[Any, ...]:
        """What is different now, with its values: calls for which this is equal may share a recording. () for none.

        `but`: entries that are not asked for, by the identity of the dict that holds them.
        """
        found: list[tuple[Any, ...]] = []
        for name, owner, key, old in self._named:
            if key in but.get(id(owner), ()):
                continue
            try:
                new = owner[key]
            except (KeyError, IndexError):
                new = None
            if new is not old and not (is_number(new) and is_number(old) and exact(new) == exact(old)):
                found.append((name, exact(new) if is_number(new) else id(new)))
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
        found += [("gone", index) for index, (keys, names) in enumerate(self._still_there) if not keys >= names]
        now = looks(self.tensors)
        found += [
            (index, new) for index, (new, old) in enumerate(zip(now, self._known.then, strict=True)) if new != old
        ]
        found += [
            ("unread", index, new)
            for index, one in enumerate(self._unread)
            if (new := look_at(one.owner, one.key)) != one.then
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

    def differing(self, but: Mapping[int, Collection[str]] = _NONE) -> list[str]:
        """The names of what is not as it was. `but`: as in `host_key`."""
        found = []
        for name, owner, key, old in self._named:
            if key in but.get(id(owner), ()):
                continue
            try:
                new = owner[key]
            except UNREADABLE:
                new = None
            if new is not old and not (is_number(new) and is_number(old) and exact(new) == exact(old)):
                found.append(name.removeprefix("."))
        without = chain(self._without_in_dicts, self._without_asked, self._without_others)
        found += [name for keys, absent in without for name in absent if not keys.isdisjoint((name,))]
        arrays = zip(self._arrays, self._array_bytes(), self._bytes, strict=True)
        found += self.states.differing()
        return [*found, *(name for name, new, old in arrays if new != old)]

    def moved(self) -> bool:
        """Whether something else stands in the place of a tensor or object: the recording cannot be used again."""
        try:
            entries = self._in_dicts, self._asked, self._others
            return not (all(one.objects_stand() for one in entries) and self.in_place() and self.states.stand())
        except UNREADABLE:
            return True

    def __len__(self) -> int:
        return len(self._named)


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
    values = Slots(holder, ()) if held.attributes else Cell(holder) if isinstance(holder, types.CellType) else holder
    return replace(held, entries=tuple([(key, values[key]) for key, _ in held.entries]))


def _is_a_librarys(container: Container) -> bool:
    """Whether a dict is one that programs rarely write: of a module, or what an optimizer keeps of a parameter."""
    of_module = isinstance(container.held, dict) and "_parameters" in container.held
    return of_module or container.always_read or (container.is_attributes and container.names is None)


def _of_optimizers(state: HostState) -> list[dict[str, torch.Tensor]]:
    """The tensors that each optimizer keeps, by names that tell of which parameter each is."""
    paths = {
        id(parameter): f"{path}.{name}"
        for path, module in state.modules.items()
        for name, parameter in module.named_parameters(recurse=False)
    }
    return [
        {
            f"{name}.state[{paths.get(id(parameter), f'parameter {index}')}][{key!r}]": value
            for index, (parameter, kept) in enumerate(optimizer.state.items())
            if isinstance(kept, dict)
            for key, value in kept.items()
            if isinstance(value, torch.Tensor)
        }
        for name, optimizer in state.optimizers.items()
    ]


def _with_addresses(
    state: HostState,
    reads: Callable[[torch.Tensor], bool],
    extra: Sequence[torch.Tensor],
    by_optimizers: Sequence[Mapping[str, torch.Tensor]],
) -> list[torch.Tensor]:
    """Tensors whose memory is compared: those of modules, those the graph reads, and a few of each optimizer's own."""
    kept = [list(found.values()) for found in by_optimizers]
    ends = [tensor for found in kept for tensor in (*found[:2], *found[-2:])]
    left_out = {id(tensor) for found in kept for tensor in found}
    held = {
        id(value)
        for container in state.containers
        if container.always_read and isinstance(container.held, dict)
        for value in container.held.values()
    }
    reached = [
        tensor
        for tensor in state.tensors.values()
        if id(tensor) not in left_out and (id(tensor) in held or reads(tensor))
    ]
    return list({id(tensor): tensor for tensor in [*reached, *ends, *extra]}.values())
