"""Rows of the judges, as JSON lines, and the tables that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from row_files import read_rows

Row = Mapping[str, Any]
PLAIN = "compile"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Raises ValueError if a line is no row."""
    return read_rows(path, is_row)


def is_row(row: Row) -> bool:
    return "run" in row or {"task", "compiler"} <= row.keys()


def by_task(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Return the rows of each sample by compiler; a later row stands for an earlier one."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "task" in row:
            found.setdefault(row["task"], {})[row["compiler"]] = row
    return found


def findings(rows: Iterable[Row], mode: str = "encore") -> list[str]:
    """Return the samples that pass under plain compile and fail under a compiler, with the reason."""
    return [
        f"{key}: {row[mode].get('wrong')}"
        for key, row in sorted(by_task(rows).items())
        if mode in row and PLAIN in row and row[PLAIN].get("passed") and not row[mode].get("passed")
    ]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a line for each database or project: how many samples passed, by compiler."""
    samples = by_task(rows)
    lines = [
        "| judge | entries | samples | pass: compile | stock (with a graph) | Encore (with a graph) | "
        "only compile passes: stock, Encore | process ended: stock, Encore |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for judge in dict.fromkeys(map(_judge, samples)):
        own = {key: row for key, row in samples.items() if _judge(key) == judge and "eager" not in row}
        if not own:
            continue
        passed = {
            name: [row[name] for row in own.values() if row.get(name, {}).get("passed")]
            for name in (PLAIN, "stock", "encore")
        }
        every = [one for row in own.values() for one in row.values()]
        ended = [sum(bool(row.get(name, {}).get("crashed")) for row in own.values()) for name in ("stock", "encore")]
        cells = (
            judge,
            len({key.split("|")[1] for key in own}),
            len(own),
            len(passed[PLAIN]),
            *(f"{len(of)} ({sum(row['replays'] > 0 for row in of)})" for of in (passed["stock"], passed["encore"])),
            ", ".join(str(len(findings(every, name))) for name in ("stock", "encore")),
            ", ".join(map(str, ended)),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _judge(key: str) -> str:
    """Return the database or project of a sample; `opcheck` judges custom operators apart."""
    database, *rest = key.split("|")
    return f"{database}, opcheck" if rest[1:2] == ["opcheck"] else database


def remain(rows: Iterable[Row]) -> int:
    """Return the number of the wheel's samples that had no rows at the end of the last run."""
    return next((int(row["run"]["remain"]) for row in reversed(list(rows)) if "remain" in row.get("run", {})), 0)


def summary(rows: Sequence[Row]) -> str:
    """Return the table as text, with each finding below it, and what was not judged."""
    lines = [table(rows), ""]
    skipped = Counter(row["skipped"].split(":")[0] for row in rows if "skipped" in row)
    lines += [f"not judged, {count}: {reason}" for reason, count in skipped.most_common()]
    if left := remain(rows):
        lines.append(f"{left} samples remain; start again with the same OUT to go on")
    for mode in ("encore", "stock"):
        found = findings(rows, mode)
        lines += ["", f"fail under {mode}, pass under plain compile: {len(found)}", *found]
    samples = by_task(rows)
    unlike = [f"{key}: {row['encore']['unlike_compile']}" for key, row in samples.items() if _unlike(row)]
    lines += ["", f"right under encore, with other bits than plain compile's: {len(unlike)}", *sorted(unlike)]
    wrong = [
        f"{key}: {row[PLAIN]['wrong']}{_as_plain(row)}" for key, row in samples.items() if "wrong" in row.get(PLAIN, {})
    ]
    return "\n".join([*lines, "", f"fail under plain compile: {len(wrong)}", *sorted(wrong)])


def _as_plain(row: Mapping[str, Row]) -> str:
    """Return what Encore makes of a sample that plain compile gets wrong."""
    if "encore" not in row:
        return ""
    unlike = row["encore"].get("unlike_compile")
    return f" [under encore: {unlike}]" if unlike else " [the same under encore]"


def _unlike(row: Mapping[str, Row]) -> bool:
    mine = row.get("encore", {})
    return bool(mine.get("passed")) and "unlike_compile" in mine
