"""Define the records of a run: the contents of `environment.json` and of each line of `cells.jsonl`.

Names of fields include units (`host_us`, `copied_bytes`). A field that was not measured is `None`, never 0. Fields of
older rows that nothing reads any more are left out while reading.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

SCHEMA_VERSION = 2
"""Version of rows and environments. Additions are optional, so that recorded runs stay readable."""

EXPLANATION_VERSION = 3
"""Version of the files of `encore explain`."""


class Record(BaseModel):
    """Define the base class of everything written to disk: immutable.

    A NaN or infinity (the error of an output with NaN in it) is written as the string "NaN" or "Infinity", which is
    valid JSON and is read as that float.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class Status(StrEnum):
    """Define the outcome of a cell. With any other than `PASS`, `encore run` exits with 1."""

    PASS = "pass"
    FAIL_ACCURACY = "fail_accuracy"
    MODEL_FAIL_TO_LOAD = "model_fail_to_load"
    COMPILE_ERROR = "compile_error"
    RUN_ERROR = "run_error"
    OOM = "oom"
    TIMEOUT = "timeout"
    CRASH = "crash"
    BAD_OUTPUT = "bad_output"
    UNSUPPORTED = "unsupported"


BAD_STATUSES = frozenset(status.value for status in Status if status is not Status.PASS)


class Grouping(StrEnum):
    """Define which modes of a workload were alive on the GPU while this one was measured."""

    TOGETHER = "together"
    HALVES = "halves"
    PAIRS = "pairs"
    SEQUENTIAL = "sequential"


THROTTLING = ("SwPowerCap", "HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
"""NVML's names of the reasons that lower a clock because of power or temperature; others are settings."""


class GpuState(Record):
    """Hold one NVML reading: the active reasons for lower clocks. Older rows have other reasons, too."""

    throttle_reasons: list[str]


Us = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A measured time in microseconds."""


class Block(Record):
    """Hold consecutive samples of one mode.

    Blocks of index k are measured one after another in all modes of a group, in an order that changes with k; `turn` is
    the position in time. Both numbers restart with each `process`.

    `host_us[i]` is wall time from the call to completion on the device, `device_us[i]` the CUDA-event time of the
    same iteration (None on a CPU), `input_sets[i]` the input set it ran on. `core` is the
    logical core that the calling thread was bound to, None where it was bound to none.
    """

    process: int = 0
    core: int | None = None
    index: int
    turn: int
    host_us: list[Us]
    device_us: list[float] | None
    input_sets: list[int]
    gpu_before: GpuState | None
    gpu_after: GpuState | None


class Correctness(Record):
    """Hold the comparison with eager on `input_count` inputs, made before any timing.

    `max_relative_error` is the largest ||x - ref|| / ||ref|| over outputs, loss and gradients, in the L2 norm and, in
    newer rows, the maximum norm; `worst` is the name of its tensor, `tolerance` the error allowed for the compute
    dtype. `reference_error` is eager's error relative to a float32 (float64) run, only where the tolerance did not
    decide; for a stochastic workload that of eager without dropout, NaN where it is infinite. `digests[i]` is the
    SHA-256 over the bits of output, loss and gradients of input set i; `deterministic`: a second call on the same
    inputs and seed had equal results. In newer rows, digests are over the tensors with constant bits, and `varying[i]`
    has the others, with sketches of their values (`suite.measure.fingerprint`). `bitwise` compares with the mode named
    in `bitwise_with` (an equal one, if the mode may equal one of several). It is None where none of them ran or is
    deterministic, or where the mode equals none of them and they differ from each other.
    """

    passed: bool
    input_count: int
    compared_tensors: int
    compute_dtype: str
    tolerance: float
    max_relative_error: float
    worst: str
    reference_error: float | None
    fallback_random: bool
    deterministic: bool
    digests: list[str]
    bitwise_with: str | None
    bitwise: bool | None
    ranks_equal: bool | None = None
    """True if all ranks' results have the same bits, on all inputs, where the workload is split over GPUs."""
    varying: list[dict[str, list[float]]] | None = None
    widened_error: float | None = None
    """Error of the mode compiled in higher precision, relative to eager in that precision; measured where eager's
    error in its own dtype is too large for a reference."""


class NotCaptured(Record):
    """Hold Inductor's reason for a graph or partition that is not in a CUDA graph, with the user's source line."""

    reason: str
    source_line: str | None
    count: int


class Coverage(Record):
    """Count kernels of one steady iteration by kind of launch (torch.profiler), without copies and memsets.

    `percent` = 100 * graph_kernels / (graph_kernels + eager_kernels), None where no kernel ran.
    """

    graph_kernels: int
    eager_kernels: int
    percent: float | None
    graph_launches: int
    graph_memcpys: int
    graph_memsets: int
    eager_memcpys: int
    eager_memsets: int
    profiled_iterations: int


class GraphCounts(Record):
    """Count the graphs of one cell. `cuda_graphs` are recordings, `partitions` the captured or capturable parts."""

    fx_graphs: int
    graph_breaks: int
    partitions: int | None
    cuda_graphs: int | None
    not_captured: list[NotCaptured]


class Copies(Record):
    """Hold the bytes moved per steady iteration.

    `placeholder_bytes` is data copied into graph placeholders, and `pointer_bytes` the pointers written instead.
    """

    placeholder_bytes: int | None
    placeholder_tensors: int | None
    pointer_bytes: int | None


class Memory(Record):
    """Hold peak bytes of PyTorch's allocator while compiling and recording, and while replaying steadily."""

    compile_peak_allocated_bytes: int | None
    compile_peak_reserved_bytes: int | None
    replay_peak_allocated_bytes: int | None
    replay_peak_reserved_bytes: int | None


class CompileConditions(StrEnum):
    """Define the conditions of a compile time: caches of earlier compilations, other modes compiling."""

    COLD_ALONE = "cold, alone"
    """Only files of the toolchain were cached, and no other mode of the run was active."""
    COLD_FOLLOWED = "cold, others followed"
    """The same, while other modes of the workload compiled too, each up to its first kernel."""
    KERNELS_ALONE = "kernels cached, alone"
    """Kernels of earlier modes in the list were cached, graphs were not."""
    KERNELS_SIDE_BY_SIDE = "kernels cached, side by side"
    """The same, while other modes of the workload compiled too. Since 2026-11-24 these include the mode that compiles
    first, and each waits for that mode's kernels (`CompileTimes.waited_s`)."""
    WARM = "cached"
    """Kernels and graphs were cached."""


class CompileTimes(Record):
    """Hold seconds to the first result (`first_call_s`) and through all of warm-up; `parts` by Dynamo's timers.

    `conditions` is None where they are unknown. `settle_calls` counts the calls after warm-up until none of Encore's
    CUDA graphs waited for more calls; `settled`: this state was reached. Until 2026-11-24 first processes spread
    Encore's work on graphs over these calls, as users' programs do. `waited_s` is the time for which the mode waited
    for the GPU's lock, and in older rows for the mode that compiled first; of the other times only `parts` include it,
    since version 0.2. `calls_s` has the first `CALLS_OF_START` calls of warm-up and settling, each with a
    synchronization; `settle_s` is the sum of all calls after warm-up.
    """

    first_call_s: float
    warm_up_s: float
    warm_cache: bool
    parts: dict[str, float]
    conditions: CompileConditions | None = None
    waited_s: float = 0.0
    settle_calls: int | None = None
    settled: bool | None = None
    warm_up_calls: int | None = None
    calls_s: tuple[float, ...] = ()
    settle_s: float | None = None


CALLS_OF_START = 100
"""Number of first calls that are timed one by one; their sum is the time of a program's start."""


class Metrics(Record):
    """Hold the metrics that a worker measures once per cell, after the timed blocks."""

    coverage: Coverage | None = None
    graphs: GraphCounts | None = None
    copies: Copies | None = None
    memory: Memory | None = None
    kernel_time_us: float | None = None
    """Sum of kernel durations of one steady iteration; iteration time over this is the distance to the limit."""
    encore_report: list[JsonValue] | None = None
    kernels: dict[str, int] | None = None
    """Kernels of one steady iteration with their launch configurations, and the count of each
    (`suite.measure.kernels`)."""
    more: dict[str, dict[str, float | None]] = {}
    """Values of the metrics in `suite.measure.metrics`, by metric and column."""


class LaterProcess(Record):
    """Describe a later process of the mode; the row includes its blocks.

    `compile`: everything was cached, and no work on graphs was spread over calls; `parts` should have no tuning.
    `retuned`: kernels and launch configurations that only one of this process and the first one ran.
    """

    process: int
    compile: CompileTimes | None
    retuned: list[str]


class HostUse(Record):
    """Describe other programs' load of the host while blocks of a mode were measured: mean number of busy CPU cores.

    It is that of the mode's most disturbed process. Older rows also count the GPUs outside of the run that were busy
    right before or right after.
    """

    cpu_cores: float | None
    gpus_at_work: int | None = None


class Cell(Record):
    """Hold one line of `cells.jsonl`: the measurements of a workload in a mode."""

    schema_version: int
    workload: str
    name: str
    suite: str
    task: str
    batch: int
    dtype_policy: str
    variant: str
    size: str
    mode: str
    baselines: list[str]
    device: str
    with_optimizer: bool
    seed: int
    status: Status
    error: str | None
    log_tail: str | None
    started_at: str
    wall_s: float
    grouping: Grouping
    group: list[str]
    parameters: int | None
    input_bytes: int | None
    correctness: Correctness | None
    compile: CompileTimes | None
    metrics: Metrics | None
    blocks: list[Block]
    baseline_blocks: dict[str, list[Block]]
    """Blocks of baselines that alternated with this cell's and are not in the baselines' rows, in `halves` and
    `pairs`."""
    processes: int = 1
    """Number of processes that have blocks. A process after the first that lacks memory is left out."""
    other_kernels: list[int] = []
    """Processes whose kernels differ from those of the first, in this mode or in one of `baseline_blocks`."""
    later: list[LaterProcess] = []
    """The mode's own processes after the first."""
    others: HostUse | None = None
    """Other programs on the host meanwhile; not recorded in older rows."""
    tp: int | None = None
    """Number of GPUs that the workload is split over (tensor parallelism); None if it is not split."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the key of a cell within a run: (workload, variant, size, mode)."""
        return (self.workload, self.variant, self.size, self.mode)

    def at(self, path: str) -> Any:
        """Return the value at a path such as "metrics.coverage.percent"; None where a part was not measured."""
        found: Any = self
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        return found

    @property
    def first_error_line(self) -> str:
        """Return the reason in one line why the cell did not pass."""
        return (self.error or "").strip().partition("\n")[0] or "no error given"


class GpuInfo(Record):
    name: str
    compute_capability: str
    memory_bytes: int


class CpuInfo(Record):
    model: str
    logical_cores: int
    physical_cores: int | None
    governor: str | None
    smt: bool | None
    numa_nodes: int | None
    memory_bytes: int


class Environment(Record):
    """Hold `environment.json`: everything that others need to evaluate or repeat the run."""

    schema_version: int
    run_id: str
    created_at: str
    command_line: list[str]
    git_commit: str | None
    git_dirty: bool | None
    code: str | None = None
    """An id of the code that ran, committed or not: see `suite.measure.environment.code_id`. Older runs have none, or
    git's id of the tree."""
    python: str
    platform: str
    packages: dict[str, str]
    torch: str
    torch_cuda: str | None
    cudnn: str | None
    driver: str | None
    gpu: GpuInfo | None
    gpu_count: int
    cpu: CpuInfo
    settings: dict[str, JsonValue]
    """Options that shape the numbers: samples, blocks, input sets, seed, size, tf32, cache policy."""

    @property
    def device(self) -> str:
        """Return the name of the GPU, or the CPU's model where there is none."""
        return self.gpu.name if self.gpu else f"CPU {self.cpu.model}"
