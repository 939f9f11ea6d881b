"""Update generated parts of Markdown pages: the README's table, and the papers' numbers in `docs/results.md`.

A generated part is between two comments, `<!-- generated: NAME -->` and `<!-- end: NAME -->`. It contains no number
written by hand. The release gate (`encore report --check-fresh`) checks that the rows of the README's table are of the
tree's version. Tests do not, because rows age with every commit.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from suite.report.units import NOTHING, markdown_table
from suite.results.errors import WrongUse
from suite.results.store import ENVIRONMENT, InvalidResults, read_environment, write_atomically

if TYPE_CHECKING:
    from suite.report.paper import Exhibit, Made


_PART = re.compile(
    r"(?P<begin><!-- generated: (?P<name>\S+) -->\n)(?P<content>.*?)(?P<end><!-- end: (?P=name) -->)", re.DOTALL
)


def update_page(page: Path, parts: Mapping[str, str]) -> None:
    """Put each text of `parts` between the comments of its name, where the page has them; other parts are unchanged.

    Raises:
        OSError: the file cannot be read or replaced; it is as it was.
        WrongUse: it has none of them, or one of them not once.
    """
    text = _read(page)
    names = [name for name in re.findall(r"^<!-- generated: (\S+) -->$", text, re.MULTILINE) if name in parts]
    if not names:
        known = ", ".join(parts)
        raise WrongUse(f"--readme {page} has no generated part; write `<!-- generated: NAME -->`, NAME of: {known}")
    for name in names:
        generated_part(text, name, f"--readme {page}: ")

    def renewed(found: re.Match[str]) -> str:
        content = parts.get(found["name"])
        return found[0] if content is None else f"{found['begin']}\n{content.strip()}\n\n{found['end']}"

    write_atomically(page, _PART.sub(renewed, text))


def generated_part(text: str, name: str, where: str = "") -> str:
    """Return the text between the comments of `name` in `text`.

    Raises:
        WrongUse: there is no such pair of comments, or several; the message begins with `where`.
    """
    found = [part["content"] for part in _PART.finditer(text) if part["name"] == name]
    if len(found) != 1:
        comments = f"`<!-- generated: {name} -->` and `<!-- end: {name} -->`"
        raise WrongUse(f"{where}{len(found)} generated parts {name!r}; write {comments} once")
    return found[0]


def paper_part(exhibits: Sequence[tuple[Exhibit, Made]]) -> str:
    """Summarize a paper's exhibits as a Markdown table: a row for each quantity, published and measured."""
    rows = []
    for exhibit, made in exhibits:
        first = f"**{exhibit.number}** `{exhibit.name}`"
        for point in made.points:
            published = NOTHING if point.published is None else str(point.published)
            rows.append((first, point.quantity, published, point.measured or NOTHING))
            first = ""
    spanned = (made.provenance for _, made in exhibits if made.provenance.spanned)
    origins = dict.fromkeys(f"{of.setting}{f' ({of.run_id})' if len(of.spanned) == 1 else ''}" for of in spanned)
    lines = markdown_table(("exhibit", "quantity", "published", "measured"), rows)
    return "\n".join([*lines, "", "Measured on:", "", *(f"* {line}" for line in origins)])


def _read(page: Path) -> str:
    try:
        text = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WrongUse(f"--readme {page}: it is not UTF-8 text; give a Markdown file with generated parts") from error
    return text


MOST_COMMITS = 200
"""Number of commits that may have changed the backend since a row was measured."""
BACKEND = "optimizations"
_RUN = re.compile(r"run (\S+) \(commit ([0-9a-f]{7,40})")
"""The text by which a generated table names a run."""


def stale_rows(readme: Path, recorded: Path, repository: Path) -> list[str]:
    """Return a sentence for each run of the README's table that is of another version or too many commits old.

    Raises:
        WrongUse: the table of the file names no run.
    """
    part = generated_part(_read(readme), "headline")
    runs = dict(_RUN.findall(part))
    if not runs:
        raise WrongUse(
            f"the table of {readme} names no run; renew it with `encore report --recorded --readme {readme}`"
        )
    version = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return [text for run, commit in runs.items() for text in _findings(run, commit, version, recorded, repository)]


def _findings(run: str, commit: str, version: str, recorded: Path, repository: Path) -> Sequence[str]:
    if not (recorded / run / ENVIRONMENT).is_file():
        return [f"run {run} is not recorded, so that its version is not known"]
    try:
        measured = read_environment(recorded / run).packages.get("encore")
    except InvalidResults as error:
        return [str(error)]
    found = []
    if measured != version:
        found.append(f"run {run} is of version {measured or 'unknown'}, and the tree is {version}")
    commits = commits_since(repository, commit)
    if commits is None:
        found.append(f"run {run} is of commit {commit}, which this checkout does not have")
    elif commits > MOST_COMMITS:
        found.append(f"{commits} commits touched {BACKEND}/ since run {run} ({commit}); {MOST_COMMITS} may")
    return found


def commits_since(repository: Path, commit: str) -> int | None:
    """Return the number of commits that changed the backend since; None if git does not have the commit."""
    command = ["git", "-C", str(repository), "rev-list", "--count", f"{commit}..HEAD", "--", BACKEND]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(done.stdout) if done.returncode == 0 else None
