"""What is asked of selection for the graphs of one compilation, and why it may not be done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from optimizations.selection.decide import Rules
from optimizations.selection.store import VerdictStore, default_directory
from optimizations.selection.timing import Objective

BUDGET_SHARE = 0.2
"""Of the time that compiling took, measuring may take at most this much more than the fastest candidate would have."""


@dataclass(slots=True)
class Settings:
    """See `Options`. `compile_s` is how long compiling took, known once that is over."""

    mode: Literal["measure", "stored"]
    objective: Objective = "latency"
    options: str = ""
    rules: Rules = field(default_factory=Rules)
    store: VerdictStore = field(default_factory=lambda: VerdictStore(default_directory()))
    compile_s: float = 0.0


def refused_for_ranks() -> str | None:
    """Why nothing is decided where several processes compute together; None where one computes alone.

    Ranks that decide apart would launch collectives from a graph on one side and without on the other, and wait for
    the slowest choice of all.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    size = distributed.get_world_size()
    return f"{size} ranks compute together, and they do not agree on verdicts yet" if size > 1 else None
