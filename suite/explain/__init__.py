"""Find what keeps a model from CUDA graphs without a GPU: `encore explain`.

The command line uses `targets` (what to explain), `run` (each target in its own process) and `text`; these import no
torch. In the worker's process `build` makes a program of fake tensors, `capture` traces one call of it with Dynamo, and
`lowering` has Inductor lower its graphs for the H100 that `pretended_gpu` pretends.
`lowering` and `generated_code` stand on their own: any FX graph that a Dynamo backend receives can be lowered and
counted.
"""
