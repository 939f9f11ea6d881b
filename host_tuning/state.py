"""Store all changes in a state file, which is written before the first change and removed after the last is undone.

Its folder is emptied when the machine restarts, which undoes the settings as well.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from host_tuning.change import Change
from host_tuning.errors import HostTuningError, Refused
from host_tuning.machine import Machine
from optimizations.atomic_file import write_atomically

STATE = Path("/run/encore-host-tuning/state.json")
FORMAT = 1
_BOOT_ID = "proc/sys/kernel/random/boot_id"


def write_state(path: Path, changes: Sequence[Change], machine: Machine) -> None:
    """Write the file so that a crash leaves the old one, the new one, or none, never a part.

    Raises:
        OSError: the folder cannot be made, or the disk is full; no file is left.
    """
    content = {
        "format": FORMAT,
        "boot": machine.read(_BOOT_ID),
        "changes": [change.as_json() for change in changes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1).encode())


def read_state(path: Path, machine: Machine) -> tuple[Change, ...]:
    """Return the changes that were made, or were about to be made.

    Raises:
        Refused: there is no such file, it is of another format, or the machine was restarted since.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise Refused(f"nothing to restore: there is no state file {path}") from None
    except (OSError, ValueError) as error:
        raise Refused(f"cannot read the state file {path}: {error}") from error
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this version reads {FORMAT}")
        changes = tuple(Change.from_json(fields) for fields in content["changes"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{path} is not a state file of this version: {error}") from error
    if content.get("boot") != machine.read(_BOOT_ID):
        raise Refused(
            f"{path} is of an earlier start of this machine, and a restart undoes all settings; delete the file"
        )
    return changes


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the state file against a second `tune` or `restore`.

    Raises:
        Refused: another one is running.
        HostTuningError: the folder of the state file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(".lock").open("w")
    except OSError as error:
        raise HostTuningError(f"cannot write next to the state file {path}: {error}; nothing was changed") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another tune or restore is at work with {path}") from None
        yield
