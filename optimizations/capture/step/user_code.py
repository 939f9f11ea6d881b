"""Find out which classes and files are the program's own code, and which names code uses."""

from __future__ import annotations

import functools
import itertools
import linecache
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

ENCORE = str(Path(__file__).resolve().parents[2])
"""The folder of Encore's code."""
_PYTHONS = {sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES = (*_PYTHONS, str(Path(torch.__file__).parent), ENCORE, "<frozen")
_STEPS = "optimizations.capture.step."


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from with_inner(constant)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code and in its nested functions."""
    return frozenset(name for one in with_inner(code) for name in one.co_names)


@functools.lru_cache(maxsize=65536)
def all_names(code: types.CodeType) -> frozenset[str]:
    """Return every name in code: of globals, attributes and variables, and strings that may be keys."""
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset((*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars, *texts))


def functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yield the methods and properties of the program's own classes among the bases of `kind`."""
    for base in kind.__mro__:
        if is_users(base.__module__):
            for name, member in list(vars(base).items()):
                code = _code_of(member)
                if name not in _NOT_IN_A_STEP and isinstance(code, types.FunctionType):
                    yield code


_NOT_IN_A_STEP = frozenset(
    {
        *("__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__repr__", "__str__"),
        *("__copy__", "__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"),
    }
)
"""Methods that run when an object is made, printed or copied."""


def _code_of(member: Any) -> Any:
    """Return the function that runs when a member of a class is read or called."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return unwrap_step(getattr(member, "__func__", member))


def unwrap_step(value: Any) -> Any:
    """Return the function that was passed to `graph_step` if this is a graphed step, else the value itself."""
    while str(type(value).__module__).startswith(_STEPS) and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value


def slots(kind: type) -> set[str]:
    """Return the names of the slots of a class's instances, private ones as Python writes them."""
    of_slots = (vars(base).items() for base in kind.__mro__ if "__slots__" in vars(base))
    return {name for items in of_slots for name, member in items if isinstance(member, types.MemberDescriptorType)}


def class_values(kind: type) -> set[str]:
    """Return the names of values, not methods, that the program's own classes among `kind` and its bases define."""
    found = (item for base in kind.__mro__ if is_users(base.__module__) for item in list(vars(base).items()))
    return {name for name, member in found if not name.startswith("__") and not hasattr(member, "__get__")}


@functools.lru_cache(maxsize=4096)
def is_users(module: Any) -> bool:
    """Return whether a module is part of the program, and not of Python or an installed library.

    A class may have anything for its `__module__`: for a compiled class it is a descriptor.
    """
    if not isinstance(module, str):
        return False
    root = module.split(".")[0]
    if root in ("torch", "optimizations", "numpy") or (root in sys.stdlib_module_names and root != "__main__"):
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    return path is None or is_users_file(path)


@functools.lru_cache(maxsize=65536)
def is_users_file(path: str) -> bool:
    """Return whether a file holds the program's own code, and not Python's, Encore's or an installed library's."""
    return not path.startswith(_LIBRARIES) and "-packages/" not in path


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return an object's `__dict__` without calling a `__getattr__`, which may raise anything; None if it has none."""
    try:
        found: Any = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if isinstance(found, dict) else None


BINDS = r"\b[^=]*=(?!=)"
GROWS = r"\b[^.]*\.(append|extend|insert|add|update|pop|popleft|appendleft|remove|clear)\("
STEPS = r"\.step\("


def last_word(path: str) -> str:
    """Return the last name in a path: "metrics" of `trainer.metrics[0]`."""
    words = re.findall(r"[^\W\d]\w*", path.split(" (")[0])
    return words[-1] if words else ""


def line_with(codes: Iterable[types.CodeType], path: str, then: str = r"\b") -> str | None:
    """Return "file:number in function" of the first line of code with the last name in a path followed by `then`.

    Return None if the source is not available or has no such line.
    """
    if not (word := last_word(path)):
        return None
    wanted = re.compile(rf"\b{re.escape(word)}{then}")
    for code in (inner for one in codes for inner in with_inner(one)):
        source = linecache.getlines(code.co_filename)
        for number in sorted({line for _, _, line in code.co_lines() if line and line <= len(source)}):
            text = source[number - 1]
            if wanted.search(text) and not text.lstrip().startswith(("def ", "@")):
                return _place(code, number)
    return None


def current_line() -> str | None:
    """Return "path:number in function" of the innermost frame that is neither Encore's nor a library's, or None.

    If a library other than PyTorch is in between, its innermost frame is named too.
    """
    through = ""
    for frame in _frames():
        path = frame.f_code.co_filename
        if _is_users(frame):
            return f"{_place(frame.f_code, frame.f_lineno)}{through}"
        if not through and "-packages/" in path and "/torch/" not in path and not path.startswith(ENCORE):
            through = f", through {path.split('-packages/')[-1]}:{frame.f_lineno} in {frame.f_code.co_name}"
    return None


ADVICE_ON_CTC = "make graphs of the model alone (graph_callables), and compute this loss after it"
_ADVICE = {
    "/torch/amp/grad_scaler.py": "make the optimizer with fused=True, which skips steps on the GPU; read the scale "
    "after the step",
    "/torch/optim/swa_utils.py": "call update_parameters after the step",
    "/torch/nn/utils/clip_grad.py": "leave error_if_nonfinite off and look at the returned norm after the step",
    "/torch/nn/modules/batchnorm.py": "give the batch normalisation a number as momentum",
    "/torch/nn/modules/transformer.py:_detect_is_causal_mask:": "say whether the masks are causal, so that the "
    "transformer does not look into them (is_causal=, or src_is_causal= and tgt_is_causal=)",
    "/torch/optim/lr_scheduler.py": "call the scheduler after the step",
    "/torch/nn/functional.py:ctc_loss:": ADVICE_ON_CTC,
    "/torch_geometric/utils/loop.py:": "make the layer with add_self_loops=False and give it a graph that has its "
    "loops, or with cached=True where its graph stays the same",
    "/torch_geometric/utils/_scatter.py:": "say how many rows there are (size= of a pool, dim_size=)",
    "/torch_geometric/utils/num_nodes.py:": "say how many nodes there are (num_nodes=)",
    "/torch/optim/": "make the optimizer with capturable=True or fused=True, or use one that takes one of these, such "
    "as AdamW; its learning rate may be a number or a tensor on the GPU",
}
"""Advice by a part of "path:function" of PyTorch's or a library's code. The first that fits is given."""


def advice_by_caller() -> str | None:
    """Return advice if a known part of PyTorch or of a library runs an operation that cannot be captured."""
    for frame in itertools.takewhile(lambda one: not _is_users(one), _frames()):
        for part, advice in _ADVICE.items():
            if part in f"{frame.f_code.co_filename}:{frame.f_code.co_name}:":
                return advice
    return None


TUNERS = (
    "/torch/_inductor/runtime/",
    "/torch/_inductor/select_algorithm.py",
    "/torch/_inductor/autotune_process.py",
    "/triton/testing.py",
    "/triton/runtime/autotuner.py",
    "/triton/compiler/",
)
"""Files of PyTorch's and Triton's compilers that compile and time kernels in the first run that needs them."""


def called_from(*parts: str) -> bool:
    """Return whether a file with one of these parts in its path is called by the program's or generated code."""
    between = itertools.takewhile(lambda frame: not _is_outside(frame.f_code.co_filename), _frames())
    return any(part in frame.f_code.co_filename for frame in between for part in parts)


def line_of(error: BaseException) -> str | None:
    """Return the innermost line of the program in an exception's traceback, or None."""
    frames = (one for one in traceback.walk_tb(error.__traceback__) if _is_users(one[0]))
    return next((_place(frame.f_code, number) for frame, number in reversed([*frames])), None)


def _place(code: types.CodeType, number: int) -> str:
    return f"{code.co_filename}:{number} in {code.co_name}"


def _frames() -> Iterator[types.FrameType]:
    """Yield the current frames, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: types.FrameType) -> bool:
    """Return whether a frame runs the program's own code. Inductor's code may be in any cache folder."""
    generated = str(frame.f_globals.get("__name__", "")).startswith("torch._inductor.")
    return _is_outside(frame.f_code.co_filename) and not generated


def _is_outside(path: str) -> bool:
    return is_users_file(path) and not path.startswith("<")
