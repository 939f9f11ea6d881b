"""Draw how the launches of a CUDA graph depend on each other: `encore draw graph`.

`timeline` places the launches of Encore's report of a recording, `svg` and `text` write them down, and `measured` gets
the reports of a workload on a GPU.
"""
