"""Show what Encore costs: GraCE Fig. 9 (reading through pointers), Fig. 13 (compiling, recording) and peak memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, INDIRECTION_MODE, PLACEMENT_MODE, UNPARTITIONED_MODE
from suite.micro.records import VARIANTS
from suite.report.cell_tables import compile_conditions
from suite.report.chart import Bar, LineChart, Scale
from suite.report.grid import NOT_MEASURED, Grid, Point, Series, known, plain_mean
from suite.report.paper.exhibit import Exhibit, Made, Results
from suite.report.provenance import of_environment
from suite.results.errors import WrongUse
from suite.results.stats import Ratio
from suite.results.store import describe, read_unpacked

_PHASES = {"compiling": ("compile", "recording"), "replaying": ("replay", "steady")}
"""Names of each phase in rows of the suite and in rows of programs."""

WITH_TUNED_KERNELS = 2
"""The process of each program whose memory counts: in one run, it finds the kernels of the first."""


def memory(exhibit: Exhibit, results: Results) -> Grid:
    """Show two bars per workload, lower is better."""

    def of(label: str, mode: str, phase: str) -> float | None:
        found: float | None = results.metric(label, mode, f"memory.{_PHASES[phase][0]}_peak_reserved_bytes")
        return found

    def measure(label: str, phase: str) -> Bar:
        ours, stock = of(label, DEFAULT_MODE, phase), of(label, GRAPH_MODE, phase)
        return known(ours / stock if ours and stock else None, results.state(label, DEFAULT_MODE, GRAPH_MODE))

    def points(of_what: str, found: Mapping[str, Ratio], papers: Mapping[str, str]) -> list[Point]:
        texts = {phase: f"{mean.value:.2f} times stock's, of {mean.count}" for phase, mean in found.items()}
        return [Point(f"{of_what}, {phase}", papers.get(phase), texts.get(phase, NOT_MEASURED)) for phase in _PHASES]

    grid = partial(
        Grid,
        "ratio",
        f"times {GRAPH_MODE}'s bytes (lower is better)",
        Scale.RATIO,
        exhibit.labels(results),
        tuple(Series(phase, partial(measure, phase=phase)) for phase in _PHASES),
        more=lambda label: {
            f"{phase}_{mode}_bytes": of(label, mode, phase) for phase in _PHASES for mode in (GRAPH_MODE, DEFAULT_MODE)
        },
        note=f"Mode {DEFAULT_MODE}.",
        shown=(1 / 8, 8),
    )
    means = grid().plain_means()
    headline = exhibit.headline(results)
    papers = {
        "compiling": f"{headline['compile_peak_memory']} in the mean",
        "replaying": f"{headline['replay_peak_memory_best']} in the best case",
    }
    found, footer = points("workloads", means, papers), []
    for device, ratios in results.programs.items():
        small = {phase: plain_mean(own) for phase, own in ratios.items() if own}
        found += points(f"programs on {device}", small, {})
        row = {f"{phase}_ratio": mean.value for phase, mean in small.items()}
        footer.append({"workload": f"programs on {device}", **row})
    return grid(points=found, means=means, footer=footer)


def read_programs(path: Path) -> tuple[str, dict[str, list[float]]]:
    """Read rows of `tests/gpu/programs.py`: their GPU, and by phase the ratios of Encore's peak memory to stock's.

    A program's first process is left out: stock tunes kernels there, which takes memory, and Encore finds them tuned.

    Raises:
        WrongUse: the file cannot be read or has other lines.
    """
    found: dict[str, dict[str, dict[str, int]]] = {}
    device = "unknown"
    try:
        for line in read_unpacked(path).splitlines():
            row = json.loads(line)
            device = row.get("device") or device
            if row["status"] == "ok" and row.get("process") == WITH_TUNED_KERNELS:
                reserved = {phase: row[name]["reserved_bytes"] for phase, (_, name) in _PHASES.items() if name in row}
                found.setdefault(row["program"], {})[row["mode"]] = reserved
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WrongUse(f"{describe(path)} holds no rows of tests/gpu/programs.py: {error}") from error
    return device, {
        phase: [
            ours / stock
            for modes in found.values()
            if (ours := modes.get("encore", {}).get(phase)) and (stock := modes.get("stock", {}).get(phase))
        ]
        for phase in _PHASES
    }


def compile_time(exhibit: Exhibit, results: Results) -> Grid:
    """Show bars of warm-up time over stock's where both compiled with cold caches; cached kernels are in the table."""
    modes = (PLACEMENT_MODE, INDIRECTION_MODE, DEFAULT_MODE)

    def times(label: str, mode: str) -> tuple[float | None, str]:
        cell = results.passed(label, mode)
        if cell is None or cell.compile is None:
            return None, results.state(label, mode) or NOT_MEASURED
        return cell.compile.warm_up_s, compile_conditions(cell.compile)

    def measure(label: str, mode: str, *, cold: bool) -> Bar:
        (stock, stocks_way), (own, way) = times(label, UNPARTITIONED_MODE), times(label, mode)
        if not stock or own is None:
            return Bar(failure=way if own is None else stocks_way)
        if way != stocks_way:
            return Bar(failure="other conditions")
        return Bar(own / stock) if way.startswith("cold") is cold else Bar(failure=way)

    def more(label: str) -> dict[str, object]:
        paper = results.published.compile_s.get(exhibit.source, {}).get(label, {})
        row: dict[str, object] = {f"{mode}_s": times(label, mode)[0] for mode in (UNPARTITIONED_MODE, *modes)}
        row |= {"graphs_published_s": paper.get("graph"), "whole_published_s": paper.get("encore")}
        return row | {"conditions": times(label, UNPARTITIONED_MODE)[1]}

    grid = partial(
        Grid,
        "ratio",
        f"times {UNPARTITIONED_MODE}'s seconds (lower is better)",
        Scale.RATIO,
        exhibit.labels(results),
        tuple(
            Series(mode if cold else f"{mode}_cached", partial(measure, mode=mode, cold=cold), drawn=cold)
            for cold in (True, False)
            for mode in modes
        ),
        more=more,
        shown=(1 / 8, 16),
    )
    means = grid().plain_means()
    texts = {name: f"{mean.value:.2f} of {mean.count}" for name, mean in means.items()}
    headline = exhibit.headline(results)
    published = f"{headline['compile_time_ratio']} in the mean, up to {headline['compile_time_ratio_max']}"
    points = [
        Point("caches cold", published, texts.get(DEFAULT_MODE, NOT_MEASURED)),
        Point("kernels cached", None, texts.get(f"{DEFAULT_MODE}_cached", NOT_MEASURED)),
    ]
    return grid(points=points, means=means)


def latency(exhibit: Exhibit, results: Results) -> Made:
    """Show lines of time per replay by the number of inputs."""
    micro, where = results.micro, results.provenance()
    found: dict[str, dict[int, float]] = {}
    if micro is not None:
        where = of_environment(micro.environment, None if micro.environment.gpu else "on the CPU")
        for measured in micro.points:
            for series in measured.series if measured.sweep == "inputs" else ():
                if series.moved and series.host_us:
                    found.setdefault(series.variant, {})[measured.inputs] = median(series.host_us)
    counts = sorted({count for line in found.values() for count in line})
    rows = [
        {
            "inputs": count,
            **{f"{variant}_us": found.get(variant, {}).get(count) for variant in VARIANTS},
            "missing": "; ".join(f"{v}: {NOT_MEASURED}" for v in VARIANTS if count not in found.get(v, {})) or None,
        }
        for count in counts
    ]
    chart = LineChart(
        exhibit.stem,
        exhibit.title(results.published),
        "inputs that moved",
        "time per replay, \N{MICRO SIGN}s (median)",
        {variant: tuple(sorted(found[variant].items())) for variant in VARIANTS if variant in found},
    )
    published = exhibit.headline(results)["indirection_prelude_us"]
    most = counts[-1] if counts else 0
    points = [
        Point(
            f"{variant}: one replay, {most:,} inputs moved",
            f"added \N{MICRO SIGN}s: {published}" if variant == "prelude" else None,
            f"{found[variant][most]:.1f} \N{MICRO SIGN}s" if most in found.get(variant, {}) else NOT_MEASURED,
        )
        for variant in VARIANTS
    ]
    return exhibit.whole(results, rows, points, chart, origin=where)
