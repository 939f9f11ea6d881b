"""List what differs around two runs: versions, hardware, settings. It comes first, because it may explain the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.measure.checkout import shown_code
from suite.report.load import Run

STOCK_SOFTWARE = ("PyTorch", "CUDA of PyTorch", "cuDNN", "driver", "Python", "package triton")
"""Where these are equal, a mode that Encore has no part in is the same program in both runs."""
_NOT_SETTINGS = ("workloads", "modes", "shard")


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that the two runs do not have in common, as text."""

    what: str
    base: str
    new: str


def differences(base: Run, new: Run) -> tuple[Difference, ...]:
    """List everything recorded of two runs that differs, the weightiest first."""
    ours, theirs = (_facts(run) for run in (base, new))
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = ((name, ours.get(name, "none"), theirs.get(name, "none")) for name in names)
    return tuple(Difference(*pair) for pair in pairs if pair[1] != pair[2])


def _facts(run: Run) -> dict[str, str]:
    environment = run.environment
    cpu, gpu = environment.cpu, environment.gpu
    commit = (environment.git_commit or "unknown")[:10] + (" + changes" if environment.git_dirty else "")
    facts: Mapping[str, Any] = {
        "device": run.device,
        "GPU memory": gpu.memory_bytes if gpu else None,
        "driver": environment.driver,
        "PyTorch": environment.torch,
        "CUDA of PyTorch": environment.torch_cuda,
        "cuDNN": environment.cudnn,
        "Python": environment.python,
        "commit": commit,
        "code": shown_code(environment.code),
        "CPU": cpu.model,
        "CPU cores": cpu.logical_cores,
        "governor": cpu.governor,
        "SMT": cpu.smt,
        "NUMA nodes": cpu.numa_nodes,
        "operating system": environment.platform,
    }
    settings = {f"setting {name}": value for name, value in environment.settings.items() if name not in _NOT_SETTINGS}
    packages = {f"package {name}": value for name, value in environment.packages.items()}
    return {
        name: "unknown" if value is None else str(value) for name, value in {**facts, **settings, **packages}.items()
    }
