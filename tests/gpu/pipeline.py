"""Train a pipeline of two stages, a process for each, whose forwards and backwards are graphs.

    torchrun --nproc-per-node 2 tests/gpu/pipeline.py                # two GPUs, NCCL
    torchrun --nproc-per-node 2 tests/gpu/pipeline.py --device cpu   # two processes, gloo, a simulated GPU

Between graphs each stage sends and receives. The schedule is 1F1B, and `graph_callables` finds it in the first
iteration. Each process compares its weights with those of both stages trained without graphs in one process.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS, MICRO_BATCHES, ROWS, WIDTH = 6, 4, 8, 32


def make_stages(device: torch.device) -> list[nn.Module]:
    """Return the stages, the same in each process."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(device)
        for _ in range(2)
    ]


def make_batches(device: torch.device) -> list[list[torch.Tensor]]:
    """Return the micro-batches of each iteration, the same in each process."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(ITERATIONS, MICRO_BATCHES, ROWS, WIDTH, generator=generator).to(device)
    return [list(of_one) for of_one in drawn]


def train_alone(stages: Sequence[nn.Module], batches: Sequence[Sequence[torch.Tensor]]) -> None:
    """Train both stages in this process, without graphs."""
    optimizer = torch.optim.SGD([one for stage in stages for one in stage.parameters()], lr=0.1)
    for micro_batches in batches:
        for x in micro_batches:
            hidden = stages[0](x)
            given = hidden.detach().requires_grad_()
            stages[1](given).square().mean().backward()
            hidden.backward(given.grad)
        optimizer.step()
        optimizer.zero_grad()


def exchange(peer: int, sent: torch.Tensor | None, received: torch.Tensor | None) -> torch.Tensor | None:
    """Send a tensor to the other stage and receive one from it, at the same time."""
    operations = [] if sent is None else [dist.P2POp(dist.isend, sent.contiguous(), peer)]
    operations += [] if received is None else [dist.P2POp(dist.irecv, received, peer)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def run_first(stage: Callable[..., Any], batches: Sequence[torch.Tensor]) -> None:
    """Run the first stage: one forward ahead, then one backward after each forward."""
    hidden = stage(batches[0])
    exchange(1, hidden.detach(), None)
    for x in batches[1:]:
        ahead = stage(x)
        hidden.backward(exchange(1, ahead.detach(), torch.empty_like(hidden)))
        hidden = ahead
    hidden.backward(exchange(1, None, torch.empty_like(hidden)))


def run_last(stage: Callable[..., Any], like: torch.Tensor, count: int) -> None:
    """Run the last stage: each backward comes right after its forward."""
    received = exchange(0, None, torch.empty_like(like))
    for index in range(count):
        assert received is not None
        given = received.requires_grad_()
        stage(given).square().mean().backward()
        received = exchange(0, given.grad, torch.empty_like(like) if index + 1 < count else None)


def main() -> int:
    """Return 0 if the weights are those of training without graphs, and calls had graphs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    kind = parser.parse_args().device
    rank = int(os.environ["RANK"])
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from optimizations.capture.callables.graph_callables import GraphedCallables

    simulated = None
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        from simulated_gpu.operators import CpuDevice

        simulated = CpuDevice()
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        stages, batches = make_stages(device), make_batches(device)
        reference = copy.deepcopy(stages)
        train_alone(reference, batches)
        stage = stages[rank]
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        group = GraphedCallables(stage, device=simulated)
        for micro_batches in batches:
            if rank == 0:
                run_first(stage, micro_batches)
            else:
                run_last(stage, micro_batches[0], len(micro_batches))
            optimizer.step()
            optimizer.zero_grad()
        reports = group.report()
        forwards = [one.replays for one in reports if one.direction == "forward"]
        line = f"rank {rank}: {forwards} forwards of graphs, {group.calls_without_graph} without\n"
        print(line, end="", flush=True)  # in one piece: the other rank writes too
        for mine, expected in zip(stage.parameters(), reference[rank].parameters(), strict=True):
            torch.testing.assert_close(mine, expected)
        assert sum(forwards) + group.calls_without_graph == (ITERATIONS - 1) * MICRO_BATCHES
        assert len(forwards) == 2 - rank and group.calls_without_graph <= 1
        group.close()
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
