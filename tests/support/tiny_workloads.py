"""Workloads of a few tensors around any module, for tests of what measures them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from models.instance import Instance, instantiate
from models.registry import Inputs, Workload
from suite.results.schema import CompileConditions
from suite.worker.live_cell import LiveCell
from suite.worker.protocol import CellSpec, Prepared


def normal_inputs(*shape: int) -> Callable[..., Inputs]:
    """An input function: one tensor of this shape, normal."""

    def inputs(variant: str, size: str, generator: torch.Generator) -> Inputs:
        return Inputs(args=(torch.randn(*shape, generator=generator),))

    return inputs


_FOUR_BY_EIGHT = normal_inputs(4, 8)


def workload_of(
    build: Callable[[], torch.nn.Module], inputs: Callable[..., Inputs] = _FOUR_BY_EIGHT, **fields: Any
) -> Workload:
    """A workload that builds its module by `build()`; float32 inference unless `fields` say otherwise."""
    defaults = {"acronym": "TINY", "name": "tiny", "suite": "tests", "task": "inference", "batch": 4}
    return Workload(
        build=lambda variant, size: build(), inputs=inputs, **{**defaults, "dtype_policy": "fp32", **fields}
    )


def instance_of(build: Callable[[], torch.nn.Module], *args: Any, device: str = "cpu", **fields: Any) -> Instance:
    """The same, on a device."""
    return instantiate(workload_of(build, *args, **fields), size="tiny", device=device, seed=3)


def spec_of(workload: str = "TINY", mode: str = "eager", **changes: Any) -> CellSpec:
    """Return the description of a cell of a tiny workload on the CPU; `changes` are other fields."""
    given = {"variant": "published", "size": "tiny", "device": "cpu", "cpu_threads": 1, "cache_dir": "unused"}
    return CellSpec(workload=workload, mode=mode, **{**given, **changes})


def without_dropout(module: torch.nn.Module) -> None:
    """It draws no random numbers but those of the host that a model may branch on."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)


class WholeCell(LiveCell):
    """A live cell whose two steps of preparation are taken at once."""

    def prepare(self) -> Prepared:
        self.build()
        self.compile(CompileConditions.COLD_ALONE)
        return self.settle()
