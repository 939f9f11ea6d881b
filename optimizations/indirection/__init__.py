"""Find where a captured graph holds its inputs' addresses, and plan who updates which, without a GPU.

`find_pointer_uses` compares two captures, `make_plan` decides.
"""

from optimizations.indirection.plan import Available, Choice, Plan, make_plan
from optimizations.indirection.pointers import Analysis, PointerUse, Reason, ReasonCode, find_pointer_uses

__all__ = [
    "Analysis",
    "Available",
    "Choice",
    "Plan",
    "PointerUse",
    "Reason",
    "ReasonCode",
    "find_pointer_uses",
    "make_plan",
]
