"""Graphs that hold collectives go before the process group; a forked child frees nothing."""

from __future__ import annotations

import os

import pytest
import torch.distributed as distributed
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from test_replay_node import Compiled, Model, check, values

from optimizations.capture.trees import endings
from optimizations.capture.trees import manager as manager_module
from optimizations.capture.trees.containers import everything, managers
from optimizations.recording.generated import GeneratedCode

__all__ = ["cuda_on_cpu"]


def test_graphs_with_collectives_are_freed_before_the_group_is_destroyed(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(endings, "_hooks", [])
    monkeypatch.setattr(endings.atexit, "register", lambda free: order.append("at exit"))
    monkeypatch.setattr(manager_module, "in_a_process_group", lambda: True)
    for module in (distributed, distributed.distributed_c10d):
        monkeypatch.setattr(module, "destroy_process_group", stock := lambda: order.append(f"{len(managers())} left"))
    monkeypatch.setattr(distributed.distributed_c10d, "destroy_process_group", distributed.destroy_process_group)
    del stock
    plain = Compiled(Model(cuda_on_cpu))
    check(plain, values(7), calls=3)
    distributed.destroy_process_group()
    assert order == ["1 left"], "nothing is freed, and nothing replaced, where no graph holds a collective"
    collective = Compiled(Model(cuda_on_cpu, code=GeneratedCode("it takes part in a collective", collective=True)))
    w = values(7)
    check(collective, w, calls=3)
    distributed.destroy_process_group()
    assert order == ["1 left", "at exit", "0 left"]
    check(collective, w, calls=4)
    assert len(managers()) == 1, "functions record again"


def test_a_forked_child_keeps_what_it_inherited_and_ends(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7), calls=3)
    expected = len(everything())
    assert expected >= 3
    child = os.fork()
    if not child:
        os._exit(0 if len(endings._INHERITED) == expected else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert endings._INHERITED == []
