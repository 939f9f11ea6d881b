"""Operators on tensors of Encore's own, apart from the program that is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from optimizations import torch_internals

T = TypeVar("T")


@contextlib.contextmanager
def apart_from_the_program() -> Iterator[None]:
    """Run operators without the program's modes, transforms and inference mode, and outside of other operators.

    No mode sees them. Leaving inference mode brings back autograd also where an operator's kernel is without. Hooks of
    saved tensors stay: what autograd would save belongs into `in_a_new_thread`.
    """
    with (
        torch_internals.disable_torch_function(),
        torch_internals.clear_functorch_levels(),
        torch_internals.disable_current_modes(),
        torch.inference_mode(False),
    ):
        yield


def in_a_new_thread(probe: Callable[[], T]) -> T:
    """Call a probe where nothing of the program's is switched on, and return its result.

    Modes, hooks of saved tensors, grad mode and autocast belong to a thread. A tensor that a probe has autograd save
    would otherwise reach the program's hooks: activation checkpointing counts the tensors that it is given, and raises
    where a forward and its recomputation differ.
    """
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(probe).result()
