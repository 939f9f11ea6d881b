"""Record the functions that Inductor compiles as CUDA graphs, by managers and nodes of CUDAGraph Trees."""
