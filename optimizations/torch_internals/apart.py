"""Operators on tensors of Encore's own, in the midst of whatever a program does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from optimizations import torch_internals


@contextlib.contextmanager
def apart_from_the_program() -> Iterator[None]:
    """Inside, operators do what they do without modes, transforms and inference mode, and outside of other operators.

    No mode sees them. Leaving inference mode brings back autograd also where an operator's kernel is without.
    """
    with (
        torch_internals.disable_torch_function(),
        torch_internals.clear_functorch_levels(),
        torch_internals.disable_current_modes(),
        torch.inference_mode(False),
    ):
        yield
