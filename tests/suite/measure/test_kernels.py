"""Kernels of two rows are compared: equal ones, and ones that differ by tuning only."""

from __future__ import annotations

import pytest

from suite.measure.kernels import Difference, count_kernels, difference, kernel_key

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel__5x_cublas"
COPY = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"


def kernels(*launched: tuple[str, int, int]) -> dict[str, int]:
    counted = count_kernels([kernel_key(name, (grid, 1, 1), (block, 1, 1)) for name, grid, block in launched], 1)
    assert counted is not None
    return counted


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("triton_poi_fused_add_3", "triton_poi_fused_add"),
        ("vendor_3", "vendor_3"),
        ("triton_poi_fused_add_7", "triton_poi_fused_add#1f09ab"),
        (f"triton_poi_{'x' * 80}_7", "#1f09ab"),
    ],
)
def test_key_is_the_launch_with_a_name_without_inductors_number(name: str, key: str) -> None:
    """The digest of its source replaces the number."""
    sources = {name: "1f09ab"} if name.endswith("7") else {}
    found = kernel_key(name, (8, 1, 1), (128, 1, 1), sources)
    assert found.endswith(f"{key} 8x1x1 128x1x1") and len(found) < 100


def test_long_names_differing_at_their_end_are_distinct() -> None:
    one, other = (kernel_key("k" * 200 + end, (1,), (1,)) for end in "ab")
    assert one != other
    assert len(one) < 90


OURS = kernels(("triton_red_1", 4, 256), (GEMM, 8, 384))
CAST = ("triton_poi_fused__to_copy_3", 2048, 256)
CASTS = "triton_poi_fused__to_copy 2048x1x1 256x1x1"
# XLNet's casts: three outputs at once in most modes, and one at a time in another, with kernels of one name.
THREE = {"triton_poi_fused__to_copy#aaaaaa 2048x1x1 256x1x1": 8}
SINGLE = {"triton_poi_fused__to_copy#bbbbbb 1024x1x1 128x1x1": 24}
SOURCED = {"triton_red#aaaaaa 4x1x1 64x1x1": 2, "triton_red#bbbbbb 4x1x1 64x1x1": 1}


@pytest.mark.parametrize(
    ("ours", "theirs", "generated"),
    [
        (OURS, kernels((GEMM, 8, 384), ("triton_red_7", 4, 256)), ()),  # in another order
        # Outside of a graph a memset or memcpy is no kernel; pointers are written in calls where an input moved.
        # Older rows have such kernels without a mark.
        *(
            (OURS, theirs, ())
            for name in (COPY, "encore_prelude", "encore_write_pointers", "memset32", "memcpy128", "memcpy32_post")
            for theirs in (OURS | kernels((name, 16, 512)), {**OURS, f"{name.split()[-1]} 16x1x1 512x1x1": 3})
        ),
        # A generated kernel of one side, or launched more often, is another program: XLNet with stock's graphs casts
        # 24 tensors in this way, without graphs 8.
        (OURS | kernels(("triton_cos_0", 1, 128)), OURS, ("triton_cos 1x1x1 128x1x1",)),
        *(
            (kernels((name, 8, 128)), {}, tuple(kernels((name, 8, 128))))
            for name in ("triton_memset", "triton_poi_fused_memcpy128_0", "triton_poi_fused_memcpy32_post_0")
        ),
        (kernels(CAST), kernels(CAST, CAST, CAST), (CASTS,)),
        (THREE, SINGLE, tuple(sorted([*THREE, *SINGLE]))),
        (THREE, dict(THREE), ()),
        (SOURCED, {"triton_red 4x1x1 64x1x1": 3}, ()),  # without sources in one row, kernels are known by name
    ],
)
def test_moving_and_generated_kernels_are_no_other_tuning(
    ours: dict[str, int], theirs: dict[str, int], generated: tuple[str, ...]
) -> None:
    assert difference(ours, theirs) == difference(theirs, ours) == Difference((), generated)


VENDORS = (GEMM, "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>")


@pytest.mark.parametrize(
    ("ours", "theirs", "kinds"),
    [
        (OURS, kernels(("triton_red_1", 4, 512), (GEMM, 8, 384)), 2),  # another number of warps
        (OURS, kernels(("triton_red_1", 2, 256), (GEMM, 8, 384)), 2),  # another tile
        (OURS, kernels(("triton_red_1", 4, 256), (GEMM.replace("128x128", "64x128"), 8, 384)), 2),  # another of cuBLAS
        (OURS, kernels(("triton_red_1", 4, 256), (GEMM, 8, 384), (GEMM, 8, 384)), 1),  # once more
        (OURS, kernels(("triton_red_1", 4, 256)), 1),  # no GEMM
        (kernels((GEMM, 8, 384)), kernels((COPY, 16, 512)), 1),  # a copy does not stand in for a GEMM
        *(({}, kernels((name, 8, 384), ("memcpy128", 16, 512)), 1) for name in VENDORS),
        (kernels(("triton_poi_copy_mul_0", 8, 128)), kernels(("triton_poi_copy_mul_0", 8, 256)), 2),
        (kernels(CAST, ("triton_poi_fused__to_copy_4", 9, 128)), kernels(CAST, CAST, CAST), 2),
        (THREE, {"triton_poi_fused__to_copy#aaaaaa 1024x1x1 512x1x1": 8}, 2),
        (SOURCED, {"triton_red 4x1x1 32x1x1": 3}, 2),
    ],
)
def test_different_tuning_is_found_from_both_sides(ours: dict[str, int], theirs: dict[str, int], kinds: int) -> None:
    assert len(difference(ours, theirs).retuned) == len(difference(theirs, ours).retuned) == kinds


def test_differing_iterations_have_no_count() -> None:
    assert count_kernels(["a", "a", "b", "b"], 2) == {"a": 1, "b": 1}
    assert count_kernels(["a", "a", "b"], 2) is None
