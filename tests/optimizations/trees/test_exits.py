"""Graphs with collectives are freed before the process group; a forked child frees nothing."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as distributed
from ranks_on_cpu import RankProgram
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, check, values

from optimizations.in_place.generated import GeneratedCode
from optimizations.trees import manager as manager_module
from optimizations.trees import process_ends
from optimizations.trees.containers import everything, managers


def test_collective_graphs_are_freed_before_their_group(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    hook = functools.cache(process_ends.free_before_process_groups_end.__wrapped__)
    monkeypatch.setattr(manager_module, "free_before_process_groups_end", hook)
    monkeypatch.setattr(process_ends.atexit, "register", lambda free: order.append("at exit"))
    monkeypatch.setattr(manager_module, "in_a_process_group", lambda: True)
    for module in (distributed, distributed.distributed_c10d):
        monkeypatch.setattr(
            module, "destroy_process_group", stock := lambda group=None: order.append(f"{len(managers())} left")
        )
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


def test_forked_child_exits_without_freeing_inherited_graphs(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7), calls=3)
    expected = len(everything())
    assert expected >= 3
    child = os.fork()
    if not child:
        os._exit(0 if len(process_ends._INHERITED) == expected else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert process_ends._INHERITED == []


GLOO_ABORTS = "terminate called without an active exception"

PROGRAM = """
import atexit, os, sys, threading, time
import pytest, torch
import torch.distributed as distributed
from simulated_gpu.runtime import played_by_the_cpu
from simulated_gpu.trees import Compiled, Model, check, values
from optimizations.trees import containers
from optimizations.in_place.generated import GeneratedCode

rank, ending = int(os.environ["RANK"]), os.environ["ENDING"]
patches = pytest.MonkeyPatch()
playing = played_by_the_cpu(patches)
cuda = next(playing)
distributed.init_process_group("gloo", init_method="file://" + os.environ["RENDEZVOUS"], rank=rank, world_size=2)
stuck = threading.Event()


def synchronize(*_):
    # A GPU in a collective that another process has left.
    if stuck.is_set():
        threading.Event().wait()


atexit.register(synchronize)  # what comes last waits for the GPU, too
patches.setattr(torch.cuda, "is_initialized", lambda: True)
patches.setattr(torch.cuda, "current_device", lambda: 0)
patches.setattr(torch.cuda, "synchronize", synchronize)
free = containers.free_all
patches.setattr(containers, "free_all", lambda: (free(), print("FREED", flush=True)))
code = GeneratedCode("it takes part in a collective", collective=True)
compiled = Compiled(Model(cuda, code=code))
check(compiled, values(7), calls=4)
print("READY", flush=True)
if ending == "destroys":
    distributed.destroy_process_group()
    print("DESTROYED", flush=True)
elif ending == "raises on one":
    if rank == 1:
        raise ValueError("rank 1 fails as planned")
    stuck.set()
elif ending == "is interrupted":
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("ending", "codes", "words"),
    [
        ("never destroys", (0, 0), ("FREED", "FREED")),
        ("destroys", (0, 0), ("FREED\nDESTROYED", "FREED\nDESTROYED")),
        ("raises on one", (1, 1), ("Timeout (0:00:05)!", "ValueError: rank 1 fails as planned")),
        ("is interrupted", (-2, -2), ("KeyboardInterrupt", "KeyboardInterrupt")),
    ],
)
def test_processes_with_captured_collectives_exit(
    tmp_path: Path, ending: str, codes: tuple[int, int], words: tuple[str, str]
) -> None:
    program = RankProgram(tmp_path, PROGRAM, 2, ENDING=ending)
    try:
        for one in program.ranks:
            one.said("READY")
        if ending == "is interrupted":
            for one in program.ranks:
                one.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        ended = program.ended(within_s=30)
        took_s = time.monotonic() - began
    finally:
        program.kill()
    assert took_s < 10, "\n\n".join(f"{end.code}: {end.output[-2500:]}" for end in ended)
    for end, code in zip(ended, codes, strict=True):
        # A gloo group that is not destroyed may abort the process at its very end, without Encore too (4 of 15).
        of_gloo = ending != "destroys" and end.code == -signal.SIGABRT and GLOO_ABORTS in end.output
        assert of_gloo or end.code == code, end.output[-1500:]
    for end, text in zip(ended, words, strict=True):
        assert text in end.output, end.output[-1500:]
