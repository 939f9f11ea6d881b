"""Hold the program of a cell: its module and input sets on the device, and the ranks that it is split over.

The program is the same in each mode; `suite.worker.compilation` compiles it for a mode.

A workload that is split over GPUs has a process for each (`suite.worker.rank_group`). Each rank compares its results
with those of the whole program and with those of the other ranks. The ranks agree on every decision about further
calls.
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
from suite.measure.gpu import gpu_reader
from suite.measure.iteration import set_numerics
from suite.measure.memory import release
from suite.measure.results import State
from suite.measure.timing import require_distinct_addresses, timer_for
from suite.worker.gpu_turns import TURNS, turns_of
from suite.worker.protocol import CellSpec
from suite.worker.rank_group import RankGroup, join


class CellProgram:
    """Hold the program of a specification. `build` sets its attributes.

    Attributes:
        instance: the module and its loss; while a trial runs, with the loss scaled for its gradients.
        input_sets: sets of inputs at different addresses.
        checked: the input sets whose results are compared.
        states: the tensors that a run on each of these changes, while results are compared.
        ranks: the ranks that the program is split over.
        turns: this process's lock of the GPU.
    """

    def __init__(self, spec: CellSpec) -> None:
        self.spec = spec
        self.turns = turns_of(Path(spec.cache_dir) / TURNS)
        self._offloaded: Instance | None = None

    def build(self) -> None:
        """Build the module and all input sets, and connect to the other ranks."""
        spec = self.spec
        workload = find(spec.workload)
        if spec.stochastic:
            workload = replace(workload, stochastic=True)
        set_numerics()
        self.ranks = join(spec)
        self.instance: Instance = instantiate(
            workload, variant=spec.variant, size=spec.size, device=spec.device, seed=spec.seed
        )
        if workload.own is None:  # a user's program keeps what it sets
            set_numerics()  # a model of TorchBench's may have set others
        if isinstance(self.ranks, RankGroup):
            assert workload.sharding is not None
            workload.sharding.shard(self.instance.module, self.ranks.mesh)
        self.input_sets: list[Inputs] = []
        for index in range(spec.input_sets):
            self.input_sets.append(self.instance.inputs(index))
            release(self.instance.device)  # inputs are drawn in float32; other modes need the memory
        require_distinct_addresses(self.input_sets)
        self.checked = self.input_sets[: spec.check_inputs]
        self.states = [State(self.instance.module, inputs) for inputs in self.checked]
        self.timer = timer_for(self.instance.device)
        if isinstance(self.ranks, RankGroup):
            self.timer.before_start = self.ranks.start_together
        self.read_gpu = gpu_reader(_gpu_uuid(self.instance.device))

    @property
    def marks_steps(self) -> bool:
        """Return whether steps are marked: in all modes, so that these differ only in the compiled code."""
        return self.instance.device.type == "cuda"

    def calling(self) -> AbstractContextManager[None]:
        """Return a shared lock for a call that must not disturb another process's tuning or timing.

        Ranks do not lock: a rank that waits for the lock while another waits for it in a collective would deadlock.
        """
        return contextlib.nullcontext() if isinstance(self.ranks, RankGroup) else self.turns.calling()

    @contextmanager
    def whole(self) -> Iterator[tuple[Instance, list[State]]]:
        """Yield the program on one GPU and its state, for the reference results.

        Where the workload is split over GPUs, this is a separate instance with the same weights. It is built at the
        first use, and kept in host memory between uses.
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
        """Drop the whole program and the states after the last comparison of results."""
        self._offloaded = None
        self.states.clear()


def _gpu_uuid(device: torch.device) -> str | None:
    """Return NVML's name of the GPU that torch uses; None on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
