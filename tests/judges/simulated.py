"""Samples on the simulated device of the other tests: no GPU is needed, and no C++ compiler."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))

import pytest
from simulated_gpu.compiler import INDUCTOR, simulated

from optimizations import torch_internals


@contextlib.contextmanager
def plain() -> Iterator[Callable[[Any], Any]]:
    """Provide `torch.compile` with the simulated device's settings and without graphs."""
    torch_internals.reset_dynamo()
    with torch_internals.fresh_cache(), torch_internals.inductor_config.patch(INDUCTOR):
        yield torch.compile
    torch_internals.reset_dynamo()


@contextlib.contextmanager
def encore(keywords: Any) -> Iterator[tuple[Callable[[Any], Any], Callable[[], int]]]:
    """Provide `torch.compile` with Encore on the simulated device, and the number of graphs launched there."""
    patch = pytest.MonkeyPatch()
    try:
        playing = simulated(patch)
        world = next(playing)
        yield (lambda target: torch.compile(target, **keywords)), (lambda: world.cuda.replays)
        next(playing, None)
    finally:
        patch.undo()
