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


def test_key_has_no_number_of_inductors_and_the_launch() -> None:
    assert kernel_key("triton_poi_fused_add_3", (8, 1, 1), (128, 1, 1)) == "triton_poi_fused_add 8x1x1 128x1x1"
    assert kernel_key("vendor_3", (8, 1, 1), (128, 1, 1)) == "vendor_3 8x1x1 128x1x1"


def test_long_names_differing_at_their_end_are_distinct() -> None:
    one, other = (kernel_key("k" * 200 + end, (1,), (1,)) for end in "ab")
    assert one != other
    assert len(one) < 90


def test_launch_order_does_not_matter() -> None:
    ours = kernels(("triton_red_1", 4, 256), (GEMM, 8, 384))
    theirs = kernels((GEMM, 8, 384), ("triton_red_7", 4, 256))
    assert difference(ours, theirs) == difference(ours, ours)
    assert not difference(ours, theirs).retuned


@pytest.mark.parametrize(
    "theirs",
    [
        kernels(("triton_red_1", 4, 512), (GEMM, 8, 384)),  # another number of warps
        kernels(("triton_red_1", 2, 256), (GEMM, 8, 384)),  # another tile
        kernels(("triton_red_1", 4, 256), (GEMM.replace("128x128", "64x128"), 8, 384)),  # another tile of cuBLAS
        kernels(("triton_red_1", 4, 256), (GEMM, 8, 384), (GEMM, 8, 384)),  # once more
        kernels(("triton_red_1", 4, 256)),  # no GEMM
    ],
)
def test_different_tuning_is_found_from_both_sides(theirs: dict[str, int]) -> None:
    ours = kernels(("triton_red_1", 4, 256), (GEMM, 8, 384))
    assert difference(ours, theirs).retuned
    assert difference(theirs, ours).retuned


@pytest.mark.parametrize(
    "name", [COPY, "encore_prelude", "encore_write_pointers", "memset32", "memcpy128", "memcpy32_post"]
)
def test_kernels_that_only_move_do_not_count(name: str) -> None:
    """Outside of a graph a memset or memcpy is no kernel; pointers are written in calls where an input moved.

    Older rows have such kernels without a mark.
    """
    ours = kernels((GEMM, 8, 384))
    for theirs in (kernels((GEMM, 8, 384), (name, 16, 512)), {**ours, f"{name.split()[-1]} 16x1x1 512x1x1": 3}):
        assert difference(ours, theirs) == difference(theirs, ours) == Difference((), ())
    assert difference(ours, kernels((name, 16, 512))).retuned, "a copy does not stand in for a GEMM"


@pytest.mark.parametrize("name", ["triton_memset", "triton_poi_fused_memcpy128_0", "triton_poi_fused_memcpy32_post_0"])
def test_generated_kernels_count_whatever_their_name(name: str) -> None:
    assert difference({}, kernels((name, 8, 128))).generated


@pytest.mark.parametrize(
    "vendors", [GEMM, "cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_32x6_tn_align8>"]
)
def test_kernels_of_vendors_count_next_to_copies(vendors: str) -> None:
    theirs = kernels((vendors, 8, 384), ("memcpy128", 16, 512))
    assert difference({}, theirs).retuned == difference(theirs, {}).retuned == tuple(kernels((vendors, 8, 384)))


def test_generated_kernel_that_copies_and_computes_counts() -> None:
    ours = kernels(("triton_poi_fused_copy_mul_0", 8, 128))
    assert difference(ours, kernels(("triton_poi_fused_copy_mul_0", 8, 256))).retuned


def test_generated_kernel_of_one_side_is_another_program() -> None:
    found = difference(kernels((GEMM, 8, 384), ("triton_poi_fused_cos_0", 1, 128)), kernels((GEMM, 8, 384)))
    assert (found.retuned, found.generated) == ((), ("triton_poi_fused_cos 1x1x1 128x1x1",))


def test_generated_kernel_launched_more_often_is_another_program() -> None:
    """XLNet with stock's graphs casts 24 tensors in this way, without graphs 8."""
    cast = ("triton_poi_fused__to_copy_3", 2048, 256)
    found = difference(kernels(cast), kernels(cast, cast, cast))
    assert (found.retuned, found.generated) == ((), ("triton_poi_fused__to_copy 2048x1x1 256x1x1",))
    both = difference(kernels(cast, ("triton_poi_fused__to_copy_4", 9, 128)), kernels(cast, cast, cast))
    assert len(both.retuned) == 2, "one launch less of one kind, and more of another"


def test_differing_iterations_have_no_count() -> None:
    assert count_kernels(["a", "a", "b", "b"], 2) == {"a": 1, "b": 1}
    assert count_kernels(["a", "a", "b"], 2) is None


def test_kernel_is_known_by_its_source_where_both_rows_have_it() -> None:
    """XLNet's casts: three outputs at once in most modes, and one at a time in another, with kernels of one name."""
    three = {"triton_poi_fused__to_copy#aaaaaa 2048x1x1 256x1x1": 8}
    single = {"triton_poi_fused__to_copy#bbbbbb 1024x1x1 128x1x1": 24}
    for found in (difference(three, single), difference(single, three)):
        assert found == Difference((), tuple(sorted([*three, *single])))
    tuned = {"triton_poi_fused__to_copy#aaaaaa 1024x1x1 512x1x1": 8}
    assert difference(three, tuned).retuned
    assert difference(three, dict(three)) == Difference((), ())


def test_kernel_without_source_in_one_row_is_known_by_name() -> None:
    sourced = {"triton_red#aaaaaa 4x1x1 64x1x1": 2, "triton_red#bbbbbb 4x1x1 64x1x1": 1}
    assert difference(sourced, {"triton_red 4x1x1 64x1x1": 3}) == Difference((), ())
    assert difference(sourced, {"triton_red 4x1x1 32x1x1": 3}).retuned
    assert difference({"triton_red 4x1x1 32x1x1": 3}, sourced).retuned


def test_source_digest_replaces_the_number() -> None:
    name = "triton_poi_fused_add_3"
    assert kernel_key(name, (8, 1, 1), (128, 1, 1), {name: "1f09ab"}) == "triton_poi_fused_add#1f09ab 8x1x1 128x1x1"
    assert kernel_key(name, (8, 1, 1), (128, 1, 1), {}) == "triton_poi_fused_add 8x1x1 128x1x1"
    long = f"triton_poi_{'x' * 80}_3"
    assert "#1f09ab 8x1x1" in kernel_key(long, (8, 1, 1), (128, 1, 1), {long: "1f09ab"})
