"""Run internal operators apart from what a program has in PyTorch's thread-local state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from optimizations import torch_internals

T = TypeVar("T")


def apart_from_the_program(do: Callable[[], T]) -> T:
    """Call `do` without the program's modes, transforms and inference mode, and outside of other operators.

    No mode sees its operators. Leaving inference mode brings back autograd also where an operator's kernel is without.
    Hooks of saved tensors stay.

    Note [Guards and interrupts]. Settings of a thread are switched by guards in C that stand in a `with` statement
    themselves, or in a `try` whose `finally` puts them back. A signal is handled after a call and when a function of
    Python begins. So `with torch.inference_mode(False)` may end between the guard, which is in an attribute of the
    context manager then, and the block. The guard is left when the traceback goes, whenever that is, and puts back what
    was there before: gradients are off from then on if the interrupted call was inside of autograd.
    """
    with torch_internals.disable_torch_function(), torch_internals.InferenceMode(False):
        if not torch_internals.len_torch_dispatch_stack() and not torch_internals.are_functorch_transforms_active():
            return do()
        with torch_internals.clear_functorch_levels(), torch_internals.disable_current_modes():
            return do()
