"""Graphs of `torch.compile`, by PyTorch's CUDAGraph Trees."""
