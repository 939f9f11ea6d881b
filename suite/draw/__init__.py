"""Draw how the launches of a CUDA graph depend on each other: `encore draw graph`.

`records` holds what is drawn, which is Encore's report of a recording; `timeline` places the launches, `svg` and `text`
write them down, and `measured` gets the records of a workload on a GPU.
"""
