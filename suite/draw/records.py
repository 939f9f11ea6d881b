"""Read and write the graphs that are drawn: Encore's report of a recording, with times of its launches.

The report of any program can be saved and drawn elsewhere:

    graphs = [{"title": "mine", "concurrency": asdict(one.concurrency)} for one in encore.recordings()]
    Path("mine.json").write_text(json.dumps({"drawn_version": 1, "graphs": graphs}))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from optimizations.report.concurrency import ConcurrencyReport
from optimizations.report.recordings import RecordingReport
from suite.measure.encore_report import with_short_paths
from suite.results.schema import Record
from suite.results.store import read_record

DRAWN_VERSION: Literal[1] = 1
"""Version of the files."""

Us = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DrawnGraph(Record):
    """Hold one CUDA graph. `times_us` are the times of its launches as a chain, where they were measured."""

    title: str
    concurrency: ConcurrencyReport
    times_us: tuple[Us, ...] | None = None

    @model_validator(mode="after")
    def _launches_follow_each_other(self) -> Self:
        for index, launch in enumerate(self.concurrency.order):
            for earlier in launch.waits_for:
                if not 0 <= earlier < index:
                    raise ValueError(
                        f"launch {index} ({launch.name}) waits for launch {earlier}, which is not before it"
                    )
        if self.times_us is not None and len(self.times_us) != len(self.concurrency.order):
            raise ValueError(f"{len(self.times_us)} times for {len(self.concurrency.order)} launches")
        return self


class DrawnGraphs(Record):
    """Hold the graphs of a file."""

    drawn_version: Literal[1]
    graphs: tuple[DrawnGraph, ...]


def graphs_of(title: str, recordings: Iterable[RecordingReport]) -> list[DrawnGraph]:
    """Return the graphs of these reports, without times."""
    reports = list(recordings)
    return [
        DrawnGraph(
            title=f"{title}, graph {number} of {len(reports)} ({report.direction})",
            concurrency=with_short_paths(asdict(report.concurrency)),  # type: ignore[arg-type]
        )
        for number, report in enumerate(reports, start=1)
        if report.concurrency is not None
    ]


def as_json(graphs: Iterable[DrawnGraph]) -> str:
    """Return the text of a file with these graphs."""
    return DrawnGraphs(drawn_version=DRAWN_VERSION, graphs=tuple(graphs)).model_dump_json(indent=1) + "\n"


def read_graphs(path: Path) -> tuple[DrawnGraph, ...]:
    """Read a file of graphs.

    Raises:
        InvalidResults: it cannot be read, or holds something else; the message says where.
    """
    return read_record(DrawnGraphs, path, "graphs", "`encore draw graph --save FILE` writes such files").graphs
