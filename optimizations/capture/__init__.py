"""Decide what becomes one CUDA graph: a function of Inductor, a training step, or a callable."""
