"""Collect what users read of the code: errors, warnings and reasons in reports. `messages.txt` is the table of them.

python -m tests.docs.messages            write the table anew, to be read before it is committed
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("messages.txt")
PACKAGES = ("encore", "host_tuning", "models", "optimizations", "suite")

WARNINGS = re.compile(r"warn|warning|warn_once")
REASONS = re.compile(r".*(Reason|refus|Refus|reason|Finding)\w*")
KEYWORDS = re.compile(r"(reason|advice|why|message|error)")


def text_of(node: ast.expr | None) -> str | None:
    """Return a string of the source with its values as {expressions}; None for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            parts = [text_of(one) if isinstance(one, ast.Constant) else "{…}" for one in values]
            return "".join(part or "" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            texts = text_of(left), text_of(right)
            return "".join(one or "{…}" for one in texts) if any(texts) else None
    return None


def called(node: ast.expr) -> str:
    """Return the last name of what is called: `warn` of `warnings.warn`."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def messages_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (kind, message) of each error, warning and reason, in the order of the source."""
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda one: (one.lineno, one.col_offset)):
        name = called(node.func)
        if id(node) in raised:
            kind, arguments = name, node.args
        elif WARNINGS.fullmatch(name):
            kind, arguments = "warning", node.args[:1]
        elif name == "error" and isinstance(node.func, ast.Attribute):
            kind, arguments = "wrong use", node.args[:1]
        else:
            named = [one.value for one in node.keywords if KEYWORDS.fullmatch(one.arg or "")]
            kind, arguments = "reason", [*(node.args if REASONS.fullmatch(name) else ()), *named]
        for one in arguments:
            text = text_of(one)
            if text and " " in text.strip():
                yield kind, " ".join(text.split())


def collect() -> list[str]:
    """Return the lines of the table: file, kind and message."""
    lines = []
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        found = messages_of(ast.parse(path.read_text(encoding="utf-8")))
        lines += [f"{name} | {kind} | {message}" for kind, message in dict.fromkeys(found)]
    return lines


if __name__ == "__main__":
    TABLE.write_text("\n".join(collect()) + "\n", encoding="utf-8")
