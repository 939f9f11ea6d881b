"""Every workload of the suite with indirection on a GPU: what is still copied has a reason that is allowed.

That their results have the bits of stock's graphs is what the suite checks in each run of mode `indirection`
(`suite.run.group.bitwise_failure`), also of what is read in place: it compares when Encore has settled.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from gpu_harness import SEED, recordings

from models.instance import instantiate
from models.registry import find, workloads
from suite.measure.copies import copies_of
from suite.measure.iteration import callable_for, iteration, set_numerics
from suite.measure.modes import MODES

pytestmark = pytest.mark.gpu

CALLS = 50

ALLOWED_COPIES = (
    "an output shares its memory",
    "kernels other than Triton's and products read it",
    "it was not aligned, or in memory that the graph writes",
    "no input explains it",  # library kernels that add in a fixed order carry bytes of the host's stack
)
"""Patterns of the reasons for which an input may be copied. What is copied, and why, is kept in the results as the
property `copied`."""

FEWEST_REPLAYS = 8
"""A recording that is replayed less often is left as stock made it; see `in_place.budget`."""


@pytest.mark.long
@pytest.mark.parametrize("acronym", sorted(workloads()))
def test_copied_inputs_have_an_allowed_reason(acronym: str, record_property: Callable[[str, object], None]) -> None:
    set_numerics()
    mode = MODES["indirection"]
    instance = instantiate(find(acronym), size="tiny", device="cuda", seed=SEED)
    sets = [instance.inputs(index % 3) for index in range(6)]  # each set of values at two addresses
    # In eager mode first: what a module keeps of its first call is no memory of a graph then.
    iteration(instance, instance.module, marks_steps=False)(sets[0])
    iterate = iteration(instance, callable_for(mode, instance.module), marks_steps=mode.uses_cuda_graphs)
    for index in range(CALLS):
        iterate(sets[index % 6])
    copied_bytes = copies_of(lambda: iterate(sets[0])).placeholder_bytes
    used = [recording for recording in recordings() if recording.replays >= FEWEST_REPLAYS]
    copied = [one for recording in used for one in recording.inputs if not one.indirect]
    lines = [f"{len(recordings())} recordings, {copied_bytes} bytes in one call"]
    lines += [f"{one.name}, {one.data_bytes} bytes: {'; '.join(one.reasons)}" for one in copied]
    found = "\n".join(lines)
    record_property("copied", found)
    assert all(one.reasons for one in copied), found
    assert used, "nothing was recorded, or nothing replayed"
    reasons = [reason for one in copied for reason in one.reasons]
    assert all(any(re.search(allowed, one) for allowed in ALLOWED_COPIES) for one in reasons), found
    assert copied or copied_bytes == 0, found
    assert any(one.indirect for recording in recordings() for one in recording.inputs) or not copied, found
