"""`encore run nanogpt`: the decode program of `models.nanogpt` on every path, and the article's two tables.

Each path (eager, a graph captured by hand, compiled in a mode) has its own process; all are alive at once and
generate in turns, so that clocks and temperature change for all alike.
"""
