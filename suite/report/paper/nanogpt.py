"""NanoGPT's numbers: a decode step, speed-ups by the length of the generation, and what a path costs before it pays."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from models.nanogpt.configurations import NAMED, SWEEP, Configuration
from suite.nanogpt.paths import EAGER, GRAPH, PATHS, REPLAY
from suite.nanogpt.ratios import PAIRED, RoundRatio, median_ms, step_over_eager, whole_over_eager, whole_over_graph
from suite.nanogpt.records import NANOGPT_SCHEMA_VERSION, Generation, NanoGptRun
from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import NOT_MEASURED, NOTHING, Exhibit, Made, Point, Results, of_environment
from suite.report.provenance import Provenance
from suite.report.table import Detailed, make_table
from suite.results.errors import WrongUse
from suite.results.store import describe, read_unpacked

_AMORTISED = "long_generation"
"""The configuration whose generations pay for a warm-up: the longest after a prompt of 8."""


def read_nanogpt(path: Path) -> NanoGptRun:
    """Return what `encore run nanogpt` wrote: the file, or the folder it is in.

    Raises:
        WrongUse: it cannot be read, or is not such a file of this version.
    """
    path = path / "nanogpt.json" if path.is_dir() else path
    try:
        run = NanoGptRun.model_validate_json(read_unpacked(path))
    except OSError as error:
        raise WrongUse(f"cannot read {describe(path)}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise WrongUse(f"{describe(path)} holds no results of `encore run nanogpt`: {where}: {first['msg']}") from error
    if run.nanogpt_schema_version != NANOGPT_SCHEMA_VERSION:
        raise WrongUse(
            f"{describe(path)} has schema version {run.nanogpt_schema_version}, this is {NANOGPT_SCHEMA_VERSION}; "
            "measure it again"
        )
    return run


def make_steps(exhibit: Exhibit, results: Results) -> Made:
    """Show the named configurations: time of a step on each path, and whole generations over eager."""
    marks = results.published.nanogpt_per_step_ms
    paper = {
        name: {"eager_ms": steps["eager"], "replay_ms": steps["graph"]}
        | {"end_to_end": results.published.nanogpt_end_to_end_speedup[name]}
        for name, steps in marks.items()
    }
    return _of_configurations(exhibit, results, NAMED, paper)


def make_sweep(exhibit: Exhibit, results: Results) -> Made:
    """Show speed-ups by the number of generated tokens."""
    sweep = results.published.nanogpt_sweep_prompt8
    paper = {f"sweep_{tokens}": {"step": one["step"], "end_to_end": one["e2e"]} for tokens, one in sweep.items()}
    made = _of_configurations(exhibit, results, SWEEP, paper)
    return replace(made, chart=None)


def _of_configurations(
    exhibit: Exhibit,
    results: Results,
    configurations: Iterable[Configuration],
    published: Mapping[str, Mapping[str, float]],
) -> Made:
    """Return a row for each configuration: steps of each path in ms and over eager, and whole generations."""
    paths = _paths(results)
    others = [path for path in paths if path != EAGER]
    bars: dict[tuple[str, str], Bar] = {}
    rows, points = [], []
    for one in configurations:
        paper = published[one.name] if _has_published_size(results) else {}
        label, measured = one.name.replace("_", " "), _measured(results, one.name)
        row: dict[str, object] = {"case": label, "prompt": one.prompt, "generated": one.new_tokens}
        row |= {f"{path}_published_ms": paper.get(f"{path}_ms") for path in (EAGER, REPLAY)}
        row |= {"step_published_speedup": paper.get("step"), "end_to_end_published_speedup": paper.get("end_to_end")}
        for path in paths:
            step = median_ms(measured[path].call_us) if path in measured else None
            row[f"{path}_ms"] = step
            bar = Bar(failure=_why(results, path)) if step is None else Bar(step, label=f"{step:.3f}")
            bars[label, path] = replace(bar, published=paper.get(f"{path}_ms"))
        for path in others:
            row[f"{path}_step_over_eager"] = _detailed(step_over_eager(measured, path))
            row |= _end_to_end(measured, path, paths)
        rows.append(row | {"missing": _missing(results, measured, paths)})
        own = step_over_eager(measured, REPLAY), whole_over_eager(measured, REPLAY)
        for name, ratio in zip(("step", "end_to_end"), own, strict=True):
            if name in published[one.name]:
                what = f"{label}, {name.replace('_', ' ')}, {REPLAY} over eager"
                points.append(Point(what, paper.get(name), str(ratio or NOT_MEASURED)))
    columns = ["case", "prompt", "generated", *(f"{path}_ms" for path in paths)]
    columns += [f"{path}_published_ms" for path in (EAGER, REPLAY)]
    for path in others:
        columns += [f"{path}_step_over_eager", *_end_to_end({}, path, paths)]
    columns += ["step_published_speedup", "end_to_end_published_speedup", "missing"]
    title, origin = exhibit.title(results.published), _origin(results)
    chart = Chart(
        exhibit.stem,
        title,
        "ms per decode step (median)",
        Scale.LINEAR,
        tuple(str(row["case"]) for row in rows),
        paths,
        bars,
        published=results.published.sources[exhibit.source].setting,
    )
    table = make_table(exhibit.stem, title, exhibit.note(results, origin), columns, rows)
    return Made(table, chart if chart.has_values else None, origin, tuple(points))


def make_costs(exhibit: Exhibit, results: Results) -> Made:
    """Show for each path warm-up, prompt, tokens per second, and when its warm-up is paid for."""
    measured = _measured(results, _AMORTISED)
    records = results.nanogpt.paths if results.nanogpt is not None else []
    tokens = next(each.new_tokens for each in NAMED if each.name == _AMORTISED)
    rows: list[dict[str, object]] = []
    warm = {record.name: record.warm_up_s for record in records}
    whole = {name: statistics.median(own.total_s) for name, own in measured.items() if own.total_s}
    for path in _paths(results):
        row: dict[str, object] = {"path": path, "warm_up_s": warm.get(path)}
        own = measured.get(path)
        if own is None or path not in whole:
            rows.append(row | {"missing": _why(results, path)})
            continue
        row["prompt_ms"] = statistics.median(own.prompt_us) / 1e3 if own.prompt_us else None
        row["generation_ms"], row["tokens_per_s"] = 1e3 * whole[path], tokens / whole[path]
        saved, extra = whole.get(EAGER, 0.0) - whole[path], (warm.get(path) or 0.0) - (warm.get(EAGER) or 0.0)
        if path != EAGER and EAGER in whole:
            row["paid_after"] = f"{max(0, round(extra / saved)):,} generations" if saved > 0 else "never"
        rows.append(row)
    title, origin = exhibit.title(results.published), _origin(results)
    columns = ["path", "warm_up_s", "prompt_ms", "generation_ms", "tokens_per_s", "paid_after", "missing"]
    table = make_table(exhibit.stem, title, exhibit.note(results, origin), columns, rows)
    points = tuple(
        Point(f"{row['path']}: tokens/s, prompt, warm-up, paid for after", None, _cost_text(row)) for row in rows
    )
    return Made(table, None, origin, points)


def _cost_text(row: Mapping[str, object]) -> str:
    speed, prompt_ms, warm_up_s = (row.get(name) for name in ("tokens_per_s", "prompt_ms", "warm_up_s"))
    if not (isinstance(speed, float) and isinstance(prompt_ms, float) and isinstance(warm_up_s, float)):
        return NOT_MEASURED
    return f"{speed:,.0f}, {prompt_ms:.2f} ms, {warm_up_s:.1f} s, {row.get('paid_after', 'at once')}"


def _paths(results: Results) -> tuple[str, ...]:
    """Return the article's two, measured or not, and the others of the run."""
    records = results.nanogpt.paths if results.nanogpt is not None else []
    wanted = {EAGER, REPLAY, *(record.name for record in records)}
    return tuple(name for name in PATHS if name in wanted)


def _has_published_size(results: Results) -> bool:
    """Return whether published values may stand next to what was measured, if anything was."""
    return results.nanogpt is None or results.nanogpt.size == "full"


def _measured(results: Results, name: str) -> Mapping[str, Generation]:
    configurations = results.nanogpt.configurations if results.nanogpt is not None else []
    return next((each.paths for each in configurations if each.name == name), {})


def _why(results: Results, path: str) -> str:
    records = results.nanogpt.paths if results.nanogpt is not None else []
    return "failed" if any(record.name == path and record.failed for record in records) else NOT_MEASURED


def _missing(results: Results, measured: Mapping[str, Generation], paths: tuple[str, ...]) -> str | None:
    if not measured:
        return NOT_MEASURED
    return "; ".join(f"{path}: {_why(results, path)}" for path in paths if path not in measured) or None


def _end_to_end(measured: Mapping[str, Generation], path: str, paths: tuple[str, ...]) -> dict[str, Detailed | None]:
    """Return the path's columns of whole generations, over eager and over stock CUDA graphs if these are a path."""
    if path == EAGER:
        return {}
    found = {f"{path}_end_to_end_over_eager": _detailed(whole_over_eager(measured, path))}
    if GRAPH in paths and PATHS[path].is_compared_with_graph:
        found[f"{path}_end_to_end_over_graph"] = _detailed(whole_over_graph(measured, path))
    return found


def _detailed(ratio: RoundRatio | None) -> Detailed | None:
    values = {"speedup": ratio.value, "low": ratio.low, "high": ratio.high} if ratio is not None else {}
    return None if ratio is None else Detailed(str(ratio), values)


def _origin(results: Results) -> Provenance:
    if results.nanogpt is None:
        return NOTHING
    environment = results.nanogpt.environment
    smoke = "in tiny size" if results.nanogpt.size != "full" else None if environment.gpu else "on the CPU"
    return of_environment(environment, smoke)


_DIFFERS = (
    f"The article's graph is the path {REPLAY}; the others are compiled. A step is the time between two CUDA events "
    "around it (median over all steps and rounds), end to end the whole generation with its prompt. Over eager, the "
    f"path with a cache, and over {GRAPH}: how many times faster. {PAIRED} The article's own two tables do not agree "
    "everywhere: 0.99 and 1.21 end to end for one length."
)
_COSTS = (
    f"Of the configuration {_AMORTISED.replace('_', ' ')}, medians. Warm-up: from making the step until its first "
    "generation is through, with empty caches of compiled kernels. Tokens per second are of whole generations, prompt "
    "included, warm-up not. Paid for: generations until what the path saves over eager makes up for its longer "
    "warm-up. The article gives none of these."
)

EXHIBITS = (
    Exhibit("nanogpt-table1", "nanogpt", "first table", "time of a decode step", _DIFFERS, make_steps),
    Exhibit("nanogpt-table2", "nanogpt", "second table", "speed-up by generated tokens", _DIFFERS, make_sweep),
    Exhibit(
        "nanogpt-costs",
        "nanogpt",
        "further numbers",
        "tokens per second, and what a path costs first",
        _COSTS,
        make_costs,
    ),
)
