"""The compile cache that all modes of a workload share: kernels are compiled and tuned once, whoever needs them first.

Inductor keeps the source of each generated kernel there with the configuration that was the fastest, Triton the
binaries. What Encore keeps (its kernels, verdicts of selection) is there too. Graphs are kept too, by the options they
were compiled with; a graph that comes from the cache takes no time to compile and does not say why it was split. So
each mode compiles its graphs itself, once (`own_graphs`), and the mode's later processes find them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from suite.schema import CompileConditions

INDUCTOR = "inductor"
TRITON = "triton"
ENCORE = "encore"
_GRAPHS = ("fxgraph", "aotautograd")
"""Folders of compiled graphs, of Inductor and of AOTAutograd, in Inductor's."""


class CompileCache:
    """A folder that `enter_environment` of a worker makes its compilers use."""

    def __init__(self, folder: Path, *, kept: bool = False) -> None:
        """`kept`: it may hold what earlier runs compiled."""
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept = kept
        self._compiled: set[str] = set()

    def of_rank(self, rank: int) -> Path:
        """The folder of a rank, where a workload is split over GPUs: each tunes its kernels for itself, at the same
        time as the others, and must find its own again in the next mode."""
        return self.folder / f"rank{rank}" if rank else self.folder

    def has(self, mode: str) -> bool:
        """Whether this mode's graphs are there, so that its next processes may compile side by side."""
        return mode in self._compiled

    @contextmanager
    def own_graphs(self, mode: str) -> Iterator[CompileConditions]:
        """Compiled graphs of other modes are out of the way inside the block. Yields what there is for the mode."""
        conditions = CompileConditions.KERNELS_ALONE if self._compiled or self._kept else CompileConditions.COLD_ALONE
        with ExitStack() as stack:
            for folder in (self.folder, *sorted(self.folder.glob("rank*"))):
                stack.enter_context(_graphs_aside(folder))
            yield conditions
        self._compiled.add(mode)


@contextmanager
def _graphs_aside(folder: Path) -> Iterator[None]:
    aside = folder / "graphs-aside"
    found = [name for name in _GRAPHS if (folder / INDUCTOR / name).is_dir()]
    for name in found:
        aside.mkdir(exist_ok=True)
        (folder / INDUCTOR / name).rename(aside / name)
    try:
        yield
    finally:
        for name in found:
            shutil.copytree(aside / name, folder / INDUCTOR / name, dirs_exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
