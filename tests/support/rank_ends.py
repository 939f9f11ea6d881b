"""End a program of several processes on the CPU, without what gloo does at the very end of some.

PyTorch's default arguments and its device meshes keep a gloo group that was destroyed, with its threads. One that still
holds the last collective's tensors when the interpreter ends asks for its lock, and the process is aborted
("terminate called without an active exception"). That is so without Encore, and a loaded machine makes it likely.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as distributed


def leave() -> None:
    """Destroy the process group and end with exit code 0, without ending the interpreter. Does not return."""
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
