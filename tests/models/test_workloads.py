"""Every registered workload: what the papers say of its full size, and that its tiny size runs."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from models.instance import Instance, instantiate
from models.nests import tensors_of
from models.registry import find, find_set, workloads
from optimizations import torch_internals

ROWS = [(row.acronym, variant) for row in workloads().values() for variant in row.variants]
FULL_ROWS = pytest.mark.parametrize(("acronym", "variant"), ROWS)

# exact count, and the millions printed with the published rows (None: none are)
PARAMETERS = {
    "ALNET": (61_100_840, "61.10"),
    "ALNET-128": (61_100_840, "61.10"),
    "BERT": (115_805_991, "115.81"),
    "BSCG": (85_113_344, "85.11"),
    "CBERT": (110_655_493, "110.66"),
    "DALLE2": (379_886_354, "379.89"),
    "DBMLM": (66_985_530, "66.99"),
    "DBV2": (877_510_658, "877.51"),
    "DCGAN": (2_765_568, "2.77"),
    "DECODER": (667_977_728, None),
    **{row.acronym: (56_769, None) for row in find_set("nanogpt")},
    "DGPT2": (81_912_576, "81.91"),
    "DLRM": (514_499_137, "514.50"),
    "DMLM": (124_685_913, "124.69"),
    "DMLM-16": (124_685_913, "124.69"),
    "DNET": (7_978_856, "7.98"),
    "DR-I": (204_475_711, "204.48"),
    "DR-I-256": (204_475_711, "204.48"),
    "DR-T": (204_475_711, "204.48"),
    "DR-T-4096": (204_475_711, "204.48"),
    "ECML": (13_546_682, "13.55"),
    "EOS": (0, None),
    "GFNET": (83_485_184, "83.49"),
    "LCNET": (1_880_856, "1.88"),
    "LLAMA-G": (1_235_814_400, None),
    "LLAMA-G-8": (1_235_814_400, None),
    "LP": (11_209_857, None),
    "MBERT": (24_582_914, "24.58"),
    "MMC": (151_277_312, "151.28"),
    "MTCG-I": (300_176_768, "300.18"),
    "MTCG-T": (300_176_768, "300.18"),
    "ST": (44_823_040, "44.82"),
    "STCLM": (12_295_168, "12.30"),
    "TEFD": (6_625_898, "6.63"),
    "TKE": (0, None),
    "VM": (44_454_513, "44.45"),
    "WHISPER-G": (241_734_912, None),
    "XLNET-I": (360_300_800, "360.30"),
    "XLNET-I-8": (360_300_800, "360.30"),
    "XLNET-T": (360_300_800, "360.30"),
}

# variants whose count differs from their workload's, which is that of the default variant
OTHER_PARAMETERS = {("MTCG-I", "current"): 172_119_424, ("MTCG-T", "current"): 172_119_424}

BF16, F16, F32, F64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64

# inputs in order, as the program gets them
SHAPES: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "ALNET": [((2, 3, 224, 224), BF16)],
    "ALNET-128": [((128, 3, 224, 224), BF16)],
    "BERT": [((16, 128), I64)] * 2,
    "BSCG": [((64, 128), I64)] * 3,
    "CBERT": [((64, 512), I64)] * 2,
    "DALLE2": [((1, 256), I64)],
    "DBMLM": [((128, 128), I64)] * 2,
    "DBV2": [((1, 512), I64), ((1,), I64), ((1,), I64)],
    "DCGAN": [((32, 3, 64, 64), F32)],
    "DECODER": [((4, 512), I64)],
    "DGPT2": [((16, 512), I64), ((16, 512), I64)],
    "DLRM": [((2048, 512), BF16), ((8, 2048), I64), *[((204_800,), I64)] * 8],
    "DMLM": [((8, 512), I64)] * 2,
    "DMLM-16": [((16, 512), I64)] * 2,
    "DNET": [((64, 3, 224, 224), BF16)],
    "DR-I": [((8192, 197_951), BF16)],
    "DR-I-256": [((256, 197_951), BF16)],
    "DR-T": [((256, 197_951), F32)],
    "DR-T-4096": [((4096, 197_951), F32)],
    "ECML": [((64, 512), I64)] * 2,
    "EOS": [((204, 204, 26), BF16), ((204, 204, 26), BF16), ((1, 1, 26), BF16)],
    "GFNET": [((16, 512), I64)] * 2,
    "LCNET": [((256, 3, 224, 224), BF16)],
    "LLAMA-G": [((1, 128), I64), ((1, 32), I64)],
    "LLAMA-G-8": [((8, 128), I64), ((8, 32), I64)],
    "LP": [((16, 9, 128, 128), F32)],
    "MBERT": [((128, 128), I64), ((128,), I64), ((128,), I64)],
    **{row.acronym: [((1, int(row.acronym.split("-")[1])), I64)] for row in find_set("nanogpt")},
    "MMC": [((1, 3, 224, 224), BF16), ((32, 77), I64)],
    "MTCG-I": [((16, 128), I64)] * 3,
    "MTCG-T": [((16, 128), I64)] * 3,
    "ST": [((10, 204, 320), BF16), ((10,), I64), ((10, 21), I64)],
    "STCLM": [((256, 128), I64)] * 2,
    "TEFD": [
        ((1, 3, 640, 640), F32),
        *[((1, side, side, 9), F32) for side in (80, 40, 20, 10, 5)],
        *[((1, side, side, 36), F32) for side in (80, 40, 20, 10, 5)],
        ((1, 1), F32),
    ],
    "TKE": [
        *[((204, 204, 26, 3), F64)] * 3,
        *[((204, 204, 26), F64)] * 3,
        *[((204,), F64)] * 4,
        *[((26,), F64)] * 2,
        *[((204,), F64)] * 2,
        ((204, 204), I64),
        *[((204, 204, 26), F64)] * 3,
        ((204, 204), F64),
        *[((204, 204, 26, 3), F64)] * 2,
    ],
    "VM": [((3, 427, 640), F16)],
    "WHISPER-G": [((1, 80, 3000), BF16), ((1, 32), I64)],
    "XLNET-I": [((1, 512), I64), ((1, 512), I64)],
    "XLNET-I-8": [((8, 512), I64)] * 2,
    "XLNET-T": [((8, 512), I64), ((8, 512), I64)],
}

# parameters that take no part in training: XLNet's second stream and segments when it is called without permutations
# and token types, attention to an encoder where there is none, frozen positions, the pooler behind another head
UNTRAINED = {
    "GFNET": r"\.pooler\.",
    "STCLM": r"\.encoder_attn|\.embed_positions\.weights$",
    "XLNET-T": r"(mask_emb|seg_embed|r_s_bias)$",
}


@functools.cache
def full_shapes(acronym: str, variant: str) -> Instance:
    return instantiate(find(acronym), variant=variant, device="meta", seed=0)


@functools.cache
def tiny(acronym: str, variant: str) -> Instance:
    return instantiate(find(acronym), variant=variant, size="tiny", device="cpu", seed=0)


def floats(nest: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(nest) if tensor.is_floating_point()]


def iterate(instance: Instance, index: int) -> list[torch.Tensor]:
    """Outputs of one iteration, and in training loss and gradients behind them."""
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
def test_full_size_has_the_published_parameters(acronym: str, variant: str) -> None:
    exact, printed = PARAMETERS[acronym]
    assert find(acronym).parameters == exact
    assert full_shapes(acronym, variant).parameters == OTHER_PARAMETERS.get((acronym, variant), exact)
    if printed is not None:
        assert f"{exact / 1e6:.2f}" == printed


@FULL_ROWS
def test_full_size_takes_the_published_inputs(acronym: str, variant: str) -> None:
    made = full_shapes(acronym, variant).inputs(0)
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of((made.args, made.kwargs))]
    assert found == SHAPES[acronym]


@FULL_ROWS
def test_full_size_is_built_for_a_gpu_that_is_not_there(acronym: str, variant: str) -> None:
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True):
        instance = instantiate(find(acronym), variant=variant, device="cuda", seed=0)
        made = instance.inputs(0)
    moved = [*instance.module.parameters(), *instance.module.buffers(), *tensors_of((made.args, made.kwargs))]
    assert {tensor.device.type for tensor in moved} == {"cuda"}
    assert instance.parameters == full_shapes(acronym, variant).parameters


@FULL_ROWS
def test_tiny_size_runs_and_depends_on_its_inputs(acronym: str, variant: str) -> None:
    first, second = iterate(tiny(acronym, variant), 0), iterate(tiny(acronym, variant), 1)
    assert all(tensor.isfinite().all() for tensor in [*first, *second])
    assert [tensor.shape for tensor in first] == [tensor.shape for tensor in second]
    assert not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@FULL_ROWS
def test_tiny_size_is_decided_by_its_seed(acronym: str, variant: str) -> None:
    one_by_one = (instantiate(find(acronym), variant=variant, size="tiny", device="cpu", seed=0) for _ in range(2))
    first, second = (iterate(instance, 0) for instance in one_by_one)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


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


def test_xlnet_returns_its_memory_in_inference_only() -> None:
    for acronym, mems in (("XLNET-I", 2), ("XLNET-T", 0)):
        instance = tiny(acronym, "published")
        output = instance.module(**instance.inputs(0).kwargs)
        assert len(output.mems or ()) == mems


def test_images_of_lcnet_are_standardised_bytes() -> None:
    (images,) = find("LCNET").inputs("published", "tiny", torch.Generator().manual_seed(0)).args
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    assert images.std().item() == pytest.approx(1, abs=1e-4)
    assert images.unique().numel() <= 256


def test_sea_water_lies_in_the_published_ranges() -> None:
    made = find("EOS").inputs("published", "full", torch.Generator().manual_seed(0)).args
    assert {tensor.dtype for tensor in made} == {torch.float64}
    for tensor, (low, high) in zip(made, [(0.01, 10), (-12, 20), (0, 1000)], strict=True):
        width = high - low
        assert low <= tensor.min() < low + 0.1 * width
        assert high - 0.1 * width < tensor.max() <= high
