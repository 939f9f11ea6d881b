"""Capture modules and functions as a forward and a backward CUDA graph each, in the order of a schedule."""
