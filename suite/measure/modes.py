"""Define the modes in which a workload is run, and the baselines of each. A mode is one record.

To add a mode, add a record to `MODES`: runner, worker and report only read its fields. This module does not import
torch, so that the command line can list and check modes quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from suite.results.errors import WrongUse, nearest

Captures = Literal["graphs", "step", "callables", "by hand"]


@dataclass(frozen=True, slots=True)
class Mode:
    """Describe how `torch.compile` is called for this mode, and which modes it is compared with.

    With `backend` None the module runs uncompiled. `baselines[0]` alternates with this mode when only two modes fit on
    the GPU. The mode must reproduce one of the deterministic modes in `bitwise_with` bit for bit; different bits are
    `fail_accuracy`, not a remark. `same_as` names modes that run the same program if kernels, launches and copies are
    equal: then a difference between the two is a false finding. A partitioned function is not the same as an
    unpartitioned one, because each call checks sizes and strides of all inputs outside of its graphs. `captures` is the
    part around the compiled code that becomes a CUDA graph: the whole iteration ("step"), the module with its loss
    ("callables"), or the part that users capture ("by hand"): a training iteration with the compiled module, or a part
    that the program names.

    `colour` is that of its bars in reports (#RRGGBB; None for the next free colour).
    """

    name: str
    summary: str
    baselines: tuple[str, ...]
    backend: str | None = "inductor"
    options: Mapping[str, Any] = field(default_factory=dict)
    bitwise_with: tuple[str, ...] = ()
    same_as: tuple[str, ...] = ()
    captures: Captures = "graphs"
    colour: str | None = None

    @property
    def uses_cuda_graphs(self) -> bool:
        """Return whether compiled code becomes CUDA graphs."""
        return self.backend == "encore" or bool(self.options.get("triton.cudagraphs"))

    @property
    def needs_gpu(self) -> bool:
        """Return whether the mode needs CUDA graphs."""
        return self.uses_cuda_graphs or self.captures_more

    @property
    def captures_more(self) -> bool:
        """Return whether the mode captures more than the compiled code. Such modes must be selected by name."""
        return self.captures != "graphs"

    @property
    def wraps_iteration(self) -> bool:
        """Return whether Encore captures the iteration, or the module with its loss."""
        return self.captures in ("step", "callables")

    @property
    def is_encores(self) -> bool:
        """Return whether Encore records the CUDA graphs."""
        return self.backend == "encore" or self.wraps_iteration

    @property
    def compared_with(self) -> tuple[str, ...]:
        """Return the modes that this one is compared with: the reference of all figures, and its baselines."""
        return tuple(dict.fromkeys(name for name in (REFERENCE_MODE, *self.baselines) if name != self.name))


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("eager", "the module as it is, not compiled", baselines=("compile",), backend=None, colour="#8C8C8C"),
        Mode("compile", "torch.compile without CUDA graphs", baselines=(), colour="#56B4E9"),
        Mode(
            "graph",
            "stock CUDA graphs: mode='reduce-overhead'",
            baselines=("compile",),
            options={"triton.cudagraphs": True},
            colour="#E69F00",
        ),
        Mode(
            "graph-unpartitioned",
            "stock CUDA graphs with graph_partition=False: the whole FX graph or nothing",
            baselines=("compile", "graph"),
            options={"triton.cudagraphs": True, "graph_partition": False},
            colour="#D55E00",
        ),
        Mode(
            "placement",
            "Encore's placement, then stock CUDA graphs",
            baselines=("compile", "graph", "graph-unpartitioned"),
            backend="encore",
            options={"indirection": "off", "lean": False},
            # Stock graphs compute some chains of constants on the GPU (XLNet's table), and the bits differ;
            # unpartitioned ones, and placement, compute them where the program does. And Inductor may tune a kernel
            # differently in each process; other tilings round differently.
            bitwise_with=("graph", "graph-unpartitioned", "compile"),
            same_as=("graph",),
            colour="#009E73",
        ),
        Mode(
            "indirection",
            "Encore's placement, then CUDA graphs that read their inputs in place",
            baselines=("compile", "graph", "placement"),
            backend="encore",
            options={"indirection": "auto", "lean": False, "selection": "off", "concurrency": "off"},
            bitwise_with=("placement", "graph", "graph-unpartitioned", "compile"),
            colour="#CC79A7",
        ),
        Mode(
            "lean",
            "as indirection, with the host out of the way of replay",
            baselines=("compile", "graph", "indirection"),
            backend="encore",
            options={"indirection": "auto", "selection": "off", "concurrency": "off"},
            bitwise_with=("indirection", "placement", "graph", "graph-unpartitioned", "compile"),
            colour="#6A51A3",
        ),
        Mode(
            "lanes",
            "as lean, and independent kernels of a graph at the same time where that is faster",
            baselines=("compile", "graph", "lean"),
            backend="encore",
            options={"indirection": "auto", "selection": "off", "concurrency": "auto"},
            bitwise_with=("lean", "indirection", "placement", "graph", "graph-unpartitioned", "compile"),
            colour="#B2DF8A",
        ),
        Mode(
            "encore",
            "as lanes, and each graph only where it pays, by rules",
            baselines=("compile", "graph", "lean"),
            backend="encore",
            options={"indirection": "auto"},
            bitwise_with=("lean", "indirection", "placement", "graph", "graph-unpartitioned", "compile"),
            same_as=("lanes",),
            colour="#0072B2",
        ),
        Mode(
            "step",
            "torch.compile inside of graph_step: a training iteration as one CUDA graph; where it is named",
            baselines=("compile", "graph", "indirection", "by-hand"),
            captures="step",
            colour="#F0E442",
        ),
        Mode(
            "callables",
            "torch.compile inside of graph_callables: module and loss, forward and backward; where it is named",
            baselines=("compile", "graph", "indirection"),
            captures="callables",
            colour="#7F3B08",
        ),
        Mode(
            "by-hand",
            "what users capture into a CUDA graph themselves: a training iteration, NANOGPT's step; where it is named",
            baselines=("eager", "compile", "graph"),
            captures="by hand",
            colour="#44AA99",
        ),
    )
}

REFERENCE_MODE = "compile"
"""Every speed-up figure divides by this mode's time."""

EAGER_MODE = "eager"
"""The program as its users run it without a compiler."""

GRAPH_MODE = "graph"
"""Outputs of other graph modes are compared with this mode's, bit for bit."""

UNPARTITIONED_MODE = "graph-unpartitioned"
"""Stock graphs as in the papers: a CPU value prevents the capture of the whole FX graph."""

PLACEMENT_MODE = "placement"
"""The mode for placement alone in analyses without a GPU."""

INDIRECTION_MODE = "indirection"
"""Placement, and graphs that read their inputs in place."""

LEAN_MODE = "lean"
"""The same with lean replay."""

LANES_MODE = "lanes"
"""The same with concurrency of independent kernels in a graph."""

DEFAULT_MODE = "encore"
"""The default mode: all optimizations, with selection by rules."""


def select_modes(names: Iterable[str]) -> tuple[Mode, ...]:
    """Return the modes of these names, in the order of `MODES`.

    Raises:
        WrongUse: a name is unknown; the message lists the nearest ones.
    """
    wanted = list(names)
    for name in wanted:
        if name not in MODES:
            raise WrongUse(f"unknown mode {name!r}; {nearest(name, MODES)} (`encore list --modes` shows all)")
    return tuple(mode for mode in MODES.values() if mode.name in wanted)
