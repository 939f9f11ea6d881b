"""Prepare a process while others compile: import what its cell will need, and start the compilers.

This module imports torch; the worker imports it once the environment variables of the cell are set.

A trial in a process that is measured later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

import suite.worker.live_cell  # noqa: F401  (with all that the cell will need)
from models.instance import instantiate
from models.registry import find
from suite.measure.compile_times import start_toolchain, tell_toolchain
from suite.measure.memory import release
from suite.measure.modes import select_modes
from suite.results.schema import Correctness
from suite.worker.live_cell import LiveCell
from suite.worker.protocol import Built, CellSpec


def start(spec: CellSpec, *, asked: bool = False) -> Built:
    """Import what the cell will need, without a GPU, while others compile.

    It starts the compilers too, once it is known what they can do, or where it is `asked` to find that out.
    """
    torch.compiler.cudagraph_mark_step_begin()  # all modes mark their steps, and the first mark imports Inductor
    (mode,) = select_modes([spec.mode])
    workload = find(spec.workload)
    if not workload.builds_on_device:
        with contextlib.suppress(Exception):  # if the tiny model fails, the real one will say why
            instantiate(workload, variant=spec.variant, size="tiny", device="cpu", seed=spec.seed)
    vec_isa_ok = None
    if mode.backend is not None and (asked or spec.vec_isa_ok is not None):
        try:
            vec_isa_ok = start_toolchain(torch.device("cpu"), spec.vec_isa_ok, spec.headers_dir)
        finally:
            if asked and spec.headers_dir is not None:
                tell_toolchain(vec_isa_ok, spec.headers_dir)
    return Built(vec_isa_ok=vec_isa_ok)


def try_apart(spec: CellSpec, announce: Callable[[str], None]) -> Correctness:
    """Return the verdict on a trial of the mode, in a process that measures something later. Nothing of it is left.

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
    """Raise what a fault on the GPU has left this process with, if there was one: it can do nothing more there."""
    if device == "cuda":
        torch.cuda.synchronize()
