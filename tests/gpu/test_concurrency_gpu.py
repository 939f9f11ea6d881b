"""Concurrent kernels on a GPU have the bits of the chain in every kind of program, with delayed kernels too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_graphs import delayed, without_edges
from forced_branches import BranchesAtOnce
from gpu_harness import assert_same_bits, drawn
from torch import nn

import optimizations
from optimizations.capture import device as capture_device
from optimizations.trees import node
from optimizations.trees.containers import managers

pytestmark = pytest.mark.gpu

CALLS = 40


@pytest.fixture(autouse=True)
def _branches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (node, capture_device):
        monkeypatch.setattr(module, "Race", BranchesAtOnce)


class Towers(nn.Module):
    """Stacks that do not depend on each other until their results are added."""

    def __init__(self, count: int = 3, depth: int = 4, width: int = 128, drop: float = 0.0) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(
                *(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(drop)) for _ in range(depth))
            )
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([tower(x * (place + 1)) for place, tower in enumerate(self.towers)]).sum(0)


class Normalized(nn.Module):
    """Kernels of Triton alone, of several sizes, that read one result: without edges they read what is no result yet.

    A kernel of cuBLAS that counts in its workspace may never end without its edges. The buffer is at a fixed address,
    so that nothing reuses a placeholder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("source", drawn(512, 512, seed=1))

    def forward(self) -> list[torch.Tensor]:
        shared = torch.softmax(self.source, 0)
        return [shared, *(torch.softmax(shared[: 128 * (number + 1)], 1) for number in range(4))]


def concurrency() -> list[Any]:
    return [one.concurrency for one in optimizations.recordings()]


def compiled(program: Any, concurrency: str) -> Callable[..., Any]:
    call: Callable[..., Any] = torch.compile(program, backend="encore", options={"concurrency": concurrency})
    return call


def test_users_kernel_may_write_its_in_ptr() -> None:
    triton = pytest.importorskip("triton")
    tl = triton.language

    @triton.jit
    def double(in_ptr, n: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, n)
        tl.store(in_ptr + at, 2 * tl.load(in_ptr + at))

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        z = y @ x
        double[(1,)](y, n=x.numel())
        return z + (y @ x).relu() + (x.cos() @ x).relu()

    with torch.no_grad():
        call = compiled(program, "auto")
        for seed in range(CALLS):
            x = drawn(32, 32, seed=seed)
            torch.testing.assert_close(call(x), program(x), rtol=1e-4, atol=1e-4)
    assert all(report.barriers >= 1 for report in concurrency() if report.launches)


def the_recording() -> Any:
    (found,) = [one for manager in managers() for one in manager.nodes()]
    return found


def results_of(recording: Any) -> list[torch.Tensor]:
    """Results in the graph's memory; those in the memory of inputs at fixed addresses as they were recorded."""
    return [
        recording._reconstruct_from_tensor_metadata(metadata) if static is None else static
        for static, metadata in zip(recording.static_output_tensors, recording.outputs_metadata, strict=True)
        if isinstance(metadata, dict)
    ]


def test_delayed_kernels_change_no_bits_and_show_missing_edges() -> None:
    model = Normalized().cuda()
    with torch.no_grad():
        call = compiled(model, "auto")
        for _ in range(CALLS):
            call()
        recording = the_recording()
        graph, results = recording.graph, results_of(recording)

        def replayed() -> list[torch.Tensor]:
            for one in results:
                one.zero_()
            graph.replay()
            torch.cuda.synchronize()
            return [one.clone() for one in results]

        expected = replayed()
        for seed in range(100):
            with delayed(graph, seed):
                assert all(map(torch.equal, replayed(), expected)), seed
        differing = 0
        for seed in range(20):
            with without_edges(graph), delayed(graph, seed):
                differing += not all(map(torch.equal, replayed(), expected))
        assert differing
        assert all(map(torch.equal, replayed(), expected))


@pytest.mark.parametrize("drop", [0.0, 0.2])
@pytest.mark.parametrize("foreach", [True, False])
def test_step_has_the_parameters_of_the_chain(drop: float, foreach: bool) -> None:
    def trained(concurrency: str) -> tuple[list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = Towers(drop=drop).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=foreach)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        graphed = optimizations.graph_step(step, check_every=None, concurrency=concurrency)
        losses = []
        for seed in range(CALLS):
            torch.manual_seed(seed)
            losses.append(graphed(drawn(8, 128, seed=seed)).clone())
        report = graphed.report()
        assert report.refusals == () and report.replays > CALLS // 2, report
        (recording,) = report.recordings
        graphed.close()
        return [*losses, *(one.detach().clone() for one in model.parameters())], recording.concurrency

    found, report = trained("auto")
    assert report.decision == "branches", report
    assert report.width >= 2 and report.longest_path < report.launches, report
    expected, chain = trained("off")
    assert chain.decision == "chain"
    assert_same_bits(found, expected)


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_callables_have_the_gradients_of_the_chain(drop: float) -> None:
    def trained(concurrency: str) -> tuple[list[torch.Tensor], list[Any]]:
        torch.manual_seed(0)
        model = Towers(drop=drop).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        graphed = optimizations.graph_callables([model], [(drawn(8, 128, seed=0),)], concurrency=concurrency)
        losses = []
        for seed in range(CALLS):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss = model(drawn(8, 128, seed=seed)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
        reports = graphed.report()
        assert all(one.replays == CALLS for one in reports), reports
        graphed.close()
        return [*losses, *(one.detach().clone() for one in model.parameters())], [one.concurrency for one in reports]

    found, reports = trained("auto")
    forward, backward = (one.decision for one in reports)
    assert backward == "branches" and (forward == "branches" or drop), reports
    expected, chains = trained("off")
    assert {one.decision for one in chains} == {"chain"}
    assert_same_bits(found, expected)


def test_kernels_with_scratch_memory_have_the_bits_of_the_chain() -> None:
    """Triton makes descriptors of tensors in memory that it takes for one launch, and that no argument names."""
    settings = {"triton.use_tensor_descriptor": True, "assume_aligned_inputs": True}

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple((x * place).sin() + (x.T @ x).relu() for place in range(4))

    found = []
    with torch.no_grad():
        for concurrency in ("auto", "off"):
            torch.compiler.reset()
            optimizations.reset()
            options = {"concurrency": concurrency, "inductor": settings}
            call = torch.compile(program, backend="encore", options=options)
            found.append([one.clone() for seed in range(CALLS) for one in call(drawn(128, 128, seed=seed))])
    assert_same_bits(*found)
