"""Capture whole training steps (`graph_step`) and single callables (`graph_callables`) as CUDA graphs."""
