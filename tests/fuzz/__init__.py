"""A differential fuzzer of placement: random programs, eager against Encore, on a GPU that the CPU stands in for."""
