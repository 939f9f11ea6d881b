"""Show what Encore costs: GraCE Fig. 9 (reading through pointers), Fig. 13 (compiling, recording) and peak memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from suite.measure.modes import DEFAULT_MODE, GRAPH_MODE, INDIRECTION_MODE, PLACEMENT_MODE, UNPARTITIONED_MODE
from suite.micro.records import VARIANTS
from suite.report.cell_tables import compile_conditions
from suite.report.chart import Line, LineChart, Scale
from suite.report.paper.exhibit import (
    NOT_MEASURED,
    Exhibit,
    Grid,
    Made,
    Point,
    Results,
    Series,
    Value,
    known,
    make_grid,
    plain_mean,
)
from suite.report.provenance import of_environment
from suite.results.errors import WrongUse
from suite.results.stats import Ratio
from suite.results.store import describe, read_unpacked

_PHASES = {"compiling": ("compile", "recording"), "replaying": ("replay", "steady")}
"""Names of each phase in rows of the suite and in rows of programs."""


def make_memory(exhibit: Exhibit, results: Results) -> Made:
    """Show two bars per workload, lower is better."""
    whole = results.whole_mode

    def of(label: str, mode: str, phase: str) -> int | None:
        cell = results.passed(label, mode)
        memory = cell.metrics.memory if cell and cell.metrics else None
        return None if memory is None else getattr(memory, f"{_PHASES[phase][0]}_peak_reserved_bytes")

    def measure(label: str, phase: str) -> Value:
        ours, stock = of(label, whole, phase), of(label, GRAPH_MODE, phase)
        why = results.state(label, whole) or results.state(label, GRAPH_MODE)
        return known(ours / stock if ours is not None and stock else None, why)

    grid = Grid(
        "ratio",
        f"times {GRAPH_MODE}'s bytes (lower is better)",
        Scale.RATIO,
        exhibit.labels(results),
        tuple(Series(phase, lambda label, phase=phase: measure(label, phase)) for phase in _PHASES),  # type: ignore[misc]
        more=lambda label: {
            f"{phase}_{mode}_bytes": of(label, mode, phase) for phase in _PHASES for mode in (GRAPH_MODE, whole)
        },
        note=f"Mode {whole}.",
        shown=(1 / 8, 8),
    )
    means = grid.plain_means()
    headline = results.published.headline[exhibit.source]
    published = {
        "compiling": f"{headline['compile_peak_memory']} in the mean",
        "replaying": f"{headline['replay_peak_memory_best']} in the best case",
    }

    def points(of_what: str, found: Mapping[str, Ratio], papers: Mapping[str, str]) -> list[Point]:
        texts = {phase: f"{mean.value:.2f} times stock's, of {mean.count}" for phase, mean in found.items()}
        return [Point(f"{of_what}, {phase}", papers.get(phase), texts.get(phase, NOT_MEASURED)) for phase in _PHASES]

    found, footer = points("workloads", means, published), []
    for device, ratios in results.programs.items():
        small = {phase: plain_mean(own) for phase, own in ratios.items() if own}
        found += points(f"programs on {device}", small, {})
        row = {f"{phase}_ratio": mean.value for phase, mean in small.items()}
        footer.append({"workload": f"programs on {device}", **row})
    return make_grid(exhibit, results, grid, found, means, footer)


def read_programs(path: Path) -> tuple[str, dict[str, list[float]]]:
    """Read rows that `tests/gpu/programs.py` wrote: their GPU, and peak memory of Encore over stock's for each program
    that both ran, by phase.

    Raises:
        WrongUse: the file cannot be read or has other lines.
    """
    found: dict[str, dict[str, dict[str, int]]] = {}
    device = "unknown"
    try:
        for line in read_unpacked(path).splitlines():
            row = json.loads(line)
            device = row.get("device") or device
            if row["status"] == "ok":
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


def make_compile_time(exhibit: Exhibit, results: Results) -> Made:
    """Show bars of warm-up time over stock's where both compiled with cold caches; with cached kernels, in the
    table."""
    modes = (PLACEMENT_MODE, INDIRECTION_MODE, DEFAULT_MODE)

    def times(label: str, mode: str) -> tuple[float | None, str]:
        cell = results.passed(label, mode)
        if cell is None or cell.compile is None:
            return None, results.state(label, mode) or NOT_MEASURED
        return cell.compile.warm_up_s, compile_conditions(cell.compile)

    def measure(label: str, mode: str, *, cold: bool) -> Value:
        (stock, stocks_way), (own, way) = times(label, UNPARTITIONED_MODE), times(label, mode)
        if not stock or own is None:
            return Value(missing=way if own is None else stocks_way)
        if way != stocks_way:
            return Value(missing="other conditions")
        return Value(own / stock) if way.startswith("cold") is cold else Value(missing=way)

    def series(mode: str, *, cold: bool) -> Series:
        name = mode if cold else f"{mode}_cached"
        return Series(name, lambda label: measure(label, mode, cold=cold), drawn=cold)

    def more(label: str) -> dict[str, object]:
        paper = results.published.compile_s.get(exhibit.source, {}).get(label, {})
        row: dict[str, object] = {f"{mode}_s": times(label, mode)[0] for mode in (UNPARTITIONED_MODE, *modes)}
        row |= {"graphs_published_s": paper.get("graph"), "whole_published_s": paper.get("encore")}
        return row | {"conditions": times(label, UNPARTITIONED_MODE)[1]}

    grid = Grid(
        "ratio",
        f"times {UNPARTITIONED_MODE}'s seconds (lower is better)",
        Scale.RATIO,
        exhibit.labels(results),
        tuple(series(mode, cold=cold) for cold in (True, False) for mode in modes),
        more=more,
        shown=(1 / 8, 16),
    )
    means = grid.plain_means()
    texts = {name: f"{mean.value:.2f} of {mean.count}" for name, mean in means.items()}
    headline = results.published.headline[exhibit.source]
    published = f"{headline['compile_time_ratio']} in the mean, up to {headline['compile_time_ratio_max']}"
    points = [
        Point("caches cold", published, texts.get(DEFAULT_MODE, NOT_MEASURED)),
        Point("kernels cached", None, texts.get(f"{DEFAULT_MODE}_cached", NOT_MEASURED)),
    ]
    return make_grid(exhibit, results, grid, points, means)


_MEMORY = (
    f"Peak bytes that PyTorch's allocator has reserved, over those of {GRAPH_MODE}. The paper gives the mean while "
    "compiling and the best case while replaying. Programs: those of tests/gpu/programs.py that both ran."
)
_COMPILE = (
    f"Time is from the first call to the end of warm-up, recordings included, over that of {UNPARTITIONED_MODE}. It is "
    "one measurement per cell and has no interval. The paper's caches were cold: only where both modes' were, there is "
    "a bar. cached: the same ratio where the kernels had been compiled before."
)


_LATENCY = (
    "From encore micro indirection: time of one replay of a graph whose inputs have all moved, against their number; "
    "the paper shows the added latency of its two ways alone, and says that the prelude exceeds 10 \N{MICRO SIGN}s at "
    "many parameters. ptx is the rewritten kernel of release 0.1, copy stock's copy of the inputs, host sets the "
    "parameters of the instantiated graph."
)


def make_latency(exhibit: Exhibit, results: Results) -> Made:
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
    table = exhibit.table(results, rows or [{"missing": NOT_MEASURED}], origin=where)
    chart = LineChart(
        exhibit.stem,
        exhibit.title(results.published),
        "inputs that moved",
        "time per replay, \N{MICRO SIGN}s (median)",
        tuple(
            Line(variant, tuple(sorted(found[variant].items())), shade=place)
            for place, variant in enumerate(VARIANTS)
            if variant in found
        ),
        x_log=True,
        y_log=True,
    )
    published = results.published.headline[exhibit.source]["indirection_prelude_us"]
    most = counts[-1] if counts else 0
    points = [
        Point(
            f"{variant}: one replay, {most:,} inputs moved",
            f"added \N{MICRO SIGN}s: {published}" if variant == "prelude" else None,
            f"{found[variant][most]:.1f} \N{MICRO SIGN}s" if most in found.get(variant, {}) else NOT_MEASURED,
        )
        for variant in VARIANTS
    ]
    return Made(table, chart if found else None, where, tuple(points))


EXHIBITS = (
    Exhibit("fig13", "grace", "Fig. 13", "compile time over that of stock CUDA graphs", _COMPILE, make_compile_time),
    Exhibit("memory", "grace", "section 5.3", "peak memory over that of stock CUDA graphs", _MEMORY, make_memory),
    Exhibit("fig9", "grace", "Fig. 9", "latency of the ways to indirection", _LATENCY, make_latency),
)
