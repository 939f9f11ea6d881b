"""Show nanoGPT's numbers: a decode step, speed-ups by the length of the generation, and the cost of warm-up.

They are from rows of the workloads NANOGPT-<prompt>-<tokens>: the ratio of whole generations is that of two rows, and
the metric `decode` has the times of steps, of the prompt, and tokens per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from models.nanogpt.configurations import NAMED, SWEEP, Configuration
from suite.measure.modes import EAGER_MODE, GRAPH_MODE
from suite.report.chart import Bar, Scale
from suite.report.grid import NOT_MEASURED, Grid, Point, Series
from suite.report.paper.exhibit import NOTHING, Exhibit, Made, Results
from suite.report.provenance import Provenance
from suite.report.runs import cell_label, mode_order

BY_HAND = "by-hand"
"""The article's graph: the step captured by hand and replayed."""
_ALL = (*NAMED, *SWEEP)
AMORTISED = next(one for one in NAMED if one.name == "long_generation")
"""The configuration by which the cost of warm-up is compared: the longest generation after a prompt of 8."""


def steps(exhibit: Exhibit, results: Results) -> Grid:
    """Show the named configurations: time of a step in each mode, and whole generations over eager."""
    paper = {
        name: {f"{EAGER_MODE}_ms": steps["eager"], f"{BY_HAND}_ms": steps["graph"]}
        | {"end_to_end": results.published.nanogpt_end_to_end_speedup[name]}
        for name, steps in results.published.nanogpt_per_step_ms.items()
    }
    return _of_configurations(_with_rows(results), NAMED, paper)


def sweep(exhibit: Exhibit, results: Results) -> Grid:
    """Show speed-ups by the number of generated tokens."""
    points = results.published.nanogpt_sweep_prompt8
    paper = {f"sweep_{tokens}": {"step": one["step"], "end_to_end": one["e2e"]} for tokens, one in points.items()}
    grid = _of_configurations(_with_rows(results), SWEEP, paper)
    return replace(grid, series=tuple(replace(one, drawn=False) for one in grid.series))


def _of_configurations(
    results: Results, configurations: Iterable[Configuration], published: Mapping[str, Mapping[str, float]]
) -> Grid:
    """Make a row for each configuration: steps of each mode in ms and over eager, and whole generations."""
    modes = _modes(results)
    as_published = all(_label(results, one) in (None, one.workload) for one in _ALL)
    cases = {one.name.replace("_", " "): one for one in configurations}

    def step_ms(case: str, mode: str) -> float | None:
        step_us = _decode(results, cases[case], mode).get("step_us")
        return None if step_us is None else step_us / 1e3

    def over_eager(case: str, mode: str) -> float | None:
        eager, own = step_ms(case, EAGER_MODE), step_ms(case, mode)
        return None if eager is None or own is None else eager / own

    def measure(case: str, mode: str) -> Bar:
        one = cases[case]
        state = results.state(_label(results, one) or one.workload, mode)
        found = step_ms(case, mode)
        return Bar(found) if found is not None else Bar(failure=state or NOT_MEASURED)

    def paper(case: str, name: str) -> float | None:
        return published[cases[case].name].get(name) if as_published else None

    def end_to_end(case: str, mode: str, base: str) -> str | None:
        return _ratio_text(results, _label(results, cases[case]), mode, base)

    def more(case: str) -> dict[str, object]:
        row: dict[str, object] = {"prompt": cases[case].prompt, "generated": cases[case].new_tokens}
        for mode in modes:
            if mode != EAGER_MODE:
                row[f"{mode}_step_over_eager"] = over_eager(case, mode)
                for base in _bases(mode, modes):
                    row[f"{mode}_end_to_end_over_{base}"] = end_to_end(case, mode, base)
        return row | {f"{name}_published_speedup": paper(case, name) for name in ("step", "end_to_end")}

    points = []
    for case, one in cases.items():
        step = over_eager(case, BY_HAND)
        found = {
            "step": None if step is None else f"{step:.2f}",
            "end_to_end": end_to_end(case, BY_HAND, EAGER_MODE),
        }
        for name, text in found.items():
            if name in published[one.name]:
                what = f"{case}, {name.replace('_', ' ')}, {BY_HAND} over eager"
                points.append(Point(what, paper(case, name), str(text or NOT_MEASURED)))
    return Grid(
        "ms",
        "ms per decode step (median)",
        Scale.LINEAR,
        tuple(cases),
        tuple(
            Series(
                mode,
                partial(measure, mode=mode),
                partial(paper, name=f"{mode}_ms") if mode in (EAGER_MODE, BY_HAND) else None,
                text="{:.3f}".format,
            )
            for mode in modes
        ),
        points,
        more=more,
        group="case",
        origin=_origin(results),
    )


def costs(exhibit: Exhibit, results: Results) -> Made:
    """Show for each mode warm-up, prompt, tokens per second, and after how many generations it is faster in total."""
    results = _with_rows(results)
    label = _label(results, AMORTISED) or AMORTISED.workload
    whole = {mode: _decode(results, AMORTISED, mode).get("generation_us") for mode in _modes(results)}
    warm = {
        mode: cell.compile.first_call_s for mode in whole if (cell := results.ratios.cell(label, mode)) and cell.compile
    }
    rows: list[dict[str, object]] = []
    points = []
    for mode, own_us in whole.items():
        row: dict[str, object] = {"mode": mode, "warm_up_s": warm.get(mode)}
        text = NOT_MEASURED
        if own_us is None:
            row["missing"] = results.state(label, mode) or NOT_MEASURED
        else:
            decode, eager_us = _decode(results, AMORTISED, mode), whole.get(EAGER_MODE)
            prompt_us, speed = decode["prompt_us"], decode["tokens_per_s"]
            row |= {"prompt_us": prompt_us, "generation_us": own_us, "tokens_per_s": speed}
            if mode != EAGER_MODE and eager_us is not None:
                saved_s, extra_s = (eager_us - own_us) / 1e6, warm.get(mode, 0.0) - warm.get(EAGER_MODE, 0.0)
                row["paid_after"] = f"{max(0, round(extra_s / saved_s)):,} generations" if saved_s > 0 else "never"
            if mode in warm and prompt_us is not None and speed is not None:
                text = f"{speed:,.0f}, {prompt_us / 1e3:.2f} ms, {warm[mode]:.1f} s, {row.get('paid_after', 'at once')}"
        rows.append(row)
        points.append(Point(f"{mode}: tokens/s, prompt, warm-up, paid for after", None, text))
    return exhibit.whole(results, rows, points, origin=_origin(results))


def _with_rows(results: Results) -> Results:
    """Return the results with a run that has rows of these workloads: the report's, else the older recording."""
    wanted = {one.workload for one in _ALL}
    if results.run is not None and any(cell.workload in wanted for cell in results.run.cells):
        return results
    return replace(results, run=results.nanogpt)


def _label(results: Results, one: Configuration) -> str | None:
    """Return the label of the configuration's row, with its size; None if there is no row."""
    cells = results.run.cells if results.run is not None else ()
    return next((cell_label(cell) for cell in cells if cell.workload == one.workload), None)


def _modes(results: Results) -> tuple[str, ...]:
    """Return the article's two configurations, measured or not, and the others that have rows."""
    wanted = {one.workload for one in _ALL}
    cells = results.run.cells if results.run is not None else ()
    found = {cell.mode for cell in cells if cell.workload in wanted} - {EAGER_MODE, BY_HAND}
    return (EAGER_MODE, BY_HAND, *sorted(found, key=mode_order))


def _decode(results: Results, one: Configuration, mode: str) -> Mapping[str, float | None]:
    """Return the metric's values in this mode; nothing if the row did not pass."""
    return (results.metric(_label(results, one) or one.workload, mode, "more") or {}).get("decode", {})


def _bases(mode: str, modes: tuple[str, ...]) -> list[str]:
    """Return the baselines of whole generations: eager, and stock CUDA graphs for other compiled modes."""
    compiled = mode not in (GRAPH_MODE, BY_HAND) and GRAPH_MODE in modes
    return [EAGER_MODE, GRAPH_MODE] if compiled else [EAGER_MODE]


def _ratio_text(results: Results, label: str | None, mode: str, base: str) -> str | None:
    found = Bar() if label is None else results.ratio(label, mode, base)
    if found.value is None or found.interval is None:
        return None
    low, high = found.interval
    return f"{found.value:.2f} [{low:.2f}, {high:.2f}]" if math.isfinite(low + high) else f"{found.value:.2f}"


def _origin(results: Results) -> Provenance:
    labels = [label for one in _ALL if (label := _label(results, one))]
    return results.provenance(labels) if labels else NOTHING
