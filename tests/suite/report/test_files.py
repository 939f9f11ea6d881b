"""A report writes, replaces and removes files, after checks that run before drawing."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.report_pages import few_exhibits, undrawn  # noqa: F401  # fixtures are used by their names
from fixtures.synthetic_results import cell, write_run

from suite.report import build
from suite.report.build import build_report
from suite.report.markdown_pages import generated_part, update_page
from suite.results.errors import WrongUse
from suite.results.store import InvalidResults


@pytest.mark.usefixtures("undrawn")
def test_report_keeps_other_files_of_a_folder_of_figures(tmp_path):
    """The repository's own figures are of several reports, and are tracked."""
    figures = tmp_path / "figures"
    figures.mkdir()
    for name in ("explain_kernels.png", "drawing.png"):
        (figures / name).write_text("mine")
    run = write_run(tmp_path / "run", [cell("EOS", "compile"), cell("EOS", "graph")])
    for out in ("out", "out", "other"):
        build_report([run], tmp_path / out, figures)
    assert (figures / "explain_kernels.png").read_text() == (figures / "drawing.png").read_text() == "mine"
    assert (figures / "over_compile.png").read_text() == "over_compile"


@pytest.mark.parametrize(
    "places",
    [("taken/file", None), ("taken/file/below", None), ("out", "taken/file"), ("taken", None)],
    ids=["out", "out/below", "figures", "tables"],
)
def test_file_in_the_way_is_wrong_use_before_anything_is_drawn(tmp_path, monkeypatch, places):
    monkeypatch.setattr(build, "draw", lambda *_: pytest.fail("drawn before the folders were looked at"))
    run = write_run(tmp_path / "run", [cell("EOS", "compile")])
    (tmp_path / "taken").mkdir()
    for name in ("file", "tables"):
        (tmp_path / "taken" / name).write_text("")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        build_report([run], *(each and tmp_path / each for each in places))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"# A page without a generated part", "has no generated part"),
        (b"<!-- generated: headline -->\n", "0 generated parts 'headline'; write .* once"),
        (b"<!-- generated: headline -->\n<!-- end: headline -->\n" * 2, "2 generated parts 'headline'"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"<!-- generated: headline -->\n<!-- end: headline -->\n", "line 1"),  # the row is what is wrong
    ],
)
def test_unusable_readme_or_row_is_wrong_use_before_drawing(tmp_path, monkeypatch, content, words):
    monkeypatch.setattr(build, "draw", lambda *_: pytest.fail("drawn before the README was looked at"))
    run = write_run(tmp_path / "run", [cell("EOS", "compile")])
    if words == "line 1":
        (run / "cells.jsonl").write_text('{"workload": "EOS"}\n')
    readme = tmp_path / "README.md"
    if content is not None:
        readme.write_bytes(content)
    with pytest.raises((WrongUse, FileNotFoundError, InvalidResults), match=words):
        build_report([run], tmp_path / "out", readme=readme)
    assert not (tmp_path / "out").exists()
    assert content is None or readme.read_bytes() == content


README = """# Title
<!-- generated: explained -->
old
<!-- end: explained -->
between
<!-- generated: recorded -->
kept
<!-- end: recorded -->
after
"""


def test_update_page_keeps_all_but_the_part(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README)
    for content in (r"| \1 | new |", "newer"):
        update_page(readme, {"explained": content})
        text = readme.read_text()
        assert generated_part(text, "explained").strip() == content
        assert generated_part(text, "recorded").strip() == "kept"
        assert text.startswith("# Title\n")
        assert text.endswith("after\n")
        assert "between" in text
    assert "old" not in text
