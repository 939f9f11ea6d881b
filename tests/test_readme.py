"""The README holds no number of its own, and names no command that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from suite.cli import app
from suite.modes import MODES
from suite.report import compare, explain_tables, provenance, speedup_tables
from suite.report.load import load_explanations, load_runs
from suite.report.readme import generated_part
from suite.report.table import to_markdown
from suite.store import RECORDED, REPOSITORY, list_runs

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
EXPLAINED = RECORDED / "explained"
RENEW = "renew it: encore report --recorded --explanations results/recorded/explained --readme README.md"


def test_the_table_of_obstacles_is_that_of_the_recorded_explanations() -> None:
    explanations = load_explanations(EXPLAINED)
    assert {item.target for item in explanations if item.error} == set()
    assert all(item.commit and item.dirty is False for item in explanations), "recorded from committed code"
    expected = to_markdown(explain_tables.overview(explanations), provenance.of_explanations(explanations))
    assert generated_part(README, "explained").strip() == expected.strip(), RENEW


def test_the_table_of_times_is_that_of_the_recorded_runs_and_without_one_nothing_is_claimed() -> None:
    part = generated_part(README, "recorded")
    if not (recorded := list_runs(RECORDED)):
        assert "No run on a GPU is recorded yet" in part
        return
    run = load_runs(recorded)
    comparisons = compare.compare(run)
    tables = (
        speedup_tables.overview(run, comparisons, compare.mean_speedups(comparisons)),
        speedup_tables.over_graphs(run, comparisons),
    )
    expected = "\n".join(to_markdown(table, provenance.of_run(run)) for table in tables)
    assert part.strip() == expected.strip(), RENEW


def test_every_command_of_the_readme_exists() -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = set(re.findall(r"`?encore ([a-z]+)", README))
    assert named <= known.keys()
    for modes in re.findall(r"--modes ([\w,-]+)", README):
        assert set(modes.split(",")) <= MODES.keys()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_every_file_the_readme_links_to_is_there(link: str) -> None:
    assert Path(REPOSITORY, link).is_file(), link
