"""Whether the rows of the README's table are of the tree's own version, and of code that has not changed much since.

The release gate runs this (`encore report --check-fresh`); tests do not, because rows age with every commit.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

from suite.report.markdown_pages import generated_part
from suite.results.errors import WrongUse
from suite.results.store import ENVIRONMENT, InvalidResults, read_environment

MOST_COMMITS = 200
"""So many commits may have touched the backend since a row was measured."""
BACKEND = "optimizations"
_RUN = re.compile(r"run (\S+) \(commit ([0-9a-f]{7,40})")
"""How a generated table names a run."""


def stale_rows(readme: Path, recorded: Path, repository: Path) -> list[str]:
    """Return a sentence for each run of the README's table that is of another version or too many commits old.

    Raises:
        WrongUse: the file cannot be read, or its table names no run.
    """
    try:
        part = generated_part(readme.read_text(encoding="utf-8"), "headline")
    except OSError as error:
        raise WrongUse(f"cannot read {readme}: {error.strerror}; give the page with the table of speed-ups") from error
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
    """How many commits touched the backend since; None where git does not know the commit."""
    command = ["git", "-C", str(repository), "rev-list", "--count", f"{commit}..HEAD", "--", BACKEND]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return int(done.stdout) if done.returncode == 0 else None
