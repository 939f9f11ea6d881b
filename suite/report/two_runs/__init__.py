"""Decide whether NEW is slower than BASE, by ratios within each run: `encore compare BASE NEW`."""

from suite.report.two_runs.pairs import Comparison, Mean, Outcome, Pair, Side, compare_sides, find_side

__all__ = ["Comparison", "Mean", "Outcome", "Pair", "Side", "compare_sides", "find_side"]
