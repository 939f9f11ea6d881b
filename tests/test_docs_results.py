"""docs/results.md: its numbers are those of the recorded runs, and it explains every figure and table."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.report_pages import undrawn  # noqa: F401  # a fixture is used by its name
from fixtures.synthetic_results import cell, environment, write_run
from recorded_runs import joined

from suite.cli_report import recorded_file
from suite.report.build import build_report, paper_results
from suite.report.load import Run
from suite.report.paper import EXHIBITS, Results
from suite.report.published import load_published
from suite.report.readme import generated_names, generated_part
from suite.report.results_page import exhibit_part
from suite.store import REPOSITORY

PAGE = REPOSITORY / "docs" / "results.md"
TEXT = PAGE.read_text(encoding="utf-8")
GENERATED = tuple(name for name in EXHIBITS if not name.endswith("table1") or name.startswith("nanogpt"))
"""Tables of workloads change with the suite, and are in the report alone."""
PUBLISHED = load_published()
RENEW = "renew it: encore report --recorded --readme docs/results.md"


@pytest.fixture(scope="module")
def recorded() -> Results:
    micro, nanogpt = recorded_file("indirection.json"), recorded_file("nanogpt.json")
    return paper_results(joined(), micro, nanogpt, PUBLISHED)


def test_every_figure_and_table_is_on_the_page_with_how_to_read_it() -> None:
    assert generated_names(PAGE) == GENERATED
    for name, exhibit in EXHIBITS.items():
        heading = f"## {PUBLISHED.sources[exhibit.source].label} {exhibit.number}: {exhibit.shows}\n"
        section = TEXT.partition(heading)[2].partition("<!-- generated:")[0].partition("\n## ")[0]
        assert len(section) > 60 and f"--only {name}`" in section


@pytest.mark.parametrize("name", GENERATED)
def test_its_numbers_are_those_of_the_recorded_runs(name: str, recorded: Results) -> None:
    exhibit = EXHIBITS[name]
    assert generated_part(TEXT, name).strip() == exhibit_part(exhibit.make(exhibit, recorded)).strip(), RENEW


def test_a_part_holds_rows_with_numbers_and_names_the_others() -> None:
    run = Run(environment(), (cell("EOS", "compile", 100), cell("EOS", "graph", 50)))
    exhibit = EXHIBITS["fig10"]
    part = exhibit_part(exhibit.make(exhibit, Results(load_published(), run)))
    assert "| EOS |" in part and "| DALLE2 |" in part, "measured, or published"
    assert "| ALNET |" not in part and "Not measured: ALNET" in part
    assert "Nothing of it is measured yet" not in part
    assert "Nothing of it is measured yet" in exhibit_part(exhibit.make(exhibit, Results(load_published())))


@pytest.mark.usefixtures("undrawn")
def test_a_report_renews_the_parts_that_a_page_has(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- generated: table2 -->\nold\n<!-- end: table2 -->\n")
    run = write_run(tmp_path / "run", [cell("ST", "compile"), cell("ST", "graph", 50)])
    build_report([run], None, tmp_path / "out", readme=page)
    text = page.read_text()
    assert "| ST |" in text and "old" not in text and text.startswith("# Page\n")
