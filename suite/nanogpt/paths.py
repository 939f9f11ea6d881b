"""The paths of the decode step, in the order in which they are shown. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from suite.measure.modes import MODES, Mode
from suite.results.errors import WrongUse

EAGER, REPLAY, GRAPH = "eager", "replay", "graph"


@dataclass(frozen=True, slots=True)
class DecodePath:
    """`mode` says how the step is compiled; None for the two paths that do not compile it."""

    name: str
    summary: str
    mode: Mode | None = None

    @property
    def needs_gpu(self) -> bool:
        return self.name == REPLAY or (self.mode is not None and self.mode.uses_cuda_graphs)

    @property
    def settles(self) -> bool:
        """Whether more calls may change how its step is served, until everything is tried out."""
        return self.mode is not None and self.mode.is_encores

    @property
    def is_compared_with_graph(self) -> bool:
        """Whether it is another way than stock CUDA graphs to run a compiled step."""
        return self.mode is not None and self.name != GRAPH


PATHS: dict[str, DecodePath] = {
    path.name: path
    for path in (
        DecodePath(EAGER, "the published eager path, with the static cache"),
        DecodePath(REPLAY, "the article's: the step captured by hand and replayed"),
        *(DecodePath(name, MODES[name].summary, MODES[name]) for name in ("compile", GRAPH, "indirection")),
        DecodePath(
            "encore",
            'torch.compile(step, backend="encore") with its defaults',
            MODES.get("encore") or Mode("encore", "", baselines=(), backend="encore", uses_cuda_graphs=True),
        ),
    )
}


def select_paths(names: Sequence[str] | None, device: str) -> list[DecodePath]:
    """Paths of these names, or all that the device can run; eager, which the others are compared with, always first.

    Raises:
        WrongUse: a name is unknown, or the device cannot run it, or there is none; the message says what there is.
    """
    possible = [path for path in PATHS.values() if device == "cuda" or not path.needs_gpu]
    if names is None:
        return possible
    if not names:
        raise WrongUse(f"--modes names no path; nanogpt has here: {', '.join(path.name for path in possible)}")
    for name in names:
        if name not in PATHS:
            near = difflib.get_close_matches(name, PATHS, n=3) or list(PATHS)
            raise WrongUse(f"nanogpt has no path {name!r}; did you mean {', '.join(near)}?")
        if PATHS[name] not in possible:
            raise WrongUse(
                f"path {name} uses CUDA graphs and needs --device cuda; without: {', '.join(p.name for p in possible)}"
            )
    return [path for path in possible if path.name in (EAGER, *names)]
