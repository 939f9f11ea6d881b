"""The README's tables, put in from results: no number there is written by hand.

A generated part stands between two comments, `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from suite.errors import WrongUse
from suite.store import write_atomically


def update_readme(readme: Path, parts: Mapping[str, str]) -> None:
    """Put each text of `parts` between the comments of its name; what is there for other names stays.

    Raises:
        WrongUse: the file cannot be read or replaced, or has no such pair of comments.
        CannotWrite: the disk is full; the file is as it was.
    """
    text = _read(readme)
    for name, content in parts.items():
        text = _replaced(text, name, content, readme)
    write_atomically(readme, text)


def check_readme(readme: Path, names: Iterable[str]) -> None:
    """Makes sure that `update_readme` will find what it needs, before minutes are spent on what it is to be given.

    Raises:
        WrongUse: the file cannot be read or replaced, or lacks the pair of comments of one of these names.
    """
    text = _read(readme)
    for name in names:
        _replaced(text, name, "", readme)


def generated_names(readme: Path) -> tuple[str, ...]:
    """Names of the generated parts that a file has room for, in its order.

    Raises:
        WrongUse: the file cannot be read or replaced.
    """
    return tuple(dict.fromkeys(re.findall(r"^<!-- generated: (\S+) -->$", _read(readme), re.MULTILINE)))


def _read(readme: Path) -> str:
    try:
        text = readme.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise WrongUse(f"--readme {readme}: {why}; give a Markdown file with generated parts") from error
    if not os.access(readme.parent, os.W_OK | os.X_OK):
        raise WrongUse(f"--readme {readme}: its folder cannot be written to")
    return text


def generated_part(text: str, name: str) -> str:
    """What stands between the comments of `name` in `text`.

    Raises:
        WrongUse: there is no such pair of comments.
    """
    found = _pattern(name).search(text)
    if found is None:
        raise WrongUse(f"no generated part {name!r}: write `{_begin(name)}` and `{_end(name)}` where it should be")
    return found["content"]


def _replaced(text: str, name: str, content: str, readme: Path) -> str:
    new, count = _pattern(name).subn(lambda found: f"{found['begin']}\n{content.strip()}\n\n{found['end']}", text)
    if count != 1:
        raise WrongUse(
            f"--readme {readme}: {count} generated parts {name!r}; write `{_begin(name)}` and `{_end(name)}` once"
        )
    return new


def _begin(name: str) -> str:
    return f"<!-- generated: {name} -->"


def _end(name: str) -> str:
    return f"<!-- end: {name} -->"


def _pattern(name: str) -> re.Pattern[str]:
    begin, end = re.escape(_begin(name)), re.escape(_end(name))
    return re.compile(f"(?P<begin>{begin}\n)(?P<content>.*?)(?P<end>{end})", re.DOTALL)
