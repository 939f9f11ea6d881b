"""`encore report --only`: some of the papers' figures and tables. Imports what it needs when it runs."""

from __future__ import annotations

import json
from pathlib import Path


def recorded_file(name: str) -> Path | None:
    """The recorded file of this name, of several the one in the last folder by name; None where there is none."""
    from suite.store import RECORDED

    return max(RECORDED.glob(f"*/{name}"), default=None)


def report_only(
    names: str,
    runs: list[Path],
    micro: Path | None,
    nanogpt: Path | None,
    out: Path | None,
    figures: Path | None,
    *,
    as_json: bool,
) -> None:
    """Writes the figures and tables of these names, separated by commas, and prints the tables as Markdown.

    Raises:
        WrongUse: a name is unknown, none is given, or the runs do not belong into one report.
        InvalidResults: a file has wrong fields.
        CannotWrite: the disk is full.
    """
    from suite import store
    from suite.errors import WrongUse
    from suite.report.build import build_exhibits
    from suite.report.paper import EXHIBITS

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise WrongUse(f"--only names nothing; known: {', '.join(EXHIBITS)}")
    folder = out or (runs[0] if len(runs) == 1 else store.REPOSITORY / "results") / "report"
    files = build_exhibits(wanted, runs, folder, figures, micro, nanogpt)
    if as_json:
        print(json.dumps({"files": [str(path) for path in files]}, indent=2))
        return
    for path in files:
        if path.suffix == ".md":
            print(path.read_text(encoding="utf-8"))
    for path in files:
        print(store.describe(path))
