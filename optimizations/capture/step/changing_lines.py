"""Find the line of the step that changes something in Python, or asks for what changes on every call, in its source."""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Iterable

from optimizations.capture.step.user_code import with_inner

BINDS = r"\b[^=]*=(?!=)"
GROWS = r"\b[^.]*\.(append|extend|insert|add|update|pop|popleft|appendleft|remove|clear)\("
STEPS = r"\.step\("


def last_word(path: str) -> str:
    """Return the last name in a path: "metrics" of `trainer.metrics[0]`."""
    words = re.findall(r"[^\W\d]\w*", path.split(" (")[0])
    return words[-1] if words else ""


def line_with(codes: Iterable[types.CodeType], path: str, then: str = r"\b") -> str | None:
    """Return "file:number in function" of the first line of code with the last name in a path followed by `then`.

    None where the source is not there, or has no such line.
    """
    wanted = re.compile(rf"\b{re.escape(last_word(path))}{then}")
    for code in (inner for one in codes for inner in with_inner(one)):
        source = linecache.getlines(code.co_filename)
        for number in sorted({line for _, _, line in code.co_lines() if line and line <= len(source)}):
            text = source[number - 1]
            if wanted.search(text) and not text.lstrip().startswith(("def ", "@")):
                return f"{code.co_filename}:{number} in {code.co_name}"
    return None
