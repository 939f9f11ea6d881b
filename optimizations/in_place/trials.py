"""Serve calls of the program by the copying graph and a candidate, until outcomes decide.

The candidate is a copy of the recorded graph that is changed as planned. Which calls are tried, and what is kept for
the next one, is here; `proof` compares the outcomes of one call and decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.graph.driver import check
from optimizations.graph.memory import size_bytes
from optimizations.in_place.budget import waiting_for_memory
from optimizations.in_place.examination import Examination, Findings, Host
from optimizations.in_place.proof import MOST_CALLS, Candidate, Proof, Standing, TrialCall

MOST_UNDER_WAY = 8
"""Trial calls whose outcome is not known yet. A program that never waits for the device is hundreds of launches ahead
of it, and one outcome at a time would take that many calls for each of `proof.MOST_CALLS`."""

NOT_READABLE = "an input was not aligned, or in memory that the graph writes, in each"
"""A program that passes results of its graphs back to them, or slices that are not aligned, does so in each call."""


class Trials:
    """Run trial calls of one candidate, as the module says. Call `close` at the end.

    Args:
        examination: that of the recording; `host` is its node.
        findings: what was found, with the plan that the candidate carries out.
        unproven: inputs whose uses are not known by construction.

    Attributes:
        calls: trial calls so far.
        short_of_memory: the memory that the next trial waits for; None where it waits for none.

    Raises:
        CudaCallFailed, AddressRefused, TableUnavailable: the plan cannot be carried out.
    """

    def __init__(self, examination: Examination, host: Host, findings: Findings, unproven: Sequence[int]) -> None:
        self._examination = examination
        self._recorded = examination.recorded
        self._host = host
        self._findings = findings
        self._candidate: Candidate | None = examination.candidate(findings)
        self._proof = Proof(frozenset(unproven))
        self._begun: deque[TrialCall] = deque()
        self._earlier: dict[int, torch.Tensor] = {}
        self._not_readable = 0
        self.calls = 0
        self.short_of_memory: str | None = None

    @property
    def under_way(self) -> int:
        """Return the number of trial calls whose outcome is not known yet."""
        return len(self._begun)

    @property
    def unproven(self) -> frozenset[int]:
        """Return the inputs whose uses are not known by construction."""
        return self._proof.unproven

    @property
    def always_the_same(self) -> frozenset[int]:
        """Return unproven inputs that held the same data in every trial call."""
        return self._proof.always_the_same

    @property
    def objection(self) -> str | None:
        """Return why the candidate was refused or given up."""
        return self._proof.objection

    @property
    def not_readable(self) -> str | None:
        """Return why the last calls could not be tried; None where the last one could."""
        return f"{NOT_READABLE} of the last {self._not_readable} calls" if self._not_readable else None

    def stop(self) -> Standing:
        """Return where the proof stands if there are no more trial calls."""
        return self._proof.stop()

    def failure(self) -> str | None:
        """Return what went wrong on the device. Waits for the device."""
        return self._candidate.failure() if self._candidate is not None else None

    def judge(self) -> Standing:
        """Take the outcomes of earlier trial calls into account, as far as they are there."""
        while self._begun:
            observed = self._begun[0].result()
            if observed is None:
                break
            self._begun.popleft()
            # Begun before it was known that the function may not repeat itself, it says nothing.
            if self._proof.needs_spread and observed.spread is None and any(observed.deviations):
                continue
            standing = self._proof.add(observed)
            if standing is not Standing.UNDECIDED:
                return standing
        return Standing.UNDECIDED

    def next_trial(self, inputs: Sequence[Any]) -> TrialCall | None:
        """Return a trial with this call; None where it is of no use, or these inputs cannot be read in place."""
        self.short_of_memory = None
        if self._candidate is None or self.under_way >= min(MOST_UNDER_WAY, MOST_CALLS - self._proof.calls):
            return None
        effects = self._host.effects(inputs)
        unproven = sorted(self.unproven)
        needed = effects.copied_bytes(spread=self._proof.needs_spread) + sum(
            2 * size_bytes(inputs[index]) for index in unproven
        )
        self.short_of_memory = waiting_for_memory(needed, self._examination.tools.free_bytes())
        if self.short_of_memory is not None:
            return None
        if not self._readable_in_place(inputs):
            self._not_readable += 1
            return None
        self._not_readable = 0
        if any(index not in self._earlier for index in unproven):
            self._keep({index: inputs[index] for index in unproven})
            return None
        again = self._launch_recorded if self._proof.needs_spread else None
        device = self._examination.tools.device
        return TrialCall(effects, unproven, dict(self._earlier), self._host.fill, again, device)

    def run(self, trial: TrialCall, inputs: Sequence[Any], replay: Callable[[], Any]) -> None:
        """Serve a call of the program by `replay`, and try the candidate on it."""
        candidate = self._candidate
        assert candidate is not None
        copied = self._recorded.copied
        tensors = {index: inputs[index] for index in copied if isinstance(inputs[index], torch.Tensor)}
        addresses = {index: inputs[index].data_ptr() for index in candidate.inputs}
        trial.run(tensors, replay, lambda: candidate.launch(addresses))
        self._begun.append(trial)
        self.calls += 1
        self._keep(tensors)

    def close(self) -> None:
        """Free what is kept on the device."""
        candidate, self._candidate = self._candidate, None
        self._begun.clear()
        self._earlier = {}
        if candidate is not None:
            candidate.close()

    def still_read(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory that launches read until the work of the stream is done. See `AppliedPlan.still_read`."""
        if self._candidate is not None:
            self._candidate.still_read(stream)

    def _keep(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Keep this call's data of unproven inputs for the next trial."""
        self._earlier = {
            index: torch_internals.clone_preserve_strides(tensors[index]) for index in sorted(self.unproven)
        }

    def _launch_recorded(self) -> None:
        tools = self._examination.tools
        executable = tools.driver.CUgraphExec(self._recorded.graph.raw_cuda_graph_exec())
        check(tools.driver.cuGraphLaunch, executable, tools.stream())

    def _readable_in_place(self, inputs: Sequence[Any]) -> bool:
        owned = self._examination.owned()
        overwritten = owned.joined(self._examination.written().values())
        for one in self._examination.tracked(self._findings):
            address = inputs[one.index].data_ptr()
            memory = owned if one.is_fixed else overwritten
            if address % one.alignment_bytes or memory.overlap(address, one.size_bytes):
                return False
        return True
