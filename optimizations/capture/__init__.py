"""Who decides what becomes one CUDA graph."""
