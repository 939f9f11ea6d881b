"""Move CPU values out of the graphs that they keep from being captured, before AOTAutograd runs.

`place` does the analysis and the rewriting, on plain graphs and without a GPU; `Feeds` supplies the rewritten graph's
inputs at run time. See the design page for what is moved, what never is, and why.
"""

from optimizations.placement.feeds import Feeds
from optimizations.placement.placing import Placement, place, untouched

__all__ = ["Feeds", "Placement", "place", "untouched"]
