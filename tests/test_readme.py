"""The README is short, and names no command or page that does not exist; measured tables are those of recorded runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import recorded_runs
import typer.main
from recorded_runs import load_recorded

from models.registry import find_set
from suite.cli import app
from suite.modes import MODES
from suite.report import cell_tables, compare, explain_tables, provenance, speedup_tables, strategies
from suite.report.join import join_runs
from suite.report.load import Run, load_explanations
from suite.report.readme import generated_part
from suite.report.same_time import is_merged
from suite.report.table import to_markdown
from suite.store import RECORDED, REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MEASURED = (REPOSITORY / "docs" / "measured.md").read_text(encoding="utf-8")
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
EXPLAINED = RECORDED / "explained"
RENEW = "renew it: encore report --recorded --explanations results/recorded/explained --readme docs/measured.md"


def test_a_reader_can_finish_it() -> None:
    """What is generated has a row for each workload that is measured."""
    prose = README.replace(generated_part(README, "headline"), "")
    assert len(prose.split()) <= 1050


def test_the_table_of_obstacles_is_that_of_the_recorded_explanations() -> None:
    explanations = load_explanations(EXPLAINED)
    assert {item.target for item in explanations if item.error} == set()
    assert all(item.commit and item.dirty is False for item in explanations), "recorded from committed code"
    expected = to_markdown(explain_tables.overview(explanations), provenance.of_explanations(explanations))
    assert generated_part(MEASURED, "explained").strip() == expected.strip(), RENEW


def test_the_table_of_times_is_that_of_the_recorded_runs_and_without_one_nothing_is_claimed() -> None:
    part = generated_part(MEASURED, "recorded")
    if not recorded_runs.paths():
        assert "No run on a GPU is recorded yet" in part
        return
    run, comparisons = recorded_runs.joined(), recorded_runs.comparisons()
    tables = (
        speedup_tables.overview(run, comparisons, compare.mean_speedups(comparisons)),
        speedup_tables.over_graphs(run, comparisons),
        strategies.strategies(run, comparisons),
    )
    expected = "\n".join(to_markdown(table, provenance.of_run(run)) for table in tables if table is not None)
    assert part.strip() == expected.strip(), RENEW


def decided(run: Run) -> int:
    """Of how many workloads on one GPU a run says how Encore compares, for the same kernels ran."""
    of_encore = [item for item in compare.compare(run) if (item.cell.mode, item.baseline) == ("encore", "compile")]
    return sum(item.verdict is not None for item in of_encore if item.is_of_one_gpu)


def test_the_table_of_the_readme_is_that_of_the_recorded_run_that_decides_most() -> None:
    """The newest of those that have verdicts on as many workloads, with later runs of nothing but what it lacks of
    GraCE's. Of those that were alone on their hosts: next to shards on other GPUs `compile`, which needs the host most,
    takes longer, and Encore looks better than it is."""
    recorded = [path for path in recorded_runs.paths() if not is_merged(load_recorded(path).environment)]
    most = max(reversed(recorded), key=lambda path: decided(load_recorded(path)))
    left = {workload.acronym for workload in find_set("grace")} - workloads_of(most)
    later = [path for path in recorded[recorded.index(most) + 1 :] if workloads_of(path) <= left]
    run = join_runs([load_recorded(path) for path in (most, *later)])
    expected = to_markdown(speedup_tables.headline(run, compare.compare(run)), provenance.of_run(run))
    assert generated_part(README, "headline").strip() == expected.strip(), "encore report RUN ... --readme README.md"


def workloads_of(path: Path) -> set[str]:
    return {cell.workload for cell in load_recorded(path).cells}


def test_the_table_of_verdicts_is_that_of_the_recorded_runs() -> None:
    run = recorded_runs.joined()
    expected = to_markdown(cell_tables.verdicts(run), provenance.of_run(run))
    assert generated_part(MEASURED, "verdicts").strip() == expected.strip(), RENEW


def test_every_command_that_is_named_exists() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = README + (REPOSITORY / "docs" / "running.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)encore ([a-z]+)", text, re.MULTILINE))
    assert {"run", "explain", "compare"} <= named <= known.keys()
    for modes in re.findall(r"--modes ([\w,-]+)", text):
        assert set(modes.split(",")) <= MODES.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not Path(page.parent, link).exists()] == []
