"""Whether the very same objects stand in lists and closure cells, none in sets that were empty, whether functions run
what they ran, with the same defaults, and objects have their classes. All that is read as words of memory
(`memory_words`).

PyTorch's guards ask for one entry after the other, 35 ns for each where all is in caches: an optimizer's list of its
parameters alone takes as long as all else that is compared. What stands in a list is an array of addresses, and the
list says where that begins and how long it is. It is read only where list and array are those of before: the array of a
list that was made longer or shorter may be gone. Who reads holds the lists, the cells, and the objects.

A list that is filled again in each call, with the same objects, has another array then, most likely. It counts as
changed, though nothing that matters is. Compiled code does not have that (`compiled_entries`). This is for where there
is none.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optimizations.torch_internals.memory_words import PART, WORD, Words, can_be_read, word

if TYPE_CHECKING:
    from optimizations.torch_internals.argument_guard import Held

PARTS_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_CONTENT = PART
"""Where a cell has the address of its content: behind what all objects have."""
_SIZE, _ITEMS = PART, PART + WORD
"""Where a list has how many it holds, and the address of its array."""
_USED = PART + WORD
"""Where a set has how many it holds: behind how many places of its table were ever taken."""
_CLASS = WORD
_OF_FUNCTIONS = {name: PART + WORD * index for index, name in enumerate(PARTS_OF_FUNCTIONS, start=4)}
"""Where a function has the addresses of these; 0 for one that is None."""


class EntryWords:
    """What stands in these lists, cells, functions and objects, as it is now; and that these sets are empty.

    Attributes:
        stages: words to compare, those of the second where those of the first are as they were.
        reads: what is read, to be held by whoever does.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.reads = [one for one in held if _is_told(one)] if _can_be_read() else []
        self._told = {id(one.holder) for one in self.reads}
        self.stages = _stages(self.reads)

    def tells_of(self, held: Held) -> bool:
        """Whether it tells whether the same objects stand there."""
        return id(held.holder) in self._told and _is_told(held)


def has_parts(held: Held) -> bool:
    """Whether it is a function, with what it runs and its defaults, or an object with its class."""
    if not held.attributes or held.looks or held.absent or not held.entries:
        return False
    parts = set(_OF_FUNCTIONS) if type(held.holder) is types.FunctionType else {"__class__"}
    return parts.issuperset([name for name, _ in held.entries])


def _is_told(held: Held) -> bool:
    """Whether it is a cell, or a list all of whose entries are looked at, and nothing else is looked at there. Or an
    empty set, a function, or the class of an object."""
    if type(held.holder) is set:
        return held.size == 0
    if has_parts(held):
        return True
    if held.attributes or held.looks or not held.entries:
        return False
    if type(held.holder) is types.CellType:
        return True
    places = [key for key, _ in held.entries]
    return type(held.holder) is list and held.size == len(held.holder) and places == list(range(len(held.holder)))


def _stages(held: Sequence[Held]) -> list[Words]:
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    for one in held:
        address, values = id(one.holder), [id(value) for _, value in one.entries]
        if type(one.holder) is set:
            first.append((address + _USED, 0))
            continue
        if type(one.holder) is types.CellType:
            first.append((address + _CONTENT, values[0]))
            continue
        if has_parts(one):
            places = {**_OF_FUNCTIONS, "__class__": _CLASS}
            first += [(address + places[name], 0 if value is None else id(value)) for name, value in one.entries]
            continue
        items = word(address + _ITEMS)
        first += [(address + _SIZE, len(values)), (address + _ITEMS, items)]
        second += [(items + WORD * index, value) for index, value in enumerate(values)]
    return [Words([place for place, _ in some], [value for _, value in some]) for some in (first, second) if some]


@functools.cache
def _can_be_read() -> bool:
    """Whether the words are what they should be."""
    return can_be_read(_are_found)


def _are_found() -> bool:
    one, other = object(), object()
    held: list[Any] = [one, other, one]
    cell, filled = types.CellType(one), {one, other}
    if word(id(cell) + _CONTENT) != id(one) or word(id(held) + _SIZE) != len(held):
        return False
    used = [word(id(filled) + _USED)]
    filled.discard(one)
    if [*used, word(id(filled) + _USED), word(id(set()) + _USED)] != [2, 1, 0]:
        return False
    items = word(id(held) + _ITEMS)
    if [word(items + WORD * index) for index in range(len(held))] != list(map(id, held)):
        return False
    if not _parts_are_found():
        return False
    cell.cell_contents = other
    held[1] = one
    return word(id(cell) + _CONTENT) == id(other) and word(items + WORD) == id(one)


class _One:
    """A class that an object gets another one for."""


class _Other:
    """The other one."""


def _parts_are_found() -> bool:
    """Whether a function has its parts where they are looked for, and an object its class; and whether it shows when
    they are exchanged."""
    of_class: Any = _One()
    if word(id(of_class) + _CLASS) != id(_One):
        return False
    of_class.__class__ = _Other
    if word(id(of_class) + _CLASS) != id(_Other):
        return False

    def one(first: int, second: int = 2, *, third: int = 3) -> int:
        return first + second + third

    def other(first: int, second: int = 2, *, third: int = 3) -> int:
        return first - second - third

    for function in (one, other):
        for name, place in _OF_FUNCTIONS.items():
            if word(id(function) + place) != id(getattr(function, name)):
                return False
    one.__code__, one.__defaults__, one.__kwdefaults__ = other.__code__, None, None
    return [word(id(one) + place) for place in _OF_FUNCTIONS.values()] == [id(other.__code__), 0, 0]
