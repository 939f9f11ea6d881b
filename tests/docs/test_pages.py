"""The README is short, names only commands and pages that exist, and has the table of the recorded runs.

docs/architecture.md shows the packages that the code has, and pages say what the default of `concurrency` is.
"""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from recorded_runs import comparisons, joined

import optimizations
from optimizations.options import CONCURRENCY, Options
from suite.cli.main import app
from suite.measure.modes import MODES
from suite.report import provenance, speedup_tables
from suite.report.build import headline_part
from suite.report.markdown_pages import generated_part
from suite.report.published import load_published
from suite.results.store import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SCRIPT = REPOSITORY / "docs" / "draw_architecture.py"
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


def test_architecture_is_up_to_date() -> None:
    ran = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_architecture_is_short() -> None:
    drawing = runpy.run_path(str(SCRIPT))
    before, _, rest = drawing["PAGE"].read_text(encoding="utf-8").partition(drawing["BEGIN"])
    assert len((before + rest.partition(drawing["END"])[2]).split()) <= 600


SAID = {
    "README.md": "side by side**: independent",
    "docs/capture.md": '| `concurrency` | `"auto"` |',
    "docs/callables.md": '| `concurrency` | `"auto"` |',
    "docs/concurrency.md": '# the default is "auto"',
    "CHANGELOG.md": 'on unless `options={"concurrency": "off"}`',
}
"""The words by which each page says that it is "auto"."""


@pytest.mark.parametrize("page", SAID)
def test_page_says_what_the_default_is(page: str) -> None:
    assert CONCURRENCY == "auto" and SAID[page] in (REPOSITORY / page).read_text(encoding="utf-8")


def test_graphs_steps_and_callables_have_one_default() -> None:
    assert Options().concurrency == CONCURRENCY
    for function in (optimizations.graph_step, optimizations.graph_callables):
        assert inspect.signature(function).parameters["concurrency"].default == CONCURRENCY
