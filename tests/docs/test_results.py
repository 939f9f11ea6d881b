"""docs/results.md: its numbers are those of the recorded runs, and every exhibit is on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fixtures.report_pages import undrawn  # noqa: F401  # a fixture is used by its name
from fixtures.synthetic_results import cell, write_run
from recorded_runs import joined

from suite.report.build import build_report, read_results
from suite.report.markdown_pages import generated_part, paper_part
from suite.report.paper import EXHIBITS, Exhibit, Made
from suite.report.published import load_published
from suite.results.store import REPOSITORY

PAGE = REPOSITORY / "docs" / "results.md"
TEXT = PAGE.read_text(encoding="utf-8")
PUBLISHED = load_published()


@pytest.fixture(scope="module")
def made() -> list[tuple[Exhibit, Made]]:
    results = read_results(joined(), recorded=True)
    return [(exhibit, exhibit.make(results)) for exhibit in EXHIBITS.values()]


def test_results_page_has_a_part_for_each_paper() -> None:
    assert re.findall(r"^<!-- generated: (\S+) -->$", TEXT, re.MULTILINE) == [*PUBLISHED.sources, "programs"]


@pytest.mark.parametrize("source", PUBLISHED.sources)
def test_results_page_has_the_numbers_of_the_recorded_runs(source: str, made: list[tuple[Exhibit, Made]]) -> None:
    expected = paper_part([pair for pair in made if pair[0].source == source])
    renew = "renew it: encore report --recorded --readme docs/results.md"
    assert generated_part(TEXT, source).strip() == expected.strip(), renew


def test_results_page_names_every_exhibit(made: list[tuple[Exhibit, Made]]) -> None:
    for exhibit, done in made:
        assert f"| **{exhibit.number}** `{exhibit.name}` |" in TEXT
        assert done.points


@pytest.mark.usefixtures("undrawn")
def test_report_renews_the_parts_that_a_page_has(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- generated: grace -->\nold\n<!-- end: grace -->\n")
    run = write_run(tmp_path / "run", [cell("ST", "compile"), cell("ST", "graph", 50)])
    build_report([run], tmp_path / "out", readme=page)
    text = page.read_text()
    assert "| **Fig. 10** `fig10` | over stock CUDA graphs" in text and "\nold\n" not in text
    assert text.startswith("# Page\n")
