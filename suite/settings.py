"""What a run is asked to do: the options that shape its numbers, and the presets `full` and `--quick`.

A resumed run must have the same `RunSettings`; which workloads and modes are run may differ between its parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from suite.errors import WrongUse
from suite.schema import Environment, Record


class RunSettings(Record):
    """Options that shape the numbers; `environment.json` keeps them.

    `samples` per cell are spread over `blocks`; inputs rotate over `input_sets` sets at different addresses.
    `warm_up` counts iterations before the first sample, recording included. `check_inputs` input sets are compared
    with eager before any timing. `variant` None means each workload's own default.
    """

    samples: int = 100
    blocks: int = 5
    input_sets: int = 4
    warm_up: int = 8
    check_inputs: int = 2
    seed: int = 1337
    with_optimizer: bool = False
    warm_cache: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    size: Literal["full", "tiny"] = "full"
    variant: str | None = None

    def checked(self) -> RunSettings:
        """These settings, once they are known to make sense.

        Raises:
            WrongUse: an option is out of range, or two do not go together.
        """
        for name, least in (("samples", 1), ("blocks", 1), ("input_sets", self.check_inputs), ("warm_up", 1)):
            if getattr(self, name) < least:
                option = "--" + name.replace("_", "-")
                raise WrongUse(f"{option} {getattr(self, name)} is too small: it must be at least {least}")
        if self.blocks > self.samples:
            raise WrongUse(
                f"--blocks {self.blocks} is more than --samples {self.samples}: each block needs at least one sample"
            )
        if not 0 <= self.seed < 2**63:
            raise WrongUse(f"--seed {self.seed} is out of range: it must be from 0 to 2**63 - 1")
        return self


@dataclass(frozen=True, slots=True)
class Preset:
    """Defaults of `encore run`. `workloads` None means all that are registered."""

    workloads: tuple[str, ...] | None
    settings: RunSettings


FULL = Preset(workloads=None, settings=RunSettings())
QUICK = Preset(workloads=("ALNET", "DCGAN", "EOS"), settings=RunSettings(samples=20, blocks=5))
"""A smoke run: a vision model, a training workload and a graph of one kernel, few samples each."""


def setting_differences(environment: Environment, given: Mapping[str, Any]) -> list[str]:
    """Options given now that differ from those a run was made with, as "--samples: 100 there, 50 now"."""
    return [
        f"--{name.replace('_', '-')}: {environment.settings.get(name)} there, {value} now"
        for name, value in given.items()
        if environment.settings.get(name) != value
    ]


_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m)?(?:(?P<s>\d+(?:\.\d+)?)s?)?")


def parse_duration(text: str, option: str) -> float:
    """Seconds of a duration such as "9m", "90s", "1h30m" or "45" (seconds).

    Raises:
        WrongUse: it is no duration, or not above zero.
    """
    match = _DURATION.fullmatch(text.strip())
    parts = {unit: float(value) for unit, value in match.groupdict().items() if value} if match else {}
    seconds = sum(value * {"h": 3600.0, "m": 60.0, "s": 1.0}[unit] for unit, value in parts.items())
    if seconds <= 0:
        raise WrongUse(f"{option} {text!r} is no duration above zero: write 90s, 9m or 1h30m")
    return seconds


def format_duration(seconds: float) -> str:
    """ "1h05m", "9m30s" or "42s"."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
