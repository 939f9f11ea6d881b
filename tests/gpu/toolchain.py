"""Find out once which vector instructions C++ can use here, and compile headers, for all processes of the GPU tests.

Each would take a minute for it. Usage: python -m tests.gpu.toolchain DIR, once for each folder; then
ENCORE_TEST_TOOLCHAIN=DIR.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from suite.measure.compile_times import start_toolchain


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if start_toolchain(device, headers=str(folder / "headers")):
        (folder / "vec_isa_ok").touch()
    (folder / "made").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
