"""Measure one mechanism alone, over sizes that no single workload has."""
