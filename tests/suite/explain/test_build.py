"""Modules and inputs as fake tensors on cuda:0: what moves, what stays, what stays shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.own_program import checked
from models.registry import find
from suite.explain.build import build_program, build_workload, replaced_on_move
from suite.measure.known_values import KnownValuesMode


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.recurrent = nn.LSTM(8, 8)
        self.register_buffer("table", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.embedding(x))
        return hidden


def made(device: str | None = None) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
    module = Tied() if device is None else Tied().to(device)
    return module, (torch.arange(4),), {"again": torch.ones(2)}


def test_program_without_gpu_tensors_is_moved_there() -> None:
    program = build_program(lambda: checked("a:b", made()))
    module = program.module
    tensors = [*module.parameters(), *module.buffers(), program.args[0], program.kwargs["again"]]
    assert {tensor.device.type for tensor in tensors} == {"cuda"}
    assert module.plain.device.type == "cpu"


def test_program_that_places_tensors_itself_is_unchanged() -> None:
    program = build_program(lambda: checked("a:b", made("cuda")))
    assert program.module.table.is_cuda
    assert program.args[0].device.type == program.kwargs["again"].device.type == "cpu"


def test_shared_parameters_stay_shared_when_moved_and_converted() -> None:
    with KnownValuesMode(), replaced_on_move():
        module = Tied().to(torch.bfloat16).to("cuda")
    assert isinstance(module.head, nn.Linear)
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.dtype == torch.bfloat16
    assert module.head.weight.requires_grad
    assert all(weight.is_cuda for weight in module.recurrent.all_weights[0])


def test_workload_is_built_in_its_dtypes_without_memory() -> None:
    program = build_workload(find("MMC"), variant="published", size="full")
    assert sum(parameter.numel() for parameter in program.module.parameters()) > 150_000_000
    assert {parameter.dtype for parameter in program.module.parameters()} == {torch.bfloat16}
    assert {tensor.device.type for tensor in program.args} == {"cuda"}
