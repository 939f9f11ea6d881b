"""What is asked of selection for the graphs of one compilation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from optimizations.selection.decide import Rules
from optimizations.selection.store import VerdictStore, default_directory
from optimizations.selection.timing import Objective


@dataclass(slots=True, eq=False)
class Settings:
    """See `Options`. `compile_s` is how long compiling took, known once that is over; `excess_s` is what measuring has
    taken, all groups together (see `budget`)."""

    mode: Literal["measure", "stored"]
    objective: Objective = "latency"
    options: str = ""
    rules: Rules = field(default_factory=Rules)
    store: VerdictStore = field(default_factory=lambda: VerdictStore(default_directory()))
    compile_s: float = 0.0
    excess_s: float = 0.0
