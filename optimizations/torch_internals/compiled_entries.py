"""Whether dicts, lists and closure cells still hold the very objects they held, asked of compiled code.

Of dicts only those are looked at that were written since.

PyTorch's guards (`dict_guard`) look at the version of each dict in each call, and once one was written, at all entries
of all. Python tells of each write into a dict that is watched (from 3.12 on), and counts versions (up to 3.13): so
where nothing was written one number is compared, and where something was, only what that dict holds.

Whether each kind of write shows is tried out once. One that does not, as in another build, is not relied on: then all
is compared in each call.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from optimizations import host_code
from optimizations.torch_internals.dict_guard import HeldEntries

if TYPE_CHECKING:
    from optimizations.torch_internals.argument_guard import Held

_DICTS = (dict, OrderedDict, defaultdict)

_WARM = 64
"""Writes after which Python writes in the quickest way that it knows for that line."""


class CompiledEntries:
    """These entries of dicts, and those of `held` that stand in dicts, lists, cells and empty sets, as they are now.

    Nothing where there is no compiled code.

    Attributes:
        unchanged: tells whether the dicts still hold them. It holds what it reads.
    """

    def __init__(self, entries: Sequence[HeldEntries], held: Sequence[Held]) -> None:
        self._compiled = host_code.looks()
        self._told: set[int] = set()
        self.unchanged: Callable[[], bool] = lambda: True
        if self._compiled is None:
            return
        in_dicts = [one for one in held if _is_in_dict(one)]
        in_lists, in_cells, sets = ([one for one in held if _is_whole(one, kind)] for kind in _OTHERS)
        self._told = {id(one) for some in (in_dicts, in_lists, in_cells, sets) for one in some}
        dicts = [
            *((one.dictionary, one.size, one.entries, one.absent) for one in entries),
            *((one.holder, one.size, one.entries, one.absent) for one in in_dicts),
        ]
        if dicts or self._told:
            self.unchanged = self._compiled.Entries(
                _for_c(dicts),
                *_shows(),
                tuple([(one.holder, tuple([value for _, value in one.entries])) for one in in_lists]),
                tuple([(one.holder, one.entries[0][1]) for one in in_cells]),
                tuple([one.holder for one in sets]),
            )

    def __bool__(self) -> bool:
        """Whether it tells of entries of dicts."""
        return self._compiled is not None

    def tells_of(self, held: Held) -> bool:
        """Whether it tells of this one, which is one of those it was made of."""
        return id(held) in self._told


_OTHERS = (list, types.CellType, set)


def _is_in_dict(held: Held) -> bool:
    """Whether it stands in a dict, under names: others are compared by what they are equal to."""
    if type(held.holder) not in _DICTS or held.attributes or held.looks:
        return False
    return all(type(key) is str for key, _ in held.entries)


def _is_whole(held: Held, kind: type) -> bool:
    """Whether it is one of this kind, and all that stands there is compared."""
    if type(held.holder) is not kind or held.attributes or held.looks or held.absent:
        return False
    if kind is set:
        return held.size == 0
    if kind is types.CellType:
        return len(held.entries) == 1
    return held.size == len(held.entries) and [key for key, _ in held.entries] == list(range(len(held.entries)))


def _for_c(entries: Iterable[tuple[dict[Any, Any], int | None, Sequence[tuple[Any, Any]], Iterable[str]]]) -> Any:
    return tuple(
        [
            (
                dictionary,
                -1 if size is None else size,
                tuple([key for key, _ in held]),
                tuple([value for _, value in held]),
                tuple(absent),
            )
            for dictionary, size, held, absent in entries
        ]
    )


@functools.cache
def _shows() -> tuple[bool, bool]:
    """Whether each write shows in the version of a dict, and whether Python tells of each."""
    by_versions, watched = (all(_is_seen(write, *way) for write in _WRITES) for way in ((True, False), (False, True)))
    return by_versions, watched


class _Holder:
    """Whose attributes are written."""


def _is_seen(write: Callable[[_Holder], object], by_versions: bool, watched: bool) -> bool:
    compiled = host_code.looks()
    assert compiled is not None
    for _ in range(_WARM):
        _is_seen_once(compiled, write, by_versions, watched)
    return _is_seen_once(compiled, write, by_versions, watched)


def _is_seen_once(compiled: Any, write: Callable[[_Holder], object], by_versions: bool, watched: bool) -> bool:
    holder = _Holder()
    for name in _NAMES:
        setattr(holder, name, object())
    held = vars(holder)
    unchanged = compiled.Entries(
        _for_c([(held, len(held), tuple(held.items()), ("another",))]), by_versions, watched, (), (), ()
    )
    if not (unchanged() and unchanged()):
        return False
    write(holder)
    return not unchanged()


_NAMES = tuple("abcdefgh")


def _set(holder: Any) -> None:
    holder.d = None


def _delete(holder: Any) -> None:
    del holder.d


def _add(holder: Any) -> None:
    holder.another = None


_WRITES: tuple[Callable[[Any], object], ...] = (
    _set,
    _delete,
    _add,
    lambda holder: setattr(holder, "d", None),
    lambda holder: object.__setattr__(holder, "d", None),
    lambda holder: delattr(holder, "d"),
    lambda holder: vars(holder).__setitem__("d", None),
    lambda holder: vars(holder).update(d=None),
    lambda holder: vars(holder).__ior__({"d": None}),
    lambda holder: vars(holder).pop("d"),
    lambda holder: vars(holder).popitem(),
    lambda holder: vars(holder).setdefault("another"),
    lambda holder: vars(holder).clear(),
    lambda holder: vars(holder).__delitem__("d"),
)
"""Ways to write into a dict of attributes."""
