"""A trial in a process that is measured later."""

from __future__ import annotations

from collections.abc import Callable

import torch

from suite.measure.memory import release
from suite.results.schema import Correctness
from suite.worker.live_cell import LiveCell
from suite.worker.protocol import CellSpec


def try_apart(spec: CellSpec, announce: Callable[[str], None]) -> Correctness:
    """The verdict on a trial of the mode, in a process that measures something later. Nothing of it is left.

    Raises:
        Inaccurate: the trial differs from eager by more than its precision explains.
    """
    cell = LiveCell(spec, announce)
    try:
        cell.build()
        return cell.trial_correctness()
    finally:
        cell.forget_trial()
        del cell
        release(torch.device(spec.device))


def require_living_gpu(device: str) -> None:
    """Raises what a fault on the GPU has left this process with, if there was one: it can do nothing more there."""
    if device == "cuda":
        torch.cuda.synchronize()
