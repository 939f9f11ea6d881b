"""Describe one change to the host as a record: the old value, the new one, and how to restore the old one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from host_tuning.gpu import Nvml
from host_tuning.machine import Machine


class Kind(StrEnum):
    """Name the kinds of change.

    FILE: a value in a file. PERSISTENCE and CLOCK: of a GPU, whose UUID is the target.
    """

    FILE = "file"
    PERSISTENCE = "persistence"
    CLOCK = "clock"


@dataclass(frozen=True, slots=True)
class Change:
    """Hold one change.

    `target` is a file relative to the root, or a GPU's UUID. `before` is what was read before anything was
    changed, None where that cannot be known: a clock lock has no getter, so restoring removes it.
    """

    item: str
    kind: Kind
    target: str
    before: str | None
    after: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Change:
        """Return the change with these fields.

        Raises:
            ValueError: fields are missing, unknown, or of another type.
        """
        names = ("item", "kind", "target", "before", "after")
        if not isinstance(fields, dict) or set(fields) != set(names):
            raise ValueError(f"a change has the fields {', '.join(names)}")
        texts = {name: fields[name] for name in names}
        if not all(isinstance(text, str) or (name == "before" and text is None) for name, text in texts.items()):
            raise ValueError("the fields of a change are texts")
        target = texts["target"]
        if target.startswith("/") or ".." in target.split("/"):
            raise ValueError(f"the target {target!r} does not lie below the root")
        return cls(texts["item"], Kind(texts["kind"]), target, texts["before"], texts["after"])

    def shown(self, machine: Machine) -> str:
        """Return one line for a user: exactly what is written, and where."""
        match self.kind:
            case Kind.FILE:
                return f"write {self.after!r} to {machine.shown(self.target)} (now {self.before!r})"
            case Kind.PERSISTENCE:
                return f"set persistence mode of {self.target} to {self.after} (now {self.before})"
            case Kind.CLOCK:
                return f"lock the graphics clock of {self.target} at {self.after} MHz"

    def shown_undo(self, machine: Machine) -> str:
        """Return one line for a user: what restoring writes, and where."""
        match self.kind:
            case Kind.FILE:
                return f"write {self.before!r} back to {machine.shown(self.target)} (now {machine.read(self.target)!r})"
            case Kind.PERSISTENCE:
                return f"set persistence mode of {self.target} back to {self.before}"
            case Kind.CLOCK:
                return f"unlock the graphics clock of {self.target}"

    def do(self, machine: Machine, gpus: Nvml) -> None:
        """Make the change.

        Raises:
            OSError, GpuError: it is not allowed, not possible, or not taken.
        """
        match self.kind:
            case Kind.FILE:
                machine.write(self.target, self.after)
            case Kind.PERSISTENCE:
                gpus.set_persistence(self.target, self.after == "on")
            case Kind.CLOCK:
                gpus.lock_clock(self.target, int(self.after))

    def undo(self, machine: Machine, gpus: Nvml) -> None:
        """Put back what was there before; do nothing where it is there already.

        Raises:
            OSError, GpuError: as for `do`, or the file is gone (that of a CPU which is offline).
        """
        match self.kind:
            case Kind.FILE:
                if not self.is_undone(machine):
                    machine.write(self.target, self.before or "")
            case Kind.PERSISTENCE:
                gpus.set_persistence(self.target, self.before == "on")
            case Kind.CLOCK:
                gpus.unlock_clock(self.target)

    def is_done(self, machine: Machine) -> bool:
        """Return whether the machine shows the change.

        The kernel takes some values silently and uses others. GPUs report an error instead, and have no getter for a
        lock.
        """
        return not self.is_shown or machine.read(self.target) == self.after

    @property
    def is_shown(self) -> bool:
        """Return whether the machine shows its state; a GPU cannot."""
        return self.kind is Kind.FILE

    def is_undone(self, machine: Machine) -> bool:
        """Return whether the machine shows what was there before, of a change that is shown.

        The files of a CPU that is offline come back with it, and have to be put back then.
        """
        return not self.is_shown or machine.read(self.target) == self.before
