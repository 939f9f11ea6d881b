from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.report_pages import few_exhibits, undrawn  # noqa: F401  # fixtures are used by their names

from suite.report.markdown_pages import generated_part, update_page
from suite.results.errors import WrongUse

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


def test_page_without_the_part_is_refused(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(README.replace("<!-- end: explained -->", ""))
    before = readme.read_text()
    with pytest.raises(WrongUse, match="<!-- generated: explained -->"):
        update_page(readme, {"explained": "new"})
    assert readme.read_text() == before
    with pytest.raises(FileNotFoundError):
        update_page(tmp_path / "other.md", {"explained": "new"})
    with pytest.raises(WrongUse, match="recorded"):
        generated_part("nothing", "recorded")
