"""Compile caches for trials. The program that is measured has others, so that no trial decides on its kernels.

All processes of all modes of a workload share them. A workload whose results are never twice the same is tried in each
process, and only the first ones have to compile for it. A first process runs its trial before it marks its graphs with
its mode's name, a later one after that; so trials have a mark of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optimizations import torch_internals
from optimizations.torch_internals.graph_keys import graphs_marked
from suite.worker.compile_cache import INDUCTOR, TRITON

TRIAL = "trial"


@contextmanager
def trial_cache(cache: Path) -> Iterator[None]:
    """Inductor and Triton use a folder in `cache` inside the block; what is loaded of either folder is forgotten."""
    used = {"TORCHINDUCTOR_CACHE_DIR": cache / TRIAL / INDUCTOR, "TRITON_CACHE_DIR": cache / TRIAL / TRITON}
    before = {name: os.environ.get(name) for name in used}
    torch_internals.clear_caches()
    os.environ |= {name: str(folder) for name, folder in used.items()}
    try:
        with graphs_marked(TRIAL):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        torch_internals.clear_caches()
