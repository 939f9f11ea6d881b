"""The article's two tables from measurements, next to its own figures, and one of what each path's warm-up costs."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from models.nanogpt.configurations import NAMED, SWEEP
from suite.nanogpt.paths import EAGER, REPLAY
from suite.nanogpt.ratios import PAIRED, median_ms, step_over_eager, whole_over_eager, whole_over_graph
from suite.nanogpt.records import MeasuredConfiguration, NanoGptRun
from suite.report.published import Published

NONE = "\u2013"
PADDING = 2
"""Between two columns on a terminal."""
UNBROKEN = 24
"""Cells of up to so many characters are kept on one line: those of a ratio with its interval."""
HEADINGS = (
    "configuration",
    "prompt",
    "tokens",
    "path",
    "step (ms)",
    "over eager",
    "step with feeding (ms)",
    "tokens/s",
    "end to end over eager",
    "end to end over graph",
    "published step (ms)",
    "published step over eager",
    "published end to end over eager",
)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text. `note` says what its columns are."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str

    def rich(self, width: int) -> Table:
        """For a terminal of this width. Headings are broken before ratios are; where that is not enough, both are."""
        table = Table(title=self.title, title_justify="left", box=None)
        cells = [max((len(row[place]) for row in self.rows), default=0) for place in range(len(self.headings))]
        whole = [max(len(heading), cell) for heading, cell in zip(self.headings, cells, strict=True)]
        longest = [max(*map(len, heading.split()), cell) for heading, cell in zip(self.headings, cells, strict=True)]
        needed = sum(min(each, UNBROKEN) + PADDING for each in longest)
        fits = needed <= width < sum(whole) + PADDING * len(whole)
        for heading, least in zip(self.headings, longest, strict=True):
            table.add_column(heading, width=least if fits and least <= UNBROKEN else None)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", *map(_line, (self.headings, ["---"] * len(self.headings), *self.rows))]
        return "\n".join([*lines, "", self.note, ""])


def grids(run: NanoGptRun, published: Published) -> list[Grid]:
    """The named configurations, the sweep over generated tokens, and the paths."""
    note = (
        "step: median over all steps of the time between two CUDA events around the step, as the article measures it "
        "(on a CPU host time); with feeding: host time from before the token is fed until the device is done. "
        "tokens/s: of whole generations, prompt included, warm-up not. over eager, over graph: how many times faster. "
        f"{PAIRED} published: {published.sources['nanogpt'].setting}; its graph is {REPLAY}."
    )
    where = next((path.device for path in run.paths if path.device), None) or "no path was ready"
    where = f"{where}, PyTorch {run.environment.torch}, {run.rounds} rounds"
    if run.size != "full":
        where += ", a smoke run: says nothing about performance"
    by_name = {configuration.name: configuration for configuration in run.configurations}
    found = []
    for title, wanted in (("named configurations", NAMED), ("tokens generated after a prompt of 8", SWEEP)):
        rows = [
            row for each in wanted if each.name in by_name for row in _rows(by_name[each.name], run.size, published)
        ]
        found.append(Grid(f"NanoGPT, {title} ({where})", HEADINGS, tuple(rows), note))
    found.append(_paths(run, where))
    return found


def _rows(configuration: MeasuredConfiguration, size: str, published: Published) -> Iterator[tuple[str, ...]]:
    paths = configuration.paths
    for name, generation in paths.items():
        printed = _published(configuration, name, published) if size == "full" else (None, None, None)
        yield (
            configuration.name,
            str(configuration.prompt),
            str(configuration.new_tokens),
            name,
            _text(median_ms(generation.call_us), 3),
            str(step_over_eager(paths, name) or NONE),
            _text(median_ms(generation.step_us), 3),
            _text(configuration.new_tokens / statistics.median(generation.total_s), 1),
            str(whole_over_eager(paths, name) or NONE),
            str(whole_over_graph(paths, name) or NONE),
            _text(printed[0], 3),
            _text(printed[1], 2),
            _text(printed[2], 2),
        )


def _published(
    configuration: MeasuredConfiguration, path: str, published: Published
) -> tuple[float | None, float | None, float | None]:
    """The article's step in ms, and its ratios of steps and of whole generations, for the paths it has."""
    if path not in (EAGER, REPLAY):
        return None, None, None
    step = published.nanogpt_per_step_ms.get(configuration.name)
    if step is not None:
        if path == EAGER:
            return step["eager"], None, None
        whole = published.nanogpt_end_to_end_speedup.get(configuration.name)
        return step["graph"], step["eager"] / step["graph"], whole
    sweep = published.nanogpt_sweep_prompt8.get(str(configuration.new_tokens))
    return (None, sweep["step"], sweep["e2e"]) if sweep and path == REPLAY else (None, None, None)


def _paths(run: NanoGptRun, where: str) -> Grid:
    differing: dict[str, list[str]] = {}
    for configuration in run.configurations:
        for name in configuration.differing():
            differing.setdefault(name, []).append(configuration.name)
    rows = []
    for path in run.paths:
        tokens = "the reference" if path.name == EAGER else f"other ones in {', '.join(differing.get(path.name, ()))}"
        if path.name != EAGER and path.name not in differing:
            tokens = "as eager" if any(path.name in each.paths for each in run.configurations) else NONE
        rows.append((path.name, _text(path.warm_up_s, 2), tokens, path.failed or path.summary))
    return Grid(
        f"NanoGPT, paths ({where})",
        ("path", "warm-up (s)", "tokens sampled", "what it is, or how it failed"),
        tuple(rows),
        "warm-up: from making the step until its first generation is through, with empty caches of compiled kernels.",
    )


def _text(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
