"""The least memory of workloads, from fake tensors, and what is said where a GPU has less."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fixtures.bench import FOUR, Bench, bench
from tiny_workloads import normal_inputs, workload_of
from torch import nn

from models.instance import instantiate
from models.registry import Inputs, find, workloads
from suite.measure.results import named_tensors
from suite.results.schema import Grouping, Status
from suite.worker import cell_program
from suite.worker import memory_need as memory_need_module
from suite.worker.live_cell import LiveCell
from suite.worker.main import failure
from suite.worker.memory_need import memory_need, require_memory
from suite.worker.protocol import CellSpec, OomExpected, OomTogether

__all__ = ["bench"]


class Widening(nn.Module):
    """[4, 256] float32 -> [4, 1] by way of a wide hidden layer, of which training keeps the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


WEIGHTS = 4 * (256 * 4096 + 4096 + 4096 + 1)
INPUTS, HIDDEN = 4 * 256 * 4, 4 * 4096 * 4
WORKLOAD = workload_of(Widening, normal_inputs(4, 256))


def test_inference_needs_weights_inputs_and_what_lives_at_once() -> None:
    need = memory_need(WORKLOAD)
    assert (need.weights, need.inputs, need.tangents, need.whole) == (WEIGHTS, INPUTS, 0, True)
    assert need.peak == WEIGHTS + INPUTS + 2 * HIDDEN, "the hidden layer before and after ReLU"
    assert need.with_input_sets(4) == need.peak + 3 * INPUTS


def test_training_needs_gradients_and_tangents() -> None:
    need = memory_need(replace(WORKLOAD, task="training", optimizer="sgd"))
    assert need.peak == 2 * WEIGHTS + INPUTS
    assert need.tangents == 4 * 4


def test_differentiating_inference_is_followed_with_gradients() -> None:
    enabled = []

    class Noting(Widening):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            enabled.append(torch.is_grad_enabled())
            return super().forward(x)

    workload = workload_of(Noting, normal_inputs(4, 256))
    assert memory_need(replace(workload, gradients_in_inference=True)).tangents == 0, "nothing comes into a backward"
    memory_need(workload)
    assert enabled == [True, False]


def test_autocast_counts_float16_outputs_and_cast_weights() -> None:
    need = memory_need(replace(WORKLOAD, task="training", optimizer="sgd", dtype_policy="amp"))
    assert need.tangents == 4 * 2
    assert memory_need(replace(WORKLOAD, task="training", dtype_policy="amp-bf16")).tangents == 4 * 2
    assert memory_need(replace(WORKLOAD, dtype_policy="amp")).peak > WEIGHTS * 1.5
    assert not torch.is_autocast_enabled("cuda")


def test_data_dependent_program_is_followed_up_to_there() -> None:
    class Choosing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([x, x])
            return x[(x * torch.randn_like(x)) > 0]

    need = memory_need(workload_of(Choosing, normal_inputs(4, 256)))
    assert not need.whole
    assert need.peak >= 3 * INPUTS


def test_a_program_that_goes_on_and_on_is_followed_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    class Repeating(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [x + step for step in range(50)]

    workload = workload_of(Repeating, normal_inputs(4, 256))
    whole = memory_need(workload)
    assert (whole.peak, whole.whole) == (51 * INPUTS, True)
    monkeypatch.setattr(memory_need_module, "LIMIT_OPERATORS", 20)
    part = memory_need(workload)
    assert (part.peak, part.whole) == (21 * INPUTS, False)


def test_cpu_input_sets_and_repeated_tensors_count_once() -> None:
    def inputs(variant: str, size: str, generator: torch.Generator) -> Inputs:
        x = torch.randn(4, 256, generator=generator)
        return Inputs(args=(x, x, torch.randn(9, generator=generator, device="cpu")))

    class Adding(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
            return x.add_(y)

    assert memory_need(workload_of(Adding, inputs)).peak == INPUTS


def test_gpu_that_is_too_small_is_an_error_with_the_need() -> None:
    need = memory_need(WORKLOAD)
    enough = need.with_input_sets(4)
    require_memory(WORKLOAD, variant=None, size="full", input_sets=4, available=enough)
    with pytest.raises(OomExpected, match=r"needs at least .* MB .* the GPU has .*--size tiny"):
        require_memory(WORKLOAD, variant=None, size="full", input_sets=4, available=enough - 1)


def test_modes_too_large_together_are_told_from_too_large_ones() -> None:
    enough = 3 * memory_need(WORKLOAD).with_input_sets(4)
    require_memory(WORKLOAD, variant=None, size="full", input_sets=4, available=enough, cells=3)
    with pytest.raises(OomTogether, match=r"3 modes at the same time need at least .* MB, and the GPU has") as raised:
        require_memory(WORKLOAD, variant=None, size="full", input_sets=4, available=enough - 1, cells=3)
    assert failure(raised.value, "build").status is Status.OOM, "the runner goes on with fewer modes at a time"


def test_largest_workload_fits_a_large_gpu_only() -> None:
    largest = find("CBERT")
    require_memory(largest, variant=None, size="full", input_sets=4, available=80 * 2**30)
    require_memory(largest, variant=None, size="tiny", input_sets=4, available=2**30)
    with pytest.raises(OomExpected, match=r"needs at least 4\d\.\d GB \(weights \d+\.\d MB,.*has 24\.0 GB"):
        require_memory(largest, variant=None, size="full", input_sets=4, available=24 * 2**30)


def test_what_cannot_be_estimated_is_tried(capfd: pytest.CaptureFixture[str]) -> None:
    def raises() -> nn.Module:
        raise ArithmeticError("not on fake tensors")

    require_memory(workload_of(raises), variant=None, size="full", input_sets=2, available=1)
    require_memory(replace(WORKLOAD, builds_on_device=True), variant=None, size="full", input_sets=2, available=1)
    assert "not on fake tensors" in capfd.readouterr().err


def test_cell_that_needs_too_much_ends_before_it_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Small:
        total_memory = 2**20

    def must_not_build(*args: object, **options: object) -> None:
        raise AssertionError("nothing may be built")

    monkeypatch.setattr(cell_program, "_require_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Small)
    monkeypatch.setattr(cell_program, "instantiate", must_not_build)
    spec = CellSpec(
        workload="ALNET",
        variant="published",
        size="tiny",
        mode="compile",
        device="cuda",
        with_optimizer=False,
        seed=3,
        input_sets=2,
        warm_up=2,
        check_inputs=2,
        cpu_threads=1,
        cache_dir=str(tmp_path),
        warm_cache=False,
    )
    with pytest.raises(OomExpected) as raised:
        LiveCell(spec, lambda phase: None).build()
    failed = failure(raised.value, "build")
    assert failed.status is Status.OOM_EXPECTED
    assert "needs at least" in failed.error


@pytest.mark.timeout(300)
def test_run_skips_a_workload_that_the_gpu_cannot_hold(bench: Bench) -> None:
    """With real workers: nothing is built, in no process, and no smaller group is tried."""
    command = [sys.executable, "-P", str(Path(__file__).parents[2] / "support" / "fixtures" / "small_gpu_worker.py")]
    bench.run(
        workloads=[find("ALNET"), find("EOS")],
        modes=FOUR[1:3],
        device="cuda",
        processes=2,
        worker_command=command,
        timeout_s=120,
    )
    cells = bench.cells()
    assert list(cells) == [f"{name}/{mode.name}" for name in ("ALNET", "EOS") for mode in FOUR[1:3]]
    too_large = [cell for cell in cells.values() if cell.workload == "ALNET"]
    assert {cell.status for cell in too_large} == {Status.OOM_EXPECTED}
    assert all("needs at least" in str(cell.error) and "has 1.0 MB" in str(cell.error) for cell in too_large)
    assert {(cell.grouping, len(cell.blocks)) for cell in too_large} == {(Grouping.TOGETHER, 0)}
    assert {cell.status for cell in cells.values() if cell.workload == "EOS"} == {Status.CRASH}, "EOS is begun"


@pytest.mark.parametrize("acronym", workloads())
def test_an_estimate_leaves_nothing_behind_in_the_libraries(acronym: str) -> None:
    """A fake tensor in a library's cache would be used by the real program that is built next in the process."""
    need = memory_need(find(acronym), size="tiny")
    instance = instantiate(find(acronym), size="tiny", device="cpu", seed=0)
    made = instance.inputs(0)
    with torch.no_grad(), instance.autocast():
        outputs = list(named_tensors(instance.module(*made.args, **made.kwargs)))
    assert outputs
    assert {type(tensor) for _, tensor in outputs} == {torch.Tensor}
    if instance.workload.dtype_policy != "fp16":
        assert need.inputs == instance.input_bytes(made)
