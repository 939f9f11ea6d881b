"""Every workload of the suite with indirection, on a GPU: bits, copies and memory beside those of stock's graphs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from indirection_on_gpu import SEED, Searched, forget, recordings, said, save_captures

from models.instance import Instance, instantiate
from models.registry import Inputs, find, workloads
from suite.iteration import callable_for, iteration, set_numerics
from suite.measure.copies import counting
from suite.measure.memory import Peak, peak, restart_peak
from suite.measure.results import State, run_checked
from suite.modes import MODES

pytestmark = pytest.mark.gpu

REPLAYS = 50

SEGMENT_BYTES = 2 * 2**20
"""What PyTorch's allocator takes from the driver for small tensors, such as a pointer table, at a time."""

ALLOWED_COPIES = (
    "an output shares its memory",
    "it held the same data in each trial call",
    "undecided after",
    "kernels of unknown construction read it",
    "two copying runs by",
)
"""Patterns of the reasons for which an input may be copied. What is copied, and why, is kept in the results as the
property `copied`."""

KEPT_WORKLOADS = ("ALNET", "DCGAN", "EOS")
KEPT_BYTES = 300_000
"""The largest file of captures that is kept."""


def keep_workload(acronym: str, captures: Sequence[Searched]) -> None:
    """The captures of each of its recordings, if there is a place for them."""
    place = os.environ.get("ENCORE_CAPTURES")
    if place is None or acronym not in KEPT_WORKLOADS:
        return
    for number, one in enumerate(captures):
        path = Path(place) / "workloads" / f"{acronym}_{number}.json"
        save_captures(f"{acronym} tiny, recording {number}", one, path)
        if path.stat().st_size > KEPT_BYTES:
            path.unlink()


def check_copies(acronym: str, copied_bytes: int) -> str:
    """What is copied before each replay and why, as lines. Every input among it must have a reason that is allowed.

    Args:
        copied_bytes: what one call of the workload copied.
    """
    copied = [one for recording in recordings() for one in recording.inputs if not one.indirect]
    lines = [f"{len(recordings())} recordings, {copied_bytes} bytes in one call"]
    lines += [f"{one.name}, {one.data_bytes} bytes: {'; '.join(one.reasons)}" for one in copied]
    found = "\n".join(lines)
    assert all(one.reasons for one in copied), found
    assert recordings(), "nothing was recorded"
    reasons = [reason for one in copied for reason in one.reasons]
    assert all(any(re.search(allowed, one) for allowed in ALLOWED_COPIES) for one in reasons), found
    assert copied or copied_bytes == 0, found
    assert any(one.indirect for recording in recordings() for one in recording.inputs) or not copied, found
    return found


def workload_iteration(instance: Instance, mode: str) -> Callable[[Inputs], Any]:
    chosen = MODES[mode]
    return iteration(instance, callable_for(chosen, instance.module), uses_cuda_graphs=chosen.uses_cuda_graphs)


@pytest.mark.parametrize("acronym", sorted(workloads()))
def test_a_workload_replays_bit_for_bit_as_stock_does(
    acronym: str, searched: list[Searched], record_property: Callable[[str, object], None]
) -> None:
    """Outputs, loss, gradients, buffers and mutated inputs over 50 calls; each set of inputs at several addresses.
    Whatever is still copied has a reason."""
    workload = find(acronym)
    set_numerics(workload)
    instance = instantiate(workload, size="tiny", device="cuda", seed=SEED)
    sets = [instance.inputs(index % 3) for index in range(6)]
    states = [State(instance.module, inputs) for inputs in sets]

    def digests(iterate: Callable[[Inputs], Any], calls: int) -> list[str]:
        return [
            run_checked(instance, iterate, sets[index % 6], states[index % 6], SEED).digest() for index in range(calls)
        ]

    first = digests(workload_iteration(instance, "graph"), REPLAYS)
    indirect = workload_iteration(instance, "indirection")
    found = digests(indirect, REPLAYS)
    keep_workload(acronym, searched)
    with counting() as count:
        digests(indirect, 1)
    record_property("copied", check_copies(acronym, count.copied_bytes))
    # Atomic additions make stock differ from itself; so what counts is the set of its outcomes, over as many calls.
    # The first call of a function warms up, the second records; from the third on everything is replayed.
    outcomes = [set(first[2 + (index - 2) % 3 :: 3]) for index in range(3)]
    odd = [index for index in range(2, REPLAYS) if found[index] not in outcomes[index % 3]]
    if any(len(one) > 1 for one in outcomes):
        assert len(odd) <= REPLAYS // 4, f"stock had {[len(one) for one in outcomes]} outcomes\n{said()}"
    else:
        assert odd == [], said()


@pytest.mark.alone
@pytest.mark.parametrize("acronym", ["DR-I", "LCNET"])
def test_replays_of_large_inputs_take_no_more_memory_than_stocks(acronym: str) -> None:
    """In the published size: 3.2 GB and 77 MB of inputs."""
    workload = find(acronym)
    set_numerics(workload)
    instance = instantiate(workload, device="cuda", seed=SEED)
    sets = [instance.inputs(index) for index in range(2)]

    def replay_peak(mode: str) -> Peak:
        iterate = workload_iteration(instance, mode)
        for index in range(16):
            iterate(sets[index % 2])
        restart_peak(instance.device)
        for index in range(4):
            iterate(sets[index % 2])
        torch.cuda.synchronize()
        found = peak(instance.device)
        assert found is not None
        del iterate
        forget()
        return found

    # What libraries allocate at their first use stays.
    replay_peak("graph")
    indirect, copying = replay_peak("indirection"), replay_peak("graph")
    assert indirect.allocated_bytes <= copying.allocated_bytes + SEGMENT_BYTES
    assert indirect.reserved_bytes <= copying.reserved_bytes + SEGMENT_BYTES
