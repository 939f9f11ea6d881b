"""Whole training steps as CUDA graphs on a GPU: loops of step_programs, batches read in place, static loaders."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_harness import assert_same_bits
from step_parts import (
    Program,
    batches,
    descend,
    network,
    outcome,
    state_of,
    training_step,
    unaudited,
)
from step_programs import PROGRAMS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import encore
from optimizations.capture.step.graphed_step import GraphedStep

pytestmark = pytest.mark.gpu


BEHIND_CYCLES = 40_000_000
"""Some 20 ms, in which the host makes several calls."""


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_training_loop_is_replayed_with_eagers_results(name: str) -> None:
    """Work between calls, such as a step of the optimizer, starts on the device when the host is in the next call.

    Until then nothing may overwrite gradients and results that the program has freed.
    """
    eager = PROGRAMS[name]("cuda")
    expected = outcome(eager, eager.step)
    made = PROGRAMS[name]("cuda")
    step = unaudited(made.step)

    def called(*batch: Any) -> Any:
        returned = step(*batch)
        torch.cuda._sleep(BEHIND_CYCLES)
        return returned

    found = outcome(made, called)
    report = step.report()
    assert report.refusals == ()
    assert_same_bits(found, expected)
    assert (report.replays, len(report.recordings)) == (made.replays, made.recordings)
    step.close()


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_failed_capture_restores_random_state() -> None:
    """The step detects the capture and synchronizes by calls of the driver, which Encore cannot see in PyTorch.

    cuDNN keeps a random state for recurrent dropout, which PyTorch creates again after the generator's state was set.
    """
    from cuda.bindings import runtime

    def made() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(5)
        layer = nn.GRU(8, 8, num_layers=2, dropout=0.5).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = descend(nn.functional.dropout(layer(x)[0], 0.3).square().mean(), optimizer)
            if int(runtime.cudaStreamIsCapturing(torch.cuda.current_stream().cuda_stream)[1]):  # 0: there is none
                runtime.cudaDeviceSynchronize()
            return loss.detach()

        return layer, step

    given = torch.randn(8, 5, 8, 8, device="cuda")
    outcomes = []
    for graphed in (False, True):
        layer, step = made()
        called = unaudited(step) if graphed else step
        outcomes.append([*(called(x) for x in given), *layer.parameters()])
        if graphed:
            (refusal,) = called.report().refusals
            assert "could not be captured" in refusal.reason, refusal
            assert called.report().replays == 0
    assert all(map(torch.equal, *outcomes))


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, extra: Callable[[Any], Any]) -> Callable[..., Any]:
    train = training_step(model, optimizer)
    return lambda batch: extra(train(batch))


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (lambda loss: loss.cpu(), "copies a tensor to the CPU"),
        (lambda loss: torch.cuda.synchronize(), "calls torch.cuda.synchronize"),
        (lambda loss: loss * torch.ones(1).cuda(), "copies a CPU tensor to the GPU"),
        (lambda loss: torch.ones(1, pin_memory=True).to("cuda", non_blocking=True), "copies a CPU tensor to the GPU"),
        (lambda loss: torch.cuda.current_stream().synchronize(), "calls torch.cuda.streams.Stream.synchronize"),
    ],
)
def test_work_only_a_gpu_can_refuse_is_refused_with_its_line(extra: Callable[[Any], Any], words: str) -> None:
    model = network("cuda")
    step = unaudited(plain(model, torch.optim.SGD(model.parameters(), lr=0.1), extra))
    for batch in batches("cuda"):
        step(*batch)
    (refusal, *_) = step.report().refusals
    assert words in refusal.reason
    assert refusal.source_line is not None and "test_step_gpu.py" in refusal.source_line


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "inductor": torch.compile,
    "stock graphs": lambda model: torch.compile(model, mode="reduce-overhead"),
    "encore": lambda model: torch.compile(model, backend="encore"),
}


@pytest.mark.parametrize("kind", sorted(COMPILED))
def test_step_with_a_compiled_module_is_replayed(kind: str) -> None:
    def make() -> Program:
        torch.compiler.reset()
        model = network("cuda", norm=True)
        compiled = COMPILED[kind](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(compiled(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            return loss

        return Program(step, batches("cuda"), lambda: state_of(model))

    eager = make()
    expected = [tensor.clone() for tensor in outcome(eager, lambda batch: eager.step(batch).clone())]
    made = make()
    step = unaudited(made.step)
    found = outcome(made, step)
    assert step.report().refusals == ()
    assert step.report().replays == made.replays
    torch.testing.assert_close(found, expected)


def test_distributed_data_parallel_is_recorded_late(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        results = []
        for graphed in (False, True):
            with torch.cuda.stream(torch.cuda.Stream()):  # as PyTorch's notes on CUDA graphs ask
                model = nn.parallel.DistributedDataParallel(network("cuda"), device_ids=[0])
            torch.cuda.synchronize()
            train = plain(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda loss: loss)
            step = unaudited(train) if graphed else train
            results.append([step(*batch).detach() for batch in batches("cuda", 16)])
            if graphed:
                assert step.report().refusals == ()
                assert step.report().replays == 16 - 11
                step.close()  # before the process group goes
        assert_same_bits(*results)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.alone
def test_launch_overhead_is_within_its_limit() -> None:
    """The host of a GPU may be half as fast as another's, so eager's time for the same step is the measure."""
    model = network("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    eager = plain(model, optimizer, lambda loss: loss)
    step = unaudited(eager)
    calls = batches("cuda", 3)
    for index in range(8):
        step(*calls[index % 3])
    assert step.report().replays == 5
    (recording,) = step._recorder.recordings.tried

    def median_us(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(300):
            torch.cuda.synchronize()
            began = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - began) / 1e3)
        return statistics.median(times)

    turns = itertools.cycle(calls)
    whole = median_us(lambda: step(*next(turns)))  # each call's batch lies elsewhere than the one before
    same = median_us(lambda: step(*calls[0]))
    launch = median_us(recording.graph.replay)
    assert step.report().replays == 5 + 2 * 300
    without = median_us(lambda: eager(*calls[0]))
    print(
        f"host time of a call {whole:.1f} us ({same:.1f} us with one batch), of its launch {launch:.1f} us, "
        f"of the step in eager {without:.1f} us"
    )
    assert whole - launch <= 0.2 * without  # no Python loop


@pytest.mark.alone
@pytest.mark.parametrize("zeroes", ["first", "last"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_memory_stays_near_eagers_while_gradients_dominate(zeroes: str, backend: str) -> None:
    """2 GiB of weights, as much of gradients, and little else. The peak is that of all calls, from the first.

    Earlier gradients stay while a step is recorded: there are some if `zero_grad()` is not at its end.
    """

    def peak(graphed: bool) -> tuple[int, torch.Tensor]:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False, device="cuda") for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        compiled = torch.compile(model, backend=backend)

        def step(x: torch.Tensor) -> torch.Tensor:
            if zeroes == "first":
                optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            if zeroes == "last":
                optimizer.zero_grad()
            return loss

        call = unaudited(step) if graphed else step
        x = torch.randn(64, 8192, device="cuda")
        losses = torch.stack([call(x).detach() for _ in range(8)])
        torch.cuda.synchronize()
        held = torch.cuda.max_memory_reserved()
        if isinstance(call, GraphedStep):
            assert (call.report().replays, call.report().refusals) == (5, ())
            call.close()
        return held - before, losses

    (eager, expected), (graphed, found) = peak(False), peak(True)
    print(f"reserved, zeroes {zeroes}: eager {eager / 2**20:.0f} MiB, one graph {graphed / 2**20:.0f} MiB")
    assert torch.equal(found, expected)
    assert graphed <= 1.1 * eager + (2**31 if zeroes == "first" else 0)


# A training step that fetches its own batches is one CUDA graph and trains as in eager.


EPOCHS, BATCH = 3, 32


def trained(*, is_graphed: bool, micro_batches: int, rows: int) -> tuple[list[list[float]], Any]:
    """Return the losses of all steps, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
    data = TensorDataset(torch.randn(rows, 16), torch.randint(4, (rows,)))
    loader = DataLoader(data, batch_size=BATCH, pin_memory=True)
    batches: Any = None

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for _ in range(micro_batches):
            inputs, labels = next(batches)
            loss = nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda())
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses)

    run: Any = encore.graph_step(step) if is_graphed else step
    if is_graphed:
        batches = encore.static_loader(loader)
    found = []
    for _ in range(EPOCHS):
        batches = iter(batches if is_graphed else loader)
        found += [one.tolist() for one in epoch(run)]
    return found, run


def epoch(step: Any) -> Iterator[torch.Tensor]:
    while True:
        try:
            losses = step()
        except StopIteration:
            return
        yield losses


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("rows", [BATCH * 12, BATCH * 12 - 8])
def test_step_that_fetches_batches_trains_as_eager(micro_batches: int, rows: int) -> None:
    expected, _ = trained(is_graphed=False, micro_batches=micro_batches, rows=rows)
    found, step = trained(is_graphed=True, micro_batches=micro_batches, rows=rows)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert step.report().replays > len(found) // 3, step.report()
    assert not step.report().refusals, step.report()


def test_buffers_are_fixed_and_filled_in_stream_order() -> None:
    source = [torch.full((2**22,), float(index)) for index in range(20)]
    loader = encore.static_loader(source)
    addresses, sums = set(), []
    for batch in loader:
        addresses.add(batch.data_ptr())
        torch.cuda._sleep(1_000_000)  # the copy of the next batch must not overtake what reads this one
        sums.append(batch.double().sum())
    assert len(addresses) == 1 and batch.is_cuda
    assert [one.item() for one in sums] == [float(index) * 2**22 for index in range(20)]
