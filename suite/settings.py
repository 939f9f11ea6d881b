"""Define the settings of a run: the options that affect its numbers, its workloads and modes, and the presets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from suite.results.errors import WrongUse
from suite.results.schema import Environment, Record

MATMUL_PRECISION: Literal["high"] = "high"
"""Precision of float32 matmuls, in PyTorch's terms: TF32 allowed, as the published runner has it for all workloads."""

USUAL_PROCESSES = 3
"""Starts of each mode on a GPU: fewer give no verdict."""


class RunSettings(Record):
    """Hold options that shape the numbers: all rows of a run have the same.

    Each mode is started `processes` times (None: three times on a GPU, once on a CPU). Each process measures at least
    `blocks` blocks of at least `samples` samples (half as many blocks where these take longer than `measure_s` and
    5 s), and more until its ratios are narrow enough, for `measure_s` seconds or up to `most_blocks`. Inputs rotate
    over `input_sets` sets at different addresses. `warm_up` counts iterations before the first sample, recording
    included. `check_inputs` input sets are compared with eager before any timing. `warm_cache`: compiled kernels are
    kept from run to run, else every workload is compiled and tuned afresh. `cold_compile_times`: each mode compiles
    once more, alone and with its own caches. `variant` None means each workload's own default. A run with
    other settings is of another version, and cannot be continued.
    """

    model_config = ConfigDict(extra="forbid")

    processes: int | None = None
    blocks: int = 20
    samples: int = 2
    measure_s: float = 16.0
    most_blocks: int = 200
    cold_compile_times: bool = False
    input_sets: int = 4
    warm_up: int = 8
    check_inputs: int = 2
    seed: int = 1337
    with_optimizer: bool = False
    warm_cache: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    size: Literal["full", "tiny"] = "full"
    variant: str | None = None
    matmul_precision: Literal["high"] = MATMUL_PRECISION

    def checked(self) -> RunSettings:
        """Return these settings, once they are known to make sense.

        Raises:
            WrongUse: the seed is out of range; the command line checks the range of the others.
        """
        if not 0 <= self.seed < 2**63:
            raise WrongUse(f"--seed {self.seed} is out of range: it must be from 0 to 2**63 - 1")
        usual = USUAL_PROCESSES if self.device == "cuda" else 1
        return self.model_copy(update={"processes": self.processes or usual})


class RunPlan(RunSettings):
    """Hold the `settings` of `environment.json`: the settings, and the names of what is run."""

    workloads: list[str]
    modes: list[str]

    @property
    def settings(self) -> RunSettings:
        return RunSettings(**{name: getattr(self, name) for name in RunSettings.model_fields})


@dataclass(frozen=True, slots=True)
class Preset:
    """Hold defaults of `encore run`. `workloads` empty means the default set, `modes` None all the device can run."""

    workloads: tuple[str, ...]
    settings: RunSettings
    modes: tuple[str, ...] | None = None


FULL = Preset(workloads=(), settings=RunSettings())
QUICK = Preset(workloads=("ALNET", "DCGAN", "EOS"), settings=RunSettings(processes=1, blocks=10, measure_s=0.0))
"""A smoke run: a vision model, a training workload and a graph of a single kernel, with few samples each."""

QUICK_PROGRAM = Preset(
    workloads=(),
    settings=RunSettings(processes=3, blocks=6, measure_s=0.0),
    modes=("eager", "compile", "graph", "encore"),
)
"""Two minutes for a program of the user's own. Three processes: fewer decide nothing."""


def recorded_plan(environment: Environment) -> RunPlan:
    """Return the plan a run was made with.

    Raises:
        WrongUse: its `settings` are not those of this version.
    """
    try:
        return RunPlan.model_validate(environment.settings)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, each["loc"])) for each in error.errors())
        raise WrongUse(
            f"run {environment.run_id}: its settings are not those of this version of Encore (see {fields}); "
            "start a new run, or use the commit it names"
        ) from error


def setting_differences(there: RunPlan, here: Mapping[str, Any]) -> list[str]:
    """Return options given now that differ from those a run was made with, as "--samples: 100 there, 50 here"."""
    return [
        f"--{name.replace('_', '-')}: {getattr(there, name)} there, {value} here"
        for name, value in here.items()
        if getattr(there, name) != value
    ]


_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0}


def parse_duration(text: str, option: str) -> float:
    """Return the seconds of a duration such as "9m", "90s", "1h30m" or "45" (seconds).

    Raises:
        WrongUse: it is not a duration, or not above zero.
    """
    match = _DURATION.fullmatch(text.strip())
    parts = match.groupdict() if match else {}
    seconds = sum(float(value) * _UNIT_S[unit] for unit, value in parts.items() if value)
    if seconds <= 0:
        raise WrongUse(f"{option} {text!r} is not a duration above zero: write 90s, 9m or 1h30m")
    return seconds


def format_duration(seconds: float) -> str:
    """Return a duration in words: "1h05m", "9m30s" or "42s"."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
