"""Define the records of `host.json`, what a call costs the host, and a table of them. `host` measures them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from suite.results.schema import Environment, Record

CALL, ENTRY, GRAPH = "call", "entry", "graph"
"""The compiled module; the function that Dynamo's code calls after guards and loading; the function that Inductor made
of a graph, or what makes and replays CUDA graphs of it."""

STRETCH = 20
UNEVEN = 1.25
"""A run is uneven where the median of one stretch of so many iterations is so many times that of another. Other work
on the machine does that for milliseconds at a time, longer than an outlier and shorter than a run."""

NONE = "\N{EN DASH}"


class LayerTime(Record):
    """Hold the median time of a layer per iteration, what it calls included, and its mean number of calls.

    A twentieth of the iterations took `fastest_us` or less: what is left where other work disturbs the rest.
    """

    layer: str
    host_us: float
    fastest_us: float
    calls: float


class FullCalls(Record):
    """Hold calls of Encore's that did all that a call of stock's does, and why (`optimizations.report.FullWay`)."""

    reason: str
    calls: int


class Judged(Record):
    """Hold what selection found for one function: which candidate it keeps, and the median times it measured.

    Its times begin where Encore is entered and end where an event after the call is reached.
    """

    kept: str
    median_us: dict[str, float]


class HostCost(Record):
    """Hold the cost of a program in a mode. Samples are in microseconds; `floor_us` is empty where nothing was
    recorded.

    Attributes:
        lean: whether Encore's option of this name was on; None for modes that are not Encore's.
        issue_us: until the call returned, nothing waited for.
        whole_us: until its work was done, as `torch.cuda.synchronize` tells it.
        whole_by_stream_us, whole_by_event_us: taken alternately with it, where the stream is waited for, or an event
            that is recorded after the call. Empty on a CPU.
        without_guards_us: `issue_us` with Dynamo's guards skipped, as far as it skips them.
        floor_us: the recorded CUDA graphs of an iteration alone, launched and waited for.
        replays: of Encore's graphs in the iterations of `whole_us`; `steady_replays`: those on the fast path.
        full_calls: why others were not, in these iterations, the first reason first.
        judged: by selection, one for each function; empty where it is off or has decided nothing.
        inside_us: from where the function of a graph is called until its work is done, with a wait right before it;
            inside_behind_idle_us: the same without that wait, where the device has had nothing to do since before the
            iteration, as selection measures. inside_idle_us: with the wait and 200 us of nothing before the iteration,
            in earlier files.
    """

    program: str
    mode: str
    lean: bool | None
    parameters: int
    buffers: int
    issue_us: list[float]
    whole_us: list[float]
    without_guards_us: list[float]
    floor_us: list[float]
    layers: list[LayerTime]
    replays: int = 0
    steady_replays: int = 0
    full_calls: tuple[FullCalls, ...] = ()
    whole_by_stream_us: tuple[float, ...] = ()
    whole_by_event_us: tuple[float, ...] = ()
    judged: tuple[Judged, ...] = ()
    inside_us: tuple[float, ...] = ()
    inside_behind_idle_us: tuple[float, ...] = ()
    inside_idle_us: tuple[float, ...] = ()

    @property
    def uneven(self) -> bool:
        """Return whether stretches of the iterations of `whole_us` differ so much that a median says little."""
        stretches = [self.whole_us[start : start + STRETCH] for start in range(0, len(self.whole_us), STRETCH)]
        medians = [statistics.median(stretch) for stretch in stretches]
        return max(medians) > UNEVEN * min(medians)

    def layer_us(self, name: str) -> float | None:
        """Return the time of a layer per iteration, or None if it was not called."""
        return next((layer.host_us for layer in self.layers if layer.layer == name), None)


class HostRun(Record):
    """Hold `host.json`."""

    micro_schema_version: int
    environment: Environment
    device: str
    size: str
    costs: list[HostCost]


def table(run: HostRun) -> Table:
    """Return medians for a terminal: whole, issue and floor; before the entry, from there to the graph, and inside it.

    `by stream` and `by event` are whole times where these were waited for. `inside` is the part of the graphs'
    functions with a wait right before and after each, `behind idle` with one after it only. `kept` is what selection
    keeps, of the times that it measured.

    A `~` marks a whole time that is uneven; `least` is what a twentieth of the iterations took or less. `steady` is the
    share of replays on the fast path, with the first reason why others were not.
    """
    shown = Table(
        "program", "mode", "lean", "tensors", "whole", "least", "issue", "floor", "whole / floor", "before entry",
        "to graph", "graph", "by stream", "by event", "inside", "behind idle", "steady", "kept",
        title=f"Host time, \N{MICRO SIGN}s per iteration ({run.device})", title_justify="left",
    )  # fmt: skip
    for cost in run.costs:
        call, entry, graph = (cost.layer_us(name) for name in (CALL, ENTRY, GRAPH))
        whole, floor = statistics.median(cost.whole_us), _median(cost.floor_us)
        shown.add_row(
            cost.program,
            cost.mode,
            {None: "", True: "on", False: "off"}[cost.lean],
            str(cost.parameters + cost.buffers),
            ("~" if cost.uneven else "") + _shown(whole),
            *map(_shown, (least(cost.whole_us), _median(cost.issue_us), floor)),
            f"{whole / floor:.2f}" if floor else NONE,
            *map(_shown, (_less(call, entry), _less(entry, graph), graph)),
            *map(_shown, (_median(cost.whole_by_stream_us), _median(cost.whole_by_event_us))),
            *map(_shown, (_median(cost.inside_us), _median(cost.inside_behind_idle_us))),
            _steady(cost),
            "; ".join(map(_kept, cost.judged)) or NONE,
        )
    return shown


def _steady(cost: HostCost) -> str:
    share = f"{cost.steady_replays / cost.replays:.0%}" if cost.replays else NONE
    return f"{share} ({cost.full_calls[0].reason})" if cost.full_calls else share


def _kept(judged: Judged) -> str:
    return f"{judged.kept} (" + ", ".join(f"{name} {us:.1f}" for name, us in judged.median_us.items()) + ")"


def least(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 20]


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def _less(outer: float | None, inner: float | None) -> float | None:
    return None if outer is None or inner is None else outer - inner


def _shown(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"
