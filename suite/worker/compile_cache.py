"""Share a compile cache between all modes of a workload: the first mode that needs a kernel compiles and tunes it.

Inductor stores the source of each generated kernel with its fastest configuration, Triton the binaries. The cache also
has Encore's kernels, and graphs by their compile options. A graph from the cache takes no time to compile and has no
reasons for its splits. So each mode compiles its own graphs once: they are marked with its name
(`torch_internals.tuning`), and the mode's later processes load them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from suite.measure.modes import Mode
from suite.results.schema import CompileConditions

INDUCTOR = "inductor"
TRITON = "triton"
JUDGED = "judged"
"""The folder where processes store verdicts on results (`suite.worker.judge`)."""


def user_cache() -> Path:
    """Return `$XDG_CACHE_HOME/encore`, else `~/.cache/encore`; without a home directory, a temporary folder."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "encore"
    except (RuntimeError, KeyError):
        return Path(tempfile.gettempdir(), f"encore-{os.getuid()}")


_GRAPHS = ("fxgraph", "aotautograd")
"""Folders of compiled graphs, of Inductor and of AOTAutograd, in Inductor's."""


class CompileCache:
    """Describe the cache folder that `enter_environment` of a worker sets for its compilers.

    `has` returns whether a mode's graphs are cached for its next processes; `has_kernels` whether any mode has
    compiled, so that nearly all kernels of the others are cached.
    """

    def __init__(self, folder: Path, *, kept: bool = False) -> None:
        """Make the folder. `kept`: of an earlier run's cache, use the kernels and delete the graphs and verdicts."""
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
        """Return the folder of a rank of a workload that is split over GPUs.

        Each rank tunes its own kernels, concurrently with the others, and loads them again in the next mode.
        """
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
