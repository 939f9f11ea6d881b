from __future__ import annotations

import pytest

from optimizations.graph.driver import KernelUnavailable, compile_cubin

KERNEL = 'extern "C" __global__ void set(int* place) { *place = 1; }'


def test_compiled_kernel_with_an_empty_log_keeps_the_process() -> None:
    compiled = compile_cubin(KERNEL, "set.cu", "sm_90")
    assert compiled.startswith(b"\x7fELF")
    # Note [Buffers NVRTC writes to]: what `encode` gives here is one object for the whole process. (The compiler would
    # fold an expression of literals, and never look.)
    space = chr(32)
    assert list(space.encode()) == [32]


def test_nvrtc_log_is_in_the_error() -> None:
    with pytest.raises(KernelUnavailable, match=r"sm_90.*set\.cu\(1\): error"):
        compile_cubin("no declaration", "set.cu", "sm_90")
