"""Read published numbers to compare with measured ones: `results/published.json`, with its sources.

A published number belongs to a workload as published, in full size; other variants and sizes have none. The papers ran
PyTorch 2.4, so their stock CUDA graphs are those of its time: the whole FX graph or nothing.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict

from suite.results.schema import Record
from suite.results.store import REPOSITORY, read_record

PUBLISHED_PATH = REPOSITORY / "results" / "published.json"
PUBLISHED_VARIANT = "published"


class Source(Record):
    """Hold the source of numbers: `citation`, and the machine and versions of the measurements."""

    label: str
    citation: str
    gpu: str
    torch: str | None
    cuda: str | None

    @property
    def setting(self) -> str:
        """Return label and machine in one phrase, for captions."""
        versions = [f"{name} {value}" for name, value in (("PyTorch", self.torch), ("CUDA", self.cuda)) if value]
        return f"{self.label}: {', '.join([self.gpu, *versions])}"


class Published(Record):
    """Hold `results/published.json`. Outer keys are those of `sources`, inner ones this suite's acronyms."""

    model_config = ConfigDict(extra="forbid")

    sources: dict[str, Source]
    headline: dict[str, dict[str, int | float | str]]
    speedups: dict[str, dict[str, dict[str, float]]]
    """Keys of the innermost level: `<mode>_over_<baseline>`."""
    coverage_percent: dict[str, dict[str, dict[str, float]]]
    """Kernels launched by CUDA graphs: `stock`, and after the paper's `placement`."""
    bytes_copied: dict[str, dict[str, dict[str, str | int]]]
    """Bytes per replay of all graphs `before` and `after` indirection, as printed, and the `graphs` that use it."""
    workloads: dict[str, dict[str, dict[str, str | int]]]
    """Rows of a paper's table: `name`, `task` and `batch`."""
    rewritten_program: dict[str, dict[str, dict[str, float]]]
    """Speed-ups of the program with its CPU tensors on the GPU: `without_graphs` and `with_graphs`."""
    copy_share_percent: dict[str, dict[str, float]]
    """Share of copies of inputs in an iteration with stock's graphs."""
    compile_s: dict[str, dict[str, dict[str, float]]]
    nanogpt_per_step_ms: dict[str, dict[str, float]]
    nanogpt_end_to_end_speedup: dict[str, float]
    nanogpt_sweep_prompt8: dict[str, dict[str, float]]

    def speedup(self, source: str, workload: str, mode: str, baseline: str) -> float | None:
        """Return the source's speed-up of the mode that corresponds to `mode` over `baseline`; its CUDA graphs are
        `graph`."""
        key = f"{mode}_over_{baseline}".replace("graph-unpartitioned", "graph")
        return self.speedups.get(source, {}).get(workload, {}).get(key)


def load_published(path: Path = PUBLISHED_PATH) -> Published:
    """Read the published numbers.

    Raises:
        InvalidResults: the file has wrong fields.
    """
    return read_record(Published, path, "published numbers", "the file belongs to the repository")
