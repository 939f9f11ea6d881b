"""`encore run --host-check`: what disturbs measurements on this host, warned of and stored with the run."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from host_tuning import Disturbance, Finding, check
from suite.results.store import write_error

HOST_CHECK = "host_check.jsonl"
"""In a run's folder: one line for each start of the run that was asked to check the host."""


def record_host_check(run: Path, console: Console) -> tuple[Finding, ...]:
    """Checks the host, prints a warning for each disturbance, and adds a line with all findings to the run.

    Raises:
        CannotWrite: the disk is full.
        OSError: the file cannot be written for another reason.
    """
    findings = check()
    for finding in findings:
        if finding.verdict is Disturbance.WARN:
            console.print(f"host: {finding.item}: {finding.value}. {finding.why}", markup=False)
    if any(finding.verdict is Disturbance.WARN for finding in findings):
        console.print("host: `python -m host_tuning tune --help` shows what can be changed, and undone")
    line = {
        "checked_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "findings": [finding.as_json() for finding in findings],
    }
    path = run / HOST_CHECK
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(path, error) from error
    return findings
