"""Call CUDA and NVRTC through `cuda.bindings`: every return code becomes an exception that names the call.

Note [Buffers NVRTC writes to]. They are bytearrays. The bindings also take `bytes` and write into them, but Python
shares `bytes` of length 1 across the whole process: an empty log (one NUL) would turn every b" " into NUL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class CudaCallFailed(RuntimeError):
    """Report that a call failed. `code` is its return code, None if the installed library has no such function."""

    def __init__(self, call: str, code: int | None, result: str) -> None:
        super().__init__(f"{call} failed: {result}" + ("" if code is None else f" ({code})"))
        self.code = code


def check(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
    """Call a function of `cuda.bindings.driver` (or `nvrtc`) and return what it returns in addition to its return code.

    Returns:
        None, the one value, or a tuple of values, as the function has 0, 1 or more of them.

    Raises:
        CudaCallFailed: the return code is not 0, which is success, or the installed library is too old for the call.
    """
    try:
        result = function(*arguments)
    except RuntimeError as error:  # the bindings raise this if a library, or a function of it, is missing
        raise CudaCallFailed(function.__name__, None, str(error)) from error
    code = result[0]
    if int(code):
        raise CudaCallFailed(function.__name__, int(code), getattr(code, "name", str(code)))
    if len(result) == 1:  # the most frequent case comes first: replay sets nodes
        return None
    return result[1] if len(result) == 2 else tuple(result[1:])


class KernelUnavailable(RuntimeError):
    """Report that a kernel of Encore cannot be built here; the message has the compiler's or linker's error."""


def compile_cubin(source: str, name: str, target: str, options: Sequence[str] = ()) -> bytes:
    """Return the cubin of `source` for `target` (`sm_90`); `name` is the name of the source in messages.

    Raises:
        KernelUnavailable: NVRTC is missing, or it refused the source or the target; the message has its log.
    """
    try:
        from cuda.bindings import nvrtc

        program = check(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), 0, [], [])
    except (ImportError, RuntimeError, OSError) as error:
        raise KernelUnavailable(f"{name} needs NVRTC, which comes with torch's CUDA wheels ({error})") from error
    flags = [flag.encode() for flag in (f"--gpu-architecture={target}", "--std=c++17", *options)]
    try:
        try:
            check(nvrtc.nvrtcCompileProgram, program, len(flags), flags)
        except CudaCallFailed as error:
            raise KernelUnavailable(f"NVRTC for {target}: {error}: {_log(nvrtc, program)}") from error
        cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize, program))  # Note [Buffers NVRTC writes to]
        check(nvrtc.nvrtcGetCUBIN, program, cubin)
        return bytes(cubin)
    finally:
        check(nvrtc.nvrtcDestroyProgram, program)


def _log(nvrtc: Any, program: Any) -> str:
    log = bytearray(check(nvrtc.nvrtcGetProgramLogSize, program))
    check(nvrtc.nvrtcGetProgramLog, program, log)
    return bytes(log).rstrip(b"\0").decode(errors="replace").strip()
