"""Each part of PyTorch that reads on the host has its own advice, with the line."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_gpu.operators import CpuDevice
from step_parts import batches, loss_of, network, training_step
from torch import nn

from optimizations.capture.step.graphed_step import GraphedStep
from optimizations.capture.step.source_lines import BINDS, GROWS, STEPS, line_with

BOTH = "make the optimizer with capturable=True or fused=True"
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str]] = {
    "Adam": (torch.optim.Adam, BOTH),
    "Adam, foreach": (lambda given: torch.optim.Adam(given, foreach=True), BOTH),
    "NAdam": (torch.optim.NAdam, "make the optimizer with capturable=True, and"),
    "Adagrad": (torch.optim.Adagrad, "make the optimizer with fused=True, and"),
    "Adafactor": (torch.optim.Adafactor, "such as AdamW: Adafactor takes neither"),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_host_side_optimizer_count_refusal_names_options(name: str) -> None:
    make, advice = OPTIMIZERS[name]
    model = network("cpu")
    step = GraphedStep(training_step(model, make(model.parameters())), device=CpuDevice())
    for batch in batches("cpu", 4):
        step(*batch)
    (refusal,) = step.report().refusals
    assert advice in refusal.advice
    assert refusal.source_line is not None and "step_parts.py:" in refusal.source_line


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
def test_optimizer_with_closure_is_named_in_the_refusal() -> None:
    model = network("cpu")
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found = loss_of(model, batch)
            found.backward()
            return found

        return optimizer.step(loss).detach()

    graphed = GraphedStep(step, device=CpuDevice())
    for batch in batches("cpu", 4):
        graphed(*batch)
    (refusal,) = graphed.report().refusals
    assert "such as AdamW: LBFGS takes neither" in refusal.advice
    assert refusal.source_line is not None and "test_advice.py:" in refusal.source_line


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, *, asks: bool = False) -> Callable[..., Any]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(batch: dict[str, torch.Tensor]) -> Any:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() if asks else None

    return step


def with_a_scaler(*, fused: bool, asks: bool) -> Callable[..., Any]:
    model = network("cpu")
    return scaled(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), asks=asks)


def with_a_check_of_the_norm() -> Callable[..., Any]:
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        return norm

    return step


def with_statistics_over_all_batches() -> Callable[..., Any]:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def with_a_scheduler_that_looks_at_the_loss() -> Callable[..., Any]:
    model = network("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    train = training_step(model, optimizer)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = train(batch)
        scheduler.step(loss.detach())
        return loss

    return step


def with_a_mask_that_may_be_causal() -> Callable[..., Any]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    call: Any = functools.partial(model, mask=mask)
    return training_step(call, optimizer)


PARTS: dict[str, tuple[Callable[[], Callable[..., Any]], str]] = {
    "a scaler that decides on the host": (lambda: with_a_scaler(fused=False, asks=False), "with fused=True"),
    "a scaler whose scale is read": (lambda: with_a_scaler(fused=True, asks=True), "read the scale after the step"),
    "clipping that raises": (with_a_check_of_the_norm, "leave error_if_nonfinite off"),
    "statistics over all batches": (with_statistics_over_all_batches, "a number as momentum"),
    "a transformer that looks whether a mask is causal": (with_a_mask_that_may_be_causal, "src_is_causal="),
    "a scheduler that looks at the loss": (with_a_scheduler_that_looks_at_the_loss, "the scheduler after the step"),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("name", sorted(PARTS))
def test_host_reads_inside_pytorch_have_their_own_advice(name: str) -> None:
    make, advice = PARTS[name]
    step = GraphedStep(make(), device=CpuDevice())
    for batch in batches("cpu", 4):
        step(*batch)
    (refusal,) = step.report().refusals
    assert "reads a value of the GPU on the host" in refusal.reason
    assert advice in refusal.advice
    assert refusal.source_line is not None
    assert "test_advice.py:" in refusal.source_line or "step_parts.py:" in refusal.source_line
    assert step.report().replays == 0


LIBRARIES = {
    "utils/loop.py": ("edge_index[:, edge_index[0] != edge_index[1]]", "add_self_loops=False"),
    "utils/_scatter.py": ("torch.zeros(int(edge_index.max()) + 1)", "size= of a pool"),
    "utils/num_nodes.py": ("int(edge_index.max()) + 1", "num_nodes="),
}


@pytest.mark.filterwarnings("ignore:.*runs without a CUDA graph")
@pytest.mark.parametrize("file", sorted(LIBRARIES))
def test_graph_library_has_its_own_advice(file: str) -> None:
    code, advice = LIBRARIES[file]
    installed = f"/somewhere/lib/python3/site-packages/torch_geometric/{file}"
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(f"def of_the_library(edge_index): return {code}", installed, "exec"), scope)  # noqa: S102
    of_the_library = scope["of_the_library"]

    def step(edge_index: torch.Tensor) -> torch.Tensor:
        of_the_library(edge_index)
        return edge_index.sum()

    graphed = GraphedStep(step, device=CpuDevice())
    for index in range(4):
        graphed(torch.tensor([[0, 1, 2], [1, 2, index % 3]]))
    (refusal,) = graphed.report().refusals
    assert advice in refusal.advice
    assert refusal.source_line is not None and f"through torch_geometric/{file}:1" in refusal.source_line


# Lines that are looked for in the source of a step once it is refused.

source: Any = None
scheduler: Any = None
trainer: Any = None


def reads_it_twice() -> Any:
    first = next(source)
    return first, next(source)


def changes_it() -> None:
    if trainer.count == 3:
        trainer.losses.append(trainer.count)
    trainer.count += 1
    scheduler.step()


def line_in(function: types.FunctionType, behind: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + behind} in {code.co_name}"


@pytest.mark.parametrize("path", ["source", "trainer.source", "source[0]", "source (2)"])
def test_first_line_that_names_a_value_is_found(path: str) -> None:
    assert line_with([changes_it.__code__, reads_it_twice.__code__], path) == line_in(reads_it_twice, 1)


@pytest.mark.parametrize(
    ("path", "then", "behind"), [("count", BINDS, 3), ("trainer.losses", GROWS, 2), ("scheduler", STEPS, 4)]
)
def test_line_that_changes_a_value_is_found(path: str, then: str, behind: int) -> None:
    assert line_with([reads_it_twice.__code__, changes_it.__code__], path, then) == line_in(changes_it, behind)


def test_value_that_no_line_names_has_none() -> None:
    assert line_with([reads_it_twice.__code__], "other") is None
