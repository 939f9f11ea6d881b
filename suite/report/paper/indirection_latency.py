"""GraCE Fig. 9: what reading an input through a pointer costs, by rewritten kernels and by a prelude kernel."""

from __future__ import annotations

from suite.micro.records import MicroRun
from suite.micro.sweeps import VARIANTS, Sweep
from suite.report.chart import Line, LineChart
from suite.report.micro_figure import lines as micro_lines
from suite.report.paper.exhibit import NOT_MEASURED, Exhibit, Made, Point, Results, of_environment
from suite.report.provenance import Provenance
from suite.report.table import make_table

_SWEEP: Sweep = "inputs"
_DIFFERS = (
    "From encore micro indirection: time of one replay of a graph whose inputs have all moved, against their number; "
    "the paper shows the added latency of its two ways alone, and says that the prelude exceeds 10 \N{MICRO SIGN}s at "
    "many parameters. ptx is the rewritten kernel, copy stock's copy of the inputs, host sets the parameters of the "
    "instantiated graph."
)


def make(exhibit: Exhibit, results: Results) -> Made:
    """Lines of time per replay by the number of inputs."""
    title = exhibit.title(results.published)
    columns = ["inputs", *(f"{variant}_us" for variant in VARIANTS), "missing"]
    micro = results.micro
    found = {variant: dict(line) for (variant, moved), line in _lines(micro).items() if moved}
    counts = sorted({count for line in found.values() for count in line})
    rows = [
        {
            "inputs": count,
            **{f"{variant}_us": found.get(variant, {}).get(count) for variant in VARIANTS},
            "missing": "; ".join(f"{v}: {NOT_MEASURED}" for v in VARIANTS if count not in found.get(v, {})) or None,
        }
        for count in counts
    ] or [{"missing": NOT_MEASURED}]
    where = results.provenance() if micro is None else _origin(micro)
    table = make_table(exhibit.stem, title, exhibit.note(results, where), columns, rows)
    drawn = tuple(
        Line(variant, tuple(sorted(found[variant].items())), shade=place)
        for place, variant in enumerate(VARIANTS)
        if found.get(variant)
    )
    chart = LineChart(
        exhibit.stem,
        title,
        "inputs that moved",
        "time per replay, \N{MICRO SIGN}s (median)",
        drawn,
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
    return Made(table, chart if drawn else None, where, tuple(points))


def _lines(micro: MicroRun | None) -> dict[tuple[str, bool], list[tuple[int, float]]]:
    return {} if micro is None else {(str(v), moved): line for (v, moved), line in micro_lines(micro, _SWEEP).items()}


def _origin(micro: MicroRun) -> Provenance:
    return of_environment(micro.environment, None if micro.environment.gpu else "on the CPU")


EXHIBITS = (Exhibit("fig9", "grace", "Fig. 9", "latency of the ways to indirection", _DIFFERS, make),)
