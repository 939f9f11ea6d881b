"""Read and write the settings files of Linux, below a root folder, so that tests can use another tree."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CPU = "sys/devices/system/cpu"
NO_TURBO = f"{CPU}/intel_pstate/no_turbo"
BOOST = f"{CPU}/cpufreq/boost"
SMT_CONTROL = f"{CPU}/smt/control"

VENDORS = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}
"""Vendors whose files are supported, by their name in /proc/cpuinfo."""


@dataclass(frozen=True, slots=True)
class IdleState:
    """Describe a sleep state of one CPU. `folder` is relative to the root; waking up takes `exit_latency_us`."""

    folder: str
    cpu: int
    name: str
    exit_latency_us: int
    disabled: bool


class Machine:
    """Read and write files of one machine; all names are relative to `root`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    @property
    def is_real(self) -> bool:
        """Return whether this is the machine itself and no tree made for tests."""
        return self.root == Path("/")

    def shown(self, name: str) -> str:
        """Return the name as a user reads it."""
        return f"/{name}"

    def read(self, name: str) -> str | None:
        """Return the content without its line end; None where there is no such file or it cannot be read."""
        try:
            return (self.root / name).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def read_number(self, name: str) -> int | None:
        """Return the content as a whole number; None where it is none."""
        text = self.read(name)
        return int(text) if text is not None and re.fullmatch(r"-?\d+", text) else None

    def read_cpus(self, name: str) -> tuple[int, ...]:
        """Return the CPUs that a file lists; none where it lists none or is missing."""
        try:
            return parse_cpus(self.read(name) or "")
        except ValueError:
            return ()

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def glob(self, pattern: str) -> list[str]:
        """Return names that match, ordered by the numbers in them: policy2 comes before policy10."""
        found = (str(path.relative_to(self.root)) for path in self.root.glob(pattern))
        return sorted(
            found, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
        )

    def write(self, name: str, text: str) -> None:
        """Write an existing file in one piece, as the kernel wants it.

        Raises:
            OSError: there is no such file, it may not be written, or the kernel does not take the value.
        """
        descriptor = os.open(self.root / name, os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)

    @property
    def vendor(self) -> str | None:
        """Return `Intel` or `AMD`; None for another or an unknown vendor."""
        return VENDORS.get(self._cpuinfo("vendor_id") or "")

    @property
    def model(self) -> str | None:
        """Return the CPU's name as the vendor prints it."""
        return self._cpuinfo("model name")

    def _cpuinfo(self, field: str) -> str | None:
        match = re.search(rf"^{field}\s*:\s*(.+)$", self.read("proc/cpuinfo") or "", re.MULTILINE)
        return match[1].strip() if match else None

    @property
    def online_cpus(self) -> tuple[int, ...]:
        return self.read_cpus(f"{CPU}/online")

    @property
    def policies(self) -> list[str]:
        """Return folders of cpufreq, one for each set of CPUs that change their frequency together."""
        return [name for name in self.glob(f"{CPU}/cpufreq/policy*") if self.exists(f"{name}/scaling_governor")]

    @property
    def idle_states(self) -> list[IdleState]:
        """Return every sleep state of every online CPU."""
        online = set(self.online_cpus)
        states = []
        for folder in self.glob(f"{CPU}/cpu[0-9]*/cpuidle/state[0-9]*"):
            match = re.search(r"/cpu(\d+)/cpuidle", folder)
            latency, disabled = self.read_number(f"{folder}/latency"), self.read(f"{folder}/disable")
            if match is None or int(match[1]) not in online or latency is None or disabled is None:
                continue
            name = self.read(f"{folder}/name") or Path(folder).name
            states.append(IdleState(folder, int(match[1]), name, latency, disabled != "0"))
        return states


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list as the kernel writes it ("0-3,8"), in order, each once; an empty list has none.

    Raises:
        ValueError: the text is not such a list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of CPUs; write it as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"{text!r} is not a list of CPUs: {first}-{last} runs backwards")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """Return the shortest list of these CPUs, as the kernel prints it."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
