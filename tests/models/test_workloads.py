"""Every registered workload: what the papers say of its full size, and that its tiny size runs."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from models.instance import Instance, instantiate
from models.nests import tensors_of
from models.registry import find, workloads
from optimizations import torch_internals

ROWS = [(row.acronym, variant) for row in workloads().values() for variant in row.variants]
FULL_ROWS = pytest.mark.parametrize(("acronym", "variant"), ROWS)


# variants whose count differs from their workload's, which is that of the default variant
OTHER_PARAMETERS = {("MTCG-I", "current"): 172_119_424, ("MTCG-T", "current"): 172_119_424}

BF16, F16, F32, F64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64


# parameters that are unused in training: XLNet's second stream and segments when it is called without permutations
# and token types, attention to an encoder where there is none, frozen positions, the pooler behind another head
UNTRAINED = {
    "GFNET": r"\.pooler\.",
    "STCLM": r"\.encoder_attn|\.embed_positions\.weights$",
    "XLNET-T": r"(mask_emb|seg_embed|r_s_bias)$",
}


@functools.cache
def tiny(acronym: str, variant: str) -> Instance:
    return instantiate(find(acronym), variant=variant, size="tiny", device="cpu", seed=0)


def floats(nest: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(nest) if tensor.is_floating_point()]


def iterate(instance: Instance, index: int) -> list[torch.Tensor]:
    """Return outputs of one iteration, and in training loss and gradients after them."""
    made = instance.inputs(index)
    torch.manual_seed(7)
    if instance.workload.task == "inference":
        with torch.no_grad(), instance.autocast():
            return floats(instance.module(*made.args, **made.kwargs))
    instance.module.zero_grad(set_to_none=True)
    with instance.autocast():
        output = instance.module(*made.args, **made.kwargs)
        loss = instance.loss(output)
    loss.backward()
    gradients = [p.grad for p in instance.module.parameters() if p.grad is not None]
    return [*(tensor.detach() for tensor in floats(output)), loss.detach(), *gradients]


@FULL_ROWS
def test_full_size_is_built_without_the_gpu(acronym: str, variant: str) -> None:
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True):
        instance = instantiate(find(acronym), variant=variant, device="cuda", seed=0)
        made = instance.inputs(0)
    moved = [*instance.module.parameters(), *instance.module.buffers(), *tensors_of((made.args, made.kwargs))]
    assert {tensor.device.type for tensor in moved} == {"cuda"}
    assert instance.parameters == OTHER_PARAMETERS.get((acronym, variant), find(acronym).parameters)


@FULL_ROWS
def test_tiny_size_runs_and_depends_on_its_inputs(acronym: str, variant: str) -> None:
    first, second = iterate(tiny(acronym, variant), 0), iterate(tiny(acronym, variant), 1)
    assert all(tensor.isfinite().all() for tensor in [*first, *second])
    assert [tensor.shape for tensor in first] == [tensor.shape for tensor in second]
    assert not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@FULL_ROWS
def test_tiny_size_follows_the_dtype_policy(acronym: str, variant: str) -> None:
    instance = tiny(acronym, variant)
    made = instance.inputs(0)
    wanted = {"bf16": BF16, "fp16": F32, "fp32": F32, "amp": F64 if acronym == "TKE" else F32}
    dtypes = {wanted[instance.workload.dtype_policy]}
    assert {tensor.dtype for tensor in floats([*instance.module.parameters(), *instance.module.buffers()])} <= dtypes
    assert {tensor.dtype for tensor in floats((made.args, made.kwargs))} <= dtypes


@pytest.mark.parametrize("acronym", [row.acronym for row in workloads().values() if row.task == "training"])
def test_every_parameter_of_a_training_row_is_trained(acronym: str) -> None:
    instance = tiny(acronym, "published")
    iterate(instance, 0)
    untrained = {name for name, parameter in instance.module.named_parameters() if parameter.grad is None}
    assert {name for name in untrained if not re.search(UNTRAINED.get(acronym, "(?!)"), name)} == set()
    assert bool(untrained) == (acronym in UNTRAINED)


@pytest.mark.parametrize("acronym", [row.acronym for row in workloads().values() if row.suite == "huggingface"])
def test_hugging_face_rows_have_the_loss_the_model_computes(acronym: str) -> None:
    instance = tiny(acronym, "published")
    made = instance.inputs(0)
    with torch.no_grad():
        output = instance.module(*made.args, **made.kwargs)
    assert torch.equal(instance.loss(output), output.loss)


@pytest.mark.parametrize(("acronym", "ahead"), [("STCLM", 0), ("DGPT2", 1)])
def test_stclm_trains_on_the_same_position_and_dgpt2_on_the_next(acronym: str, ahead: int) -> None:
    """STCLM's stand-in compares each position with its own label, as Speech2Text2 of transformers 4 does."""
    instance = tiny(acronym, "published")
    made = instance.inputs(0)
    with torch.no_grad():
        output = instance.module(*made.args, **made.kwargs)
    logits, labels = output.logits, made.kwargs["labels"]
    losses = [
        torch.nn.functional.cross_entropy(
            logits[:, : logits.shape[1] - shift].flatten(0, 1), labels[:, shift:].flatten()
        )
        for shift in (0, 1)
    ]
    assert abs(losses[0] - losses[1]) > 1e-3
    assert instance.loss(output).item() == pytest.approx(losses[ahead].item(), rel=1e-5)
    assert ("not shifted" in instance.workload.notes) == (acronym == "STCLM")


def test_images_of_lcnet_are_standardised_bytes() -> None:
    (images,) = find("LCNET").inputs("published", "tiny", torch.Generator().manual_seed(0)).args
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)
    assert images.unique().numel() <= 256


def test_sea_water_is_within_the_published_ranges() -> None:
    made = find("EOS").inputs("published", "full", torch.Generator().manual_seed(0)).args
    assert {tensor.dtype for tensor in made} == {torch.float64}
    for tensor, (low, high) in zip(made, [(0.01, 10), (-12, 20), (0, 1000)], strict=True):
        width = high - low
        assert low <= tensor.min() < low + 0.1 * width
        assert high - 0.1 * width < tensor.max() <= high
