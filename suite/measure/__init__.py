"""Measure one cell in a worker (`suite.worker.live_cell`). Each module is one quantity.

Before timing: `results` (what an iteration computed), `compare` and `correctness` (is it what eager computes).
While compiling: `compile_times`, `graphs` (partitions, reasons).
Blocks: `timing`, `gpu`. After them: `memory`, `copies` (into placeholders), `metrics` and `profiling`.
"""
