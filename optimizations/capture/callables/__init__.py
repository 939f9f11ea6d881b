"""Modules and functions, each as a forward and a backward CUDA graph, in the order of a schedule."""
