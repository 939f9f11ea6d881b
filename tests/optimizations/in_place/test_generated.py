"""Facts about generated functions are read from sources in Inductor's form."""

from __future__ import annotations

import ast
from textwrap import dedent
from typing import Any

import pytest
import torch

from optimizations.in_place.generated import GeneratedCode, Launch, read_function, read_generated
from optimizations.torch_internals.left_out import OPERATORS

NAMES = ("triton_poi_a_0", "triton_red_b_1", "one_shot_all_reduce_0", "triton_poi_fused_all_reduce_2")
KERNELS = {name: f"{name}_of_the_driver" for name in NAMES}


def read(body: str) -> GeneratedCode:
    source = "def partition_0(args):\n    arg0_1, arg1_1, arg2_1 = args\n    args.clear()\n" + dedent(body).replace(
        "\n", "\n    "
    )
    (definition,) = ast.parse(source.rstrip() + "\n    return (buf0, )\n").body
    assert isinstance(definition, ast.FunctionDef)
    return read_function(definition, KERNELS)


def test_operators_left_out_of_graphs_exist() -> None:
    known = []
    for name in OPERATORS:
        library, _, operator = name.partition("::")
        packet, _, overload = operator.partition(".")
        known.append(hasattr(getattr(getattr(torch.ops, library), packet, None), overload or "default"))
    gone = [name for name, is_known in zip(OPERATORS, known, strict=True) if not is_known]
    assert set(gone) <= {"aten::cholesky"}, "2.15 has it no more"


def test_triton_kernel_arguments_are_counted_and_others_unknown() -> None:
    code = read(
        """
        assert_size_stride(arg0_1, (8, 8), (8, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
            stream0 = get_raw_stream(0)
            triton_poi_a_0.run(arg0_1, arg0_1, buf0, 64, stream=stream0)
            triton_red_b_1.run(buf0, arg0_1, 64, stream=stream0)
            del arg0_1
            extern_kernels.mm(arg1_1, reinterpret_tensor(buf0, (8, 8), (1, 8), 0), out=buf0)
            del arg1_1
        """
    )
    assert code.opaque is None
    assert not code.random
    assert code.triton_uses == {0: 3, 2: 0}
    assert code.products == {0, 1, 2}, "nothing else uses them"
    assert code.launches == (
        Launch("triton_poi_a_0_of_the_driver", (0, 0)),
        Launch("triton_red_b_1_of_the_driver", (0,)),
    )
    assert code.reused == frozenset()


@pytest.mark.parametrize(
    ("use", "only"),
    [
        ("extern_kernels.addmm(arg0_1, buf0, reinterpret_tensor(arg0_1, (8, 8), (1, 8), 0), out=buf0)", True),
        ("buf1 = extern_kernels.convolution(buf0, arg0_1, stride=(1, 1), bias=None)", True),
        ("buf1 = torch.ops.aten._scaled_mm.default(buf0, arg0_1)", True),
        ("triton_poi_a_0.run(arg0_1, buf0, 64, stream=stream0)\nextern_kernels.mm(buf0, arg0_1, out=buf0)", True),
        ("buf1 = torch.ops.aten._grouped_mm.default(buf0, arg0_1)", False),
        ("extern_kernels._grouped_mm(buf0, arg0_1, out=buf0)", False),
        ("buf1 = arg0_1\nextern_kernels.mm(buf0, buf1, out=buf0)", False),
        ("extern_kernels.mm(buf0, arg0_1, out=buf0)\nbuf1 = torch.ops.aten.sort.default(arg0_1)", False),
        ("extern_kernels.mm(buf0, torch.ops.aten.sort.default(arg0_1), out=buf0)", False),
        ("arg0_1 = buf0", False),
    ],
)
def test_inputs_used_only_by_kernels_and_products_are_known(use: str, only: bool) -> None:
    assert (0 in read(f"\n{use}\n").products) is only


RUN = "triton_poi_a_0.run({}, buf0, 64, stream=stream0)"
REUSED = frozenset({0})
TENSOR_MAPS = "triton.tools.tensor_descriptor.TensorDescriptor", "triton.tools.experimental_descriptor"


@pytest.mark.parametrize(
    ("lines", "reused"),
    [
        ([RUN.format("reinterpret_tensor(arg0_1, (4, ), (1, ), 4)")], frozenset()),
        (["one_shot_all_reduce_0.run(arg0_1, buf0, 64, stream=stream0)"], frozenset()),
        ([f"buf1 = {TENSOR_MAPS[0]}.from_tensor(arg0_1, [32, 32])", RUN.format("buf1")], frozenset()),
        (
            [f"buf1 = {TENSOR_MAPS[1]}.create_2d_tma_descriptor(arg0_1.data_ptr(), 32, 32, 16, 16, 4)"],
            frozenset(),
        ),
        (["buf1 = arg0_1; del arg0_1  # reuse", RUN.format("buf1")], REUSED),
        (["buf1 = arg0_1", RUN.format("buf1")], REUSED),
        (["buf1 = reinterpret_tensor(arg0_1, (), (), 0); del arg0_1", RUN.format("buf1")], REUSED),
    ],
)
def test_input_with_unknown_uses_is_not_counted(lines: list[str], reused: frozenset[int]) -> None:
    """It is viewed, in a tensor map, in a kernel of several ranks, or its memory is reused."""
    code = read("\n" + "\n".join(lines) + "\n")
    assert code.opaque is None or code.collective
    assert (code.triton_uses, code.reused) == ({1: 0, 2: 0}, reused)


def test_alignment_check_of_an_input_is_no_use() -> None:
    """PyTorch 2.14 and later generate it. An aligned input is returned unchanged."""
    code = read("\narg0_1 = copy_if_misaligned(arg0_1)\ntriton_poi_a_0.run(arg0_1, buf0, 64, stream=stream0)\n")
    assert (code.opaque, code.triton_uses[0]) == (None, 1)
    copied = read("\narg0_1 = copy_if_misaligned(arg0_1_orig)\ntriton_poi_a_0.run(arg0_1, buf0, 64, stream=stream0)\n")
    assert copied.opaque == "it calls copy_if_misaligned, whose effects are not known"


COLLECTIVE = {"collective": True, "opaque": "collective"}

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("torch.ops.aten._linalg_svd.default(arg0_1, True)", {"uncapturable": "aten::_linalg_svd"}),
    ("aten.cholesky.default(arg0_1)", {"uncapturable": "aten::cholesky"}),
    ("torch.ops.aten.linalg_pinv.atol_rtol_tensor(arg0_1)", {"uncapturable": "aten::linalg_pinv.atol_rtol_tensor"}),
    ("torch.ops.aten.linalg_cholesky_ex.default(arg0_1)", {"uncapturable": None}),
    ("torch.ops.mine.cholesky.default(arg0_1)", {"uncapturable": None}),
    ("torch.ops.aten.set_.source_Tensor(arg0_1, buf0)", {"uncapturable": "aten::set_.source_Tensor"}),
    ("inductor_ops.resize_storage_bytes_(arg0_1, 0)", {"uncapturable": "inductor::resize_storage_bytes_"}),
    ("extern_kernels.mm(arg0_1, arg1_1)", {"uncapturable": None}),
    ("torch.ops.mylib.step.default(arg0_1)", {"opaque": "custom operator, mylib::step"}),
    ("cpp_fused_add_0(arg0_1)", {"opaque": "cpp_fused_add_0"}),
    ("other_kernel.run(arg0_1)", {"opaque": "other_kernel.run"}),
    ("something[0](arg0_1)", {"opaque": "calls something[0], whose"}),
    ("something()(arg0_1)", {"opaque": "calls something(), whose"}),
    ("buf0[0].register_hook(buf0)", {"opaque": "calls buf0[0].register_hook, whose"}),
    ("other(arg0_1)[0:8].view(2, 4).sum(dim=0)", {"opaque": "calls other, whose"}),
    ("torch.ops.torchvision.nms.default(arg0_1, arg1_1, 0.5)", {"opaque": "custom operator, torchvision::nms"}),
    ("torch.ops.higher_order.cond(arg0_1)", {"opaque": "custom operator, higher_order::cond"}),
    ("torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')", COLLECTIVE),
    ("torch.ops.symm_mem.one_shot_all_reduce.default(arg0_1, 'sum', '2')", COLLECTIVE),
    ("torch.ops._dtensor.shard_dim_alltoall.default(arg0_1, 0, 1, '0')", COLLECTIVE),
    ("torch.ops.vllm.all_reduce.default(arg0_1, 'tp:0')", COLLECTIVE),
    ("torch.ops._C_custom_ar.all_reduce.default(7, arg0_1)", COLLECTIVE),
    ("torch.ops.mylib.broadcast_.default(arg0_1)", COLLECTIVE),
    ("empty_strided_p2p((8, 8), (8, 1), torch.float32, torch.device('cuda:0'), group_name='0')", COLLECTIVE),
    ("one_shot_all_reduce_0.run(arg0_1, 64, stream=stream0)", COLLECTIVE),
    ("torch.ops.aten.broadcast_tensors.default(arg0_1)", {"collective": False}),
    ("torch.ops.mylib.sender.default(arg0_1)", {"collective": False}),
    ("triton_poi_fused_all_reduce_2.run(arg0_1, 64, stream=stream0)", {"collective": False}),
    ("empty_strided_cuda((8, 8), (8, 1), torch.float32)", {"collective": False}),
    ("torch.ops.aten.bernoulli.default(arg0_1)", {"random": True, "opaque": None}),
    ("aten.randint.low_out(0, 9, [1], out=buf1)", {"random": True, "opaque": None}),
    (
        "torch.ops.aten._scaled_dot_product_flash_attention.default(arg0_1, arg0_1, arg0_1)",
        {"random": True, "opaque": None},
    ),
    ("torch.ops.aten.native_layer_norm.default(arg0_1)", {"random": False, "opaque": None}),
    ("extern_kernels.addmm(arg0_1, arg1_1, arg2_1, out=buf0)", {"random": False, "opaque": None}),
    # What cannot notice a capture is accepted.
    ("workspace_0[0 * 2048 * 768 : (0 + 1) * 2048 * 768].view(2048, 768).sum(dim=0)", {"opaque": None}),
    ("workspace_0[1 * 2048 * 768 : 2 * 2048 * 768].view(2048, 768).amax(dim=0).to(torch.bfloat16)", {"opaque": None}),
    ("buf1.sum(dim=0)", {"opaque": None}),
    ("arg0_1.size()", {"opaque": None}),
    ("arg0_1.stride()", {"opaque": None}),
    ("torch.ops.torchvision.roi_align.default(arg0_1, arg1_1, 0.25, 7, 7, 2, False)", {"opaque": None}),
    ("torch.ops.torchvision._deform_conv2d_backward.default(arg0_1, arg1_1)", {"opaque": None}),
]


@pytest.mark.parametrize(("call", "expected"), CALLS)
def test_facts_about_a_call_are_found(call: str, expected: dict[str, Any]) -> None:
    """A reason why the function is opaque is expected in part."""
    code = read(f"\nbuf0 = {call}\n")
    for name, value in expected.items():
        found = getattr(code, name)
        assert found == value or (name == "opaque" and value is not None and value in str(found)), name


def test_function_that_cannot_be_read_is_opaque() -> None:
    assert "cannot be read" in str(read_generated(len).opaque) and read_generated(len).reused is None
    assert read_generated(lambda args: args).opaque is not None
    (definition,) = ast.parse("def call(args):\n    return args\n").body
    assert isinstance(definition, ast.FunctionDef)
    assert "naming its inputs" in str(read_function(definition, {}).opaque)


SLICE = "buf0 = torch.ops.aten.slice.Tensor(arg1_1, 1, 2, 3)"
COMPLEX = "buf0 = torch.ops.aten.view_as_complex.default(reinterpret_tensor(arg2_1, (4, 2), (2, 1), 8))"
COPY_TO_0 = "buf9 = torch.ops.aten.copy_.default(buf0, arg0_1)"


@pytest.mark.parametrize(
    ("lines", "written"),
    [
        ((SLICE, COPY_TO_0), {1}),
        ((SLICE, "buf1 = buf0", "torch.ops.aten.copy_.default(buf1, arg0_1)"), {1}),
        (("buf0 = torch.ops.aten.split.Tensor(arg1_1, 2)", "buf1 = buf0[1]", "aten.zero_.default(buf1)"), {1}),
        ((COMPLEX, "torch.ops.aten.index_put_.default(buf0, [arg1_1], arg0_1)"), {2}),
        (("torch.ops.aten._foreach_add_.List([arg0_1, buf9], [arg1_1, buf8])",), {0}),
        (("torch.ops.aten.mm.out(arg0_1, arg1_1, out=arg2_1)",), {2}),
        (("buf0 = arg1_1[0:8].view(2, 4)", "torch.ops.aten.copy_.default(buf0, arg0_1)"), {1}),
        (("buf0 = arg1_1[0:8].view(2, 4).sum(dim=0)", "torch.ops.aten.copy_.default(buf0, arg0_1)"), set()),
        ((SLICE, "buf2 = torch.ops.aten.copy.default(buf0, arg0_1)"), set()),
        ((SLICE, "buf0 = torch.ops.aten.clone.default(buf0)", COPY_TO_0), set()),
        (("buf0 = arg1_1; del arg1_1  # reuse", COPY_TO_0), set()),
        (("buf0 = reinterpret_tensor(arg1_1, (8,), (1,), 0); del arg1_1  # reuse", COPY_TO_0), set()),
        (("torch.ops.aten.no_such_operator_.default(arg0_1)", "buf0 = torch.ops.aten.sin(arg1_1)"), set()),
    ],
)
def test_writes_through_views_of_inputs_are_found(lines: tuple[str, ...], written: set[int]) -> None:
    assert read("\n" + "\n".join(lines) + "\n").written == written
