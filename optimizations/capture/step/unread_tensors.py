"""Tensors that stand where a step looks and that its graph does not read: any that looks the same may stand there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from optimizations.capture.step.tensor_marks import Look, look
from optimizations.capture.step.watched_entries import UNREADABLE
from optimizations.torch_internals.argument_guard import can_be_asked


@dataclass(frozen=True, slots=True)
class Unread:
    """Where a tensor stands that the graph does not read, and how it looked. Any that looks so may stand there.

    `holder` is what C++ reads as Python reads `owner`, None where it does not; `attributes` as in `Held`.
    """

    owner: Any
    key: Any
    then: Look
    holder: Any
    attributes: bool


def asked_for(holder: Any, key: Any, tensor: torch.Tensor, attributes: bool) -> Any:
    """The holder, if C++ can be asked how the tensor looks that stands there; else None."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and look(tensor)[-1] is not None
    return holder if plain and (attributes or can_be_asked(holder, [(key, tensor)])) else None


def look_as_then(unread: Iterable[Unread]) -> bool:
    return all(look_at(one.owner, one.key) == one.then for one in unread)


def look_at(owner: Any, key: Any) -> Look | None:
    """How the tensor looks that stands there; None if there is none."""
    try:
        held = owner[key]
    except UNREADABLE:
        return None
    return look(held) if isinstance(held, torch.Tensor) else None
