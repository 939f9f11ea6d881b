"""Show nanoGPT's numbers: a decode step, speed-ups by the length of the generation, and what a mode costs at first.

They are rows of the workloads NANOGPT-<prompt>-<tokens> like any other's: the ratio of whole generations is that of two
rows, and the metric `decode` has the times of steps, of the prompt, and tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from models.nanogpt.configurations import NAMED, SWEEP, Configuration
from suite.measure.modes import EAGER_MODE, GRAPH_MODE
from suite.report.chart import Bar, Chart, Scale
from suite.report.compare import Ratios
from suite.report.paper.exhibit import NOT_MEASURED, NOTHING, Exhibit, Made, Point, Results, Value
from suite.report.provenance import Provenance
from suite.report.runs import cell_label, mode_order
from suite.report.table import Detailed

BY_HAND = "by-hand"
"""The article's graph: the step captured by hand and replayed."""

_AMORTISED = next(one for one in NAMED if one.name == "long_generation")
"""The configuration whose generations pay for a warm-up: the longest after a prompt of 8."""


def make_steps(exhibit: Exhibit, results: Results) -> Made:
    """Show the named configurations: time of a step in each mode, and whole generations over eager."""
    paper = {
        name: {f"{EAGER_MODE}_ms": steps["eager"], f"{BY_HAND}_ms": steps["graph"]}
        | {"end_to_end": results.published.nanogpt_end_to_end_speedup[name]}
        for name, steps in results.published.nanogpt_per_step_ms.items()
    }
    return _of_configurations(exhibit, _with_rows(results), NAMED, paper)


def make_sweep(exhibit: Exhibit, results: Results) -> Made:
    """Show speed-ups by the number of generated tokens."""
    sweep = results.published.nanogpt_sweep_prompt8
    paper = {f"sweep_{tokens}": {"step": one["step"], "end_to_end": one["e2e"]} for tokens, one in sweep.items()}
    return replace(_of_configurations(exhibit, _with_rows(results), SWEEP, paper), chart=None)


def _of_configurations(
    exhibit: Exhibit,
    results: Results,
    configurations: Iterable[Configuration],
    published: Mapping[str, Mapping[str, float]],
) -> Made:
    """Make a row for each configuration: steps of each mode in ms and over eager, and whole generations."""
    modes = _modes(results)
    as_published = all(_label(results, one) in (None, one.workload) for one in (*NAMED, *SWEEP))
    bars: dict[tuple[str, str], Bar] = {}
    rows: list[dict[str, object]] = []
    points = []
    for one in configurations:
        row_label, label = _label(results, one), one.name.replace("_", " ")
        paper = published[one.name] if as_published else {}
        steps = {mode: _decode(results, one, mode).get("step_us") for mode in modes}
        missing = {mode: results.state(row_label or one.workload, mode) for mode in modes}
        row: dict[str, object] = {"case": label, "prompt": one.prompt, "generated": one.new_tokens}
        over_eager: dict[str, object] = {}
        for mode, step_us in steps.items():
            row[f"{mode}_ms"] = None if step_us is None else step_us / 1e3
            bars[label, mode] = (
                Bar(failure=missing[mode] or NOT_MEASURED, published=paper.get(f"{mode}_ms"))
                if step_us is None
                else Bar(step_us / 1e3, label=f"{step_us / 1e3:.3f}", published=paper.get(f"{mode}_ms"))
            )
            if mode != EAGER_MODE:
                over_eager[f"{mode}_step_over_eager"] = _over(steps, mode)
                for base in _bases(mode, modes):
                    over_eager[f"{mode}_end_to_end_over_{base}"] = _detailed(results, row_label, mode, base)
        row |= {f"{mode}_published_ms": paper.get(f"{mode}_ms") for mode in (EAGER_MODE, BY_HAND)} | over_eager
        row |= {f"{name}_published_speedup": paper.get(name) for name in ("step", "end_to_end")}
        rows.append(row | {"missing": "; ".join(f"{mode}: {why}" for mode, why in missing.items() if why) or None})
        step, whole = _over(steps, BY_HAND), _detailed(results, row_label, BY_HAND, EAGER_MODE)
        for name, text in (("step", None if step is None else f"{step:.2f}"), ("end_to_end", whole)):
            if name in published[one.name]:
                what = f"{label}, {name.replace('_', ' ')}, {BY_HAND} over eager"
                points.append(Point(what, paper.get(name), str(text or NOT_MEASURED)))
    origin = _origin(results)
    chart = Chart(
        exhibit.stem,
        exhibit.title(results.published),
        "ms per decode step (median)",
        Scale.LINEAR,
        tuple(str(row["case"]) for row in rows),
        modes,
        bars,
        published=exhibit.setting(results.published),
    )
    table = exhibit.table(results, rows, origin=origin)
    return Made(table, chart if chart.has_values else None, origin, tuple(points))


def make_costs(exhibit: Exhibit, results: Results) -> Made:
    """Show for each mode warm-up, prompt, tokens per second, and when its warm-up is paid for."""
    results = _with_rows(results)
    label = _label(results, _AMORTISED) or _AMORTISED.workload
    whole = {mode: _decode(results, _AMORTISED, mode).get("generation_us") for mode in _modes(results)}
    warm = {mode: cell.compile.first_call_s for mode in whole if (cell := results.cell(label, mode)) and cell.compile}
    rows: list[dict[str, object]] = []
    points = []
    for mode, own_us in whole.items():
        row: dict[str, object] = {"mode": mode, "warm_up_s": warm.get(mode)}
        text = NOT_MEASURED
        if own_us is None:
            row["missing"] = results.state(label, mode) or NOT_MEASURED
        else:
            decode, eager_us = _decode(results, _AMORTISED, mode), whole.get(EAGER_MODE)
            prompt_us, speed = decode["prompt_us"], decode["tokens_per_s"]
            row |= {"prompt_us": prompt_us, "generation_us": own_us, "tokens_per_s": speed}
            if mode != EAGER_MODE and eager_us is not None:
                saved_s, extra_s = (eager_us - own_us) / 1e6, warm.get(mode, 0.0) - warm.get(EAGER_MODE, 0.0)
                row["paid_after"] = f"{max(0, round(extra_s / saved_s)):,} generations" if saved_s > 0 else "never"
            if mode in warm and prompt_us is not None and speed is not None:
                text = f"{speed:,.0f}, {prompt_us / 1e3:.2f} ms, {warm[mode]:.1f} s, {row.get('paid_after', 'at once')}"
        rows.append(row)
        points.append(Point(f"{mode}: tokens/s, prompt, warm-up, paid for after", None, text))
    origin = _origin(results)
    return Made(exhibit.table(results, rows, origin=origin), None, origin, tuple(points))


def _with_rows(results: Results) -> Results:
    """Return the results with the run that has rows of these workloads: the report's own, else the older recording."""
    wanted = {one.workload for one in (*NAMED, *SWEEP)}
    if results.run is not None and any(cell.workload in wanted for cell in results.run.cells):
        return results
    return replace(results, ratios=None if results.nanogpt is None else Ratios(results.nanogpt))


def _label(results: Results, one: Configuration) -> str | None:
    """Return what the configuration's row is called, its size included; None where there is no row."""
    cells = results.run.cells if results.run is not None else ()
    return next((cell_label(cell) for cell in cells if cell.workload == one.workload), None)


def _modes(results: Results) -> tuple[str, ...]:
    """Return the article's two, measured or not, and the others of the rows."""
    wanted = {one.workload for one in (*NAMED, *SWEEP)}
    cells = results.run.cells if results.run is not None else ()
    found = {EAGER_MODE, BY_HAND, *(cell.mode for cell in cells if cell.workload in wanted)}
    return (EAGER_MODE, BY_HAND, *sorted(found - {EAGER_MODE, BY_HAND}, key=mode_order))


def _decode(results: Results, one: Configuration, mode: str) -> Mapping[str, float | None]:
    """Return what the metric found in this mode; nothing where the row has not passed."""
    cell = results.passed(_label(results, one) or one.workload, mode)
    return {} if cell is None or cell.metrics is None else cell.metrics.more.get("decode", {})


def _over(steps: Mapping[str, float | None], mode: str) -> float | None:
    eager, own = steps.get(EAGER_MODE), steps.get(mode)
    return None if eager is None or own is None else eager / own


def _bases(mode: str, modes: tuple[str, ...]) -> list[str]:
    """Return what whole generations are compared with: eager, and stock CUDA graphs for other compiled modes."""
    compiled = mode not in (GRAPH_MODE, BY_HAND) and GRAPH_MODE in modes
    return [EAGER_MODE, GRAPH_MODE] if compiled else [EAGER_MODE]


def _detailed(results: Results, label: str | None, mode: str, base: str) -> Detailed | None:
    found = Value() if label is None else results.ratio(label, mode, base)
    if found.number is None or found.interval is None:
        return None
    low, high = found.interval
    if not math.isfinite(low + high):
        return Detailed(f"{found.number:.2f}", {"speedup": found.number, "low": None, "high": None})
    text = f"{found.number:.2f} [{low:.2f}, {high:.2f}]"
    return Detailed(text, {"speedup": found.number, "low": low, "high": high})


def _origin(results: Results) -> Provenance:
    labels = [label for one in (*NAMED, *SWEEP) if (label := _label(results, one))]
    return results.provenance(labels) if labels else NOTHING


_DIFFERS = (
    f"The article's graph is mode {BY_HAND}; the others are compiled. A step is the time between two CUDA events "
    "around it (median over all steps), end to end the generation with its prompt. Over eager, the path with a cache, "
    f"and over {GRAPH_MODE}: how many times faster; end to end with the interval of the rows' processes. The article's "
    "own two tables do not agree everywhere: 0.99 and 1.21 end to end for one length."
)
_COSTS = (
    f"Of the {_AMORTISED.name.replace('_', ' ')}, medians. Warm-up: until the first generation is through, "
    "compiling or capturing included. Tokens per second are of whole generations, prompt included, warm-up not. Paid "
    "for: generations until what the mode saves over eager makes up for its longer warm-up. The article gives none."
)

_SHOWS_COSTS = "tokens per second, and what a mode costs first"
EXHIBITS = (
    Exhibit("nanogpt-table1", "nanogpt", "first table", "time of a decode step", _DIFFERS, make_steps),
    Exhibit("nanogpt-table2", "nanogpt", "second table", "speed-up by generated tokens", _DIFFERS, make_sweep),
    Exhibit("nanogpt-costs", "nanogpt", "further numbers", _SHOWS_COSTS, _COSTS, make_costs),
)
