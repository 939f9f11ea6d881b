"""How code uses names: which are globals, which are attributes and of what, which strings are only keys.

Note [What a name is used as]. The same name may be a global, an attribute, and a key of a batch. It is told from the
instructions, of Python 3.11 to 3.14. What is not understood counts as an attribute's name.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_GLOBALS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"}
    | {"DELETE_NAME"}
)
_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_PARTS = ("EXTENDED_ARG", "CACHE")
_NOTHING = frozenset({*_PARTS, "NOP", "PRECALL", "KW_NAMES", "RESUME", "NOT_TAKEN"})
_LOADS = frozenset(
    {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_CONST", "LOAD_SMALL_INT"}
    | {"LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLOSURE", "PUSH_NULL"}
    | {"LOAD_COMMON_CONSTANT", "LOAD_CONST_IMMORTAL", "LOAD_CONST_MORTAL", "LOAD_BUILD_CLASS"}
)
"""They put something on the stack, and take nothing."""
_GIVES_ONE = frozenset(
    {"BINARY_OP", "UNARY_NEGATIVE", "UNARY_NOT", "UNARY_INVERT", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "MAKE_FUNCTION"}
    | {"CALL_INTRINSIC_1", "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE", "BUILD_STRING"}
    | {"BUILD_TUPLE", "BUILD_LIST", "BUILD_SET", "BUILD_SLICE", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "BINARY_SLICE"}
    | {"BINARY_SUBSCR", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "GET_ITER", "TO_BOOL", "SET_FUNCTION_ATTRIBUTE"}
)
"""They put one thing on the stack, and take as many as their effect on it says."""
_TAKE: dict[str, int] = {
    **dict.fromkeys(("POP_TOP", "STORE_FAST", "STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"), 1),
    **{"STORE_ATTR": 2, "DELETE_SUBSCR": 2, "STORE_SUBSCR": 3, "STORE_FAST_STORE_FAST": 2},
}
"""How many things on the stack are taken by what puts nothing there."""
_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR")
_WORD = re.compile(r"[^\W\d]\w*")
_PIECE = re.compile(r"\w+")
_PLACE = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]|\{[^}]*\}")
"""Where `%` and `format` put something into a string."""

COMPARE = frozenset(
    {"index", "count", "remove", "eq", "ne", "contains", "countOf", "indexOf", "__eq__", "__ne__", "groupby", "approx"}
)
"""Functions and methods that ask for equality, next to those whose name begins with `assert`."""
_FORMATS = ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE")
_TEXTS = frozenset(
    {"str", "repr", "ascii", "format", "format_map", "vformat", "format_field", "print", "substitute", "Template"}
    | {"pformat", "pprint", "pp", "saferepr", "safe_substitute"}
)
"""By these, code makes texts of objects."""

Owner = tuple[str, ...]
"""Where an object comes from: "global", "free" (a variable around the function) or "first" (its first parameter), the
variable's name, and attributes one by one."""
FIRST, FREE, GLOBAL = "first", "free", "global"
MATCHED = "__match_args__"
"""What a class pattern asks a class for."""


@dataclass(frozen=True, slots=True)
class Use:
    """A method that is called. `owner`: whose; `given`: what it is given that is not a constant."""

    name: str
    owner: Owner
    given: tuple[Owner, ...] = ()


@dataclass(frozen=True, slots=True)
class NameUses:
    """Names in a function, inner ones included.

    Attributes:
        globals: loaded, written or deleted as globals, or as names in the body of a class.
        attributes: names of attributes, of which it is not known whose they are, and strings that may be such.
        known: attributes of which it is.
        keys: strings that are only keys, or compared, other strings among the constants, and parameters.
        stored: attributes and variables that are written.
        words: names in strings that are none themselves, such as what `eval` is given.
        pieces: parts of strings in code that puts strings together.
        compares: whether it may compare two objects, and not only one with a constant.
        texts: whether it may make texts of objects.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    known: frozenset[Use]
    keys: frozenset[str]
    stored: frozenset[str]
    words: frozenset[str]
    pieces: frozenset[str]
    compares: bool
    texts: bool


def instructions(code: types.CodeType) -> list[dis.Instruction]:
    """What code does, without what only belongs to the instruction next to it."""
    return _doing(dis.get_instructions(code))


def _doing(steps: Iterable[dis.Instruction]) -> list[dis.Instruction]:
    """Without what only belongs to the instruction behind it, which is jumped to where that is."""
    found: list[dis.Instruction] = []
    is_target = False
    for step in steps:
        is_target = is_target or bool(step.is_jump_target)
        if step.opname not in _PARTS:
            found.append(_as_target(step) if is_target and not step.is_jump_target else step)
            is_target = False
    return found


def _as_target(step: dis.Instruction) -> dis.Instruction:
    """The same instruction, as one that is jumped to. Since Python 3.13 that is one which has a label."""
    fields: Any = {"is_jump_target": True} if "is_jump_target" in step._fields else {"label": 0}
    return step._replace(**fields)


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The functions and classes that stand in code."""
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def words_in(text: str) -> list[str]:
    """Parts of a text that may be names."""
    return _WORD.findall(text)


@functools.lru_cache(maxsize=4096)
def name_uses(code: types.CodeType) -> NameUses:
    """How a function uses names. Note [What a name is used as]."""
    steps = list(dis.get_instructions(code))
    read = {step.argval for step in steps if step.opname in _GLOBALS}
    attributes, known = _attributes(code, steps)
    attributes.update(set(code.co_names).difference(read, attributes, (use.name for use in known)))
    strings = set(_strings(code.co_consts))
    given = {text for text in _given(steps) if text.isidentifier()}
    words = {word for text in strings if not text.isidentifier() for word in words_in(text)}
    attributes |= given
    for text in strings:
        if "." in text and all(map(str.isidentifier, text.split("."))):
            attributes.update(text.split("."))
    keys = {text for text in strings if text.isidentifier()}
    keys.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])  # of `f(**vars(held))`
    if not {"format", "format_map"}.isdisjoint(code.co_names):  # which looks up attributes
        attributes |= words
    keys.update(word for text in strings if "%(" in text or "{" in text for word in words_in(text))
    if any(step.opname == "MATCH_CLASS" for step in steps):
        attributes |= keys | {MATCHED}
    pieces = {word for text in strings for word in _PIECE.findall(_PLACE.sub(" ", text))} if _joins(steps) else set()
    called = {*code.co_names, *(set() if {"getattr", "methodcaller"}.isdisjoint(code.co_names) else given)}
    doing = _doing(steps)
    compares = _compares(doing) or any(map(asks_for_equality, called))
    texts = _makes_texts(doing) or not _TEXTS.isdisjoint(called)
    stored = {one for step in steps if step.opname in _STORES for one in [step.argval]}
    if not {"setattr", "delattr", "__setattr__", "__delattr__"}.isdisjoint(code.co_names):
        stored |= given
    for inner in map(name_uses, inner_codes(code)):
        read |= inner.globals
        attributes |= inner.attributes
        keys |= inner.keys
        stored |= inner.stored
        words |= inner.words
        pieces |= inner.pieces
        compares = compares or inner.compares
        texts = texts or inner.texts
        for use in inner.known:
            owners = [_outside(code, steps, one) for one in (use.owner, *use.given)]
            if None in owners:
                attributes.add(use.name)
            else:
                owner, *others = (one for one in owners if one is not None)
                known.add(Use(use.name, owner, tuple(others)))
    made = map(frozenset, (read, attributes, known, keys, stored, words, pieces))
    return NameUses(*made, compares, texts)  # type: ignore[call-arg, arg-type]


def asks_for_equality(name: str) -> bool:
    """Whether a function or method of this name compares what it is given."""
    return name in COMPARE or name.startswith("assert")


def _makes_texts(steps: Sequence[dis.Instruction]) -> bool:
    """Whether there is an f-string that something is put into, or a `%` whose right side is not a number."""
    for one, step in zip([None, *steps], steps, strict=False):
        by_number = one is not None and _is_constant(one) and isinstance(one.argval, (int, float))
        if step.opname in _FORMATS or (step.opname == "BINARY_OP" and step.argrepr in ("%", "%=") and not by_number):
            return True
    return False


def _compares(steps: Sequence[dis.Instruction]) -> bool:
    """Whether two objects are compared, or one is looked for among others. Constants do not count."""
    for two, one, step in zip([None, None, *steps], [None, *steps], steps, strict=False):
        if step.opname == "COMPARE_OP" and ("==" in step.argrepr or "!=" in step.argrepr):
            if one is None or not _is_constant(one):
                return True
        elif step.opname == "CONTAINS_OP" and (two is None or one is None or not _is_constant(two)):
            return True
    return False


def _is_constant(step: dis.Instruction) -> bool:
    return step.opname in ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_CONST_IMMORTAL", "LOAD_CONST_MORTAL")


def relative_imports(code: types.CodeType) -> Iterator[tuple[int, str]]:
    """What code imports from the package that it stands in: how many levels up, and the name; or none."""
    steps = instructions(code)
    for level, step in zip([None, None, *steps], steps, strict=False):
        if step.opname == "IMPORT_NAME" and level is not None and isinstance(level.argval, int) and level.argval:
            yield level.argval, step.argval
    for inner in inner_codes(code):
        yield from relative_imports(inner)


@functools.lru_cache(maxsize=4096)
def handed_on(code: types.CodeType) -> frozenset[str]:
    """Variables that code loads for something else than an attribute of theirs: it may give them to other code."""
    steps = instructions(code)
    found: set[str] = set()
    for step, behind in zip(steps, [*steps[1:], None], strict=True):
        if step.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")):
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            of_last = behind is not None and behind.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
            found.update(loaded[:-1] if of_last else loaded)
    return frozenset(found).union(*map(handed_on, inner_codes(code)))


@functools.lru_cache(maxsize=4096)
def imported_as(code: types.CodeType) -> frozenset[str]:
    """Variables that code itself imports something as."""
    found: set[str] = set()
    importing = False
    for step in dis.get_instructions(code):
        if step.opname in ("IMPORT_NAME", "IMPORT_FROM"):
            importing = True
        elif importing and step.opname.startswith("STORE_"):
            found.add(step.argval)
            importing = False
    return frozenset(found).union(*map(imported_as, inner_codes(code)))


@functools.lru_cache(maxsize=4096)
def chains(code: types.CodeType) -> frozenset[Owner]:
    """Globals that code loads, each with the attributes that are looked up of it one by one."""
    found: set[Owner] = set()
    chain: Owner | None = None
    for step in instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (step.argval,)
            found.add(chain)
        elif chain is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain = (*chain, step.argval)
            found.add(chain)
        else:
            chain = None
    return frozenset(found).union(*map(chains, inner_codes(code)))


def _joins(steps: Sequence[dis.Instruction]) -> bool:
    """Whether code may put strings together."""
    return any(step.opname in ("BUILD_STRING", "BINARY_OP") or step.argval in ("format", "join") for step in steps)


def _strings(constants: Sequence[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings(tuple(constant))


def _attributes(code: types.CodeType, steps: Sequence[dis.Instruction]) -> tuple[set[str], set[Use]]:
    """Names of attributes of what is not known, and the others."""
    names: set[str] = set()
    known: set[Use] = set()
    owner: Owner | None = None
    for index, step in enumerate(steps):
        if step.is_jump_target:
            owner = None
        if step.opname in _PARTS:
            continue
        if (found := _root(code, steps, step)) is not None:
            owner = found
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            given = _arguments(code, steps, index) if owner is not None and _is_called(step) else None
            if owner is not None and given is not None:
                known.add(Use(step.argval, owner, given))
            elif owner is None or not _is_taken_on(steps, index):
                names.add(step.argval)
            else:
                known.add(Use(step.argval, owner))
            owner = None if owner is None or _is_called(step) else (*owner, step.argval)
        else:
            if step.opcode in dis.hasname and step.opname not in _GLOBALS and isinstance(step.argval, str):
                names.add(step.argval)
            owner = None
    return names, known


def _is_called(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_METHOD" or "NULL" in step.argrepr


def _is_taken_on(steps: Sequence[dis.Instruction], index: int) -> bool:
    """Whether another attribute is looked up of this one."""
    for step in steps[index + 1 :]:
        if step.is_jump_target:
            return False
        if step.opname not in _PARTS:
            return step.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return False


def _root(code: types.CodeType, steps: Sequence[dis.Instruction], step: dis.Instruction) -> Owner | None:
    """The variable that an instruction loads last, if all know what it is."""
    if step.opname == "LOAD_GLOBAL" and "NULL" not in step.argrepr:
        return GLOBAL, step.argval
    if step.opname == "LOAD_NAME":  # in the body of a class, where it may be a name of that body
        return None
    if step.opname.startswith("LOAD_FAST") and step.opname != "LOAD_FAST_AND_CLEAR":
        name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        return (FIRST, name) if _is_first(code, steps, name) else None
    if step.opname == "LOAD_DEREF":
        return _of_cell(code, steps, step.argval)
    return None


def _of_cell(code: types.CodeType, steps: Sequence[dis.Instruction], name: str) -> Owner | None:
    if name in code.co_freevars:
        return FREE, name
    return (FIRST, name) if _is_first(code, steps, name) else None


def _is_first(code: types.CodeType, steps: Sequence[dis.Instruction], name: str) -> bool:
    """Whether this is the first parameter, which is never written here."""
    if not code.co_argcount or code.co_varnames[0] != name:
        return False
    writes = (step for step in steps if "STORE_" in step.opname or "DELETE_" in step.opname or "CLEAR" in step.opname)
    return not any(name in _written(step) for step in writes if "FAST" in step.opname or "DEREF" in step.opname)


def _written(step: dis.Instruction) -> tuple[Any, ...]:
    if not isinstance(step.argval, tuple):
        return (step.argval,)
    return step.argval[:1] if "LOAD" in step.opname else step.argval


def _outside(code: types.CodeType, steps: Sequence[dis.Instruction], owner: Owner) -> Owner | None:
    """What an owner in an inner function is in this one."""
    kind, name, *rest = owner
    if kind == GLOBAL:
        return owner
    found = _of_cell(code, steps, name) if kind == FREE else None
    return None if found is None else (*found, *rest)


def _arguments(code: types.CodeType, steps: Sequence[dis.Instruction], index: int) -> tuple[Owner, ...] | None:
    """What is given in the call of the method that is loaded here: variables, and attributes of such."""
    given: list[Owner] = []
    last = False
    for step in steps[index + 1 :]:
        if step.is_jump_target:
            return None
        if step.opname in _NOTHING:
            continue
        if step.opname in ("CALL", "CALL_KW"):
            return tuple(given)
        if isinstance(step.argval, tuple) and step.opname.startswith("LOAD_FAST"):
            return None
        if (found := _root(code, steps, step)) is not None:
            given.append(found)
            last = True
        elif step.opname == "LOAD_ATTR" and last and not _is_called(step):
            given[-1] = (*given[-1], step.argval)
        elif _is_constant(step):
            last = False
        else:
            return None
    return None


def _given(steps: Sequence[dis.Instruction]) -> set[str]:
    """Strings that are not only keys, or compared: something else is done with them, or it is not known what."""
    return {
        step.argval
        for index, step in enumerate(steps)
        if step.opcode in dis.hasconst and isinstance(step.argval, str)
        if not (step.opname.startswith("LOAD_CONST") and is_key(steps[index + 1 :]))
    }


def is_key(behind: Sequence[dis.Instruction]) -> bool:
    """Whether what was put on the stack is only a key or compared, going on from there as far as no branch comes."""
    stack = [True]  # whether it is this string; the last is the top
    for step in behind:
        name = step.opname
        if step.is_jump_target:
            return False
        if name in _NOTHING:
            continue
        if name in ("COPY", "SWAP"):
            depth = step.arg or 1
            stack[:0] = [False] * (depth - len(stack))
            if name == "COPY":
                stack.append(stack[-depth])
            else:
                stack[-1], stack[-depth] = stack[-depth], stack[-1]
            continue
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        if name in _LOADS:
            stack += [False] * effect
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            takes, gives = 1, 1 + effect
        elif name in _GIVES_ONE:
            takes, gives = 1 - effect, 1
        elif name in _TAKE:
            takes, gives = _TAKE[name], 0
        else:
            return False
        stack[:0] = [False] * (takes - len(stack))
        taken = stack[len(stack) - takes :]
        if any(ours and not _as_key(step, takes - 1 - place) for place, ours in enumerate(taken)):
            return False
        stack[len(stack) - takes :] = [False] * gives
        if not any(stack):
            return True
    return False


def _as_key(step: dis.Instruction, below_top: int) -> bool:
    """Whether an instruction takes what lies so far below the top of the stack as a key, or compares it."""
    if step.opname in _SUBSCRIPTS or (step.opname == "BINARY_OP" and step.argrepr == "[]"):
        return below_top == 0
    if step.opname == "BUILD_MAP":
        return below_top % 2 == 1
    return step.opname in ("COMPARE_OP", "CONTAINS_OP", "IS_OP", "POP_TOP")
