"""Describe one change to the host as a record: the old value, the new one, and how to restore the old one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from host_tuning.cpu_list import parse_cpus
from host_tuning.gpu import Nvml
from host_tuning.machine import CGROUP, Machine


class Kind(StrEnum):
    """Name the kinds of change.

    FILE: a value in a file. CONTROLLER: a word in a cgroup's list of controllers. CGROUP: a cgroup that is made.
    PERSISTENCE and CLOCK: of a GPU, whose UUID is the target.
    """

    FILE = "file"
    CONTROLLER = "controller"
    CGROUP = "cgroup"
    PERSISTENCE = "persistence"
    CLOCK = "clock"


@dataclass(frozen=True, slots=True)
class Change:
    """Hold one change.

    `target` is a file or folder relative to the root, or a GPU's UUID. `before` is what was read before anything was
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
            case Kind.CONTROLLER:
                return f"write '+{self.after}' to {machine.shown(self.target)} (now {self.before!r})"
            case Kind.CGROUP:
                return f"make the cgroup {machine.shown(self.target)}"
            case Kind.PERSISTENCE:
                return f"set persistence mode of {self.target} to {self.after} (now {self.before})"
            case Kind.CLOCK:
                return f"lock the graphics clock of {self.target} at {self.after} MHz"

    def shown_undo(self, machine: Machine) -> str:
        """Return one line for a user: what restoring writes, and where."""
        match self.kind:
            case Kind.FILE:
                return f"write {self.before!r} back to {machine.shown(self.target)} (now {machine.read(self.target)!r})"
            case Kind.CONTROLLER:
                return f"write '-{self.after}' to {machine.shown(self.target)}"
            case Kind.CGROUP:
                return f"move what runs in the cgroup {machine.shown(self.target)} out of it, and remove it"
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
            case Kind.CONTROLLER:
                machine.write(self.target, f"+{self.after}")
            case Kind.CGROUP:
                machine.make_folder(self.target)
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
            case Kind.CONTROLLER:
                if not self.is_undone(machine):
                    machine.write(self.target, f"-{self.after}")
            case Kind.CGROUP:
                if machine.exists(self.target):
                    _empty(machine, self.target)
                    machine.remove_folder(self.target)
            case Kind.PERSISTENCE:
                gpus.set_persistence(self.target, self.before == "on")
            case Kind.CLOCK:
                gpus.unlock_clock(self.target)

    def is_done(self, machine: Machine) -> bool:
        """Return whether the machine shows the change.

        The kernel takes some values silently and uses others. GPUs report an error instead, and have no getter for a
        lock.
        """
        match self.kind:
            case Kind.FILE:
                return self._holds(machine, self.after)
            case Kind.CONTROLLER:
                return self.after in (machine.read(self.target) or "").split()
            case Kind.CGROUP:
                return machine.exists(self.target)
        return True

    @property
    def is_shown(self) -> bool:
        """Return whether the machine shows its state; a GPU cannot."""
        return self.kind in (Kind.FILE, Kind.CONTROLLER, Kind.CGROUP)

    def is_undone(self, machine: Machine) -> bool:
        """Return whether the machine shows what was there before, of a change that is shown.

        A cgroup that has ended took its settings with it. The files of a CPU that is offline come back with it, and
        have to be put back then.
        """
        match self.kind:
            case Kind.FILE:
                ended = self.target.startswith(f"{CGROUP}/") and not machine.exists(self.target)
                return ended or self._holds(machine, self.before or "")
            case Kind.CONTROLLER:
                words = (machine.read(self.target) or "").split()
                return self.after not in words or self.after in (self.before or "").split()
            case Kind.CGROUP:
                return not machine.exists(self.target)
        return True

    def _holds(self, machine: Machine, wanted: str) -> bool:
        found = machine.read(self.target)
        if found is None or found == wanted:
            return found == wanted
        try:  # the kernel prints a list of CPUs in its own form
            return "cpuset" in self.target and parse_cpus(found) == parse_cpus(wanted)
        except ValueError:
            return False


def _empty(machine: Machine, cgroup: str) -> None:
    """Move what runs in a cgroup to the one above, for only an empty one can be removed."""
    above = f"{cgroup.rpartition('/')[0]}/cgroup.procs"
    for process in (machine.read(f"{cgroup}/cgroup.procs") or "").split():
        try:
            machine.write(above, process)
        except ProcessLookupError:
            continue
