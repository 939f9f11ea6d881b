from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.instance import instantiate
from models.registry import DtypePolicy, Inputs, Size, Workload
from optimizations import torch_internals


class Program(nn.Module):
    """Weights, a buffer of either kind, and a table kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.outer = nn.Linear(4, 3)
        self.outer.weight = self.inner.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("count", torch.tensor(3))
        self.table = torch.arange(3.0)

    def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.outer(x) + self.table.to(x.device) + (first + second)[:, None]


def build(variant: str, size: Size) -> nn.Module:
    return Program()


def inputs(variant: str, size: Size, generator: torch.Generator) -> Inputs:
    ids = torch.randint(9, (5,), generator=generator)
    return Inputs(args=(torch.randn(5, 4, generator=generator), ids), kwargs={"second": ids})


TRAINING = Workload(
    acronym="PROGRAM",
    name="program",
    suite="torchbench",
    task="training",
    batch=5,
    dtype_policy="amp",
    build=build,
    inputs=inputs,
    variants=("published", "current"),
    optimizer="adam",
)
INFERENCE = replace(TRAINING, task="inference", dtype_policy="bf16", optimizer=None)


def values(made: Inputs) -> list[torch.Tensor]:
    return [*made.args, *made.kwargs.values()]


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
        ("amp", torch.float32),
        ("amp-bf16", torch.float32),
    ],
)
def test_policy_decides_floating_weights_and_inputs_only(policy: DtypePolicy, dtype: torch.dtype) -> None:
    instance = instantiate(replace(INFERENCE, dtype_policy=policy), device="cpu", seed=0)
    x, ids = instance.inputs(0).args
    floating = [*instance.module.parameters(), instance.module.scale, x]
    assert {tensor.dtype for tensor in floating} == {dtype}
    assert ids.dtype == instance.module.count.dtype == torch.int64


def test_autocast_is_float16_on_a_gpu_by_default() -> None:
    found = {}
    for policy in ("amp", "amp-bf16"):
        instance = instantiate(replace(INFERENCE, dtype_policy=policy), device="cpu", seed=0)
        with instance.autocast():
            assert instance.module(*instance.inputs(0).args, instance.inputs(0).args[1]).dtype == torch.float32
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        on_gpu: Any = replace(instance, device=torch.device("cuda")).autocast
        found[policy] = on_gpu.keywords["dtype"]
    assert found == {"amp": torch.float16, "amp-bf16": torch.bfloat16}


def test_program_without_cpu_operators_is_float32_on_the_cpu() -> None:
    workload = replace(INFERENCE, dtype_policy="fp16", float32_on_cpu=True)
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float16)):
        instance = instantiate(workload, device=device, seed=0)
        assert {instance.module.inner.weight.dtype, instance.inputs(0).args[0].dtype} == {dtype}


def test_inputs_depend_on_seed_and_index_only() -> None:
    instance = instantiate(INFERENCE, device="cpu", seed=0)
    before = values(instance.inputs(1))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    instance.inputs(0)
    assert torch.equal(torch.get_rng_state(), state)
    after = values(instance.inputs(1))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert before[0].data_ptr() != after[0].data_ptr()


@pytest.mark.parametrize(("one", "other"), [((0, 0), (0, 1)), ((0, 1), (1, 0)), ((0, 0), (1, 0))])
def test_other_seeds_and_indices_give_other_inputs(one: tuple[int, int], other: tuple[int, int]) -> None:
    x, y = (instantiate(INFERENCE, device="cpu", seed=seed).inputs(index).args[0] for seed, index in (one, other))
    assert x.shape == y.shape
    assert not torch.equal(x, y)


def test_training_step_updates_weights_by_its_optimizer() -> None:
    for name, kind in (("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        instance = instantiate(replace(TRAINING, optimizer=name), device="cpu", seed=0)
        made, optimizer = instance.inputs(0), instance.optimizer()
        assert isinstance(optimizer, kind)
        assert (optimizer.defaults["lr"], optimizer.defaults["foreach"]) == (0.01, True)
        before = instance.module.inner.weight.clone()
        with instance.autocast():
            loss = instance.loss(instance.module(*made.args, **made.kwargs))
        loss.backward()
        optimizer.step()
        assert not torch.equal(before, instance.module.inner.weight)


def test_adam_is_capturable_off_the_cpu() -> None:
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True):
        assert instantiate(TRAINING, device="cuda", seed=0).optimizer().defaults["capturable"]
    assert not instantiate(TRAINING, device="cpu", seed=0).optimizer().defaults["capturable"]


def test_inference_has_no_optimizer() -> None:
    with pytest.raises(ValueError, match="PROGRAM is for inference"):
        instantiate(INFERENCE, device="cpu", seed=0).optimizer()


def test_first_variant_is_the_default_unknown_ones_are_refused() -> None:
    assert instantiate(INFERENCE, device="cpu", seed=0).variant == "published"
    assert instantiate(INFERENCE, variant="current", device="cpu", seed=0).variant == "current"
    with pytest.raises(ValueError, match="no variant 'future'; it has published, current"):
        instantiate(INFERENCE, variant="future", device="cpu", seed=0)


def test_meta_instances_have_shapes_only() -> None:
    instance = instantiate(INFERENCE, device="meta", seed=0)
    assert {tensor.device.type for tensor in [*instance.module.parameters(), *values(instance.inputs(0))]} == {"meta"}
    assert instance.input_bytes(instance.inputs(0)) == 5 * 4 * 2 + 5 * 8


def test_fake_instances_keep_cpu_attributes_and_shared_weights() -> None:
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True):
        instance = instantiate(INFERENCE, device="cuda", seed=0)
        made = instance.inputs(0)
        output = instance.module(*made.args, **made.kwargs)
    module = instance.module
    moved = [*module.parameters(), *module.buffers(), *values(made), output]
    assert {tensor.device.type for tensor in moved} == {"cuda"}
    assert module.inner.weight is module.outer.weight
    assert isinstance(module.inner.weight, nn.Parameter)
    assert (module.table.device.type, module.table.dtype) == ("cpu", torch.float32)
    assert (module.scale.dtype, module.count.dtype) == (torch.bfloat16, torch.int64)
    assert made.args[1] is made.kwargs["second"]


def test_builder_that_places_its_module_gets_the_device() -> None:
    asked: list[Any] = []

    def placing(variant: str, size: Size, device: torch.device) -> nn.Module:
        asked.append((device.type, torch.get_default_device().type))
        return Program()

    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True):
        instantiate(replace(INFERENCE, build=placing, builds_on_device=True), device="cuda", seed=0)
    assert asked == [("cuda", "cpu")]
