"""Capture a whole training step as one CUDA graph per signature of its batch. The entry is
`graphed_step.graph_step`."""
