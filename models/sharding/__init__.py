"""Split modules of the workloads over the processes of a device mesh: tensor parallelism.

Each module here has a function `shard(module, mesh)`, which splits a module in place over a mesh of one dimension, one
process per device. The module is the same on all processes before, and its results are after. Embeddings, norms and
output layers are kept whole on each, as in the papers' program. A plain transformer is split by PyTorch's
`parallelize_module`; where the program's shape does not fit that (weights of three dimensions, gated halves, heads that
share keys) it is done by hand (`by_hand`).
"""
