"""Capture a whole training step as one CUDA graph per signature of its batch. Entry: `graphed_step.graph_step`."""
