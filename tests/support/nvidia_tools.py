"""The CUDA binary tools that come with Triton, for tests of cubins."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from triton import knobs


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin by `nvdisasm`."""
    return _run(knobs.nvidia.nvdisasm.path, [], cubin)


def entry_points(cubin: bytes) -> set[str]:
    """Names of the kernels in a cubin, from its ELF symbols."""
    listing = _run(knobs.nvidia.cuobjdump.path, ["--dump-elf-symbols"], cubin)
    return set(re.findall(r"STT_FUNC\s+STB_GLOBAL\s+STO_ENTRY\s+(\S+)", listing))


def _run(tool: str, options: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{Path(tool).name}: {done.stderr}"
    return done.stdout
