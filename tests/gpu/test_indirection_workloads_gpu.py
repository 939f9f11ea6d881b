"""Every workload of the suite with indirection on a GPU: bits and copies compared with stock's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gpu_harness import SEED, copy_reasons, forget, recordings
from real_programs.compare import relative_error

from models.instance import Instance, instantiate
from models.registry import Inputs, find, workloads
from suite.measure.copies import copies_of
from suite.measure.iteration import callable_for, iteration, set_numerics
from suite.measure.modes import MODES
from suite.measure.results import Results, State, run_checked

pytestmark = pytest.mark.gpu

REPLAYS = 50

ALLOWED_COPIES = (
    "an output shares its memory",
    "kernels other than Triton's and products read it",
    "it was not aligned, or in memory that the graph writes",
    "no input explains it",  # library kernels that add in a fixed order carry bytes of the host's stack
)
"""Patterns of the reasons for which an input may be copied. What is copied, and why, is kept in the results as the
property `copied`."""

OVERWRITTEN = "overwritten by a subsequent run"
"""Part of stock's error where a program keeps results, as detection models of torchvision do."""

FEWEST_REPLAYS = 8
"""A recording that is replayed less often is left as stock made it; see `in_place.budget`."""

MOST_OF_STOCKS_SPREAD = 3.0
"""Largest difference where stock's bits vary, as a multiple of the differences between stock's own runs."""

EAGERS_TOLERANCE = 0.05
"""Largest difference from eager where stock cannot run the program, as a share of the tensor's norm."""


def check_copies(acronym: str, copied_bytes: int) -> str:
    """Return lines on what is copied before each replay and why. Every input needs an allowed reason.

    Args:
        copied_bytes: what one call of the workload copied.
    """
    used = [recording for recording in recordings() if recording.replays >= FEWEST_REPLAYS]
    copied = [one for recording in used for one in recording.inputs if not one.indirect]
    lines = [f"{len(recordings())} recordings, {copied_bytes} bytes in one call"]
    lines += [f"{one.name}, {one.data_bytes} bytes: {'; '.join(one.reasons)}" for one in copied]
    found = "\n".join(lines)
    assert all(one.reasons for one in copied), found
    assert used, "nothing was recorded, or nothing replayed"
    reasons = [reason for one in copied for reason in one.reasons]
    assert all(any(re.search(allowed, one) for allowed in ALLOWED_COPIES) for one in reasons), found
    assert copied or copied_bytes == 0, found
    assert any(one.indirect for recording in recordings() for one in recording.inputs) or not copied, found
    return found


def workload_iteration(instance: Instance, mode: str) -> Callable[[Inputs], Any]:
    chosen = MODES[mode]
    return iteration(instance, callable_for(chosen, instance.module), marks_steps=chosen.uses_cuda_graphs)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Avoid atomic additions where PyTorch can: with them stock's bits vary from call to call."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Outcomes:
    """Results of calls on one set of inputs: digests, the first call's results, and errors of the others."""

    digests: list[str] = field(default_factory=list)
    reference: Results | None = None
    spread: dict[str, float] = field(default_factory=dict)

    def add(self, results: Results) -> None:
        self.digests.append(results.digest())
        if self.reference is None:
            self.reference = results
        elif results.digest() != self.digests[0]:
            for name, difference in differences(results, self.reference).items():
                self.spread[name] = max(self.spread.get(name, 0.0), difference)


def differences(results: Results, reference: Results) -> dict[str, float]:
    """Return by tensor the norm of the difference over the reference's norm; infinite if incomparable."""
    assert results.tensors.keys() == reference.tensors.keys()
    return {name: relative_error(value, reference.tensors[name]) for name, value in results.tensors.items()}


@pytest.mark.long
@pytest.mark.parametrize("acronym", sorted(workloads()))
def test_workload_replays_bit_identically_to_stock(
    acronym: str, record_property: Callable[[str, object], None], deterministic: None
) -> None:
    """Outputs, loss, gradients, buffers and mutated inputs over 50 calls; each set of inputs at several addresses.
    Whatever is still copied has a reason.

    Where stock differs from itself all the same, what counts is the set of its outcomes; and where it never gives the
    same twice, how far it is from itself.
    """
    workload = find(acronym)
    set_numerics()

    def fresh() -> tuple[Instance, list[Inputs], list[State]]:
        instance = instantiate(workload, size="tiny", device="cuda", seed=SEED)
        sets = [instance.inputs(index % 3) for index in range(6)]
        return instance, sets, [State(instance.module, inputs) for inputs in sets]

    instance, sets, states = fresh()

    def results(iterate: Callable[[Inputs], Any], index: int) -> Results:
        return run_checked(instance, iterate, sets[index % 6], states[index % 6], SEED)

    def outcomes_of(mode: str) -> list[Outcomes]:
        outcomes = [Outcomes() for _ in range(3)]
        iterate = workload_iteration(instance, mode)
        # The first call of a function warms up, the second records; from the third on everything is replayed.
        for index in range(REPLAYS):
            found = results(iterate, index)
            if index >= 2:
                outcomes[index % 3].add(found)
        return outcomes

    try:
        stock, tolerance = outcomes_of("graph"), None
    except Exception as error:
        if OVERWRITTEN not in str(error):
            raise
        forget()
        instance, sets, states = fresh()  # the module may hold a result of stock's graphs
        stock, tolerance = outcomes_of("eager"), EAGERS_TOLERANCE
    indirect = workload_iteration(instance, "indirection")
    off: list[str] = []
    for index in range(REPLAYS):
        found = results(indirect, index)
        expected = stock[index % 3]
        if index < 2 or found.digest() in expected.digests:
            continue
        assert expected.reference is not None
        several = len(set(expected.digests)) > 1
        for name, difference in differences(found, expected.reference).items():
            allowed = tolerance or (MOST_OF_STOCKS_SPREAD * expected.spread.get(name, 0.0) if several else 0.0)
            if difference > allowed:
                off.append(f"call {index}, {name}: {difference:.2g} off, {allowed:.2g} allowed")
    copied_bytes = copies_of(lambda: results(indirect, 0)).placeholder_bytes
    assert copied_bytes is not None
    record_property("copied", check_copies(acronym, copied_bytes))
    own = [len(set(one.digests)) for one in stock]
    record_property("outcomes", f"stock had {own}; tolerance {tolerance}")
    assert off == [], f"stock had {own} outcomes\n{copy_reasons()}"
