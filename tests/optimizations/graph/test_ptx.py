"""Rewritten PTX: one more load per pointer and nothing else, on kernels Inductor generates; refusals for the rest.

`ENCORE_FULL_SWEEP=1` runs every stored kernel on every architecture (some minutes); without it all run on sm_90 and a
few on the others.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import triton
from hypothesis import given
from hypothesis import strategies as st
from nvidia_tools import opcodes
from triton_corpus import CorpusKernel, compile_ptx, corpus

from optimizations.compiled_cache import CompiledCache
from optimizations.graph.ptx import (
    PtxasFailed,
    PtxasMissing,
    PtxError,
    assemble,
    dereference,
    find_ptxas,
    read_kernel,
)

CORPUS = corpus()
FULL_SWEEP = os.environ.get("ENCORE_FULL_SWEEP") == "1"
SUBSET = range(0, len(CORPUS), 8)
SWEEP = [
    pytest.param(kernel, capability, id=f"{kernel.workload}-{kernel.name[:60]}-sm_{capability}")
    for number, kernel in enumerate(CORPUS)
    for capability in (80, 90, 100)
    if FULL_SWEEP or (capability == 90 and number % 2 == 0) or number in SUBSET
]


def test_the_corpus_covers_the_registered_workloads() -> None:
    kinds = Counter(kernel.name.split("_")[1] for kernel in CORPUS)
    assert len(CORPUS) >= 30
    assert {"poi", "per", "red"} <= set(kinds), "pointwise kernels, persistent and looped reductions"
    assert len({kernel.workload for kernel in CORPUS}) >= 10


@pytest.mark.parametrize(("kernel", "capability"), SWEEP)
def test_generated_kernels_gain_one_load_per_pointer(
    kernel: CorpusKernel, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    original = compile_ptx(kernel, capability, tmp_path)
    entry = read_kernel(original)
    assert kernel.pointers, "every kernel has pointers to indirect"
    assert [entry.refusals[number] for number in kernel.pointers] == [None] * len(kernel.pointers)
    assert all(entry.parameters[number].used for number in kernel.pointers)

    rewritten = dereference(original, kernel.pointers)

    with ThreadPoolExecutor(max_workers=2) as pool:
        before, after = pool.map(lambda ptx: measured(ptx, CompiledCache(tmp_path / "cubins")), (original, rewritten))
    assert after.global_loads == before.global_loads + len(kernel.pointers)
    # No kernel spills more; with registers at their limit a few spill 8 bytes less.
    assert after.spill_store_bytes <= before.spill_store_bytes
    assert after.spill_load_bytes <= before.spill_load_bytes


@dataclass(frozen=True)
class Measured:
    """Bytes that an assembled kernel spills per thread, and how many global loads (`LDG`) its machine code has."""

    spill_store_bytes: int
    spill_load_bytes: int
    global_loads: int


def measured(ptx: str, cache: CompiledCache) -> Measured:
    assembled = assemble(ptx, read_kernel(ptx), cache=cache)
    (spills,) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembled.compiler_log)
    return Measured(*map(int, spills), opcodes(assembled.image)["LDG"])


PTX = """
//
// .entry commented( .param .u64 no )
/* .entry commented_too() { ld.param.b64 %rd8, [k_param_0]; } */
.version 8.7
.target sm_90a
.address_size 64
.file 1 "a file of .entry strings { \\" ;"
.extern .shared .align 16 .b8 global_smem[];
.visible .func (.param .b32 result) helper(.param .b64 x)
{
    ret;
}
.visible .entry k(
    .param .u64 .ptr .global .align 16 k_param_0,
    .param .b64 k_param_1,
    .param .u32 k_param_2,
    .param .align 64 .b8 k_param_3[128],
    .param .u64 .ptr .const .align 8 k_param_4,
    .param .u64 k_param_5
)
.maxntid 128, 1, 1
.reqntid 128
{
    .reg .b64 %rd<9>;
    .reg .b32 %r<9>;
    .loc 1 5 0
    ld.param.b64 %rd1, [k_param_0]; // k_param_0 is loaded here
$L__BB0_1:
    { ld.param.u64
        %rd2 , [ k_param_1 ] ; }
    ld.param.b32 %r1, [k_param_2];
    st.global.b64 [%rd1+8], %rd2;
    ret;
}
"""


def test_each_parameter_load_is_followed_by_one_dereference() -> None:
    kernel = read_kernel(PTX)
    assert (kernel.name, kernel.target) == ("k", "sm_90a")
    rewritten = dereference(PTX, [0, 1])
    expected = PTX.replace(".ptr .global .align 16 k", ".ptr .global .align 8 k")
    expected = expected.replace(
        "ld.param.b64 %rd1, [k_param_0];", "ld.param.b64 %rd1, [k_param_0];\n\tld.global.b64 \t%rd1, [%rd1];"
    )
    expected = expected.replace("[ k_param_1 ] ;", "[ k_param_1 ] ;\n\tld.global.b64 \t%rd2, [%rd2];")
    assert rewritten == expected
    assert dereference(PTX, []) == PTX


@given(chosen=st.sets(st.sampled_from([0, 1, 5])))
def test_parameters_not_chosen_are_left_alone(chosen: set[int]) -> None:
    rewritten = dereference(PTX, chosen)
    assert rewritten.count("ld.global.b64") == len(chosen & {0, 1})
    assert (".align 16 k_param_0" in rewritten) == (0 not in chosen)
    assert read_kernel(rewritten).refusals == read_kernel(PTX).refusals


def test_words_are_accepted_all_else_is_refused_with_a_reason() -> None:
    kernel = read_kernel(PTX)
    assert kernel.refusals[0] is None
    assert kernel.refusals[1] is None
    assert kernel.refusals[2] == "it is of type .u32, not a 64-bit word"
    assert str(kernel.refusals[3]).startswith("it is a byte array")
    assert kernel.refusals[4] == "it points to .const memory"
    assert [parameter.used for parameter in kernel.parameters] == [True, True, True, False, False, False]
    with pytest.raises(PtxError, match="parameter 3 of k cannot be dereferenced: it is a byte array"):
        dereference(PTX, [0, 3])
    with pytest.raises(PtxError, match="k has 6 parameters, so there is none of number 6"):
        dereference(PTX, [6])
    with pytest.raises(PtxError, match="none of number -1"):
        dereference(PTX, [-1])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("@%p1 ld.param.b64 %rd1, [k_param_0];", "predicated (@%p1"),
        ("@!%p1 ld.param.b64 %rd1, [k_param_0];", "predicated (!%p1"),
        ("ld.param.b64 %rd1, [k_param_0+0];", "other than by a plain load"),
        ("ld.param.b32 %r1, [k_param_0];", "other than as one 64-bit word"),
        ("ld.param.v2.b32 {%r1, %r2}, [k_param_0];", "other than as one 64-bit word"),
        ("ld.param.f64 %fd1, [k_param_0];", "other than as one 64-bit word"),
        ("ld.param.b64 %rd1, [k_param_0]; ld.param.b64 %rd2, [k_param_0];", "loaded 2 times"),
        ("mov.b64 %rd1, k_param_0;", "other than by a plain load"),
        ("cvta.param.u64 %rd1, k_param_0;", "other than by a plain load"),
        ("prefetch.param.tensormap [k_param_0];", "other than by a plain load"),
        ("ld.param.b64 %rd1, [k_param_0]", "other than by a plain load"),
    ],
)
def test_uses_that_are_no_plain_load_are_refused(use: str, said: str) -> None:
    ptx = PTX.replace("ld.param.b64 %rd1, [k_param_0]; // k_param_0 is loaded here", use)
    refusal = read_kernel(ptx).refusals[0]
    assert refusal is not None
    assert said in refusal
    with pytest.raises(PtxError, match="cannot be dereferenced"):
        dereference(ptx, [0])


@pytest.mark.parametrize(
    "declaration",
    [
        ".param .u64 .volatile k_param_0",
        ".u64 k_param_0",
        ".param k_param_0",
        ".param .u64 .ptr .shared .align 8 k_param_0",
    ],
)
def test_declarations_that_are_not_understood_are_refused(declaration: str) -> None:
    assert read_kernel(PTX.replace(".param .u64 .ptr .global .align 16 k_param_0", declaration)).refusals[0] is not None


@pytest.mark.parametrize(
    "declaration",
    [
        ".param .u64 k_param_0",
        ".param .s64 .ptr k_param_0",
        ".param .b64 .ptr .align 4 k_param_0",
        ".param .u64 .ptr .global k_param_0",
    ],
)
def test_every_form_of_a_64_bit_word_is_accepted(declaration: str) -> None:
    assert read_kernel(PTX.replace(".param .u64 .ptr .global .align 16 k_param_0", declaration)).refusals[0] is None


def test_one_of_several_entries_is_chosen_by_name() -> None:
    second = PTX[PTX.index(".visible .entry") :].replace(".entry k(", ".entry k2(")
    both = f".visible .entry declared(.param .u64 k_param_0);\n{PTX}{second}.entry bare {{ ret; }}\n"
    with pytest.raises(PtxError, match="which kernel is meant: the module defines k, k2, bare"):
        read_kernel(both)
    with pytest.raises(PtxError, match="no entry other: the module defines k, k2, bare"):
        read_kernel(both, "other")
    assert read_kernel(both, "bare").parameters == ()
    rewritten = dereference(both, [0], "k2")
    assert rewritten[: both.index(".entry k2(")] == both[: both.index(".entry k2(")]
    assert rewritten.count("ld.global.b64") == 1


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ("", "the module defines no kernel"),
        (PTX[: PTX.index("st.global")], "never closed; is the file truncated"),
        (PTX[: PTX.index(".param .u32")], "never closed; is the file truncated"),
        (PTX.replace(".address_size 64", ".address_size 32"), "no 64-bit addresses"),
        (PTX.replace(".target sm_90a", ""), "names no .target"),
        (PTX.replace('{ \\" ;"', ""), "a string that does not end"),
    ],
)
def test_modules_that_cannot_be_read_are_refused(spoilt: str, said: str) -> None:
    with pytest.raises(PtxError, match=said):
        read_kernel(spoilt)


SMALL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 k_param_0)
{
    .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [k_param_0];
    st.global.b64 [%rd1], %rd1;
    ret;
}
"""


def test_a_kernel_is_assembled_once_for_the_same_content(tmp_path: Path) -> None:
    cache, kernel = CompiledCache(tmp_path), read_kernel(SMALL)
    first = assemble(SMALL, kernel, cache=cache)
    (path,) = tmp_path.iterdir()
    written = path.stat().st_ino
    assert assemble(SMALL, kernel, cache=cache).image == first.image
    assert path.stat().st_ino == written
    assert first.image
    assemble(SMALL, kernel, cache=cache, options=["--fmad=false"])
    assemble(SMALL.replace("sm_90", "sm_80"), read_kernel(SMALL.replace("sm_90", "sm_80")), cache=cache)
    assert len(list(tmp_path.iterdir())) == 3, "options and target are part of the content"
    path.write_bytes(b"damaged")
    assert assemble(SMALL, kernel, cache=cache).image == first.image


def test_another_ptxas_version_assembles_again(tmp_path: Path) -> None:
    kernel, cache = read_kernel(SMALL), CompiledCache(tmp_path / "cache")
    assemble(SMALL, kernel, cache=cache)
    newer = tmp_path / "ptxas"
    real = find_ptxas("sm_90")
    newer.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo newer; else exec {real} "$@"; fi\n')
    newer.chmod(newer.stat().st_mode | stat.S_IXUSR)
    assemble(SMALL, kernel, cache=cache, ptxas=newer)
    assert len(list(cache.directory.iterdir())) == 2


def test_what_ptxas_says_of_an_error_is_kept(tmp_path: Path) -> None:
    wrong = SMALL.replace("st.global.b64", "st.nowhere.b64")
    with pytest.raises(PtxasFailed, match=r"ptxas for sm_90 ended with \d+: (.|\n)*line 9.*nowhere"):
        assemble(wrong, read_kernel(wrong), cache=CompiledCache(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["sm_42", "sm_90q", "compute_90"])
def test_an_unknown_target_is_refused(tmp_path: Path, target: str) -> None:
    ptx = SMALL.replace("sm_90", target)
    with pytest.raises(PtxasFailed, match=target):
        assemble(ptx, read_kernel(ptx), cache=CompiledCache(tmp_path))


def test_a_missing_ptxas_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = tmp_path / "absent"
    with pytest.raises(PtxasMissing, match=r"absent cannot be run .* reinstall triton"):
        assemble(SMALL, read_kernel(SMALL), cache=CompiledCache(tmp_path), ptxas=absent)

    class Bare:
        @property
        def ptxas(self) -> None:
            raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(triton.knobs, "nvidia", Bare())
    with pytest.raises(PtxasMissing, match=r"Triton has no ptxas for sm_90 .*Cannot find ptxas"):
        find_ptxas("sm_90")


def test_blackwell_has_an_assembler_of_its_own() -> None:
    assert find_ptxas("sm_100a") != find_ptxas("sm_90a")
    assert find_ptxas("sm_80") == find_ptxas("sm_90a")
