"""Two processes train a pipeline, each with the graphs of one stage, and send and receive between these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).resolve().parents[3] / "gpu" / "pipeline.py"


def test_stages_in_two_processes_train_as_eager() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(
        [*command, str(SCRIPT), "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert torch.distributed.is_available()
    for rank, graphs in ((0, 2), (1, 1)):
        (line,) = [line for line in ran.stdout.splitlines() if line.startswith(f"rank {rank}: ")]
        assert line.count(",") == graphs, line
