"""Share a compile cache between all modes of a workload: the first mode that needs a kernel compiles and tunes it.

Inductor keeps the source of each generated kernel there with the configuration that was the fastest, Triton the
binaries. Encore's own kernels are there too. Graphs are kept too, by the options they were compiled with; a graph that
comes from the cache takes no time to compile and does not say why it was split. So each mode compiles its graphs
itself, once: they are marked with its name (`torch_internals.tuning`), and the mode's later processes find them.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path

from suite.measure.modes import Mode
from suite.results.schema import CompileConditions

INDUCTOR = "inductor"
TRITON = "triton"
JUDGED = "judged"
"""The folder where processes note results that they found right (`suite.worker.eager_comparison`)."""


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/encore`, else `~/.cache/encore`; a new folder for a user without a home directory."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "encore"
    except (RuntimeError, KeyError):
        return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="encore-"))


_GRAPHS = ("fxgraph", "aotautograd")
"""Folders of compiled graphs, of Inductor and of AOTAutograd, in Inductor's."""


class CompileCache:
    """Describe a folder that `enter_environment` of a worker makes its compilers use.

    `has` says whether a mode's graphs are there, so that its next processes find all they need; `has_kernels` whether
    a mode has compiled, so that the others find nearly all of their kernels.
    """

    def __init__(self, folder: Path, *, kept: bool = False) -> None:
        """Make the folder. `kept`: it may hold what earlier runs compiled; its kernels are used, its graphs and results
        are not."""
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept = kept
        self._compiled: set[str] = set()
        if kept:
            for graphs in (found for name in _GRAPHS for found in self.folder.glob(f"**/{INDUCTOR}/{name}")):
                shutil.rmtree(graphs, ignore_errors=True)
            for judged in self.folder.glob(f"**/{JUDGED}"):
                shutil.rmtree(judged, ignore_errors=True)

    def of_rank(self, rank: int) -> Path:
        """Return the folder of a rank, where a workload is split over GPUs: each tunes its kernels for itself, at the
        same time as the others, and must find its own again in the next mode."""
        return self.folder / f"rank{rank}" if rank else self.folder

    def has(self, mode: Mode) -> bool:
        return mode.name in self._compiled

    @property
    def has_kernels(self) -> bool:
        return bool(self._compiled)

    def conditions(self, modes: int) -> CompileConditions:
        """Return the conditions of so many modes that compile for the first time, at the same time."""
        if self._compiled or self._kept:
            return CompileConditions.KERNELS_SIDE_BY_SIDE if modes > 1 else CompileConditions.KERNELS_ALONE
        return CompileConditions.COLD_ALONE

    def compiled(self, mode: Mode) -> None:
        """Note that a mode has compiled here."""
        self._compiled.add(mode.name)
