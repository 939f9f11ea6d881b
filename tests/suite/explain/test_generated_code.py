"""Work of generated modules is counted, on handwritten sources in Inductor's form."""

from __future__ import annotations

from collections import Counter
from textwrap import dedent

from suite.explain.generated_code import read_module

PARTITIONED = dedent(
    """
    from torch._inductor.async_compile import AsyncCompile
    async_compile = AsyncCompile()
    triton_poi_a_0 = async_compile.triton('triton_poi_a_0', '''source of a''', device_str='cuda')
    cpp_fused_b_1 = async_compile.cpp_pybinding(['float*'], '''source of b''')
    triton_poi_c_2 = async_compile.triton('triton_poi_c_2', '''source of c''', device_str='cuda')

    def partition_0(args):
        arg0_1, = args
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
            triton_poi_a_0.run(arg0_1, buf0, 64, stream=stream0)
            extern_kernels.mm(buf0, reinterpret_tensor(buf0, (8, 8), (1, 8), 0), out=buf0)
            buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(buf0, buf0, buf0)
            buf2 = torch.ops.aten.view.dtype(buf1, torch.int32)
        return (buf2, )

    def partition_10(args):
        with torch.cuda._DeviceGuard(0):
            triton_poi_c_2.run(args[0], 1, stream=stream0)

    def partition_2(args):
        with torch.cuda._DeviceGuard(0):
            triton_poi_c_2.run(args[0], 1, stream=stream0)
            triton_poi_c_2.run(args[0], 1, stream=stream0)
            args[0].copy_(args[1], False)

    async_compile.wait(globals())

    class Runner:
        def __init__(self, partitions):
            self.partitions = partitions

        def call(self, args):
            arg0_1, arg1_1 = args
            cpp_fused_b_1(arg1_1)
            extern_kernels.mm(arg1_1, arg1_1, out=arg1_1)
            with torch.cuda._DeviceGuard(0):
                torch.cuda.set_device(0)
                buf3 = empty_strided_cuda((8, ), (1, ), torch.float32)
                buf3.copy_(arg1_1, False)
                buf4.copy_(arg2_1, True)
            buf5.copy_(buf3, False)
            (buf6,) = self.partitions[0]([arg0_1])
            return (buf6, )
    """
)


def test_partitions_come_in_order_with_their_launches() -> None:
    first, third, eleventh, _ = read_module(PARTITIONED)
    assert first == Counter(gpu_kernels=3), "a Triton kernel, a library call and an operator; a view launches nothing"
    assert third == Counter(gpu_kernels=2), "a copy inside a partition stays on the GPU"
    assert eleventh == Counter(gpu_kernels=1)


def test_call_counts_cpu_work_and_copies_apart_from_partitions() -> None:
    assert read_module(PARTITIONED)[-1] == Counter(cpu_kernels=2, host_to_device_copies=2, blocking_copies=1)


def test_partial_sums_of_a_kernel_are_added_up_by_kernels() -> None:
    source = """
        triton_per_a_0 = async_compile.triton('triton_per_a_0', '''source of a''', device_str='cuda')

        def partition_0(args):
            with torch.cuda._DeviceGuard(0):
                triton_per_a_0.run(args[0], workspace_0, 64, 8, stream=stream0)
                buf1 = workspace_0[0 * 2 * 8 : (0 + 1) * 2 * 8].view(2, 8).sum(dim=0)
                buf2 = workspace_0[1 * 2 * 8 : (1 + 1) * 2 * 8].view(2, 8).sum(dim=0).to(torch.bfloat16)
            return (buf1, buf2)
    """
    assert read_module(dedent(source)) == [Counter(gpu_kernels=4), Counter()]


def test_nothing_generated_does_nothing() -> None:
    assert read_module("") == [Counter()]
