"""Identify the checkout that runs: its commit, whether its code was changed since, and an id of the code as it is."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

CODE = ("encore", "suite", "models", "optimizations", "pyproject.toml", "requirements.lock")
"""Files that shape numbers, at the top of the repository: the dirty flag and the code id are about these, so that a
newly drawn figure changes neither."""

SHOWN_DIGITS = 12
"""Digits of a code id where it stands in a text."""


def git_state(repository: Path) -> tuple[str | None, bool | None]:
    """Return (commit, whether code differs from it); Nones where the folder is not its own git checkout."""
    commit = _git(repository, "rev-parse", "HEAD")
    if commit is None or _git(repository, "rev-parse", "--show-prefix") != "":
        return None, None
    status = _git(repository, "status", "--porcelain", "--untracked-files=normal", "--", *CODE)
    return commit, None if status is None else bool(status)


def code_id(repository: Path) -> str | None:
    """Return the SHA-256, in hexadecimal, of what `git ls-tree -r` prints of the code: modes, contents, file names.

    Equal ids are equal code, whatever the commits are. Changed files, and new ones that are not ignored, count as
    `git add -A` and a commit would record them. So anyone can find out whether code that was not committed when it ran
    is that of a commit: this prints the same id.

        git ls-tree -r COMMIT -- encore suite models optimizations pyproject.toml requirements.lock | sha256sum

    Index and objects of the checkout stay as they are. None where `git_state` knows no commit, or git cannot say, as in
    the middle of a merge.
    """
    commit, dirty = git_state(repository)
    if commit is None or dirty is None:
        return None
    if not dirty:
        return _listing_id(repository, commit)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            return _id_of_files(repository, Path(scratch))
    except OSError:  # no room for temporary files, or an index that this user may not read
        return None


def shown_code(code: str | None) -> str | None:
    """Return a code id as it stands in a text, cut short."""
    return None if code is None else code[:SHOWN_DIGITS]


def _id_of_files(repository: Path, scratch: Path) -> str | None:
    """Return the id of the code as the files are now. New objects, and an own index, go to the scratch folder."""
    places = _git(repository, "rev-parse", "--git-path", "index", "--git-path", "objects")
    # `git add` refuses a path that it knows nothing of.
    listed = _git(repository, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *CODE)
    if places is None or listed is None:
        return None
    index, objects = (repository / place for place in places.splitlines())
    known = sorted({name.split("/")[0] for name in listed.split("\0") if name})
    if index.exists():
        # With its time, by which git knows which files may have changed just after they were added.
        shutil.copy2(index, scratch / "index")
    (scratch / "objects" / "info").mkdir(parents=True)
    (scratch / "objects" / "info" / "alternates").write_text(f"{objects.resolve()}\n")
    apart = {"GIT_INDEX_FILE": str(scratch / "index"), "GIT_OBJECT_DIRECTORY": str(scratch / "objects")}
    if _git(repository, "add", "-A", "--", *known, **apart) is None:
        return None
    tree = _git(repository, "write-tree", **apart)
    return None if tree is None else _listing_id(repository, tree, **apart)


def _listing_id(repository: Path, tree: str, **variables: str) -> str | None:
    # With git's own default of quoting names, which a user may have changed.
    listing = _output(repository, ("-c", "core.quotePath=true", "ls-tree", "-r", tree, "--", *CODE), variables)
    return None if listing is None else hashlib.sha256(listing).hexdigest()


def _git(repository: Path, *arguments: str, **variables: str) -> str | None:
    output = _output(repository, arguments, variables)
    return None if output is None else os.fsdecode(output).strip()


def _output(repository: Path, arguments: tuple[str, ...], variables: Mapping[str, str]) -> bytes | None:
    """Return what git prints; None where it fails. Without its optional locks, `git status` leaves the index as it
    is."""
    command = ["git", "--no-optional-locks", "-C", str(repository), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, check=True, env={**os.environ, **variables})
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
