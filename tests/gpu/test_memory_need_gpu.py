"""The least memory that is estimated from fake tensors beside what eager takes on a GPU."""

from __future__ import annotations

import pytest
import torch

from models.instance import instantiate
from models.registry import find
from suite.measure.iteration import iteration, set_numerics
from suite.worker.memory_need import memory_need

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

WORKSPACE_BYTES = 2**28
"""What libraries keep for themselves, and what the allocator rounds up."""


@pytest.mark.parametrize("acronym", ["ALNET", "BERT", "DALLE2", "DGPT2", "DR-T", "MBERT", "STCLM", "TEFD", "TKE", "VM"])
def test_eager_takes_what_was_estimated_and_not_far_more(acronym: str) -> None:
    workload = find(acronym)
    need = memory_need(workload)
    set_numerics()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    instance = instantiate(workload, device="cuda", seed=0)
    inputs = instance.inputs(0)
    iteration(instance, instance.module, marks_steps=False)(inputs)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert need.peak <= taken
    if need.whole:
        assert taken <= 2 * need.peak + WORKSPACE_BYTES
