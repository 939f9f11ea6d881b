"""The program's own code among what a step reaches: whose it is, which names it uses, which methods may run.

The code of installed libraries is not followed. But where a class of the program's own inherits of a library's, what
that code uses of the object is known by its names, and it may call whatever the program's class overrides.
"""

from __future__ import annotations

import abc
import datetime
import dis
import functools
import importlib.metadata
import inspect
import pathlib
import sys
import sysconfig
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from optimizations.capture.step.name_uses import inner_codes, is_key

_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
PARTIALS = (functools.partial, functools.partialmethod)
CACHED = type(functools.lru_cache(lambda: None))

_BUILT_IN = (types.WrapperDescriptorType, types.MethodDescriptorType, types.BuiltinFunctionType)
_STEPS = "optimizations.capture.step."
_WITHOUT_LOOKUPS = ("abc", "typing", "collections.abc")
"""Modules of bases that know nothing of the attributes of their objects."""
MAKING = frozenset({"__init__", "__new__", "__post_init__"})
"""Called for objects that the step makes, of classes it names; not for those that are there."""
_DATES = frozenset({"now", "today", "utcnow"})
_TELL_DATES = (datetime, datetime.datetime, datetime.date)
_LOOK_UP_OR_IMPORT = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
CLOCKS = tuple(
    f"{name}{unit}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
)
"""Functions of the module `time` that give another value each time they are asked."""
ADVICE_ON_CLOCKS = "measure around it; decide by the time before it, and pass the decision"
TEXTS = frozenset({"__repr__", "__str__"})
"""Called where texts are made of objects."""
COPIES = frozenset({"__copy__", "__deepcopy__", "__getstate__", "__reduce__", "__reduce_ex__", "__replace__"})
"""Called where objects are copied, or pickled."""
_NOT_IN_A_STEP = frozenset(
    {*TEXTS, *COPIES, *MAKING, "__del__", "__setstate__", "__init_subclass__", "__set_name__", "__dir__", "__sizeof__"}
)


def methods(kind: type) -> Iterator[tuple[type, str, Any]]:
    """Code of the program's own classes among the bases of `kind`: functions, and objects that stand for such.

    With the class that defines it, and its name there.
    """
    for base in reversed(kind.__mro__):
        if is_users(base.__module__):
            for name, value in list(vars(base).items()):
                code = code_of(value)
                if isinstance(code, (types.FunctionType, CACHED, *PARTIALS)) or _is_users_object(code):
                    yield base, name, code


def compares_fields(kind: type, name: str) -> bool:
    """Whether a method is the `__eq__` that `dataclass` made, which runs for a comparison and for nothing else.

    Where objects have a hash, or an order, they are compared in other places too.
    """
    made = vars(kind).get("__eq__") if name == "__eq__" and "__dataclass_params__" in vars(kind) else None
    code = getattr(made, "__code__", None)
    return code is not None and code.co_filename == "<string>" and kind.__hash__ is None and "__lt__" not in vars(kind)


def inherited(kind: type) -> Mapping[str, frozenset[str]]:
    """Methods of libraries' classes among the bases of a class of the program's own, with the names in their code.

    Those of `torch.nn.Module` itself are left out: of it is known which may matter.
    """
    found: dict[str, frozenset[str]] = {}
    for base in kind.__mro__ if is_users(kind.__module__) else ():
        if base not in (object, torch.nn.Module) and not is_users(base.__module__):
            for name, value in list(vars(base).items()):
                code = inspect.unwrap(code_of(value)) if callable(code_of(value)) else None
                if isinstance(code, types.FunctionType) and name not in _NOT_IN_A_STEP:
                    found[name] = found.get(name, frozenset()).union(names(code.__code__))
    return found


@functools.lru_cache(maxsize=1)
def of_modules() -> Mapping[str, frozenset[str]]:
    """The methods of `torch.nn.Module`, with the names in their code: `eval` calls `train`."""
    found = {
        name: value for name, value in list(vars(torch.nn.Module).items()) if isinstance(value, types.FunctionType)
    }
    return {name: frozenset(names(value.__code__)) for name, value in found.items() if name not in _NOT_IN_A_STEP}


def used_by(of_libraries: Mapping[str, frozenset[str]], called: Collection[str]) -> set[str]:
    """Names in those of the `inherited` methods that run where `called` are called, by name or by one of these."""
    found: set[str] = set()
    waiting = [name for name in of_libraries if name in called or is_implicit(name)]
    done = set(waiting)
    while waiting:
        new = of_libraries[waiting.pop()]
        found |= new
        waiting += (more := [name for name in new if name in of_libraries and name not in done])
        done.update(more)
    return found


def reads_a_date(named: Collection[str], scope: Mapping[str, Any]) -> bool:
    """Whether code that uses these names, of this scope, asks `datetime` what time it is."""
    if _DATES.isdisjoint(named):
        return False
    here = [scope.get(name) for name in named]
    return "datetime" in named or any(one is value for one in _TELL_DATES for value in here)


def is_clock(value: Any) -> bool:
    """Whether it is one of the functions of `time` that give another value each time."""
    return isinstance(value, types.BuiltinFunctionType) and value.__module__ == "time" and value.__name__ in CLOCKS


@functools.lru_cache(maxsize=4096)
def loads(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """Globals that code loads, `(name,)`, and what it takes of variables at once, `(name, attribute)`.

    Other than `names`, without what only has the same name: the attribute of something else, or the key of a batch.
    """
    found: set[tuple[str, ...]] = set()
    last: str | None = None
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            last = step.argval
            found.add((step.argval,))
        elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):  # such as a module that it imports itself
            last = step.argval if isinstance(step.argval, str) else None
        elif step.opname != "EXTENDED_ARG":
            if last is not None and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                found.add((last, step.argval))
            last = None
    return frozenset(found).union(*map(loads, inner_codes(code)))


def code_of(member: Any) -> Any:
    """What a member of a class runs when it is looked up, or called."""
    if isinstance(member, (property, types.DynamicClassAttribute)):  # the latter of `Enum`
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    if isinstance(member, functools.singledispatchmethod):
        return member.dispatcher
    return behind_step(getattr(member, "__func__", member))


def behind_step(value: Any) -> Any:
    """The function that `graph_step` was given, of the step that it made; all else itself."""
    while str(type(value).__module__).startswith(_STEPS) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def _is_users_object(value: Any) -> bool:
    """Whether it is an object of the program's own that acts as a method or property."""
    kind = type(value)
    acts = any(name in vars(base) for base in kind.__mro__ for name in ("__get__", "__call__"))
    return acts and is_users(kind.__module__) and not isinstance(value, type)


def is_implicit(name: str) -> bool:
    """Whether Python calls a method of this name by itself: for operators, `with`, iteration, attributes."""
    return name.startswith("__") and name.endswith("__") and name not in _NOT_IN_A_STEP


def is_plain(kind: type, but: type = object) -> bool:
    """Whether a class has nothing of a library's but of `but` that might look up names of its objects."""
    if type(kind) not in (type, abc.ABCMeta) and not is_users(type(kind).__module__):
        return False
    for base in kind.__mro__:
        if is_users(base.__module__):
            if any(map(_is_a_librarys, list(vars(base).values()))):
                return False
        elif base not in (object, types.SimpleNamespace, but) and base.__module__ not in _WITHOUT_LOOKUPS:
            return False
    return True


def _is_a_librarys(member: Any) -> bool:
    """Whether a member of a class is code of Python's own or a library's."""
    code = inspect.unwrap(member) if isinstance(member, types.FunctionType) else member
    if isinstance(code, types.FunctionType):
        return not is_users_file(code.__code__.co_filename)
    return isinstance(code, _BUILT_IN)


def slots(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class's instances, private ones as Python writes them."""
    found: list[str] = []
    for base in kind.__mro__:
        given = vars(base).get("__slots__", ())
        for name in (given,) if isinstance(given, str) else given:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in dict.fromkeys(found) if name not in ("__dict__", "__weakref__"))


def data(kind: type) -> tuple[str, ...]:
    """Names of the values, not methods or properties, in `kind` and its bases, as far as the program defines these."""
    found = (item for base in kind.__mro__ if is_users(base.__module__) for item in list(vars(base).items()))
    return tuple(dict.fromkeys(name for name, member in found if _is_data(name, member)))


def _is_data(name: str, member: Any) -> bool:
    return not name.startswith("__") and not hasattr(member, "__get__")


def names(code: types.CodeType) -> Iterator[str]:
    """Names that code uses: of globals and attributes, and strings that may be such (`getattr`)."""
    for one in _with_inner(code):
        yield from one.co_names
    yield from strings(code)


def strings(code: types.CodeType) -> Iterator[str]:
    """Strings in code that may be names."""
    return filter(str.isidentifier, texts(code))


def texts(code: types.CodeType) -> Iterator[str]:
    """All strings among the constants of code."""
    for one in _with_inner(code):
        yield from (text for text in one.co_consts if isinstance(text, str))


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in inner_codes(code):
        yield from _with_inner(inner)


@functools.lru_cache(maxsize=4096)
def looks_up_by_variable(code: types.CodeType) -> bool:
    """Whether code may ask `getattr`, or `hasattr`, for a name that is not there: a variable, or put together."""
    if any(map(looks_up_by_variable, inner_codes(code))):
        return True
    inside = stands_there = False
    steps = list(dis.get_instructions(code))
    for index, step in enumerate(steps):
        if not inside:
            inside = step.opname in _LOOK_UP_OR_IMPORT and step.argval in ("getattr", "hasattr")
            stands_there = False
        elif step.opname.startswith("CALL"):
            if not stands_there:
                return True
            inside = False
        elif step.opname in ("BINARY_OP", "BUILD_STRING", "LOAD_METHOD", "PUSH_NULL") or "NULL" in step.argrepr:
            return True  # put together; or a call among its arguments, behind which its own is not looked for
        elif step.opname.startswith(("STORE", "RETURN", "BUILD")):
            return True  # it is kept, to be called later
        elif step.opname == "LOAD_CONST":
            stands_there = stands_there or (isinstance(step.argval, str) and not is_key(steps[index + 1 :]))
    return inside


@functools.lru_cache(maxsize=4096)
def is_users(module: Any) -> bool:
    """Whether a module is part of the user's program, and not of Python or an installed library.

    What a class says of its module may be anything: of compiled classes it is the descriptor that gives it.
    """
    if not isinstance(module, str):
        return False
    root = module.split(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return False
    if root in ("torch", "optimizations", "numpy"):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return path is None or is_users_file(path)


@functools.lru_cache(maxsize=65536)
def is_users_file(path: str) -> bool:
    """Whether the program's own code stands in a file, and not Python's or an installed library's."""
    if path.startswith(_LIBRARIES) or "site-packages" in path or path.startswith("<frozen"):
        return False
    file = pathlib.Path(path)
    return not any(
        isinstance(folder, str)
        and folder
        and path.startswith(folder)
        and file.is_relative_to(folder)
        and _is_installed(file.relative_to(folder), folder)
        for folder in sys.path
    )


def _is_installed(file: pathlib.Path, folder: str) -> bool:
    return bool(file.parts) and file.parts[0] in _installed_in(folder)


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """What packages that were installed into a folder have there, as `pip install --target` does: files and folders.

    The program's own code may lie in the same folder. A package with an `.egg-info` is not counted: that is how a
    program's own code looks while it is being developed.
    """
    described = map(importlib.metadata.PathDistribution, pathlib.Path(folder).glob("*.dist-info"))
    return frozenset(file.parts[0] for one in described for file in one.files or ())


def attributes_of(value: Any) -> dict[str, Any] | None:
    """What an object has in its `__dict__`, without asking a `__getattr__`, which may raise what it likes. Its class is
    asked for what looks attributes up: `threading.local` has a dict for each thread."""
    try:
        lookup: Any = type(value).__getattribute__
        found: dict[str, Any] | None = lookup(value, "__dict__")
    except AttributeError:
        found = None
    return found
