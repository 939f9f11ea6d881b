"""A whole training step as one CUDA graph per signature of its batch. `graphed_step.graph_step` is the entry."""
