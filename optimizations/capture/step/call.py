"""One call of a step that no recording fits: its arguments, and what the step reaches at that time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.signature import names
from optimizations.capture.step.gradients import gradients
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.observer import storage


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments of a call, the tensors among them with their names, and the state that the step reaches.

    `before` are the gradients of `parameters` at the beginning of the call.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    labels: list[str]
    state: HostState
    parameters: list[torch.Tensor]
    before: list[torch.Tensor | None]


def call_of(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], state: HostState) -> Call:
    """A `Call` with the gradients as they are now."""
    labels = [label for index, value in enumerate(args) for label in names(value, f"argument {index}")]
    labels += [label for name, value in kwargs.items() for label in names(value, name)]
    parameters = state.parameters()
    return Call(args, kwargs, tensors, labels, state, parameters, gradients(parameters))


def by_storage(tensors: Iterable[torch.Tensor], labels: Iterable[str]) -> dict[int, str]:
    """Names of tensors by where their storages lie."""
    return {storage(tensor): label for tensor, label in zip(tensors, labels, strict=False)}
