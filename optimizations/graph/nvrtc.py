"""Compiles CUDA C++ with the NVRTC that comes with the torch wheel.

Note [Buffers NVRTC writes to]. They are bytearrays. The bindings also take `bytes` and write into them, but Python
shares `bytes` of length 1 across the whole process: an empty log (one NUL) would turn every b" " into NUL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizations.compiled_cache import Compiled
from optimizations.graph.driver import CudaCallFailed, check


class CompilationFailed(RuntimeError):
    """NVRTC refused the source, the target or an option; the message holds what it said."""


def compile_cubin(nvrtc: Any, source: str, name: str, target: str, options: Sequence[str] = ()) -> Compiled:
    """The cubin of `source` for `target` (`sm_90`), and NVRTC's log.

    Args:
        nvrtc: the module `cuda.bindings.nvrtc`.
        name: what the source is called in messages.

    Raises:
        CompilationFailed: NVRTC did not compile it.
        CudaCallFailed: another call failed.
    """
    flags = [flag.encode() for flag in (f"--gpu-architecture={target}", "--std=c++17", *options)]
    program = check(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], [])
    try:
        try:
            check(nvrtc.nvrtcCompileProgram, program, len(flags), flags)
        except CudaCallFailed as error:
            raise CompilationFailed(f"NVRTC for {target}: {error}: {_log(nvrtc, program)}") from error
        cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize, program))  # Note [Buffers NVRTC writes to]
        check(nvrtc.nvrtcGetCUBIN, program, cubin)
        return Compiled(bytes(cubin), _log(nvrtc, program))
    finally:
        check(nvrtc.nvrtcDestroyProgram, program)


def _log(nvrtc: Any, program: Any) -> str:
    said = bytearray(check(nvrtc.nvrtcGetProgramLogSize, program))
    check(nvrtc.nvrtcGetProgramLog, program, said)
    return bytes(said).rstrip(b"\0").decode(errors="replace").strip()
