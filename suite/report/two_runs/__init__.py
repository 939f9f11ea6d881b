"""`encore compare BASE NEW`: decide whether NEW is slower, by ratios within each run."""

from suite.report.two_runs.change import Change
from suite.report.two_runs.pairs import Comparison, Mean, Outcome, Pair, Side, compare_sides, find_side

__all__ = ["Change", "Comparison", "Mean", "Outcome", "Pair", "Side", "compare_sides", "find_side"]
