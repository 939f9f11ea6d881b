"""Whole training steps as CUDA graphs on a GPU: what the loops of `step_programs` do is eager's, bit for bit."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from step_parts import (
    CALLS,
    KeepsMasks,
    Program,
    batches,
    loss_of,
    network,
    outcome,
    state_of,
    training_step,
    unaudited,
)
from step_programs import PROGRAMS
from step_refusals import REFUSED
from torch import nn

import optimizations
from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.observer import StepRefused
from optimizations.graph.pools import others_have_graphs

pytestmark = pytest.mark.gpu


class LayersAtRateZero(nn.Module):
    """As BART's layers: each draws a number on the CPU in training, and branches on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.0:
                x = x + self.dropout(layer(x)).relu()
        return self.last(x)


def layers_at_rate_zero(device: str, *, compiled: bool) -> Program:
    torch.manual_seed(7)
    model = LayersAtRateZero().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
    call: Any = torch.compile(model) if compiled else model
    return Program(training_step(call, optimizer), batches(device, 12), lambda: state_of(model, optimizer))


@pytest.mark.parametrize("compiled", [False, True])
def test_step_with_harmless_host_draws_is_one_graph(compiled: bool) -> None:
    eager = layers_at_rate_zero("cuda", compiled=compiled)
    expected = outcome(eager, eager.step)
    made = layers_at_rate_zero("cuda", compiled=compiled)
    step = unaudited(made.step, host_draws="unused")
    found = outcome(made, step)
    report = step.report()
    assert (report.refusals, report.drawn_on_the_host) == ((), ("torch's CPU generator",))
    assert report.replays > 0
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index}"
    step.close()
    made = layers_at_rate_zero("cuda", compiled=compiled)
    with pytest.warns(UserWarning, match="draws random numbers on the host"):
        refused = unaudited(made.step)
        outcome(made, refused)
    assert refused.report().replays == 0


def capturable_adam(device: str) -> Program:
    model = network(device, dropout=0.1, norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, capturable=True, foreach=True, amsgrad=True)
    step = training_step(model, optimizer)
    return Program(step, batches(device), lambda: state_of(model, optimizer))


def rate_as_a_tensor(device: str) -> Program:
    model = network(device)
    rate = torch.tensor(0.01, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, capturable=True, foreach=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, CALLS)
    step = training_step(model, optimizer)
    return Program(step, batches(device), lambda: state_of(model, optimizer), lambda index: scheduler.step())


GPU_PROGRAMS: dict[str, Callable[[str], Program]] = {
    **PROGRAMS,
    "capturable_adam": capturable_adam,
    "rate_as_a_tensor": rate_as_a_tensor,
}


BEHIND_CYCLES = 40_000_000
"""Some 20 ms, in which the host makes several calls."""


@pytest.mark.parametrize("behind", [False, True], ids=["", "behind"])
@pytest.mark.parametrize("name", sorted(GPU_PROGRAMS))
def test_training_loop_is_replayed_with_eagers_results(name: str, behind: bool) -> None:
    """`behind`: what the program does between calls, such as a step of the optimizer, begins when the host is in the
    next call. Until then nothing may write to gradients and results that the program has let go of."""
    eager = GPU_PROGRAMS[name]("cuda")
    expected = outcome(eager, eager.step)
    made = GPU_PROGRAMS[name]("cuda")
    step = unaudited(made.step)

    def called(*batch: Any) -> Any:
        returned = step(*batch)
        if behind:
            torch.cuda._sleep(BEHIND_CYCLES)
        return returned

    found = outcome(made, called)
    report = step.report()
    assert report.refusals == ()
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {index}"
    assert (report.replays, len(report.recordings)) == (made.replays, made.recordings)
    step.close()


SHOWN_FIRST = {
    "tensor_from_python_values": ("CPU tensor to the GPU",),
    "loss_of_ctc": ("copies a tensor to the CPU",),  # lengths, before its kernels
}
"""Where there is a GPU, what these do to it shows them first."""


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_step_that_cannot_be_repeated_is_refused(name: str) -> None:
    made = REFUSED[name]("cuda")
    step = unaudited(made.step)
    torch.manual_seed(3)
    for index, batch in enumerate(made.batches or batches("cuda")):
        step(*tuple(to_gpu(member) for member in batch))
        made.between(index)
    (refusal, *_) = step.report().refusals
    assert any(words in refusal.reason for words in (made.words, *SHOWN_FIRST.get(name, ()))), refusal
    assert made.advice in refusal.advice
    assert step.report().replays == 0
    assert torch.isfinite(next(made.model.parameters())).all()


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_recurrent_dropout_goes_on_after_a_failed_capture() -> None:
    """cuDNN keeps a state of its own for it, which PyTorch makes anew once a state of the generator was set."""

    def made() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        torch.manual_seed(5)
        layer = nn.GRU(8, 8, num_layers=2, dropout=0.5).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = layer(x)[0].square().mean()
            loss.backward()
            if torch._C._cuda_isCurrentStreamCapturing():
                raise RuntimeError("not in a capture")
            optimizer.step()
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
    assert all(map(torch.equal, *outcomes))


def to_gpu(value: Any) -> Any:
    return {key: tensor.cuda() for key, tensor in value.items()} if isinstance(value, dict) else value


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
def test_what_only_a_gpu_can_refuse(extra: Callable[[Any], Any], words: str) -> None:
    model = network("cuda")
    step = unaudited(plain(model, torch.optim.SGD(model.parameters(), lr=0.1), extra))
    for batch in batches("cuda"):
        step(*batch)
    (refusal, *_) = step.report().refusals
    assert words in refusal.reason
    assert refusal.source_line is not None and "test_step_gpu.py" in refusal.source_line


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_broken_capture_leaves_the_programs_random_numbers() -> None:
    """The break passes no operator: the driver itself is waited for, which a capture forbids. Nor does the question
    whether there is one pass PyTorch, which would tell what eager is told."""
    from cuda.bindings import runtime

    model = network("cuda", dropout=0.3)
    train = plain(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda loss: loss)
    reference_model = network("cuda", dropout=0.3)
    reference = plain(reference_model, torch.optim.SGD(reference_model.parameters(), lr=0.1), lambda loss: loss)

    def breaking(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        if int(runtime.cudaStreamIsCapturing(torch.cuda.current_stream().cuda_stream)[1]):  # 0: there is none
            runtime.cudaDeviceSynchronize()
        return loss

    step = unaudited(breaking)
    results = []
    for function in (reference, step):
        torch.manual_seed(5)
        results.append([function(*batch).detach() for batch in batches("cuda")])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    assert len(step.report().refusals) == 1
    assert step.report().replays == 0


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "inductor": torch.compile,
    "stock graphs": lambda model: torch.compile(model, mode="reduce-overhead"),
    "encore": lambda model: torch.compile(model, backend="encore"),
}


@pytest.mark.parametrize("kind", sorted(COMPILED))
def test_a_compiled_module_inside(kind: str) -> None:
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
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_moved_batches_and_kept_results_are_eagers() -> None:
    eager_model, model = network("cuda"), network("cuda")
    steps = [plain(one, torch.optim.SGD(one.parameters(), lr=0.1), lambda loss: loss) for one in (eager_model, model)]
    step = unaudited(steps[1])
    calls = batches("cuda", 12)
    expected = [steps[0](*batch).detach() for batch in calls]
    found = [step(*batch) for batch in calls]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert step.report().replays == len(calls) - 3


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("each", [False, True])
def test_masks_that_attributes_are_bound_to_stay_valid(backend: str, each: bool) -> None:
    torch.manual_seed(4)
    model, like = (KeepsMasks(12, 10_000, each=each).cuda() for _ in range(2))
    like.load_state_dict(model.state_dict())
    compiled, like_compiled = (torch.compile(one, backend=backend) for one in (model, like))
    step = unaudited(lambda x: compiled(x).detach())
    kept = []
    for _ in range(10):
        x = torch.randn(6, 4, device="cuda")
        assert torch.equal(step(x), like_compiled(x).detach())
        for mine, theirs in zip(model.layers, like.layers, strict=True):
            assert torch.equal(mine.mask, theirs.mask) and mine.mask.stride() == theirs.mask.stride()
        kept.append([(layer.mask, layer.mask.clone()) for layer in model.layers])
    torch.cuda.synchronize()
    assert all(torch.equal(mask, before) for masks in kept for mask, before in masks), "results stay valid"
    assert step.report().replays == 7, step.report().refusals


@pytest.mark.alone
@pytest.mark.parametrize("multiplies", [False, True])
def test_cublas_workspaces_are_kept_for_matrix_products(multiplies: bool) -> None:
    def model_of() -> nn.Module:
        torch.manual_seed(5)
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)]
        return nn.Sequential(*layers, *([nn.Linear(6, 6)] if multiplies else [])).cuda()

    def step_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    gc.collect()
    assert not others_have_graphs(), "of an earlier test, which are in the way of what is looked at here"
    model, like = model_of(), model_of()
    step, expected = unaudited(step_of(model)), step_of(like)
    given = torch.randn(12, 4, 3, 8, 8, device="cuda")
    weight = torch.randn(512, 512, device="cuda")
    for index, x in enumerate(given):
        torch.testing.assert_close(step(x), expected(x))
        if index > 4:  # what the program multiplies, and its memory, are no business of the graph
            product = weight @ weight
            kept = torch.full((16, 2**20), 7.0, device="cuda")
            assert torch.equal(product, weight @ weight) and bool((kept == 7).all())
    assert step.report().replays == 9, step.report().refusals
    for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    workspaces = step._recorder.device._streams.workspaces()
    assert bool(workspaces) == multiplies


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
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.alone
def test_a_launch_takes_the_host_no_longer_than_promised() -> None:
    model = network("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    step = unaudited(plain(model, optimizer, lambda loss: loss))
    calls = batches("cuda", 3)
    for index in range(8):
        step(*calls[index % 3])
    assert step.report().replays == 5
    (recording,) = step._recorder.recordings

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
    print(f"host time of a call {whole:.1f} us ({same:.1f} us with one batch), of its launch {launch:.1f} us")
    assert step.report().replays == 5 + 2 * 300
    assert whole - launch <= 80  # no Python loop


@pytest.mark.alone
@pytest.mark.parametrize("zeroes", ["first", "last"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_memory_stays_near_eagers_while_gradients_dominate(zeroes: str, backend: str) -> None:
    """2 GiB of weights, as much of gradients, and little else. The peak is that of all calls, from the first."""

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
    assert graphed <= 1.1 * eager


def test_gradients_are_there_again_after_a_recording_that_failed() -> None:
    """The capture itself succeeds, and is too large then."""
    model = network("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = batches("cuda", 5)
    step = unaudited(training_step(model, optimizer), memory_budget_bytes=1, on_refusal="raise")
    for batch in given[:3]:
        step(*batch)
    before = [parameter.grad for parameter in model.parameters()]
    identities, values = [*map(id, before)], [one.clone() for one in before if one is not None]
    del before
    with pytest.raises(StepRefused, match="memory_budget_bytes"):
        step(*given[3])
    after = [parameter.grad for parameter in model.parameters()]
    assert [*map(id, after)] == identities
    assert all(one is not None and torch.equal(one, value) for one, value in zip(after, values, strict=True))
    training_step(model, optimizer)(*given[4])
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_audit_passes_and_finds_a_number_without_a_name() -> None:
    """An audit runs uncaptured on the side stream, next to the graph's pool."""
    hidden = {"a": {"b": {"c": {"d": {"scale": 1.0}}}}}
    model = network("cuda", dropout=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        held: Any = hidden
        while "scale" not in held:
            (held,) = held.values()
        return loss_of(model, batch).detach() * held["scale"]

    graphed = optimizations.graph_step(step)
    for batch in batches("cuda", 60):
        torch.manual_seed(3)
        expected = step(*batch)
        torch.manual_seed(3)
        assert torch.equal(graphed(*batch), expected)
    (recording,) = graphed.report().recordings
    assert recording.audits == 6 and recording.audits_skipped == 0
    checked = optimizations.graph_step(step, check_every=2)
    for batch in batches("cuda", 8):
        checked(*batch)
    hidden["a"]["b"]["c"]["d"]["scale"] = 0.5
    with pytest.raises(optimizations.StepChanged, match=r"ran mul\(\.\.\., 0\.5\) where its recorded graph has 1\.0"):
        for batch in batches("cuda", 4):
            checked(*batch)
