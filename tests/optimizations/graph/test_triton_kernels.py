"""The PTX of captured kernels is found in Triton's own cache, and what is made of it loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from cuda.bindings import driver as real
from simulated_gpu.driver import SimulatedDriver
from triton_corpus import compile_ptx, corpus

from optimizations import torch_internals
from optimizations.compiled_cache import CompiledCache
from optimizations.graph import device as tools_module
from optimizations.graph import prelude as prelude
from optimizations.graph import table
from optimizations.graph.device import DeviceTools, RecordingTools, device_tools, unload_kernels
from optimizations.graph.driver import DEFAULT_SHARED_BYTES, CudaCallFailed, LoadedModules
from optimizations.graph.plan import Choice, PlannedNode
from optimizations.graph.pointers import PointerUse
from optimizations.graph.ptx import read_kernel
from optimizations.graph.records import CapturedGraph, KernelNode
from optimizations.graph.triton_kernels import KernelFile, Refusals, read_folder, triton_kernels

KERNEL = corpus()[0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of Triton's with one kernel, compiled for an H100 without one."""
    root = tmp_path_factory.mktemp("triton")
    with pytest.MonkeyPatch.context() as patch:
        # Both: once anything has set Triton's knob, it no longer looks at the environment.
        patch.setenv("TRITON_CACHE_DIR", str(root))
        patch.setattr(triton.knobs.cache, "dir", str(root))
        compile_ptx(KERNEL, 90, tmp_path_factory.mktemp("source"))
        yield root


def folder_of(cache: Path) -> Path:
    return next(cache.rglob(f"{KERNEL.name}.ptx")).parent


def autotuner(*hashes: str) -> Any:
    """An Inductor kernel that has this many launchers left."""
    made = object.__new__(torch_internals.CachingAutotuner)
    made.launchers = [SimpleNamespace(cache_hash=one) for one in hashes]
    return made


def function_in(**names: Any) -> Callable[..., Any]:
    def call(inputs: list[Any]) -> None: ...

    return FunctionType(call.__code__, names)


def test_kernels_of_the_functions_module_are_found(cache: Path) -> None:
    kernel = autotuner(folder_of(cache).name)
    found = triton_kernels(function_in(first=kernel, second=kernel, other=3), 0)
    assert list(found) == [KERNEL.name]
    assert found[KERNEL.name].kernel.kernel.target.startswith("sm_90")
    assert found[KERNEL.name].kernel.options == ()


def test_a_method_of_a_generated_class_is_as_good_as_a_function(cache: Path) -> None:
    runner = SimpleNamespace(__func__=function_in(kernel=autotuner(folder_of(cache).name)))
    assert list(triton_kernels(runner, 0)) == [KERNEL.name]


@pytest.mark.parametrize("hashes", [(), ("one", "two"), ("missing",)])
def test_kernels_that_are_undecided_or_gone_are_passed_over(cache: Path, hashes: tuple[str, ...]) -> None:
    assert triton_kernels(function_in(kernel=autotuner(*hashes)), 0) == {}
    assert triton_kernels(print, 0) == {}


def test_a_name_that_stands_for_two_kernels_is_passed_over(cache: Path, tmp_path: Path) -> None:
    first, twin = folder_of(cache), cache / "twin"
    twin.mkdir()
    for path in first.glob(f"{KERNEL.name}.*"):
        (twin / path.name).write_bytes(path.read_bytes())
    try:
        model = function_in(first=autotuner(first.name), second=autotuner("twin"))
        assert triton_kernels(model, 0) == {}
    finally:
        for path in twin.iterdir():
            path.unlink()
        twin.rmdir()


@pytest.mark.parametrize(
    ("metadata", "options"),
    [
        ('{"enable_fp_fusion": true, "ptx_options": null}', ()),
        ('{"enable_fp_fusion": false}', ("--fmad=false",)),
        ('{"ptx_options": "--maxrregcount 64"}', ("--maxrregcount", "64")),
    ],
)
def test_how_a_kernel_was_compiled_is_read(cache: Path, tmp_path: Path, metadata: str, options: Any) -> None:
    (tmp_path / "kernel.ptx").write_text(next(folder_of(cache).glob("*.ptx")).read_text())
    (tmp_path / "kernel.json").write_text(metadata)
    (kernel,) = read_folder(tmp_path)
    assert kernel.kernel.options == options


@pytest.mark.parametrize(("ptx", "metadata"), [("not PTX", "{}"), (None, "{"), (None, None)])
def test_files_that_are_not_understood_give_no_dereference(
    cache: Path, tmp_path: Path, ptx: str | None, metadata: str | None
) -> None:
    (tmp_path / "kernel.ptx").write_text(ptx or next(folder_of(cache).glob("*.ptx")).read_text())
    if metadata is not None:
        (tmp_path / "kernel.json").write_text(metadata)
    (kernel,) = read_folder(tmp_path)
    assert kernel.refusals == ()


def test_ptx_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "kernel.ptx").write_text("not PTX")
    (kernel,) = read_folder(tmp_path)
    found = Refusals({1: kernel, 2: KernelFile(tmp_path / "gone.ptx")})
    assert (list(found), len(found), 1 in found, kernel.name) == ([1, 2], 2, True, "kernel")
    assert (found[1], found[2]) == ((), ())


class LoadingDriver(SimulatedDriver):
    """Loads any image; a function's handle tells the image and the name."""

    CUfunction_attribute = real.CUfunction_attribute

    def __init__(self) -> None:
        super().__init__()
        self.images: list[bytes] = []
        self.unloaded: list[int] = []
        self.shared: list[int] = []
        self.version = 13000

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        assert image.startswith(b"\x7fELF")
        self.images.append(image)
        return real.CUresult.CUDA_SUCCESS, len(self.images)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        found = name in self.images[module - 1]
        return (real.CUresult.CUDA_SUCCESS if found else real.CUresult.CUDA_ERROR_NOT_FOUND), (module, name)

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[Any, ...]:
        self.shared.append(value)
        return (real.CUresult.CUDA_SUCCESS,)

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:
        self.unloaded.append(module)
        return (real.CUresult.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return real.CUresult.CUDA_SUCCESS, self.version


@pytest.fixture
def driver() -> LoadingDriver:
    return LoadingDriver()


@pytest.fixture
def tools(driver: LoadingDriver, tmp_path: Path) -> DeviceTools:
    return DeviceTools(driver, torch.device("cuda", 0), "sm_90", CompiledCache(tmp_path / "cubins"), None)


def node_of(parameter: int) -> PlannedNode:
    return PlannedNode((0,), Choice.PTX, (PointerUse((0,), parameter, 0, 0, 0),))


def record_of(name: str | None, shared_bytes: int = 0) -> KernelNode:
    fields = {"name": name, "function": 1, "by_library": False, "shared_bytes": shared_bytes, "cluster": None}
    one = (1, 1, 1)
    return KernelNode(**fields, grid=one, block=one, attributes=(), parameters=())


def test_a_rewritten_kernel_is_assembled_and_loaded_once(
    cache: Path, driver: LoadingDriver, tools: DeviceTools
) -> None:
    (kernel,) = read_folder(folder_of(cache))
    with_kernels = RecordingTools(tools, {KERNEL.name: kernel})
    node, record = node_of(KERNEL.pointers[0]), record_of(KERNEL.name, DEFAULT_SHARED_BYTES + 1)
    assert with_kernels.ptx_refusal(node, record) is None
    function = with_kernels.rewritten_function([KERNEL.pointers[0]], record)
    assert function == (1, KERNEL.name.encode())
    assert len(driver.images) == 1
    assert driver.shared == [DEFAULT_SHARED_BYTES + 1] * 2
    with_kernels.rewritten_function([KERNEL.pointers[1]], record_of(KERNEL.name))
    assert len(driver.images) == 2, "other parameters make another kernel"
    tools.unload()
    assert sorted(driver.unloaded) == [1, 2]


def test_kernel_that_cannot_be_rewritten_is_refused_with_reason(cache: Path, tools: DeviceTools) -> None:
    (kernel,) = read_folder(folder_of(cache))
    number = next(place for place in range(len(kernel.refusals)) if kernel.refusals[place])
    with_kernels = RecordingTools(tools, {KERNEL.name: kernel})
    refusal = with_kernels.ptx_refusal(node_of(number), record_of(KERNEL.name))
    assert f"parameter {number} of {KERNEL.name} cannot be dereferenced" in str(refusal)
    broken = KernelFile(folder_of(cache) / f"{KERNEL.name}.ptx")
    broken.kernel = dataclasses.replace(kernel.kernel, ptx=kernel.kernel.ptx.replace("ret;", "rat;"))
    refusal = RecordingTools(tools, {KERNEL.name: broken}).ptx_refusal(
        node_of(KERNEL.pointers[0]), record_of(KERNEL.name)
    )
    assert "ptxas" in str(refusal)


def test_only_kernels_whose_ptx_is_at_hand_are_available(cache: Path, tools: DeviceTools) -> None:
    (kernel,) = read_folder(folder_of(cache))
    nodes = (record_of("ampere_sgemm"), record_of(KERNEL.name), record_of(None))
    available = RecordingTools(tools, {KERNEL.name: kernel}).available(CapturedGraph(nodes=nodes, edges=()))
    assert dict(available.ptx) == {(1,): read_kernel(kernel.kernel.ptx).refusals}
    assert available.off == {}


def test_an_old_driver_turns_the_prelude_off_and_nothing_else(driver: LoadingDriver, tools: DeviceTools) -> None:
    driver.version = 12030
    assert list(tools.off) == [Choice.PRELUDE]
    assert "12.4 or newer, and this one is for 12.3" in tools.off[Choice.PRELUDE]


def test_without_a_compiler_only_the_host_is_left(tools: DeviceTools, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> bytes:
        raise table.TableUnavailable("no NVRTC")

    monkeypatch.setattr(table, "build_table_kernel", missing)
    assert set(tools.off) == {Choice.PRELUDE, Choice.PTX}


def test_encores_own_kernels_load(driver: LoadingDriver, tools: DeviceTools) -> None:
    assert tools.own_function(prelude.build_prelude, prelude.KERNEL_NAME)[1] == prelude.KERNEL_NAME.encode()
    assert tools.table_function(16)[1] == table.KERNEL_NAME.encode()
    assert len(driver.images) == 2
    tools.own_function(prelude.build_prelude, prelude.KERNEL_NAME)
    assert len(driver.images) == 2


def test_a_kernel_that_is_not_in_its_image_is_an_error(driver: LoadingDriver) -> None:
    with pytest.raises(CudaCallFailed, match="cuModuleGetFunction"):
        LoadedModules(driver).function(b"\x7fELF", "nothing")


def test_a_device_keeps_its_tools_until_they_are_unloaded(
    tools: DeviceTools, driver: LoadingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceTools, "of", classmethod(lambda cls, index: tools))
    monkeypatch.setattr(DeviceTools, "synchronize", lambda self: driver.unloaded.append(-1))
    assert device_tools(0) is device_tools(0) is tools
    monkeypatch.setattr(tools_module.torch.cuda, "device", lambda index: nullcontext())
    tools.own_function(prelude.build_prelude, prelude.KERNEL_NAME)
    unload_kernels()
    assert driver.unloaded == [-1, 1], "the device is waited for first"
    assert not tools_module._DEVICES
