"""Refuse calls that a capture cannot hold: waits for the GPU, random state read or set.

`torch.tensor(0.5, device="cuda")` copies from host memory, which cannot be in a graph either. A fill with the same
number has the same bits, and the number stands in the trace, where calls are compared.

Note [Random state and checkpoints]. `torch.utils.checkpoint` saves the GPU's random state and sets it again for the
recomputation, and neither can be done in a capture. Where the step draws no random numbers there is nothing to keep,
and during the capture these two calls do nothing. Where it draws some, the recomputation would draw others.

Note [Code that asks whether it is captured]. Libraries ask, and if it is captured leave out what a graph cannot hold:
Hugging Face's models then do not look into their masks. The captured call would differ from those that were observed.
So all calls get the same answer: at first that of eager, which gives eager's results, and if a step that asks is
refused, that of a capture. Not where something was refused before it asked: no answer would change that, and the call
would take another kernel than eager's for nothing. PyTorch's optimizers ask to refuse a capture unless they have
`capturable=True`, although what is `fused=True` keeps its counts on the GPU as well. Their check returns
False: the observer sees what they count on the host.
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
from optimizations.torch_internals import function_tables, replaced_attribute

_WAITS: tuple[tuple[Any, str], ...] = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Event, "query"),
    (torch.cuda.Stream, "query"),
)
_SEEDS: tuple[tuple[Any, str], ...] = (
    (torch, "manual_seed"),
    (torch.cuda, "manual_seed"),
    (torch.cuda, "manual_seed_all"),
    (torch.cuda, "seed"),
    (torch.cuda, "seed_all"),
)

_CAPTURED = "_cuda_isCurrentStreamCapturing"
_OPTIMIZERS = "/torch/optim/"


class Asked:
    """Record whether a step asked for the GPU's random state, to set it again, and whether it is captured.

    The latter is recorded only until something of the step is refused.

    `as_captured`: what it is told. Note [Code that asks whether it is captured].
    """

    def __init__(self, *, as_captured: bool = False) -> None:
        self.random_state = self.captured = False
        self.as_captured = as_captured


@contextlib.contextmanager
def watched(observer: Observer, asked: Asked, *, capturing: bool, compiled: bool) -> Iterator[None]:
    """Refuse these calls while a step runs, in its thread and its backward's. Note [Random state and checkpoints].

    `compiled`: whether the step holds compiled code. Its guards ask for PyTorch's own `torch.tensor`, so that stays.
    """
    thread = threading.get_ident()
    over = False  # a module that is imported meanwhile may keep what stands in for a function
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
        asked.random_state = True
        if capturing:
            return nothing
        with observers[0].unseen():
            return stock_get(*arguments, **keywords)

    def set_rng_state(state: torch.Tensor, *arguments: Any, **keywords: Any) -> None:
        if elsewhere():
            stock_set(state, *arguments, **keywords)
            return
        asked.random_state = True
        if not capturing:
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
        asked.captured = asked.captured or not observers[0].refusals
        return asked.as_captured

    function_tables.fill()
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    cpu_is_gpu = observer.holds(nothing)
    graphs: Any = torch_internals.cuda_graphs
    stock_captured = getattr(graphs, _CAPTURED)
    stock_get, stock_set = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    with contextlib.ExitStack() as stack:
        for owner, name in _WAITS:
            stock = vars(owner).get(name)
            if stock is None:
                continue
            advice = "a graph is waited for after its launch: wait after the step"
            stack.enter_context(replaced_attribute(owner, name, refusing(_qualified(owner, name), stock, advice)))
        for owner, name in _SEEDS:
            advice = "seed before the step: a graph would not do it again"
            call = refusing(_qualified(owner, name), vars(owner)[name], advice)
            stack.enter_context(replaced_attribute(owner, name, call))
        for name in () if compiled else ("tensor", "as_tensor"):
            stock = vars(torch)[name]
            if not isinstance(stock, FunctionType) or stock.__module__ == __name__:  # the program's own functions stay
                stack.enter_context(replaced_attribute(torch, name, filling(stock)))
        # What `torch.cuda.is_current_stream_capturing` calls: compiled code looks whether that itself is PyTorch's.
        stack.enter_context(replaced_attribute(graphs, _CAPTURED, is_captured))
        stack.enter_context(replaced_attribute(torch.cuda, "get_rng_state", get_rng_state))
        stack.enter_context(replaced_attribute(torch.cuda, "set_rng_state", set_rng_state))
        try:
            yield
        finally:
            over = True
            observers.clear()  # what such a module keeps holds nothing of the step


def _qualified(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '') + '.' if isinstance(owner, type) else ''}{owner.__name__}.{name}"
