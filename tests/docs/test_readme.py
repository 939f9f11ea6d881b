"""The README is short, names only commands and pages that exist, and has the table of the recorded runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main
from recorded_runs import comparisons, joined

from suite.cli.main import app
from suite.measure.modes import MODES
from suite.report import provenance, speedup_tables
from suite.report.build import headline_part
from suite.report.markdown_pages import generated_part
from suite.report.published import load_published
from suite.results.store import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))


def test_a_reader_can_finish_it() -> None:
    """What is generated has a row for each workload that is measured."""
    prose = README.replace(generated_part(README, "headline"), "")
    assert len(prose.split()) <= 900


def test_readme_table_is_that_of_the_report() -> None:
    run = joined()
    table = speedup_tables.headline(comparisons(), load_published())
    expected = headline_part(table, provenance.of_run(run))
    renew = "renew it: encore report --recorded --readme README.md"
    assert generated_part(README, "headline").strip() == expected.strip(), renew


def test_readme_shows_the_figure_of_speed_ups() -> None:
    assert "](figures/over_compile.png)" in README


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
