"""Change keys of compiled graphs in the caches of Inductor and AOTAutograd without changing those of kernels.

Note [Keys of tuning]. `torch.compiler.config.cache_key_tag` is made for this and does more: it is in the keys of what
tuning found as well, though only of what the process itself looks up. Compile workers, which are processes of their
own, do not know it. So a kernel is tuned and stored without the tag. When its graph comes from the cache, the kernel is
looked up with the tag. Nothing is found, and each process tunes it again, perhaps to another result. All settings of
Inductor are in the keys of graphs. The one that is used here only adds text to what AOTInductor packages.

Checked on PyTorch 2.11.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optimizations import torch_internals


def mark_graphs(owner: str) -> None:
    """Find only compiled graphs that were compiled under the same mark from now on. Kernels are found by all."""
    torch_internals.inductor_config.aot_inductor.metadata = {"owner": owner}


@contextmanager
def graphs_marked(owner: str) -> Iterator[None]:
    """Do the same inside the block only: after it the mark is what it was."""
    with torch_internals.inductor_config.patch({"aot_inductor.metadata": {"owner": owner}}):
        yield
