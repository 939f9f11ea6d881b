"""`encore record`: what is kept of runs. Imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from suite.cli_choices import JsonOption
from suite.console import print_json
from suite.errors import WrongUse


def record(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN]...", help="Finished runs to pack into results/recorded.", show_default=False),
    ] = None,
    retire: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN", help="A recorded run to keep in results/history.csv alone; may be given again."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack runs into results/recorded, and renew the table there."""
    from suite import store
    from suite.history import rows
    from suite.history.recording import record_run, renew_page, retire_runs

    if not runs and not retire:
        raise WrongUse("nothing to record: name a finished run, or --retire a recorded one")
    old = [store.find_run(name, (store.RECORDED,)) for name in retire or ()]
    if strangers := [folder for folder in old if store.RECORDED not in folder.resolve().parents]:
        raise WrongUse(f"--retire {store.describe(strangers[0])}: it is not in {store.describe(store.RECORDED)}")
    packed = [store.describe(record_run(store.find_run(name), store.RECORDED)) for name in runs or ()]
    count = retire_runs(old, rows.HISTORY) if old else 0
    renew_page(store.RECORDED)
    if as_json:
        print_json({"recorded": packed, "retired": [folder.name for folder in old], "history_rows": count})
        return
    for where in packed:
        print(f"{where}: recorded")
    if old:
        print(f"{store.describe(rows.HISTORY)}: {count} more rows, of {', '.join(folder.name for folder in old)}")
