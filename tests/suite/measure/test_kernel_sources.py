"""Sources of generated kernels, from modules that Inductor loads."""

from __future__ import annotations

from pathlib import Path

from optimizations import torch_internals
from suite.measure.profiling import KernelSources

MODULE = """
class Compiler:
    def triton(self, name, source, device_str):
        return name

async_compile = Compiler()
{name} = async_compile.triton('{name}', \'\'\'
def {name}(in_ptr0, out_ptr0):
    {body}
\'\'\', device_str='cuda')
"""


def load(name: str, body: str) -> str:
    module = torch_internals.PyCodeCache.load(MODULE.format(name=name, body=body))
    assert getattr(module, name) == name and module.__file__
    return str(module.__file__)


def test_kernels_of_one_source_have_one_digest() -> None:
    first, second = KernelSources(), KernelSources()
    load("triton_poi_fused_add_0", "first body")
    load("triton_poi_fused_add_4", "first body")
    load("triton_poi_fused_add_7", "second body")
    found = first.digests()
    assert set(found) == {"triton_poi_fused_add_0", "triton_poi_fused_add_4", "triton_poi_fused_add_7"}
    assert found["triton_poi_fused_add_0"] == found["triton_poi_fused_add_4"] != found["triton_poi_fused_add_7"]
    assert second.digests() == found


def test_name_of_several_sources_has_no_digest() -> None:
    sources = KernelSources()
    load("triton_red_fused_sum_1", "of one graph")
    assert set(sources.digests()) == {"triton_red_fused_sum_1"}
    load("triton_red_fused_sum_1", "of another graph")
    assert sources.digests() == {}


def test_earlier_and_unreadable_sources_do_not_count() -> None:
    load("triton_per_fused_max_2", "of the trial")
    sources = KernelSources()
    load("triton_per_fused_max_2", "of the real compilation")
    gone = load("triton_per_fused_max_3", "of a folder that is gone")
    assert set(sources.digests()) == {"triton_per_fused_max_2", "triton_per_fused_max_3"}
    Path(gone).unlink()
    assert set(sources.digests()) == {"triton_per_fused_max_2"}
