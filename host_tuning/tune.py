"""Make all changes or none, and restore the old values.

Note [State first]: the state file contains every change before the first one is made. So `restore` has the old values
even if `tune` ends in between. Undoing a change that was not made does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from host_tuning.change import Change
from host_tuning.errors import HostTuningError, Refused
from host_tuning.gpu import Nvml
from host_tuning.machine import Machine
from host_tuning.plan import Wishes, plan
from host_tuning.state import locked, read_state, write_state

Say = Callable[[str], None]


def tune(
    wishes: Wishes, machine: Machine, gpus: Nvml, state: Path, say: Say = print, *, dry_run: bool = False
) -> tuple[Change, ...]:
    """Make the changes, and print each before. With `dry_run` print them only, and write nothing.

    A change that fails, or is not taken by the kernel, ends it: what was changed is put back.

    Raises:
        Refused: see `plan`; without the rights; or where a state file is there already. Nothing was changed.
        HostTuningError: a change failed; the message says whether all is as it was.
    """
    changes = plan(wishes, machine, gpus)
    if dry_run:
        for change in changes:
            say(f"would {change.shown(machine)}")
        return changes
    _require_rights(machine)
    with locked(state):
        if state.exists():
            raise Refused(f"this host is tuned already, as {state} says; run restore first")
        if not changes:
            say("everything asked for is so already; nothing was changed")
            return ()
        try:
            write_state(state, changes, machine)
        except OSError as error:
            raise HostTuningError(f"cannot write the state file {state}: {error}; nothing was changed") from error
        try:
            for change in changes:
                say(change.shown(machine))
                _make(change, machine, gpus)
        except (OSError, HostTuningError) as error:
            raise HostTuningError(f"{error}; {_roll_back(changes, machine, gpus, state)}") from error
        except KeyboardInterrupt:
            raise HostTuningError(f"interrupted; {_roll_back(changes, machine, gpus, state)}") from None
    return changes


def restore(machine: Machine, gpus: Nvml, state: Path, say: Say = print, *, dry_run: bool = False) -> int:
    """Restore the values in the state file, and remove it; return the number of changes. Doing it twice is safe.

    What cannot be put back stays in the state file, and the rest is put back.

    Raises:
        Refused: there is no state file, it is not readable, or the rights are missing.
        HostTuningError: something could not be put back; the message names it.
    """
    changes = read_state(state, machine)
    if dry_run:
        for change in reversed(changes):
            say(f"would {change.shown_undo(machine)}")
        return len(changes)
    _require_rights(machine)
    with locked(state):
        changes = read_state(state, machine)
        left = _undo_all(changes, machine, gpus)
        _keep(left, machine, state)
    if left:
        raise HostTuningError(
            f"{len(left)} of {len(changes)} changes could not be put back: "
            + "; ".join(f"{change.item} at {change.target}: {reason}" for change, reason in left)
            + f". They stay in {state}: run restore again when what stands against it is gone"
        )
    say(f"{len(changes)} changes undone")
    return len(changes)


def _make(change: Change, machine: Machine, gpus: Nvml) -> None:
    try:
        change.do(machine, gpus)
    except OSError as error:
        raise HostTuningError(f"{change.item}: cannot {change.shown(machine)}: {error.strerror or error}") from error
    if not change.is_done(machine):
        raise HostTuningError(
            f"{change.item}: the kernel did not take it: {machine.shown(change.target)} holds "
            f"{machine.read(change.target)!r} after {change.after!r} was written"
        )


def _undo_all(changes: Sequence[Change], machine: Machine, gpus: Nvml) -> list[tuple[Change, str]]:
    """Undo in reverse, and go on after a failure; return what is not as it was, in the order it was made.

    Values are read back after all writes: one setting may block another (see Note [Order]) or change it.
    """
    reasons: dict[int, str] = {}
    for place in reversed(range(len(changes))):
        try:
            changes[place].undo(machine, gpus)
        except (OSError, HostTuningError) as error:
            reasons[place] = (error.strerror if isinstance(error, OSError) else None) or str(error)
    for place, change in enumerate(changes):
        if change.is_shown and change.is_undone(machine):
            reasons.pop(place, None)
        elif change.is_shown:
            reasons.setdefault(place, f"holds {machine.read(change.target)!r} instead of {change.before!r}")
    return [(changes[place], reasons[place]) for place in sorted(reasons)]


def _roll_back(changes: Sequence[Change], machine: Machine, gpus: Nvml, state: Path) -> str:
    left = _undo_all(changes, machine, gpus)
    try:
        _keep(left, machine, state)
    except OSError as error:
        return f"run restore: what is left to be put back could not be noted ({error}), {state} still holds all of it"
    if not left:
        return "everything is as it was before"
    return f"{len(left)} changes could not be put back and stay in {state}: run restore"


def _keep(left: Sequence[tuple[Change, str]], machine: Machine, state: Path) -> None:
    """Store the remaining changes in the state file, or remove the file if there are none."""
    if left:
        write_state(state, [change for change, _ in left], machine)
    else:
        state.unlink(missing_ok=True)


def _require_rights(machine: Machine) -> None:
    if machine.is_real and os.geteuid() != 0:
        raise Refused("changing settings of the host needs root; nothing was changed. --dry-run shows what it would do")
