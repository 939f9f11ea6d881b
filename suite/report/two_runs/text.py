"""Print a comparison on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from suite.report.two_runs.pairs import Comparison, Outcome, Pair
from suite.report.units import NOTHING, format_value
from suite.results.errors import EXIT_UNDECIDED

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS = (
    "workload",
    "mode",
    "BASE (µs)",
    "NEW (µs)",
    "over",
    "in BASE",
    "in NEW",
    "NEW is faster by",
    "outcome",
    "notes",
)
_SHOWN_DIFFERENCES = 20
_MOST_NAMED = 4
_HOW = (
    "In each run the mode is compared with a baseline of the same run; NEW is faster by the ratio of these two ratios, "
    "with its 95 % interval."
)
_Table = tuple[str, Sequence[Sequence[str]], Sequence[str]]


def headline(comparison: Comparison) -> str:
    """Summarize the decision in one sentence."""
    if found := comparison.regressions:
        named = ", ".join(found[:_MOST_NAMED]) + (
            f" and {len(found) - _MOST_NAMED} more" if found[_MOST_NAMED:] else ""
        )
        return f"{len(found)} regression{'s' * (len(found) != 1)} beyond {comparison.threshold:.0%}: {named}"
    outcomes = Counter(pair.outcome for pair in comparison.pairs)
    counts = ", ".join(
        f"{outcomes[outcome]} {outcome.value}"
        for outcome in Outcome
        if outcomes[outcome] or outcome is Outcome.UNDECIDED
    )
    if comparison.exit_code == EXIT_UNDECIDED:
        return f"nothing can be decided: {counts}"
    return f"no regression beyond {comparison.threshold:.0%}: {counts}"


def print_terminal(comparison: Comparison, console: Console) -> None:
    """Print differences of environments, remarks, means, rows, rows without a partner, and the decision."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    parts: list[Table | Text] = [Text(f"BASE {comparison.base}, NEW {comparison.new}")]
    for each in comparison.differences[:_SHOWN_DIFFERENCES]:
        parts.append(Text(f"differs: {each['what']}: {each['base']} in BASE, {each['new']} in NEW"))
    if (more := len(comparison.differences) - _SHOWN_DIFFERENCES) > 0:
        parts.append(Text(f"differs: {more} more; the runs' environment.json have all"))
    parts += [Text(remark) for remark in comparison.remarks] + [Text(_HOW)]
    for title, rows, columns in _tables(comparison):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for place, column in enumerate(columns):
            table.add_column(column, overflow="fold", no_wrap=place in (0, 1, 7, 8) and len(columns) == len(_COLUMNS))
        for row in rows:
            table.add_row(*(Text(text) for text in row))
        parts.append(table)
    for part in (*parts, *map(Text, comparison.advice), Text(headline(comparison))):
        console.print(part, soft_wrap=isinstance(part, Text))


def _tables(comparison: Comparison) -> list[_Table]:
    """Return (title, rows, columns) of the tables that have rows."""
    compared = [
        _row(pair) for pair in comparison.pairs if pair.base_us is not None and pair.outcome is not Outcome.CONTROL
    ]
    means = [
        (modes, mean.change.text(3), str(mean.change.count), mean.outcome.value)
        for modes, mean in comparison.means.items()
    ]
    modes: dict[tuple[str, str], list[str]] = {}
    for pair in comparison.pairs:
        if pair.base_us is None:
            modes.setdefault((pair.label, pair.reason or ""), []).append(pair.mode)
    labels: dict[tuple[str, str], list[str]] = {}
    for (label, reason), of_label in modes.items():
        labels.setdefault((", ".join(of_label), reason), []).append(label)
    left = [(", ".join(of_modes), shown, reason) for (shown, reason), of_modes in labels.items()]
    found: list[_Table] = [
        ("Geometric means", means, ("mode", "NEW is faster by", "workloads", "outcome")),
        ("Rows", compared, _COLUMNS),
        ("Without a ratio", left, ("workloads", "modes", "why")),
    ]
    return [each for each in found if each[1]]


def _row(pair: Pair) -> tuple[str, ...]:
    ratios = [f"{ratio:.3f}" for ratio in pair.ratios] if pair.baseline else []
    kernels = [] if pair.kernel_change is None else [f"same kernels: {pair.kernel_change:.3f}"]
    return (
        pair.label,
        pair.mode,
        format_value("base_us", pair.base_us),
        format_value("new_us", pair.new_us),
        pair.baseline or NOTHING,
        *(ratios or (NOTHING, NOTHING)),
        pair.change.text(3) if pair.change else NOTHING,
        pair.outcome.value,
        "; ".join([*([pair.reason] if pair.reason else []), *kernels, *pair.remarks]),
    )
