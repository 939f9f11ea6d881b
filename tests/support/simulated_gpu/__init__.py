"""One simulated GPU, in layers: each uses the ones before it, and a test uses the lowest that shows its behaviour.

* `driver`: the calls of the CUDA driver that Encore makes. Graphs run on host memory, and CUDA's rules are checked.
* `allocator`: streams, memory pools and cuBLAS workspaces of PyTorch.
* `runtime`: `torch.cuda` as CUDAGraph Trees use it, on that driver.
* `trees`: functions whose capture is known, as Inductor would hold them.
* `compiler`: whole programs through `torch.compile(backend="encore")`.
* `operators`: the device of whole steps and callables; its graphs of PyTorch's operators are in `operator_graphs`.
* `placement`: FX graphs that were made for a GPU, on the CPU, with the aliasing that they would have there.

`fixtures` has the fixtures of all of them; every test can use them by name.
"""
