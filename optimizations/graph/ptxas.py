"""Assembles PTX with the `ptxas` that comes with Triton, and reads what it says about registers and spills."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimizations.compiled_cache import Compiled, CompiledCache
from optimizations.graph.ptx_rewriting import PtxKernel

TIMEOUT_S = 300
BLACKWELL = 100
"""From this compute capability (10.0) on, Triton assembles with a `ptxas` of its own for it."""


class PtxasMissing(RuntimeError):
    """There is no `ptxas` to be had; the message says where one was looked for."""


class PtxasFailed(RuntimeError):
    """`ptxas` refused its input; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes per thread: registers, and bytes spilled to local memory."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True, slots=True)
class Assembled:
    """A cubin and the resources of its kernel."""

    cubin: bytes
    resources: Resources


def find_ptxas(target: str) -> Path:
    """The `ptxas` Triton uses for `target` (`sm_90a`).

    Raises:
        PtxasMissing: Triton has none.
    """
    from triton import knobs

    match = re.fullmatch(r"sm_(\d+)[af]?", target)
    if match is None:
        raise PtxasFailed(f"{target!r} is not a target of ptxas; targets look like sm_80 or sm_90a")
    try:
        tool = knobs.nvidia.ptxas_blackwell if int(match.group(1)) >= BLACKWELL else knobs.nvidia.ptxas
        return Path(tool.path)
    except RuntimeError as error:
        raise PtxasMissing(
            f"Triton has no ptxas for {target} ({error}); reinstall triton, or set TRITON_PTXAS_PATH"
        ) from error


def assemble(
    ptx: str,
    kernel: PtxKernel,
    *,
    cache: CompiledCache,
    options: Sequence[str] = (),
    ptxas: Path | None = None,
) -> Assembled:
    """The cubin of `ptx` for the target it names, from the cache or by `ptxas`.

    Args:
        kernel: the entry of `ptx` whose resources are wanted (`ptx.read_kernel`).
        options: further options of ptxas; a kernel Triton compiled without fused multiply-add needs `--fmad=false`.
        ptxas: the assembler, by default the one Triton uses for the target.

    Raises:
        PtxasMissing: there is no assembler.
        PtxasFailed: it refused the PTX, the target or an option, or did not end in `TIMEOUT_S` seconds.
    """
    tool = ptxas or find_ptxas(kernel.target)
    key = ("ptxas", ptx, kernel.target, ptxas_version(tool), *options)
    compiled = cache.get_or_build(key, lambda: _run(tool, ptx, kernel.target, options))
    return Assembled(compiled.image, read_resources(compiled.compiler_log, kernel.name))


@functools.cache
def ptxas_version(ptxas: Path) -> str:
    """What `ptxas --version` prints.

    Raises:
        PtxasMissing: the file cannot be run.
    """
    try:
        return subprocess.run(
            [ptxas, "--version"], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PtxasMissing(f"{ptxas} cannot be run ({error}); reinstall triton, or set TRITON_PTXAS_PATH") from error


def _run(ptxas: Path, ptx: str, target: str, options: Sequence[str]) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="encore-ptxas-") as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={target}", *options, str(source), "-o", str(cubin)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except OSError as error:
            raise PtxasMissing(f"{ptxas} cannot be run ({error}); reinstall triton") from error
        except subprocess.TimeoutExpired as error:
            raise PtxasFailed(f"ptxas for {target} did not end in {TIMEOUT_S} s") from error
        said = done.stdout + done.stderr
        if done.returncode != 0:
            raise PtxasFailed(f"ptxas for {target} ended with {done.returncode}: {said.strip()}")
        return Compiled(cubin.read_bytes(), said)


def read_resources(said: str, name: str) -> Resources:
    """What `ptxas -v` said of entry `name`.

    Raises:
        PtxasFailed: it said nothing that is understood.
    """
    about = re.search(
        rf"Function properties for {re.escape(name)}\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\s+ptxas\S* info\s*: Used (\d+) registers",
        said,
    )
    if about is None:
        raise PtxasFailed(f"ptxas did not say what {name} takes: {said.strip()}")
    stack, stores, loads, registers = (int(number) for number in about.groups())
    return Resources(registers, stack, stores, loads)
