"""Refuse functions that cannot be captured: waiting for the GPU, reading or setting random state.

`torch.tensor(0.5, device="cuda")` copies from host memory, which cannot be captured either. It is replaced by a fill
with the same number: the result has the same bits, and the number is in the trace by which calls are compared.

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
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.step.observer import Observer
from optimizations.capture.step.source_lines import called_from
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

_CAPTURED = "_cuda_isCurrentStreamCapturing"
_OPTIMIZERS = "/torch/optim/"


@contextlib.contextmanager
def watched(observer: Observer, *, compiled: bool) -> Iterator[None]:
    """Refuse these functions while a step runs, in its thread and in autograd's. Note [Random state and checkpoints].

    `compiled`: whether the step has compiled code. Its guards compare `torch.tensor` with PyTorch's own, so that is not
    replaced.
    """
    thread = threading.get_ident()
    over = False  # a module that is imported during the block may keep a replacement function
    observers = [observer]

    def elsewhere() -> bool:
        return over or (threading.get_ident() != thread and torch_internals.current_autograd_node() is None)

    def refusing(name: str, stock: Callable[..., Any], advice: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not elsewhere():
                observers[0].refuse(f"calls {name}", advice)
            return stock(*arguments, **keywords)

        return call

    def get_rng_state(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if elsewhere():
            return stock_get(*arguments, **keywords)
        observers[0].queries_random_state = True
        if observers[0].forbids:
            return nothing
        with observers[0].unseen():
            return stock_get(*arguments, **keywords)

    def set_rng_state(state: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        if elsewhere():
            stock_set(state, *arguments, **keywords)
            return
        observers[0].queries_random_state = True
        if not observers[0].forbids:
            with observers[0].unseen():
                stock_set(state, *arguments, **keywords)

    def filling(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def tensor(*data: Any, device: Any = None, **keywords: Any) -> torch.Tensor:
            of_a_number = len(data) == 1 and type(data[0]) in (bool, int, float) and keywords.keys() <= {"dtype"}
            if of_a_number and device is not None and not (elsewhere() or torch_internals.len_torch_function_stack()):
                with contextlib.suppress(RuntimeError, TypeError, ValueError, OverflowError):
                    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
                    if place.type == "cuda" or (place.type == "cpu" and cpu_is_gpu):
                        return torch.full((), data[0], device=place, **keywords)
            return stock(*data, device=device, **keywords)

        return tensor

    def is_captured() -> bool:
        if elsewhere():
            return bool(stock_captured())
        if called_from(_OPTIMIZERS):
            return False
        observers[0].queries_capture |= not observers[0].refusals
        return observers[0].as_captured

    _fill_function_tables()
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    cpu_is_gpu = observer.holds(nothing)
    graphs: Any = torch_internals.cuda_graphs
    stock_captured = getattr(graphs, _CAPTURED)
    stock_get, stock_set = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    with contextlib.ExitStack() as stack:
        for owner, name, advice in _REFUSED:
            if (stock := vars(owner).get(name)) is not None:
                call = refusing(_qualified(owner, name), stock, advice)
                stack.enter_context(replaced_attribute(owner, name, call))
        for name in () if compiled else ("tensor", "as_tensor"):
            stock = vars(torch)[name]
            if not isinstance(stock, FunctionType) or stock.__module__ == __name__:  # not the program's own
                stack.enter_context(replaced_attribute(torch, name, filling(stock)))
        # Compiled code checks that `torch.cuda.is_current_stream_capturing` is stock: replace the function it calls.
        stack.enter_context(replaced_attribute(graphs, _CAPTURED, is_captured))
        stack.enter_context(replaced_attribute(torch.cuda, "get_rng_state", get_rng_state))
        stack.enter_context(replaced_attribute(torch.cuda, "set_rng_state", set_rng_state))
        try:
            yield
        finally:
            over = True
            observers.clear()  # a replacement that such a module keeps must not reference the step


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


def _qualified(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '') + '.' if isinstance(owner, type) else ''}{owner.__name__}.{name}"
