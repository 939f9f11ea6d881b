"""Show nanoGPT's numbers: a decode step, speed-ups by the length of the generation, and the cost of warm-up.

They are from rows of the workloads NANOGPT-<prompt>-<tokens>: the ratio of whole generations is that of two rows, and
the metric `decode` has the times of steps, of the prompt, and tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from models.nanogpt.configurations import NAMED, SWEEP, Configuration
from suite.measure.modes import EAGER_MODE, GRAPH_MODE
from suite.report.chart import Bar, Scale
from suite.report.grid import NOT_MEASURED, Grid, Point, Series, known
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
    end_to_end = results.published.nanogpt_end_to_end_speedup
    paper = {
        name: {EAGER_MODE: steps["eager"], BY_HAND: steps["graph"], "end_to_end": end_to_end[name]}
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
    as_published = all(_label(results, one) == one.workload for one in _ALL)
    cases = {one.name.replace("_", " "): one for one in configurations}
    labels = {case: _label(results, one) for case, one in cases.items()}
    paper = {case: published[one.name] if as_published else {} for case, one in cases.items()}
    step_us = {
        (case, mode): _decode(results, one, mode).get("step_us") for case, one in cases.items() for mode in modes
    }
    over_eager = {
        (case, mode): eager / own
        for (case, mode), own in step_us.items()
        if own is not None and (eager := step_us[case, EAGER_MODE]) is not None
    }

    def measure(case: str, mode: str) -> Bar:
        own = step_us[case, mode]
        return known(None if own is None else own / 1e3, results.state(labels[case], mode))

    def printed(case: str, mode: str) -> float | None:
        return paper[case].get(mode)

    def end_to_end(case: str, mode: str, base: str) -> str | None:
        found = results.ratios.find(labels[case], mode, base)
        return None if found is None or found.ratio is None else found.ratio.text()

    def more(case: str) -> dict[str, object]:
        row: dict[str, object] = {"prompt": cases[case].prompt, "generated": cases[case].new_tokens}
        for mode in modes[1:]:
            row[f"{mode}_step_over_eager"] = over_eager.get((case, mode))
            for base in (EAGER_MODE, GRAPH_MODE) if mode not in (GRAPH_MODE, BY_HAND) else (EAGER_MODE,):
                if base in modes:
                    row[f"{mode}_end_to_end_over_{base}"] = end_to_end(case, mode, base)
        return row | {f"{name}_published_speedup": paper[case].get(name) for name in ("step", "end_to_end")}

    points = []
    for case, one in cases.items():
        step = over_eager.get((case, BY_HAND))
        found = {"step": step and f"{step:.2f}", "end_to_end": end_to_end(case, BY_HAND, EAGER_MODE)}
        points += [
            Point(
                f"{case}, {name.replace('_', ' ')}, {BY_HAND} over eager", paper[case].get(name), text or NOT_MEASURED
            )
            for name, text in found.items()
            if name in published[one.name]
        ]
    return Grid(
        "ms",
        "ms per decode step (median)",
        Scale.LINEAR,
        tuple(cases),
        tuple(
            Series(
                mode,
                partial(measure, mode=mode),
                partial(printed, mode=mode) if mode in (EAGER_MODE, BY_HAND) else None,
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
    label = _label(results, AMORTISED)
    whole = {mode: _decode(results, AMORTISED, mode).get("generation_us") for mode in _modes(results)}
    cells = {mode: cell for mode in whole if (cell := results.ratios.cell(label, mode)) is not None}
    warm = {mode: cell.compile.first_call_s for mode, cell in cells.items() if cell.compile is not None}
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
    has_rows = any(_label(results, one) in results.ratios.labels for one in _ALL)
    return results if has_rows else replace(results, run=results.nanogpt)


def _label(results: Results, one: Configuration) -> str:
    """Return the label of the configuration's row, with its size."""
    return next((cell_label(cell) for cell in results.ratios.cells if cell.workload == one.workload), one.workload)


def _modes(results: Results) -> tuple[str, ...]:
    """Return the article's two configurations, measured or not, and the others that have rows."""
    wanted = {one.workload for one in _ALL}
    found = {cell.mode for cell in results.ratios.cells if cell.workload in wanted} - {EAGER_MODE, BY_HAND}
    return (EAGER_MODE, BY_HAND, *sorted(found, key=mode_order))


def _decode(results: Results, one: Configuration, mode: str) -> Mapping[str, float | None]:
    """Return the metric's values in this mode; nothing if the row did not pass."""
    return (results.metric(_label(results, one), mode, "more") or {}).get("decode", {})


def _origin(results: Results) -> Provenance:
    labels = [label for one in _ALL if (label := _label(results, one)) in results.ratios.labels]
    return results.provenance(labels) if labels else NOTHING
