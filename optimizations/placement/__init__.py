"""Move CPU values out of the graphs that they keep from being captured, before AOTAutograd runs.

`place` does the analysis and the rewriting, on plain graphs and without a GPU; `Feeds` supplies the rewritten graph's
inputs at run time. See the design page for what is moved, what never is, and why.
"""

from optimizations.placement.feeds import Feeds
from optimizations.placement.observe import CannotObserve
from optimizations.placement.placing import Placement, place, residency_of, untouched
from optimizations.placement.residency import Residency, ResidentNode, source_line

__all__ = [
    "CannotObserve",
    "Feeds",
    "Placement",
    "Residency",
    "ResidentNode",
    "place",
    "residency_of",
    "source_line",
    "untouched",
]
