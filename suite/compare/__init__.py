"""`encore compare BASE NEW`: decide whether NEW is slower, by ratios within each run."""

from suite.compare.change import Change
from suite.compare.pairs import Comparison, Mean, Outcome, Pair, compare_sides
from suite.compare.sides import Side, find_side

__all__ = ["Change", "Comparison", "Mean", "Outcome", "Pair", "Side", "compare_sides", "find_side"]
