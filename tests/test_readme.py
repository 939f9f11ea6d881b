"""The README is short, names only commands and pages that exist, and has the table of the recorded runs."""

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
from suite.report import compare, provenance, speedup_tables
from suite.report.join import join_runs
from suite.report.load import Run
from suite.report.readme import generated_part
from suite.report.same_time import is_merged
from suite.report.table import to_markdown
from suite.store import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))


def test_a_reader_can_finish_it() -> None:
    """What is generated has a row for each workload that is measured."""
    prose = README.replace(generated_part(README, "headline"), "")
    assert len(prose.split()) <= 1050


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
