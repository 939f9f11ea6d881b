"""`host_tuning check` on a machine with a GPU. Reads only: nothing of the machine is changed here."""

from __future__ import annotations

import pytest
import torch

from host_tuning import Disturbance, check
from host_tuning.gpu import Nvml

pytestmark = pytest.mark.gpu


def test_gpu_properties_equal_those_of_torch() -> None:
    facts = Nvml().facts()
    assert facts is not None
    assert facts.name == torch.cuda.get_device_properties(0).name
    assert facts.sm_clock_mhz and facts.highest_sm_clock_mhz and facts.sm_clock_mhz <= facts.highest_sm_clock_mhz
    assert Nvml().facts(999) is None


def test_every_item_of_the_gpu_has_a_finding() -> None:
    findings = {finding.item: finding for finding in check()}
    assert {"numa", "gpu_processes", "gpu_clock", "gpu_persistence", "gpu_throttling"} <= set(findings)
    assert findings["gpu_processes"].verdict in (Disturbance.OK, Disturbance.WARN)
    assert "MHz now" in findings["gpu_clock"].value
