"""Each kind of look in compiled code: it finds what it should, refuses what it cannot read, and keeps what it reads."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import struct
import sys
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest

KINDS = ("Words", "Entries", "Looks", "Settings", "Nest", "Versions", "Bound")
TENSOR, SEQUENCE, DICT, VALUE, ASKED = range(5)
NO_PLACES = struct.pack("<10q", object.__basicsize__, *range(9))
EMPTY_CALL = (SEQUENCE, tuple, ()), (DICT, (), ())
COUNT = 64


@pytest.fixture(autouse=True)
def looks(compiled_looks: ModuleType) -> ModuleType:
    return compiled_looks


class Memory:
    """So many words that nobody else writes, each of which is its own place."""

    def __init__(self) -> None:
        self.words = (ctypes.c_uint64 * COUNT)(*range(COUNT))

    def stage(self, places: Iterable[int], size: int = 8) -> tuple[bytes, bytes, int]:
        places = list(places)
        start = ctypes.addressof(self.words)
        return packed(*[start + 8 * place for place in places]), packed(*places), size


class Kept:
    """What can be told to be gone."""


class WithRoom:
    """An object with a word where one of PyTorch has its part in C++: it is none that could be followed."""

    __slots__ = ("first", "second")


def packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def entries_of(looks: ModuleType, held: dict[Any, Any], ways: tuple[bool, bool] = (True, True), **other: Any) -> Any:
    one = (held, other.get("size", len(held)), tuple(held), tuple(held.values()), other.get("absent", ()))
    return looks.Entries((one,), *ways, (), (), ())


def one_of_each(looks: ModuleType, value: object) -> dict[str, Any]:
    """One of each kind that can hold any object, and holds this one."""
    memory, cell = Memory(), types.CellType(value)
    return {
        "Words": looks.Words((memory, value), (memory.stage([1, 2]),)),
        "Entries": looks.Entries(
            (({"a": value}, 1, ("a",), (value,), ()),), True, True, (([value], (value,)),), ((cell, value),), ()
        ),
        "Settings": looks.Settings((lambda: value,), (value,)),
        "Nest": looks.Nest((SEQUENCE, tuple, ((VALUE, value), (ASKED, lambda *_: value))), (DICT, (), ())),
        "Bound": looks.Bound((({"a": value}, "a"),)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_made_of_what_it_reads_only(kind: str, looks: ModuleType) -> None:
    made = getattr(looks, kind)
    for wrong in (
        lambda: made(),
        lambda: made(1),
        lambda: made(1, 2, 3, 4, 5, 6, 7),
        lambda: object.__new__(made),
        lambda: made.__new__(int),
        lambda: type("Derived", (made,), {}),
        lambda: setattr(made, "other", 1),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_named_arguments_are_refused(looks: ModuleType) -> None:
    for make in (
        lambda **named: looks.Words((), (), **named),
        lambda **named: looks.Entries((), True, True, (), (), (), **named),
        lambda **named: looks.Looks((), NO_PLACES, 0, True, **named),
        lambda **named: looks.Settings((), (), **named),
        lambda **named: looks.Nest(*EMPTY_CALL, **named),
        lambda **named: looks.Versions((), 16, 40, 16, **named),
        lambda **named: looks.Bound((), **named),
    ):
        made = make()
        with pytest.raises(TypeError, match="named"):
            make(other=1)
        with pytest.raises(TypeError):
            made(other=1)
        with pytest.raises(TypeError):
            made(1, 2, 3)


WRONG: dict[str, tuple[type[Exception], Callable[[ModuleType], object]]] = {
    "stages that are no tuples": (TypeError, lambda looks: looks.Words((), (5,))),
    "addresses that are no bytes": (TypeError, lambda looks: looks.Words((), (("a", b"", 8),))),
    "more addresses than values": (ValueError, lambda looks: looks.Words((), ((packed(1, 2), packed(1), 8),))),
    "half an address": (ValueError, lambda looks: looks.Words((), ((packed(1)[:4], packed(1)[:4], 8),))),
    "words of another size": (ValueError, lambda looks: looks.Words((), ((b"", b"", 2),))),
    "dicts that are no tuples": (TypeError, lambda looks: looks.Entries((5,), True, True, (), (), ())),
    "a dict that is none": (TypeError, lambda looks: looks.Entries((([], 0, (), (), ()),), True, True, (), (), ())),
    "too few values": (ValueError, lambda looks: looks.Entries((({}, 0, ("a",), (), ()),), True, True, (), (), ())),
    "a list that is none": (TypeError, lambda looks: looks.Entries((), True, True, (((), ()),), (), ())),
    "values of a list in a list": (TypeError, lambda looks: looks.Entries((), True, True, (([], []),), (), ())),
    "a list alone": (TypeError, lambda looks: looks.Entries((), True, True, ([],), (), ())),
    "a cell that is none": (TypeError, lambda looks: looks.Entries((), True, True, (), ((1, 1),), ())),
    "a set that is none": (TypeError, lambda looks: looks.Entries((), True, True, (), (), (frozenset(),))),
    "looks that are no tuples": (TypeError, lambda looks: looks.Looks((5,), NO_PLACES, 0, True)),
    "a look of too few": (TypeError, lambda looks: looks.Looks(((WithRoom, 4),), NO_PLACES, 0, True)),
    "too few places": (ValueError, lambda looks: looks.Looks((), NO_PLACES[:-8], 0, True)),
    "half of a word's look": (
        ValueError,
        lambda looks: looks.Looks(((WithRoom, 4, False, packed(1, 2)),), NO_PLACES, 0, True),
    ),
    "a class that is none": (ValueError, lambda looks: looks.Looks(((5, 4, False, b""),), NO_PLACES, 0, True)),
    "a class without a part": (ValueError, lambda looks: looks.Looks(((object, 4, False, b""),), NO_PLACES, 0, True)),
    "an object without a part": (ValueError, lambda looks: looks.Versions((object(),), 16, 40, 16)),
    "a part before the object": (ValueError, lambda looks: looks.Versions((WithRoom(),), -8, 40, 16)),
    "a part behind the object": (ValueError, lambda looks: looks.Versions((WithRoom(),), 2**40, 40, 16)),
    "places in a list": (TypeError, lambda looks: looks.Bound([])),
    "a place in no dict": (TypeError, lambda looks: looks.Bound((([], 0),))),
    "a place without a key": (TypeError, lambda looks: looks.Bound((({},),))),
    "values in a list": (TypeError, lambda looks: looks.Bound((({}, "a"),))([1])),
    "too few values for the places": (TypeError, lambda looks: looks.Bound((({}, "a"), ({}, "b")))((1,))),
    "a key without a hash": (TypeError, lambda looks: looks.Bound((({}, []),))((1,))),
    "a key without a hash that is asked for": (TypeError, lambda looks: looks.Bound((({}, []),))()),
    "more functions than values": (ValueError, lambda looks: looks.Settings((len,), ())),
    "functions in a list": (TypeError, lambda looks: looks.Settings([], ())),
    "a nest that is none": (TypeError, lambda looks: looks.Nest(5, EMPTY_CALL[1])),
    "a kind of nest that is none": (TypeError, lambda looks: looks.Nest((9,), EMPTY_CALL[1])),
    "a kind of nest that is too large": (TypeError, lambda looks: looks.Nest((2**80,), EMPTY_CALL[1])),
    "a sequence of another class": (TypeError, lambda looks: looks.Nest((SEQUENCE, set, ()), EMPTY_CALL[1])),
    "members that are no nests": (TypeError, lambda looks: looks.Nest((SEQUENCE, tuple, (5,)), EMPTY_CALL[1])),
    "a dict without members": (TypeError, lambda looks: looks.Nest((DICT, ("a",), ()), EMPTY_CALL[1])),
    "keys that are no text": (TypeError, lambda looks: looks.Nest((DICT, (1,), ((TENSOR,),)), EMPTY_CALL[1])),
    "a value of too few": (TypeError, lambda looks: looks.Nest((VALUE,), EMPTY_CALL[1])),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_cannot_be_read_is_refused(what: str, looks: ModuleType) -> None:
    error, make = WRONG[what]
    with pytest.raises(error):
        make(looks)


@pytest.mark.parametrize("size", [8, 4])
def test_a_word_that_differs_is_found_wherever_it_is(size: int, looks: ModuleType) -> None:
    drawn = random.Random(1)
    for _ in range(50):
        memory = Memory()
        places = [drawn.sample(range(COUNT), drawn.randrange(5)), range(first := drawn.randrange(60), first + 3)]
        stages = tuple([memory.stage(one, size) for one in places])
        words = looks.Words(memory, stages)
        read = {place for one in places for place in one}
        for place in range(COUNT):
            for bit in (0, 31, 32, 63):
                memory.words[place] ^= 1 << bit
                assert words() == (place not in read or bit >= 8 * size)
                memory.words[place] ^= 1 << bit
        assert words()


def test_words_behind_one_that_differs_are_not_read(looks: ModuleType) -> None:
    """An address there would end the process."""
    memory = Memory()
    words = looks.Words(memory, (memory.stage([3]), (packed(8, 16), packed(0, 0), 8)))
    memory.words[3] = 0
    assert not words()


def test_a_word_behind_the_last_of_a_stage_is_not_read_with_it(looks: ModuleType) -> None:
    """Memory that may not be read begins there."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(start + page, page, 0) == 0
    stages = [(packed(start + page - 8), packed(1), 8), (packed(start + page), packed(0), 8)]
    assert not looks.Words(memory, tuple(stages))()
    assert protect(start + page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    memory[page - 8 : page] = packed(1)
    assert looks.Words(memory, tuple(stages))()


def test_an_address_that_is_led_to_is_read_only_where_it_is_the_one_expected(looks: ModuleType) -> None:
    first, second = Memory(), Memory()
    first.words[0] = ctypes.addressof(second.words)
    leads = (packed(ctypes.addressof(first.words)), packed(first.words[0]), 8)
    words = looks.Words((first, second), (leads, second.stage([5])))
    assert words()
    first.words[0] = 8
    assert not words()


WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "set": lambda held: held.__setitem__("b", 0),
    "delete": lambda held: held.__delitem__("b"),
    "add": lambda held: held.__setitem__("new", 0),
    "pop": lambda held: held.pop("b"),
    "popitem": lambda held: held.popitem(),
    "clear": lambda held: held.clear(),
    "update": lambda held: held.update(b=0),
    "merge": lambda held: held.__ior__({"b": 0}),
    "setdefault": lambda held: held.setdefault("new", 0),
    "made again": lambda held: dict.__init__(held, {"b": 0}),
    "in C": lambda held: ctypes.pythonapi.PyDict_SetItemString(ctypes.py_object(held), b"b", ctypes.py_object(0)),
    "deleted in C": lambda held: ctypes.pythonapi.PyDict_DelItemString(ctypes.py_object(held), b"b"),
}
DICTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda held: defaultdict(int, held),
}


@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("kind", sorted(DICTS))
@pytest.mark.parametrize("write", sorted(WRITES))
def test_each_write_into_a_dict_is_seen(write: str, kind: str, ways: tuple[bool, bool], looks: ModuleType) -> None:
    held = DICTS[kind]({"a": object(), "b": object(), "c": object()})
    entries = entries_of(looks, held, ways, absent=("new",))
    assert entries() and entries()
    before = dict(held)
    WRITES[write](held)
    assert not entries() and not entries()
    held.clear()
    held.update(before)
    assert entries() and entries()


def test_a_missing_key_that_a_defaultdict_makes_is_seen(looks: ModuleType) -> None:
    held: dict[str, Any] = defaultdict(int, a=1)
    entries = entries_of(looks, held)
    assert entries()
    assert held["b"] == 0 and not entries()


@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)])
def test_of_several_dicts_the_one_that_was_written_is_found(ways: tuple[bool, bool], looks: ModuleType) -> None:
    dicts = [{"a": object()} for _ in range(5)]
    entries = looks.Entries(tuple([(one, 1, ("a",), (one["a"],), ()) for one in dicts]), *ways, (), (), ())
    others = [entries_of(looks, one, ways) for one in dicts]
    for index, one in enumerate(dicts):
        assert entries()
        before, one["a"] = one["a"], object()
        assert not entries()
        assert [other() for other in others] == [place != index for place in range(5)]
        one["a"] = before


def test_entries_that_are_not_looked_at_do_not_matter(looks: ModuleType) -> None:
    held = {"a": object(), "b": object()}
    entries = looks.Entries(((held, -1, ("a",), (held["a"],), ("new",)),), True, True, (), (), ())
    held["b"] = held["other"] = object()
    assert entries()
    del held["b"]
    assert entries()
    held["new"] = object()
    assert not entries()


class Named(str):
    """A name that is compared by a function of Python, which counts."""

    asked = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Named.asked += 1
        return str.__eq__(self, str(other))


@pytest.mark.parametrize("ways", [(True, False), (True, True), *[(False, True)][: sys.version_info >= (3, 12)]])
def test_dicts_that_were_not_written_are_not_looked_into(ways: tuple[bool, bool], looks: ModuleType) -> None:
    """Python tells of writes from 3.12 on."""
    value = object()
    written, others = {"a": value, "b": value}, [{Named("a"): value} for _ in range(4)]
    given = [(one, 1, (Named("a"),), (value,), ()) for one in others]
    entries = looks.Entries(((written, 2, ("a",), (value,), ()), *given), *ways, (), (), ())
    assert entries()
    Named.asked = 0
    for _ in range(3):
        written["b"] = object()
        assert entries() and Named.asked == 0
    others[2][Named("a")] = object()
    Named.asked = 0
    assert not entries() and Named.asked


def test_a_write_is_found_among_as_many_of_others_as_there_may_be(looks: ModuleType) -> None:
    """Also where more was written than is kept in mind."""
    value = object()
    held, other = {"a": value}, {"b": value}
    entries, of_other = entries_of(looks, held), entries_of(looks, other)
    assert entries() and of_other()
    for count in (0, 1, 254, 255, 256, 257, 600):
        for first in (True, False):
            for _ in range(count * (not first)):
                other["b"] = object()
            held["a"] = object()
            for _ in range(count * first):
                other["b"] = object()
            assert not entries() and not entries()
            held["a"], other["b"] = value, value
            assert entries() and of_other()
    for _ in range(600):
        other["b"] = object()
    assert entries() and not of_other()


def test_a_name_is_found_whichever_object_it_is(looks: ModuleType) -> None:
    """What is written under an equal string is written."""
    value = object()
    for name in ("a" * 40, "".join(["a"] * 40)):  # Python has one object for the first kind, and several for others
        for other in ("a" * 40, "".join(["a"] * 40), Named("a" * 40)):
            held: dict[Any, Any] = {name: value, "b": value}
            entries = entries_of(looks, held, absent=("new" * 40,))
            assert entries()
            held[other] = object()
            assert not entries()
            held[other] = value
            assert entries()
            held["".join(["new"] * 40)] = value
            assert not entries()


def test_a_new_name_that_others_of_the_class_have_is_seen(looks: ModuleType) -> None:
    """Objects of a class share their names: Python 3.12 tells of such a one as of one that has another value."""
    first = Kept()
    first.__dict__.update(a=1, new=1, more=1)
    for absent, size in (("new",), -1), ((), 1), (("more",), -1):
        one = Kept()
        one.__dict__["a"] = 1
        entries = looks.Entries(((vars(one), size, ("a",), (1,), absent),), True, True, (), (), ())
        assert entries()
        one.__dict__["new"] = 1
        assert entries() == (absent == ("more",))


def test_what_stands_in_places_is_given_and_put_there(looks: ModuleType) -> None:
    one, other = object(), object()
    first, second = {"a": one, "b": one}, {"a": one}
    bound = looks.Bound(((first, "a"), (second, "a")))
    assert bound() == [one], "all hold the same"
    second["a"] = other
    assert bound() == [one, other]
    del second["a"]
    assert bound() == [one, None]
    assert bound((other, one)) is None
    assert bound() == [other, one] and first == {"a": other, "b": one}
    del first["a"], second["a"]
    assert bound() == [None]
    nothing = looks.Bound(())
    assert nothing() == [] and nothing(()) is None


def test_an_equal_object_is_another(looks: ModuleType) -> None:
    held = {"a": 1000.5}
    entries = entries_of(looks, held)
    held["a"] = float("1000.5")
    assert not entries()


def test_a_dict_in_the_place_of_one_that_is_gone_is_looked_at(looks: ModuleType) -> None:
    for _ in range(200):
        held = {"a": object()}
        entries = entries_of(looks, held)
        assert entries()
        held["a"] = object()
        assert not entries()
        del held, entries


class Raises:
    def __hash__(self) -> int:
        return hash("a")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")


def test_an_error_in_a_comparison_is_raised(looks: ModuleType) -> None:
    entries = looks.Entries((({Raises(): 1}, 1, ("a",), (1,), ()),), True, True, (), (), ())
    for _ in range(3):
        with pytest.raises(RuntimeError, match="not to be compared"):
            entries()


@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)])
def test_a_write_while_it_is_compared_is_seen_the_next_time(ways: tuple[bool, bool], looks: ModuleType) -> None:
    class Writes:
        def __hash__(self) -> int:
            return hash("b")

        def __eq__(self, other: object) -> bool:
            held["a"] = None
            return False

    value = object()
    held: dict[Any, Any] = {"a": value}
    held[Writes()] = held["b"] = value
    held["a"] = value
    entries = looks.Entries(((held, 3, ("a", "b"), (value, value), ()),), *ways, (), (), ())
    assert entries() and held["a"] is None
    assert not entries()


def test_changes_of_lists_cells_and_sets_are_seen(looks: ModuleType) -> None:
    one, other = object(), object()
    some, cell, empty, no_list = [one, other], types.CellType(one), set[Any](), list[Any]()
    entries = looks.Entries((), True, True, ((some, (one, other)), (no_list, ())), ((cell, one),), (empty,))
    assert entries()
    for change, put_back in (
        (lambda: some.reverse(), lambda: some.reverse()),
        (lambda: some.append(one), lambda: some.pop()),
        (lambda: some.pop(), lambda: some.append(other)),
        (lambda: some.clear(), lambda: some.extend([one, other])),
        (lambda: no_list.append(one), lambda: no_list.clear()),
        (lambda: setattr(cell, "cell_contents", other), lambda: setattr(cell, "cell_contents", one)),
        (lambda: delattr(cell, "cell_contents"), lambda: setattr(cell, "cell_contents", one)),
        (lambda: empty.add(one), lambda: empty.clear()),
    ):
        change()
        assert not entries()
        put_back()
        assert entries()
    some[:] = [one, other, *range(1000)]
    del some[2:]
    assert entries(), "the array of a list may be another one"


def test_settings_are_compared_by_class_and_value(looks: ModuleType) -> None:
    now: list[Any] = ["high", 1]
    settings = looks.Settings((lambda: now[0], lambda: now[1]), ("high", 1))
    assert settings()
    now[0] = "".join(["hi", "gh"])
    assert settings()
    for place, value in ((0, "low"), (0, None), (1, 2), (1, True), (1, 1.0)):
        before, now[place] = now[place], value
        assert not settings()
        now[place] = before

    def fails() -> object:
        raise RuntimeError("not set")

    with pytest.raises(RuntimeError, match="not set"):
        looks.Settings((fails,), (1,))()


def test_the_tensors_of_a_nest_are_taken_in_order_and_others_are_not(looks: ModuleType) -> None:
    def asked(value: object, found: list[Any]) -> bool:
        found.append("asked")
        return value == "fits"

    members = ((TENSOR,), (DICT, ("a", "b"), ((TENSOR,), (VALUE, 3))), (SEQUENCE, list, ((TENSOR,), (ASKED, asked))))
    nest = looks.Nest((SEQUENCE, tuple, members), (DICT, ("named",), ((TENSOR,),)))
    one, two, three, four = (object() for _ in range(4))
    good = (one, {"a": two, "b": 3}, [three, "fits"])
    assert nest(good, {"named": four}) == [one, two, three, "asked", four]
    by_parts = {"".join(["na", "med"]): four}
    assert nest(good, by_parts) == [one, two, three, "asked", four]
    for args, kwargs in (
        (good, {}),
        (good, {"named": four, "more": 1}),
        (good, {"other": four}),
        (good, {1: four}),
        (list(good), {"named": four}),
        (good[:2], {"named": four}),
        ((*good, one), {"named": four}),
        ((one, {"b": 3, "a": two}, good[2]), {"named": four}),
        ((one, {"a": two, "b": True}, good[2]), {"named": four}),
        ((one, {"a": two, "b": 3.0}, good[2]), {"named": four}),
        ((one, OrderedDict(good[1]), good[2]), {"named": four}),
        ((one, good[1], (three, "fits")), {"named": four}),
        ((one, good[1], [three, "not"]), {"named": four}),
        ((one, good[1], [three]), {"named": four}),
        ((one, good[1], None), {"named": four}),
        (5, 6),
    ):
        assert nest(args, kwargs) is None, (args, kwargs)
    with pytest.raises(TypeError):
        nest(good)


def test_what_is_asked_may_change_what_is_taken_apart(looks: ModuleType) -> None:
    some: list[Any] = [1, 2, 3]
    by_name: dict[str, Any] = {"a": 1, "b": 2}

    def shorter(value: object, found: list[Any]) -> bool:
        some.clear()
        by_name.clear()
        return True

    members = ((SEQUENCE, list, ((ASKED, shorter), (TENSOR,), (TENSOR,))),)
    assert looks.Nest((SEQUENCE, tuple, members), EMPTY_CALL[1])((some,), {}) is None
    by_name.update(a=1, b=2)
    keys = (DICT, ("a", "b"), ((ASKED, shorter), (TENSOR,)))
    assert looks.Nest((SEQUENCE, tuple, (keys,)), EMPTY_CALL[1])((by_name,), {}) is None

    def longer(value: object, found: list[Any]) -> bool:
        some.append(1)
        return True

    some[:] = [1]
    assert looks.Nest((SEQUENCE, tuple, ((SEQUENCE, list, ((ASKED, longer),)),)), EMPTY_CALL[1])((some,), {}) is None

    def fails(value: object, found: list[Any]) -> bool:
        raise RuntimeError("cannot say")

    with pytest.raises(RuntimeError, match="cannot say"):
        looks.Nest((SEQUENCE, tuple, ((ASKED, fails),)), EMPTY_CALL[1])((1,), {})


def test_looks_take_a_list_of_as_many(looks: ModuleType) -> None:
    none = looks.Looks((), NO_PLACES, 0, True)
    assert none([]) == [] and none([1]) is None
    with pytest.raises(TypeError):
        none(())
    one = looks.Looks(((WithRoom, 4, False, b""),), NO_PLACES, 0, True)
    assert one([]) is None and one([object()]) is None and one([5]) is None
    assert one([WithRoom()]) is None, "it has no part in C++"


@pytest.mark.parametrize("kind", ["Words", "Entries", "Settings", "Nest", "Bound"])
def test_what_is_read_is_held_and_goes_with_what_reads(kind: str, looks: ModuleType) -> None:
    value = Kept()
    gone = weakref.ref(value)
    made = one_of_each(looks, value)[kind]
    del value
    gc.collect()
    assert gone() is not None
    del made
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", ["Words", "Entries", "Settings", "Nest", "Bound"])
def test_what_reads_itself_is_collected(kind: str, looks: ModuleType) -> None:
    value = Kept()
    gone = weakref.ref(value)
    value.__dict__["reads"] = one_of_each(looks, value)[kind]
    del value
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="the collector knows an empty dict there, and begins with it")
@pytest.mark.parametrize("kind", ["Words", "Entries"])
def test_what_was_taken_apart_says_that_all_is_otherwise(kind: str, looks: ModuleType) -> None:
    """Such as where something that it held asks once more while it goes."""
    said: list[object] = []
    asked = [0]

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def ask(capsule: int) -> None:
        said.append(ctypes.cast(asked[0], ctypes.py_object).value())

    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype, make_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    memory, held = Memory(), dict[str, Any]()  # the collector begins with what was made first, and knows no empty dict
    if kind == "Words":
        made = looks.Words(held, (memory.stage([1]),))
    else:
        made = looks.Entries(((held, -1, (), (), ()),), True, True, (), (), ())
    asked[0] = id(made)
    held["itself"] = made
    held["asks"] = make_capsule(1, None, ctypes.cast(ask, ctypes.c_void_p))
    assert made()
    del held, made
    gc.collect()
    assert said == [False]


def test_many_calls_and_many_objects_keep_nothing(looks: ModuleType) -> None:
    value = object()
    made = one_of_each(looks, value)
    nest = looks.Nest((SEQUENCE, tuple, ((TENSOR,), (VALUE, "x"))), (DICT, (), ()))
    none = looks.Looks((), NO_PLACES, 0, True)

    def call() -> None:
        assert made["Words"]() and made["Entries"]() and made["Settings"]()
        assert nest((value, "x"), {}) == [value] and nest((value, "y"), {}) is None
        assert none([]) == [] and none([value]) is None
        assert made["Bound"]() == [value] and made["Bound"]((value,)) is None

    call()
    before = sys.getrefcount(value), sys.getrefcount(None), sys.getallocatedblocks()
    for _ in range(20_000):
        call()
    for _ in range(2_000):
        one_of_each(looks, value)
    gc.collect()
    after = sys.getrefcount(value), sys.getrefcount(None), sys.getallocatedblocks()
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) < 100 and after[2] - before[2] < 500


def test_a_write_is_found_where_comparing_keys_runs_what_writes(looks: ModuleType) -> None:
    """As much as what is kept in mind: the write that is still to be looked at is not among it any more."""
    value, act = object(), False

    def write_much() -> None:
        for _ in range(300):
            other["c"] = object()
        other["c"] = value

    class Acts(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal act
            if act:
                act = False
                write_much()
            return str.__eq__(self, str(other))

    first, second, other = {Acts("a"): value}, {"b": value}, {"c": value}
    given = [(first, 1, ("a",), (value,), ()), (second, 1, ("b",), (value,), ()), (other, 1, ("c",), (value,), ())]
    entries = looks.Entries(tuple(given), False, True, (), (), ())
    assert entries()
    first["a"] = object()
    second["b"] = object()
    first["a"] = value
    act = True
    assert not entries()
