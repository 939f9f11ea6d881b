"""Which of the names in a step's code may be those of Python state that it reads.

Note [Which names count]. A name often occurs twice: a loop counts its `step`, and its step calls `optimizer.step()`. So

* globals are those that code loads or writes as such, not what has their name;
* a string counts as an attribute's name, but not where it is only a key or compared;
* a method that is called counts, but not where it is called of an object that is found without running anything, is of
  a library, and holds nothing of the program's own: `self.optimizer.step()`, where `self` can only be objects that are
  known (`owners.py`). What stands in `self.optimizer` is watched, so that another is noticed, and all is looked at
  again. Of objects whose classes have a base of a library such names count: its code may call them;
* `dataclass` makes an `__eq__` that names all fields. They count only where code compares two objects, makes texts of
  objects, or copies them;
* what a call of `torch.nn.Module` calls in turn counts for modules of the program's own: `eval` calls `train`;
* a class counts as one of which objects are made where one of its class methods is called.

Where code may look names up by a variable, more of them count. With `getattr` and `vars` strings in data do, and all
names and strings in code; so do parts of strings that it puts together. With what gives attributes as a dict, such as
`asdict`, all names and strings in code do. With `globals`, `eval` and the like they count for variables, too.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from optimizations.capture.step.host_state import cell_content
from optimizations.capture.step.name_uses import (
    FIRST,
    FREE,
    NameUses,
    Owner,
    Use,
    asks_for_equality,
    name_uses,
    words_in,
)
from optimizations.capture.step.owners import UNKNOWN, attribute_of, is_librarys, only_librarys
from optimizations.capture.step.program_code import COPIES, TEXTS, looks_up_by_variable, strings

_BY_VARIABLE = ("vars", "__dict__")
_WITH_KEYS = frozenset(
    {"dir", "asdict", "astuple", "fields", "getmembers", "getmembers_static", "getattr_static", "attrgetter"}
    | {"methodcaller", "__getattribute__", "__getattr__", "__getstate__", "__reduce_ex__", "__slots__", "locals"}
    | {"f_locals", "model_dump", "to_dict", "as_dict", "__dataclass_fields__", "__annotations__", "__fields__"}
    | {"_get_kwargs"}
)
"""By these, code may have attributes as entries of a dict, or look them up by strings."""
_BY_A_STRING = frozenset(
    {"attrgetter", "methodcaller", "__getattribute__", "getattr_static", "get_field", "__reduce_ex__", "__reduce__"}
    | {"__getstate__", "getmembers", "getmembers_static", "asdict", "model_dump"}
)
"""Those of these by which a string that is held may be such a name."""
_VARIABLES = frozenset(
    {"globals", "eval", "exec", "compile", "__globals__", "f_globals", "modules", "import_module", "__import__"}
    | {"__builtins__", "getmodule"}
)
"""By these, code may look up the variables of a module by strings, or as attributes."""
_EVALUATE = frozenset({"eval", "exec", "compile"})
_FORMAT = frozenset({"format", "format_map", "vformat", "get_field", "Formatter"})
"""By these, code may look up attributes that stand in a text."""
_COPY = frozenset({"copy", "deepcopy", "dumps", "dump", "save", "replace"})
"""By these, code may copy an object, or write all that it holds."""
_OTHER_OBJECTS = frozenset({"copy", "deepcopy", "replace", "__class__", "__new__", "__func__"})
"""By these, code may run a method for an object that is not reached."""
_LOOK_UP: tuple[Any, ...] = (getattr, vars, dir, globals, locals, eval, exec, compile)
_READ_FIELDS = (*_BY_VARIABLE, *_WITH_KEYS, *_OTHER_OBJECTS, *_COPY, "tree_map", "tree_flatten", "tree_leaves")
"""By these, code may read all fields of a dataclass, which occur in the code that compares it."""
MOST_OF_A_KIND = 16
"""Objects of which a method may be, where it is asked whose attributes it uses."""
LONGEST_EXPRESSION = 200
"""Characters of a string that is looked through for names, where code evaluates such."""


class CountedNames:
    """Names in code that was met so far, and what they may name.

    Attributes:
        attributes: names of attributes.
        of_others: those that are only of objects of libraries.
        asked: those that code may ask for by `getattr` or `hasattr`: classes, modules, functions and tensors may get
            them later.
        strings: what stands in data: names too, where code looks attributes up by a variable.
        keys: other names and strings in code.
        named: all that occurs there, at whatever place.
        by_variable, compares, texts: whether code may ask `getattr` for a variable, compare objects, or make texts of
            them.
        met_another: whether a method was found to be of another object since `settle` was called.
        in_whole, by_strings: what `settle` found: all that a namespace holds counts; variables may be looked up by
            texts.
    """

    def __init__(self) -> None:
        self.attributes: set[str] = set()
        self.of_others: set[str] = set()
        self.asked: set[str] = set()
        self.strings: set[str] = set()
        self.keys: set[str] = set()
        self.named: set[str] = set()
        self.by_variable = self.compares = self.texts = False
        self.met_another = self.in_whole = self.by_strings = False
        self._words: set[str] = set()
        self._pieces: set[str] = set()
        self._said: set[str] = set()
        self._stored: set[str] = set()
        self._globals: set[str] = set()
        self._functions: list[tuple[types.FunctionType, NameUses]] = []
        self._reached_alone: set[int] = set()
        self._first: dict[int, dict[int, Any]] = {}
        self._known: dict[tuple[int, str], bool] = {}
        self._texts: list[str] = []

    def take_in(self, function: types.FunctionType, named: set[str]) -> tuple[NameUses, set[str]]:
        """A function of the program's own, which names these. Gives their uses, and which it may ask `getattr` for."""
        code = function.__code__
        uses = name_uses(code)
        self._functions.append((function, uses))
        self.attributes |= uses.attributes
        self.keys |= named | uses.keys
        self.named |= named
        self.compares = self.compares or uses.compares
        self.texts = self.texts or uses.texts
        self.by_variable = self.by_variable or looks_up_by_variable(code)
        self._words |= uses.words
        self._pieces |= uses.pieces
        self._said.update(strings(code))
        self._stored |= uses.stored
        self._globals |= uses.globals
        asked = set() if named.isdisjoint(("getattr", "hasattr")) else set(strings(code))
        self.asked |= asked
        return uses, asked

    def occurs(self, *given: str) -> None:
        """Names that count wherever they stand."""
        self.attributes.update(given)
        self.named.update(given)

    def held_in_data(self, text: str) -> None:
        """A string that the step reaches."""
        if text.isidentifier():
            self.strings.add(str.__str__(text))  # one of a class of the program's own may have no hash
        elif len(text) <= LONGEST_EXPRESSION:
            self._texts.append(str.__str__(text))

    def is_held(self, function: types.BuiltinFunctionType) -> None:
        """A function of Python's that is reached, perhaps under another name."""
        if function in _LOOK_UP:
            self.named.add(function.__name__)
            self.by_variable = self.by_variable or function is getattr
        self.compares = self.compares or asks_for_equality(function.__name__)
        self.texts = self.texts or function in (repr, ascii, format, print)

    def is_reached_alone(self, function: types.FunctionType) -> None:
        """A function that is not reached as a method of an object: its first parameter may be anything."""
        self._reached_alone.add(id(function))

    def is_of(self, method: types.FunctionType, value: Any) -> None:
        """A method may run for this object."""
        known = self._first.setdefault(id(method), {})
        if len(known) <= MOST_OF_A_KIND and id(value) not in known:
            known[id(value)] = value
            self.met_another = True

    def settle(self) -> None:
        """Find out what counts of all that was taken in."""
        self.met_another = False
        self._take_in_uses()
        self.in_whole = self.by_variable or self._occurs_one_of(_BY_VARIABLE)
        self.by_strings = self._occurs_one_of(_VARIABLES)
        if self._occurs_one_of(_EVALUATE):
            self.attributes.update(word for text in self._texts for word in words_in(text))
            self.attributes |= self._words
        if self._occurs_one_of(_FORMAT):
            self.attributes.update(word for text in self._texts if "{" in text for word in words_in(text))
            self.attributes |= self._words
        if self.in_whole or self.by_strings or self._occurs_one_of(_BY_A_STRING):
            self.attributes |= self.strings
        if self.in_whole or self.by_strings or self._occurs_one_of(_WITH_KEYS):
            self.attributes |= self.keys | self.of_others

    @property
    def with_keys(self) -> set[str]:
        """All of them, for objects whose classes have a base of a library."""
        return self.attributes | self.keys | self.of_others

    def looked_up_unnamed(self, given: Iterable[str]) -> set[str]:
        """Those of these attributes that code may ask for though their names stand nowhere.

        It may put a name together: of a beginning or an end that stands in it, or of texts that are held, with a piece
        between them or a number behind. A name that is none can only be asked for so, or by a text that stands there.
        """
        odd = {name for name in given if not name.isidentifier()}
        if not self.by_variable:
            return odd
        pieces = tuple(self._pieces)
        texts = self.strings | self._said
        return odd.union(
            name
            for name in given
            if name.startswith(pieces) or name.endswith(pieces) or self._is_of_texts(name, pieces, texts)
        )

    @staticmethod
    def _is_of_texts(name: str, pieces: Iterable[str], texts: Collection[str]) -> bool:
        for end in range(1, len(name)):
            if name[:end] in texts:
                rest = [name[end:], *(name[end + len(one) :] for one in pieces if name.startswith(one, end))]
                if any(one in texts or one.isdigit() for one in rest):
                    return True
        return False

    @property
    def called_unnamed(self) -> frozenset[str]:
        """Methods that run where objects are copied, or texts are made of them."""
        found = TEXTS | {"extra_repr"} if self.texts else frozenset()
        return found | COPIES if self._occurs_one_of(_COPY) else found

    @property
    def reads_fields(self) -> bool:
        """Whether code may read all fields of a dataclass."""
        return self.compares or self.texts or self.by_variable or self._occurs_one_of(_READ_FIELDS)

    def _occurs_one_of(self, given: Iterable[str]) -> bool:
        return not self.named.isdisjoint(given)

    def _take_in_uses(self) -> None:
        """Attributes of libraries' objects are no names of others, as long as no other use of their names is found."""
        for function, uses in self._functions:
            for use in uses.known:
                if use.name not in self.attributes:
                    (self.of_others if self._is_a_librarys(function, use) else self.attributes).add(use.name)

    def _is_a_librarys(self, function: types.FunctionType, use: Use) -> bool:
        owners = self._owners(function, use.owner)
        if not owners or not all(self._only_librarys(owner, use.name) for owner in owners):
            return False
        given = [value for one in use.given for value in self._owners(function, one) or (UNKNOWN,)]
        return all(map(is_librarys, given))

    def _only_librarys(self, owner: Any, name: str) -> bool:
        key = id(owner), name
        if key not in self._known:
            self._known[key] = only_librarys(owner, name)
        return self._known[key]

    def _owners(self, function: types.FunctionType, owner: Owner) -> list[Any]:
        """What code means by these variables and attributes; nothing if that is not known."""
        kind, name, *rest = owner
        found: list[Any]
        if kind == FIRST:
            any_object = id(function) in self._reached_alone or "type" in self._globals
            any_object = any_object or not self.named.isdisjoint(_OTHER_OBJECTS)
            found = [] if any_object else list(self._first.get(id(function), {}).values())
            if len(found) > MOST_OF_A_KIND or any(value is None for value in found):
                return []
        elif name in self._stored:
            return []
        elif kind == FREE:
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
            found = [cell_content(cell) for free, cell in cells if free == name]
        else:
            found = [function.__globals__[name]] if name in function.__globals__ else []
        for attribute in rest:
            found = [attribute_of(one, attribute, self._stored) for one in found]
            if any(one is UNKNOWN for one in found):
                return []
        return [behind(one) for one in found]


def looks_up_variables(named: set[str]) -> bool:
    """Whether code that names these may have variables by texts."""
    return not named.isdisjoint((*_BY_VARIABLE, *_VARIABLES))


def behind(value: Any) -> Any:
    """The object that a weak proxy stands for, None if it is gone; all else itself."""
    if type(value) not in weakref.ProxyTypes:
        return value
    try:
        return value.__repr__.__self__
    except ReferenceError:
        return None
