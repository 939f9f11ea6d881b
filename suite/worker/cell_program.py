"""Keep the program of a cell: its module and input sets on the device, and the ranks that it is split over.

All of it is the same in each mode. What a mode makes of it is a compilation (`suite.worker.compilation`).

A workload that is split over GPUs has a process for each (`suite.worker.rank_group`). Each compares its own results
with those of the whole program, and all compare theirs with one another. What is decided about further calls is decided
together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from models.instance import Instance, instantiate
from models.registry import Inputs, find
from suite.measure.gpu_state import gpu_reader
from suite.measure.iteration import set_numerics
from suite.measure.memory import release
from suite.measure.results import State
from suite.measure.timing import require_distinct_addresses, timer_for
from suite.worker.gpu_turns import TURNS, turns_of
from suite.worker.protocol import CellSpec
from suite.worker.rank_group import RankGroup, join


class CellProgram:
    """Keep the program that a specification asks for. It is there once it is built.

    Attributes:
        instance: the module and its loss; while a trial runs, with the loss scaled as its gradients need it.
        input_sets: each at addresses of its own.
        checked: those of them whose results are compared.
        states: what a run on each of these changes, until results are compared no more.
        ranks: those that it is split over.
        turns: of this process on the GPU.
    """

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        self.turns = turns_of(Path(spec.cache_dir) / TURNS)
        self._offloaded: Instance | None = None

    def build(self) -> None:
        """Build the module and all input sets, and meet the other ranks."""
        spec = self.spec
        workload = find(spec.workload)
        if spec.stochastic:
            workload = replace(workload, stochastic=True)
        set_numerics()
        self.ranks = join(spec)
        self.instance: Instance = instantiate(
            workload, variant=spec.variant, size=spec.size, device=spec.device, seed=spec.seed
        )
        if isinstance(self.ranks, RankGroup):
            assert workload.sharding is not None
            workload.sharding.shard(self.instance.module, self.ranks.mesh)
        self.input_sets: list[Inputs] = []
        for index in range(spec.input_sets):
            self.input_sets.append(self.instance.inputs(index))
            release(self.instance.device)  # drawn in float32: twice what stays, and other modes need it
        require_distinct_addresses(self.input_sets)
        self.checked = self.input_sets[: spec.check_inputs]
        self.states = [State(self.instance.module, inputs) for inputs in self.checked]
        self.timer = self.ranks.timer(timer_for(self.instance.device))
        self.read_gpu = gpu_reader(_gpu_uuid(self.instance.device))

    @property
    def marks_steps(self) -> bool:
        """Return whether steps are marked, in all modes alike, those that need no marks among them: they differ in what
        is compiled, in nothing else."""
        return self.instance.device.type == "cuda"

    def calling(self) -> AbstractContextManager[None]:
        """Return a turn for a call that another process's tuning, or its timing of an iteration, must not meet.

        Ranks have none: one that waits for its turn while its neighbour waits for it in a collective would wait for
        ever.
        """
        return contextlib.nullcontext() if isinstance(self.ranks, RankGroup) else self.turns.calling()

    @contextmanager
    def whole(self) -> Iterator[tuple[Instance, list[State]]]:
        """Yield the program on one GPU, and its state: what results are compared with.

        Where it is split over GPUs, that is another instance with the same weights. It is built when it is first asked
        for, and waits in host memory between.
        """
        if not isinstance(self.ranks, RankGroup):
            yield self.instance, self.states
            return
        spec, device = self.spec, self.instance.device
        whole = self._offloaded or instantiate(
            self.instance.workload, variant=spec.variant, size=spec.size, device=spec.device, seed=spec.seed
        )
        whole.module.to(device)
        try:
            yield (
                replace(whole, loss_scale=self.instance.loss_scale),
                [State(whole.module, inputs) for inputs in self.checked],
            )
        finally:
            whole.module.to("cpu")
            self._offloaded = whole
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def forget_checks(self) -> None:
        """Forget the whole program and the states: results are compared no more."""
        self._offloaded = None
        self.states.clear()


def _gpu_uuid(device: torch.device) -> str | None:
    """Return NVML's name of the GPU that torch uses; None on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
