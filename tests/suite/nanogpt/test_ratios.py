"""Ratios of NanoGPT's paths and their intervals: on times whose truth is known, and as tables show them."""

from __future__ import annotations

import numpy as np
import pytest
from fixtures.synthetic_results import environment
from rich.console import Console

from suite.nanogpt.paths import PATHS
from suite.nanogpt.ratios import (
    RoundRatio,
    ratio_over_rounds,
    step_over_eager,
    whole_over_eager,
    whole_over_graph,
)
from suite.nanogpt.records import NANOGPT_SCHEMA_VERSION, Generation, MeasuredConfiguration, NanoGptRun, PathRecord
from suite.nanogpt.tables import NONE, grids
from suite.report import page
from suite.report.chart import Chart, colour
from suite.report.paper import EXHIBITS, Results
from suite.report.published import load_published
from suite.report.table import Detailed, to_csv, to_markdown

Rounds = list[list[float]]


def rounds_of(*times: float) -> Rounds:
    return [[time] for time in times]


def two_states(generator: np.random.Generator, fast: float, rounds: int = 20, share: float = 0.5) -> Rounds:
    """Each round is fast, or 1.7 times as slow, with little noise in either state."""
    slow = generator.random(rounds) < share
    return rounds_of(*(fast * np.where(slow, 1.7, 1.0) * np.exp(generator.normal(0, 0.02, rounds))))


def generation(total_s: list[float], call_us: list[list[float]]) -> Generation:
    return Generation(tokens=[1], total_s=total_s, prompt_us=[1.0], step_us=call_us, call_us=call_us)


def constant(total_s: float, step_us: float, rounds: int) -> Generation:
    return generation([total_s] * rounds, [[step_us] * 3] * rounds)


def test_ratio_is_the_median_over_rounds_of_their_ratios():
    base = [[8.0, 8.0, 90.0], [6.0, 6.0, 6.0], [10.0, 10.0, 1.0]]
    own = [[2.0, 1.0, 2.0], [2.0, 2.0, 50.0], [1.0, 1.0, 1.0]]
    found = ratio_over_rounds(base, own)
    assert found is not None and found.value == pytest.approx(4)
    assert (found.low, found.high) == (None, None)
    assert str(found) == "4.00", "three rounds have no interval"


def test_rounds_are_paired():
    """What slows a whole round down is not in the ratio."""
    drift = [1.0, 5.0, 2.0, 9.0, 3.0]
    found = ratio_over_rounds(rounds_of(*(3 * time for time in drift)), rounds_of(*drift))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((3, 3, 3))


def test_interval_of_five_rounds_is_their_range_and_of_four_none():
    """The median of five drawn from five is the lowest in 5.8 % of cases, which is more than the 2.5 % outside."""
    ones = rounds_of(1, 1, 1, 1, 1)
    assert str(ratio_over_rounds(rounds_of(2, 3, 4, 5, 6), ones)) == "4.00 [2.00, 6.00]"
    assert str(ratio_over_rounds(rounds_of(2, 3, 4, 6), ones[:4])) == "3.46"


def test_same_times_give_the_same_interval_and_its_inverse():
    generator = np.random.default_rng(1)
    base, own = two_states(generator, 2.0), two_states(generator, 1.0)
    found, again, inverse = ratio_over_rounds(base, own), ratio_over_rounds(base, own), ratio_over_rounds(own, base)
    assert found == again
    assert found is not None and found.low is not None and found.high is not None
    assert inverse is not None
    assert (inverse.value, inverse.low, inverse.high) == pytest.approx((1 / found.value, 1 / found.high, 1 / found.low))


def test_failed_path_is_compared_in_the_rounds_it_has():
    assert str(ratio_over_rounds(rounds_of(2, 2, 2, 9, 9, 9), rounds_of(1, 1, 1))) == "2.00"
    assert ratio_over_rounds(rounds_of(2), []) is None
    assert ratio_over_rounds([[]], [[]]) is None


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.2), (0.8, 0.8)])
def test_interval_of_equal_paths_mostly_covers_one(shares: tuple[float, float]):
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        base, own = (two_states(generator, 1.0, share=share) for share in shares)
        found = ratio_over_rounds(base, own)
        assert found is not None and found.low is not None and found.high is not None
        covered += found.low <= 1 <= found.high
    assert covered >= 0.9 * 300


def test_the_interval_finds_a_faster_path_in_spite_of_two_states():
    generator = np.random.default_rng(8)
    intervals = []
    for _ in range(100):
        found = ratio_over_rounds(two_states(generator, 3.0, share=0.3), two_states(generator, 1.0, share=0.3))
        assert found is not None and found.low is not None and found.high is not None
        intervals.append((found.low, found.high))
    assert sum(low > 1 for low, _ in intervals) >= 99
    assert sum(low <= 3 <= high for low, high in intervals) >= 90


def test_what_each_path_is_compared_with():
    paths = {
        "eager": constant(8.0, 800.0, 5),
        "replay": constant(1.0, 100.0, 5),
        "compile": constant(4.0, 200.0, 5),
        "graph": constant(2.0, 160.0, 5),
        "encore": constant(1.6, 100.0, 5),
    }
    for name in ("eager", "another"):
        assert step_over_eager(paths, name) is whole_over_eager(paths, name) is whole_over_graph(paths, name) is None
    assert str(step_over_eager(paths, "graph")) == "5.00 [5.00, 5.00]"
    assert str(whole_over_eager(paths, "graph")) == "4.00 [4.00, 4.00]"
    assert whole_over_graph(paths, "graph") is whole_over_graph(paths, "replay") is None
    assert str(whole_over_graph(paths, "compile")) == "0.50 [0.50, 0.50]"
    assert str(whole_over_graph(paths, "encore")) == "1.25 [1.25, 1.25]"
    assert whole_over_graph(paths, "indirection") is None, "it has no samples"
    del paths["graph"], paths["eager"]
    assert whole_over_graph(paths, "encore") is whole_over_eager(paths, "encore") is None


def run_of(rounds: int) -> NanoGptRun:
    paths = {"eager": constant(8.0, 800.0, rounds), "graph": constant(2.0, 160.0, rounds)}
    paths["encore"] = generation([1.6, 2.0, 2.0, 2.5, 1.0, 4.0][:rounds], [[100.0]] * rounds)
    return NanoGptRun(
        nanogpt_schema_version=NANOGPT_SCHEMA_VERSION,
        environment=environment(),
        size="full",
        rounds=rounds,
        paths=[PathRecord(name=name, summary=PATHS[name].summary) for name in paths],
        configurations=[
            MeasuredConfiguration(name="medium_generation", prompt=8, new_tokens=32, paths=paths),
            MeasuredConfiguration(name="sweep_8", prompt=8, new_tokens=8, paths=paths),
        ],
    )


def test_tables_show_ratios_with_their_intervals():
    named, _, _ = grids(run_of(6), load_published())
    rows = {row[3]: dict(zip(named.headings, row, strict=True)) for row in named.rows}
    shown = {
        name: (row["over eager"], row["end to end over eager"], row["end to end over graph"])
        for name, row in rows.items()
    }
    assert shown["eager"] == (NONE, NONE, NONE)
    assert shown["graph"] == ("5.00 [5.00, 5.00]", "4.00 [4.00, 4.00]", NONE)
    steps, eager, graph = shown["encore"]
    assert steps == "8.00 [8.00, 8.00]"
    assert eager.startswith("4.00 [") and graph.startswith("1.00 [")
    assert "paired by round" in named.note and "drawn again with replacement" in named.note


def test_tables_of_few_rounds_show_ratios_alone():
    named, _, _ = grids(run_of(4), load_published())
    assert not any("[" in cell for row in named.rows for cell in row)
    (encore,) = (row for row in named.rows if row[3] == "encore")
    assert encore[5] == "8.00"


@pytest.mark.parametrize("name", ["nanogpt-table1", "nanogpt-table2"])
def test_the_report_has_the_same_ratios_and_their_ends_in_csv(name: str):
    run = run_of(6)
    made = EXHIBITS[name].make(EXHIBITS[name], Results(load_published(), nanogpt=run))
    ratio = whole_over_graph(run.configurations[0].paths, "encore")
    assert isinstance(ratio, RoundRatio) and ratio.low is not None and ratio.low < 1
    (cell,) = (each for each in made.table.frame["encore_end_to_end_over_graph"] if each is not None)
    assert isinstance(cell, Detailed) and cell == str(ratio)
    assert cell.values == {"speedup": ratio.value, "low": ratio.low, "high": ratio.high}
    assert f"| {ratio} |" in to_markdown(made.table, made.provenance)
    assert "encore_end_to_end_over_graph_low" in to_csv(made.table, made.provenance).partition("\n")[0]
    assert "graph_end_to_end_over_graph" not in made.table.frame


def shown_on_a_terminal(width: int) -> list[str]:
    named, _, _ = grids(run_of(6), load_published())
    terminal = Console(width=width)
    with terminal.capture() as shown:
        terminal.print(named.rich(width))
    return shown.get().splitlines()


def test_terminal_breaks_headings_and_cuts_no_column():
    ratio = "5.00 [5.00, 5.00]"
    whole, narrow = (shown_on_a_terminal(width) for width in (400, 160))
    assert len(whole) == 5, "a title, headings and three rows"
    assert len(narrow) > 5 and any(ratio in line for line in narrow)
    assert all(len(line.rstrip()) <= 160 for line in narrow)
    assert any(line.rstrip().endswith("eager") for line in narrow), "the last heading"


def test_the_chart_of_steps_has_a_colour_for_each_path():
    run = run_of(6)
    for name in ("replay", "compile", "indirection"):
        run.paths.append(PathRecord(name=name, summary=""))
    chart = EXHIBITS["nanogpt-table1"].make(EXHIBITS["nanogpt-table1"], Results(load_published(), nanogpt=run)).chart
    assert isinstance(chart, Chart) and set(chart.series) == set(PATHS)
    assert len({colour(chart, path) for path in chart.series}) == len(PATHS)


@pytest.mark.parametrize(("rounds", "parts"), [(6, ("4.00", "[4.00, 4.00]", "")), (2, ("4.00", "", ""))])
def test_page_separates_ratios_without_verdict_or_interval(rounds: int, parts: tuple[str, str, str]):
    exhibit = EXHIBITS["nanogpt-table1"]
    table = page._shown(exhibit.make(exhibit, Results(load_published(), nanogpt=run_of(rounds))).table)
    place = [heading.text for heading in table.headings].index("graph end to end over eager")
    (cell,) = (row.cells[place] for row in table.rows if row.cells[place].parts)
    assert cell.parts == parts
