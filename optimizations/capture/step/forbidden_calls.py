"""Refuse functions that cannot be captured: waiting for the GPU, reading or setting random state, compiling.

`torch.tensor(0.5, device="cuda")` copies from host memory, which cannot be captured either. It is replaced by a fill
with the same number: the result has the same bits, and the number is in the trace by which calls are compared.

A call in which code is compiled, or kernels are timed, is not representative of the next call. So it does not count as
observed. Neither may happen in a capture: constants that the compiler computes would be in the graph's memory and would
never be computed. A compilation in a capture raises before it begins, the capture is discarded, and the call runs, and
is compiled, eagerly.

Note [Random state and checkpoints]. `torch.utils.checkpoint` saves the GPU's random state and sets it again for the
recomputation. Neither can be captured. If the step draws no random numbers, the state does not matter, and during the
capture both functions do nothing. If it draws some, the recomputation would draw different ones, so it is refused.

Note [Code that queries whether it is captured]. Some libraries call `torch.cuda.is_current_stream_capturing` and skip
what cannot be captured: Hugging Face's models then do not read their masks. The captured call would differ from the
observed calls. So the query returns the same value in all calls. At first this is False, which gives eager's results.
If a step that makes the query is refused, it becomes True. It stays False if something was refused before the query:
True would not change that refusal, and the call would use different kernels than eager without a gain. PyTorch's
optimizers make the query to refuse a capture unless they have `capturable=True`, although `fused=True` keeps its
counts on the GPU as well. Their query returns False: the observer sees what they count on the host.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.step.observer import SETS_UP, Observer, StepDiffers
from optimizations.capture.step.user_code import called_from
from optimizations.torch_internals import replaced_attribute

_WAIT = "a graph is waited for after its launch: wait after the step"
_SEED = "seed before the step: a graph would not do it again"
_REFUSED: tuple[tuple[Any, str, str], ...] = (
    (torch.cuda, "synchronize", _WAIT),
    (torch.cuda.Stream, "synchronize", _WAIT),
    (torch.cuda.Event, "synchronize", _WAIT),
    (torch.cuda.Event, "query", _WAIT),
    (torch.cuda.Stream, "query", _WAIT),
    (torch, "manual_seed", _SEED),
    *((torch.cuda, name, _SEED) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")),
)
"""Functions that a graph cannot repeat, with what to do instead."""

_OPTIMIZERS = "/torch/optim/"
_Replaced = tuple[Any, str, Callable[..., Any]]
"""An owner, the name of its function, and what runs in its place."""


def _qualified(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '') + '.' if isinstance(owner, type) else ''}{owner.__name__}.{name}"


@contextlib.contextmanager
def watched(observer: Observer, *, compiled: bool) -> Iterator[None]:
    """Refuse these functions while a step runs, in its thread and in autograd's. Note [Random state and checkpoints].

    `compiled`: whether the step has compiled code. Its guards compare `torch.tensor` with PyTorch's own, so that is not
    replaced.
    """
    thread, observers = threading.get_ident(), [observer]

    def replacing(stock: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            elsewhere = threading.get_ident() != thread and torch_internals.current_autograd_node() is None
            if elsewhere or not observers:
                return stock(*arguments, **keywords)
            return instead(observers[0], stock, *arguments, **keywords)

        return call

    _fill_function_tables()
    kinds = ("cuda", "cpu") if observer.holds(_NO_STATE) else ("cuda",)
    names = () if compiled else ("tensor", "as_tensor")
    fills: list[_Replaced] = [(torch, name, functools.partial(_fill, kinds)) for name in names]
    with contextlib.ExitStack() as stack:
        for owner, name, instead in [*_REPLACED, *fills]:
            stock = vars(owner).get(name)
            # The program's own `torch.tensor` stays; `torch.manual_seed` is a function of Python.
            is_programs = (owner, name, instead) in fills and isinstance(stock, FunctionType)
            if stock is not None and (not is_programs or stock.__module__ == __name__):
                stack.enter_context(replaced_attribute(owner, name, replacing(stock, instead)))
        try:
            yield
        finally:
            # A module that is imported in the block may keep a replacement, which must not reference the step.
            observers.clear()


def _refuse(what: str, advice: str, observer: Observer, stock: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    observer.refuse(f"calls {what}", advice)
    return stock(*given, **keywords)


def _rng_state(observer: Observer, stock: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    """Read or set the GPU's random state. In a capture do nothing."""
    observer.queries_random_state = True
    if observer.forbids:
        return _NO_STATE
    with observer.unseen():
        return stock(*given, **keywords)


def _is_captured(observer: Observer, stock: Callable[..., Any]) -> bool:
    """Return whether the step is captured. Note [Code that queries whether it is captured]."""
    if called_from(_OPTIMIZERS):
        return False
    observer.queries_capture |= not observer.refusals
    return observer.as_captured


class _NotCapturing:
    """Stand in for the current stream where an optimizer queries whether it is captured."""

    def is_capturing(self) -> bool:
        return False


def _current_stream(observer: Observer, stock: Callable[..., Any], *given: Any, **keywords: Any) -> Any:
    """Return the current stream. PyTorch 2.14's optimizers query it, through no other function."""
    return _NotCapturing() if called_from(_OPTIMIZERS) else stock(*given, **keywords)


def _fill(
    kinds: Sequence[str],
    observer: Observer,
    stock: Callable[..., Any],
    *data: Any,
    device: Any = None,
    **keywords: Any,
) -> Any:
    """Make a tensor of a number by a fill, if its device is of these kinds. PyTorch makes the others."""
    of_a_number = len(data) == 1 and type(data[0]) in (bool, int, float) and keywords.keys() <= {"dtype"}
    if of_a_number and device is not None and not torch_internals.len_torch_function_stack():
        with contextlib.suppress(RuntimeError, TypeError, ValueError, OverflowError):
            place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
            if place.type in kinds:
                return torch.full((), data[0], device=place, **keywords)
    return stock(*data, device=device, **keywords)


_REPLACED: tuple[_Replaced, ...] = (
    *((owner, name, functools.partial(_refuse, _qualified(owner, name), advice)) for owner, name, advice in _REFUSED),
    # Compiled code checks that `torch.cuda.is_current_stream_capturing` is stock: replace the function it calls.
    (torch_internals.cuda_graphs, "_cuda_isCurrentStreamCapturing", _is_captured),
    (torch.accelerator, "current_stream", _current_stream),
    (torch.cuda, "get_rng_state", _rng_state),
    (torch.cuda, "set_rng_state", _rng_state),
)
_NO_STATE = torch.empty(0, dtype=torch.uint8, device="cpu")


def _fill_function_tables() -> None:
    """Fill PyTorch's tables of functions, which are otherwise filled on first use.

    One that is filled while other functions stand in for PyTorch's own would know those for as long as the process
    runs: the compiler would no more know `torch.tensor`, and a default device would not reach it. The first mode that
    sees operators imports the compiler, which empties its tables when it is reset.
    """
    torch_internals.torch_obj_rule_map()
    torch_internals.tensor_method()
    torch_internals.device_constructors()
    torch.overrides.get_overridable_functions()
    torch.overrides.is_tensor_method_or_property(torch.Tensor.add)


@contextlib.contextmanager
def noticed(observer: Observer) -> Iterator[None]:
    """Report compilations in the block to the observer; raise instead in a capture.

    Raises:
        StepDiffers: in a capture, code would be compiled or kernels timed.
    """
    handler: Any = torch_internals.compilation_callbacks

    def begins(arguments: Any) -> None:
        observer.set_up = observer.compiling = True
        if observer.forbids:
            raise StepDiffers(SETS_UP)

    def ends(arguments: Any) -> None:
        observer.compiling = False

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)
    try:
        with torch.compiler.set_stance("fail_on_recompile") if observer.forbids else contextlib.nullcontext():
            yield
    except Exception as error:
        must_not_compile = observer.set_up or "'fail_on_recompile'" in str(error)
        if observer.forbids and not isinstance(error, StepDiffers) and must_not_compile:
            observer.set_up = True
            raise StepDiffers(SETS_UP) from error
        raise
    finally:
        for remove, callback in (handler.remove_start_callback, begins), (handler.remove_end_callback, ends):
            with contextlib.suppress(ValueError):  # `torch.compiler.reset` forgets all of them
                remove(callback)
