"""What stands in dicts, lists, cells and empty sets is compared by compiled code, dicts only once they were written."""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from optimizations import host_code
from optimizations.torch_internals import compiled_entries
from optimizations.torch_internals.argument_guard import Held, same_values
from optimizations.torch_internals.compiled_entries import CompiledEntries
from optimizations.torch_internals.dict_guard import HeldEntries, same_entries


@pytest.fixture(autouse=True)
def looks(compiled_looks: ModuleType) -> ModuleType:
    return compiled_looks


class Kept:
    """An object like others, with attributes."""


A, B, C = Kept(), Kept(), Kept()


class MyDict(dict[str, Any]):
    """A dict of a program's own class."""


def held_entries(held: dict[str, Any], **other: Any) -> HeldEntries:
    return HeldEntries(held, tuple(held.items()), other.get("size", len(held)), other.get("absent", frozenset()))


def whole(holder: Any) -> Held:
    """All that stands there."""
    if isinstance(holder, types.CellType):
        return Held(holder, (("cell_contents", holder.cell_contents),), None)
    if isinstance(holder, dict):
        return Held(holder, tuple(holder.items()), len(holder))
    return Held(holder, tuple(enumerate(holder)), len(holder))


WRITES: dict[str, Callable[[Any], object]] = {
    "an attribute is set": lambda one: setattr(one, "a", C),
    "an attribute is deleted": lambda one: delattr(one, "a"),
    "another attribute comes": lambda one: setattr(one, "c", C),
    "one that is to be absent comes": lambda one: setattr(one, "absent", C),
    "all attributes go": lambda one: vars(one).clear(),
    "some are updated": lambda one: vars(one).update(b=C),
    "one is put in the place of the last": lambda one: (vars(one).popitem(), setattr(one, "z", B)),
    "nothing": lambda one: None,
    "the same is set again": lambda one: setattr(one, "a", one.a),
    "two are exchanged": lambda one: vars(one).update(a=one.b, b=one.a),
    "one comes and goes": lambda one: (setattr(one, "c", C), delattr(one, "c")),
}


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("write", sorted(WRITES))
def test_what_python_would_see_is_seen(write: str, size: int | None) -> None:
    """And nothing else is, compared with PyTorch's guards."""
    one, other = Kept(), Kept()
    for some in (one, other):
        some.__dict__.update(a=A, b=B)
    entries = [held_entries(vars(some), size=size, absent=frozenset({"absent"})) for some in (one, other)]
    told, asked = CompiledEntries(entries, ()), same_entries(entries)
    assert told and told.unchanged() and asked()
    for some in (one, other):
        WRITES[write](some)
        assert told.unchanged() == asked() == told.unchanged()
        vars(some).clear()
        vars(some).update(a=A, b=B)
        assert told.unchanged() and asked()


@pytest.mark.parametrize(
    "holder",
    [{"a": A, "b": B}, OrderedDict(a=A, b=B), defaultdict(list, a=A, b=B), {}, [A, B, A], [], types.CellType(A), set()],
    ids=lambda one: f"{type(one).__name__} of {len(one) if hasattr(one, '__len__') else 1}",
)
def test_a_holder_is_told_of_where_all_of_it_is_compared(holder: Any) -> None:
    held = whole(holder)
    told, asked = CompiledEntries((), (held,)), same_values([held])
    assert told.tells_of(held) and told.unchanged() and asked()
    if isinstance(holder, dict):
        holder["c"] = C
    elif isinstance(holder, list):
        holder.append(C)
    elif isinstance(holder, set):
        holder.add(C)
    else:
        holder.cell_contents = C
    assert not told.unchanged() and not asked()


@pytest.mark.parametrize(
    "held",
    [
        Held({1: A}, ((1, A),), 1),
        whole(MyDict(a=A)),
        Held(Kept, (("a", A),), None, attributes=True),
        Held({"a": A}, (("a", A),), 1, looks=(("a", A),)),
        Held([A, B], ((0, A),), 2),
        Held([A, B], ((1, B), (0, A)), 2),
        Held([A, B], ((0, A), (1, B)), None),
        Held([A], ((0, A),), 1, absent=frozenset({"a"})),
        Held((A,), ((0, A),), 1),
        Held(frozenset(), (), 0),
        Held(types.CellType(A), (), None),
    ],
)
def test_all_else_is_left_to_others(held: Held) -> None:
    told = CompiledEntries((), (held,))
    assert not told.tells_of(held) and told.unchanged()


def test_several_are_told_of_at_once_and_each_is_looked_at() -> None:
    """Also those that are looked at in two ways."""
    some: list[Any] = [{"a": A}, {"b": B}, [A, B], types.CellType(B), set()]
    held = [whole(one) for one in some]
    apart = {"a": A, "c": C}
    entries = [held_entries(apart), HeldEntries(some[0], (), None, frozenset({"absent"}))]
    told = CompiledEntries(entries, held)
    assert all(map(told.tells_of, held)) and told.unchanged()
    for change, put_back in (
        (lambda: some[0].update(a=B), lambda: some[0].update(a=A)),
        (lambda: some[0].update(absent=B), lambda: some[0].pop("absent")),
        (lambda: some[1].clear(), lambda: some[1].update(b=B)),
        (lambda: some[2].reverse(), lambda: some[2].reverse()),
        (lambda: setattr(some[3], "cell_contents", A), lambda: setattr(some[3], "cell_contents", B)),
        (lambda: some[4].add(A), lambda: some[4].clear()),
        (lambda: apart.update(c=A), lambda: apart.update(c=C)),
    ):
        change()
        assert not told.unchanged()
        put_back()
        assert told.unchanged()


def test_an_empty_cell_is_another_than_one_that_holds_something() -> None:
    cell = types.CellType(A)
    told = CompiledEntries((), (whole(cell),))
    del cell.cell_contents
    assert not told.unchanged()


def test_what_is_compared_is_held_for_as_long() -> None:
    value = Kept()
    gone = weakref.ref(value)
    told = CompiledEntries((held_entries({"a": value}),), (whole([value]), whole(types.CellType(value))))
    del value
    gc.collect()
    assert gone() is not None and told.unchanged()
    del told
    gc.collect()
    assert gone() is None


def test_nothing_is_told_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_code, "looks", lambda: None)
    held = whole([A])
    told = CompiledEntries((held_entries({"a": A}),), (held,))
    assert not told and not told.tells_of(held)


def test_of_nothing_nothing_changes() -> None:
    told = CompiledEntries((), ())
    assert told and told.unchanged()


def test_each_way_to_write_shows() -> None:
    assert compiled_entries._shows.__wrapped__() == (True, True)


@pytest.mark.parametrize("way", [0, 1], ids=["by versions", "watched"])
@pytest.mark.parametrize("missed", range(len(compiled_entries._WRITES)))
def test_a_way_in_which_a_write_does_not_show_is_not_relied_on(
    missed: int, way: int, looks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another build of Python told of all writes but one: then all is compared in each call."""

    class Blind:
        """Does not see a write of this kind, in this way."""

        write: Any = None

        @classmethod
        def Entries(cls, dicts: Any, *given: Any) -> Callable[[], bool]:
            made: Callable[[], bool] = looks.Entries(dicts, *given)
            is_blind = cls.write is compiled_entries._WRITES[missed] and given[way]
            return (lambda: True) if is_blind else made

    is_seen = compiled_entries._is_seen

    def is_seen_by_blind(write: Any, *given: Any) -> bool:
        Blind.write = write
        return is_seen(write, *given)

    monkeypatch.setattr(host_code, "looks", lambda: Blind)
    monkeypatch.setattr(compiled_entries, "_is_seen", is_seen_by_blind)
    monkeypatch.setattr(compiled_entries, "_WARM", 1)
    assert compiled_entries._shows.__wrapped__() == (way != 0, way != 1)


def test_what_says_that_all_is_otherwise_is_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        @staticmethod
        def Entries(*given: Any) -> Callable[[], bool]:
            return lambda: False

    monkeypatch.setattr(host_code, "looks", lambda: Never)
    assert compiled_entries._shows.__wrapped__() == (False, False)


@pytest.mark.parametrize("ways", [(False, False), (True, False), (False, True)])
def test_where_a_way_is_not_relied_on_all_is_compared(ways: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_entries, "_shows", lambda: ways)
    held = {"a": A, "b": B}
    told = CompiledEntries((held_entries(held),), ())
    for _ in range(3):
        assert told.unchanged()
        held["b"] = C
        assert not told.unchanged()
        held["b"] = B


def test_writes_of_a_line_that_was_often_run_show() -> None:
    """Python exchanges what such a line does for something quicker."""

    def write(one: Any, value: object) -> None:
        one.a = value

    others = [Kept() for _ in range(2000)]
    for one in others:
        write(one, A)
    for one in others[:200]:
        told = CompiledEntries((held_entries(vars(one)),), ())
        assert told.unchanged()
        write(one, B)
        assert not told.unchanged()
        write(one, A)
        assert told.unchanged()


variable: Any = A


def write_variable(value: object) -> None:
    global variable
    variable = value


def delete_variable() -> None:
    global variable
    del variable


def test_writes_of_module_variables_show() -> None:
    write_variable(A)
    told = CompiledEntries((HeldEntries(globals(), (("variable", A),), None),), ())
    try:
        for _ in range(200):
            write_variable(A)
            assert told.unchanged()
            write_variable(B)
            assert not told.unchanged()
        write_variable(A)
        assert told.unchanged()
        delete_variable()
        assert not told.unchanged()
    finally:
        write_variable(A)
