"""The objects that stand in lists and closure cells, and that sets are empty, read as words of memory."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from optimizations.torch_internals import entry_words, memory_words
from optimizations.torch_internals.argument_guard import Held
from optimizations.torch_internals.entry_words import EntryWords
from optimizations.torch_internals.memory_words import as_expected

pytestmark = pytest.mark.usefixtures("looked_at")


class Kept:
    """An object like others."""


class MyList(list[Any]):
    """A list of a program's own class."""


A, B, C = Kept(), Kept(), Kept()


def held(holder: Any) -> Held:
    if isinstance(holder, types.CellType):
        return Held(holder, (("content", holder.cell_contents),), None)
    if isinstance(holder, set):
        return Held(holder, (), len(holder))
    return Held(holder, tuple(enumerate(holder)), len(holder))


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "another object": lambda some: some.__setitem__(1, Kept()),
    "another order": list.reverse,
    "one more": lambda some: some.append(A),
    "one less": list.pop,
    "another for one": lambda some: (some.pop(), some.append(A)),
    "one more in front": lambda some: some.insert(0, A),
    "none": list.clear,
    "many more": lambda some: some.extend([A] * 100),
    "an equal one": lambda some: some.__setitem__(1, float("1e3")),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_of_a_list_is_seen(change: str) -> None:
    some, other = [A, float("1e3"), B, C], [C]
    words = EntryWords([held(other), held(some)])
    same = as_expected(*words.stages)
    assert words.tells_of(held(some)) and words.tells_of(held(other))
    assert same() and same()
    CHANGES[change](some)
    assert not same()


def test_what_is_put_back_where_it_stood_is_no_change() -> None:
    some = [A, B]
    same = as_expected(*EntryWords([held(some)]).stages)
    some[0] = C
    assert not same()
    some[0] = A
    assert same()


def test_a_change_of_a_cell_is_seen() -> None:
    cells = [types.CellType(one) for one in (A, B)]
    words = EntryWords(list(map(held, cells)))
    same = as_expected(*words.stages)
    assert all(words.tells_of(held(one)) for one in cells) and same()
    cells[1].cell_contents = C
    assert not same()
    cells[1].cell_contents = B
    assert same()
    del cells[0].cell_contents
    assert not same()


def test_an_entry_of_a_set_that_was_empty_is_seen() -> None:
    sets: list[set[object]] = [set(), set()]
    words = EntryWords(list(map(held, sets)))
    same = as_expected(*words.stages)
    assert all(words.tells_of(held(one)) for one in sets) and same()
    sets[1].add(A)
    assert not same()
    sets[1].discard(A)
    assert same()
    sets[0] |= {A, B, C}
    assert not same()
    sets[0].clear()
    assert same()


@pytest.mark.parametrize(
    "one",
    [
        held([]),
        held({A}),
        held(MyList([A])),
        held((A, B)),
        Held(deque([A]), ((0, A),), 1),
        Held({"a": A}, (("a", A),), 1),
        Held([A, B], ((0, A),), 2),
        Held([A, B], ((1, B), (0, A)), 2),
        Held([A, B], ((0, A), (1, B)), None),
        Held([A], ((0, A),), 1, attributes=True),
    ],
)
def test_all_else_is_left_to_others(one: Held) -> None:
    words = EntryWords([one])
    assert not words.tells_of(one) and not words.stages and not words.reads


def test_of_one_list_that_is_looked_at_in_two_ways_one_is_left_to_others() -> None:
    some = [A, B]
    part = Held(some, ((0, A),), None)
    words = EntryWords([held(some), part])
    assert words.tells_of(held(some)) and not words.tells_of(part)


@pytest.mark.parametrize("place", ["_SIZE", "_ITEMS", "_CONTENT", "_USED"])
def test_nothing_is_read_where_words_are_elsewhere(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can_be_read = entry_words._can_be_read.__wrapped__
    assert can_be_read()
    monkeypatch.setattr(entry_words, place, getattr(entry_words, place) - 8)  # the class of the object, or its size
    assert not can_be_read()
    monkeypatch.setattr(entry_words, "_can_be_read", can_be_read)
    assert not EntryWords([held([A])]).stages


def test_nothing_is_read_where_other_threads_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_words, "no_lock", lambda: "Python has no lock")
    assert not entry_words._can_be_read.__wrapped__()


def adds(first: int, second: int = 2, *, third: int = 3) -> int:
    return first + second + third


def subtracts(first: int, second: int = 2, *, third: int = 3) -> int:
    return first - second - third


PARTS: dict[str, tuple[Any, Any]] = {
    "__code__": (adds.__code__, subtracts.__code__),
    "__defaults__": ((2,), None),
    "__kwdefaults__": ({"third": 3}, {"third": 4}),
}


@pytest.mark.parametrize("changed", PARTS)
def test_a_change_of_a_function_is_seen(changed: str) -> None:
    function = types.FunctionType(adds.__code__, {})
    for name, (part, _) in PARTS.items():
        setattr(function, name, part)
    parts = tuple([(name, getattr(function, name)) for name in PARTS])
    words = EntryWords([Held(function, parts, None, attributes=True)])
    same = as_expected(*words.stages)
    assert words.tells_of(Held(function, parts, None, attributes=True)) and same() and same()
    before, other = PARTS[changed]
    setattr(function, changed, other)
    assert not same()
    setattr(function, changed, before)
    assert same()


def test_other_attributes_of_functions_are_not_told_of() -> None:
    given = Held(adds, (("__doc__", adds.__doc__),), None, attributes=True)
    words = EntryWords([given])
    assert not words.tells_of(given) and words.stages == []


def test_functions_are_not_read_where_their_parts_stand_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {name: place + 8 for name, place in entry_words._OF_FUNCTIONS.items()}
    monkeypatch.setattr(entry_words, "_OF_FUNCTIONS", moved)
    assert not entry_words._are_found()


class Another:
    """Another class for an object."""


def test_another_class_of_an_object_is_seen() -> None:
    one: Any = Kept()
    given = Held(one, (("__class__", Kept),), None, attributes=True)
    words = EntryWords([given])
    same = as_expected(*words.stages)
    assert words.tells_of(given) and same()
    one.__class__ = Another
    assert not same()
