"""Explain why a capture failed, and undo its changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from optimizations.capture.step.observer import StepRefused
from optimizations.capture.step.source_lines import line_of
from optimizations.report.steps import Refusal


def cause(error: BaseException) -> BaseException:
    """Return the first exception of a capture: ending the capture may raise a second one because of it."""
    while isinstance(error, torch.AcceleratorError) and error.__context__ is not None:
        error = error.__context__
    return error


HELD_NODES = Refusal(
    "goes on with what autograd keeps of a call on the default stream: a loss or another result of a call before the "
    "step's own is still held with its graph",
    "detach() what is kept of earlier calls, or make the step before the first backward",
)
"""The nodes that add to gradients belong to the stream they were first used on, as long as a result refers to them."""


def is_programs_own(error: Exception) -> bool:
    """Return whether the program itself may have raised this, so that it would do so uncaptured as well."""
    return not isinstance(error, (StepRefused, torch.OutOfMemoryError))


def why(error: Exception) -> Refusal:
    """Return the refusal for an exception of a capture."""
    if isinstance(error, StepRefused):
        return error.refusal
    if isinstance(error, torch.OutOfMemoryError):
        return Refusal(
            "needs more memory for its capture than is free",
            "make the batch smaller, or call zero_grad() at the end of the step and not at its beginning",
        )
    text = str(error).strip().split("\n")[0][:300]
    if "legacy stream depend on a capturing" in text:
        return HELD_NODES
    return Refusal(
        f"could not be captured ({type(error).__name__}: {text})",
        "compute it outside of the step, or make graphs of the modules with graph_callables; see docs/capture.md for "
        "what a graph cannot hold",
        line_of(error),
    )


def do_all(actions: list[Callable[[], Any]]) -> None:
    """Run all actions. An action that is interrupted is run again from its beginning.

    Raises:
        KeyboardInterrupt: an action was interrupted. It is raised after the last action.
    """
    try:
        while actions:
            actions[0]()
            del actions[0]
    except KeyboardInterrupt:
        do_all(actions)
        raise
