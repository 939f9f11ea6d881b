"""`encore compare BASE NEW`: two runs, or two modes, cell by cell, with what differs around them."""

from suite.compare.pairs import Comparison, Pair, PairKind, compare_sides
from suite.compare.sides import Side, find_side

__all__ = ["Comparison", "Pair", "PairKind", "Side", "compare_sides", "find_side"]
