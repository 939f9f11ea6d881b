"""Convert lists of CPUs as the kernel writes them: "0-3,8" (Documentation/admin-guide/cputopology)."""

from __future__ import annotations

import re
from collections.abc import Iterable


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list, in order, each once; an empty list has none.

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
