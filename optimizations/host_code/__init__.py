"""What looks at a replay's surroundings in C, in the calls where Python would take longer than the launch.

`module.c` is compiled on the machine where it runs, as Triton compiles what launches its kernels, with the same
compiler and for the Python that runs. The result is kept in the user's cache. Without a compiler or the headers of
Python everything is compared in Python, with NumPy and PyTorch's guards. That takes longer and finds the same.
`ENCORE_HOST_CODE=off` asks for that.
"""

from optimizations.host_code.compiling import looks

__all__ = ["looks"]
