"""The two tables of "NanoGPT: CUDA Graph Replay": a decode step, and speed-ups by the length of the generation."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from suite.report.chart import Bar, Chart, Scale
from suite.report.paper.exhibit import NOT_MEASURED, DecodeRow, Exhibit, Made, Results, chart_or_none
from suite.report.table import make_table
from suite.store import InvalidResults, describe

DECODE = "decode.jsonl"
"""In a run's folder: a `DecodeRow` a line."""
EAGER, REPLAY = "eager", "replay"
_SWEEP_PROMPT = 8
_DIFFERS = (
    "The article measures a character model on a laptop's GPU; its graphs are captured by hand. Speed-ups are over "
    "the eager path with a cache. Its own two tables do not agree everywhere (end-to-end 0.99 and 1.21 for one length)."
)


def read_decode(run: Path) -> tuple[DecodeRow, ...]:
    """Rows of a run's decode programs; none where it has no such file.

    Raises:
        InvalidResults: a line has wrong fields.
    """
    path = run / DECODE
    if not path.is_file():
        return ()
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append(DecodeRow.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the line"
            raise InvalidResults(f"{describe(path)} line {number}: {where}: {first['msg']}") from error
    return tuple(rows)


def make_steps(exhibit: Exhibit, results: Results) -> Made:
    """Named configurations: time of a step on each path, beside the article's."""
    paths = _paths(results)
    bars: dict[tuple[str, str], Bar] = {}
    rows = []
    for case, paper in results.published.nanogpt_per_step_ms.items():
        measured = {row.path: row for row in results.decode if row.case == case}
        eager = measured.get(EAGER)
        marks = {EAGER: paper["eager"], REPLAY: paper["graph"]}
        row: dict[str, object] = {
            "case": case.replace("_", " "),
            "prompt": int(paper["prompt"]),
            "generated": int(paper["gen"]),
            "eager_published_ms": paper["eager"],
            "graph_published_ms": paper["graph"],
            "end_to_end_published_speedup": results.published.nanogpt_end_to_end_speedup.get(case),
            "missing": None if measured else NOT_MEASURED,
        }
        for path in paths:
            found = measured.get(path)
            bars[str(row["case"]), path] = Bar(failure=NOT_MEASURED, published=marks.get(path))
            if found is not None:
                row[f"{path}_ms"] = found.step_ms
                bars[str(row["case"]), path] = Bar(
                    found.step_ms, published=marks.get(path), label=f"{found.step_ms:.3g}"
                )
            if found is not None and eager is not None and path != EAGER:
                row[f"{path}_end_to_end_speedup"] = eager.total_s / found.total_s
        rows.append(row)
    columns = ["case", "prompt", "generated", *(f"{path}_ms" for path in paths), "eager_published_ms"]
    columns += ["graph_published_ms", *(f"{path}_end_to_end_speedup" for path in paths if path != EAGER)]
    columns += ["end_to_end_published_speedup", "missing"]
    title = exhibit.title(results.published)
    chart = Chart(
        exhibit.stem,
        title,
        "ms per decode step (median)",
        Scale.LINEAR,
        tuple(dict.fromkeys(group for group, _ in bars)),
        paths,
        bars,
        published=results.published.sources[exhibit.source].setting,
    )
    table = make_table(exhibit.stem, title, exhibit.note(results), columns, rows)
    return Made(table, chart_or_none(chart), results.provenance())


def make_sweep(exhibit: Exhibit, results: Results) -> Made:
    """Speed-ups by the number of generated tokens, prompt 8."""
    paths = [path for path in _paths(results) if path != EAGER]
    columns = ["generated"]
    for path in paths:
        columns += [f"{path}_end_to_end_speedup", f"{path}_step_speedup"]
    columns += ["end_to_end_published_speedup", "step_published_speedup", "missing"]
    rows = []
    for generated, paper in results.published.nanogpt_sweep_prompt8.items():
        measured = {
            row.path: row for row in results.decode if row.prompt == _SWEEP_PROMPT and row.generated == int(generated)
        }
        eager = measured.get(EAGER)
        row: dict[str, object] = {
            "generated": int(generated),
            "end_to_end_published_speedup": paper["e2e"],
            "step_published_speedup": paper["step"],
            "missing": None if eager and len(measured) > 1 else NOT_MEASURED,
        }
        for path in paths:
            if eager is not None and (found := measured.get(path)) is not None:
                row[f"{path}_end_to_end_speedup"] = eager.total_s / found.total_s
                row[f"{path}_step_speedup"] = eager.step_ms / found.step_ms
        rows.append(row)
    title = exhibit.title(results.published)
    return Made(make_table(exhibit.stem, title, exhibit.note(results), columns, rows), None, results.provenance())


def _paths(results: Results) -> tuple[str, ...]:
    """The paths that were measured, eager first; the article's two where none was."""
    found = dict.fromkeys(row.path for row in results.decode)
    return tuple(sorted(found, key=lambda path: path != EAGER)) or (EAGER, REPLAY)


EXHIBITS = (
    Exhibit("nanogpt-table1", "nanogpt", "first table", "time of a decode step", _DIFFERS, make_steps),
    Exhibit("nanogpt-table2", "nanogpt", "second table", "speed-up by generated tokens", _DIFFERS, make_sweep),
)
