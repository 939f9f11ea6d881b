"""Decide whether NEW is slower than BASE, by ratios within each run: `encore compare BASE NEW`."""
