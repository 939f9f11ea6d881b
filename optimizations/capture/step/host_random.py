"""Random numbers of the host that a step draws: a graph would not draw them again."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


class HostRandom:
    """The states of Python's, NumPy's and PyTorch's CPU generators when this was made.

    `with_torch`: PyTorch's counts as the host's (it does not where the CPU stands for the GPU).
    """

    def __init__(self, *, with_torch: bool) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random.get_state() if numpy is not None else None
        self._torch = torch.random.get_rng_state() if with_torch else None

    def drawn(self) -> Iterator[str]:
        """The generators whose state is another now, as a program names them."""
        if random.getstate() != self._python:
            yield "random"
        if self._numpy is not None:
            now: Any = sys.modules["numpy"].random.get_state()
            if now[2:] != self._numpy[2:] or (now[1] != self._numpy[1]).any():
                yield "numpy.random"
        if self._torch is not None and not torch.equal(torch.random.get_rng_state(), self._torch):
            yield "torch's CPU generator"

    def restore(self) -> None:
        """Put the states back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if self._torch is not None:
            torch.random.set_rng_state(self._torch)
