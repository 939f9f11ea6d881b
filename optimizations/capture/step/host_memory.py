"""Compute how much host memory a process may take without taking it from others, by machine and control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OF_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_OF_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def spare_host_bytes(*, processes: Path = Path("/proc"), root: Path = _ROOT) -> int:
    """Return the bytes that are free, or hold what was read from files and not used lately; 0 if that is not known."""
    try:
        spare = _numbers(processes / "meminfo")["MemAvailable:"] * 1024
        groups = list(_groups(processes / "self" / "cgroup", root))
    except (OSError, KeyError, ValueError):
        return 0
    for group in groups:
        for limit, used, cached in (_OF_VERSION_1, _OF_VERSION_2):
            try:
                left = int((group / limit).read_text()) - int((group / used).read_text())
                spare = min(spare, left + _numbers(group / "memory.stat").get(cached, 0))
            except (OSError, ValueError):  # of the other version, or without a limit
                continue
    return max(spare, 0)


def _groups(of_process: Path, root: Path) -> Iterator[Path]:
    """Yield the process's own control groups that may limit its memory, and those around them."""
    for line in of_process.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / name.lstrip("/")
        yield from (one for one in (group, *group.parents) if one.is_relative_to(top))


def _numbers(file: Path) -> dict[str, int]:
    """Return the numbers after the names in a file of the kernel's."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
