"""Make PyTorch compile for an H100 that is not present: a table of its properties replaces queries of the driver.

Inside `pretended_gpu()` Dynamo, AOTAutograd and Inductor behave as on a machine with that GPU, as long as every CUDA
tensor is fake and nothing is launched. Measurements on the GPU are replaced by assumptions, which are reported.

The table is installed in global state of PyTorch and Triton, and values computed from it remain in caches. Enter
`pretended_gpu` only in a process that is used for nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from optimizations import torch_internals
from suite.explain import attention
from suite.explain.attention import overridden

WARP_SIZE = 32


CAPABILITY = (9, 0)
NAME = "NVIDIA H100 80GB HBM3"

_PROPERTIES = SimpleNamespace(
    name=NAME,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=80 * 2**30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=WARP_SIZE,
    L2_cache_size=50 * 2**20,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
)
"""`torch.cuda.get_device_properties` of the SXM5 board, by the CUDA programming guide's table for compute capability
9.0."""


@contextlib.contextmanager
def pretended_gpu() -> Iterator[list[str]]:
    """Make PyTorch take an H100 for device cuda:0 while the block runs. Yields the sentences for the report on where an
    answer was assumed that a real GPU gives by measuring."""
    torch_internals.require_supported()
    assumed: list[str] = []

    def assume(sentence: str) -> None:
        if sentence not in assumed:
            assumed.append(sentence)

    # PyTorch's guard for tracing CUDA programs without a device; without it any indexing queries the driver.
    torch_internals.ensure_cuda_device_guard_set()
    with contextlib.ExitStack() as stack:
        for owner, attribute, answer in _answers():
            stack.enter_context(torch_internals.replaced_attribute(owner, attribute, answer))
        # Constants of a traced program stay on the CPU instead of being moved to the device at once.
        stack.enter_context(torch_internals.replaced("avoid_device_init", property(lambda mode: True)))
        stack.enter_context(torch_internals.replaced("cuda_lazy_init", lambda: None))
        for name in ("exchange_device", "maybe_exchange_device"):
            stack.enter_context(torch_internals.replaced(name, lambda device: 0))
        stack.enter_context(torch_internals.replaced("should_pad", _padding_not_worth_it(assume)))
        stack.enter_context(_triton_driver())
        stack.enter_context(_real_tensors_on_the_cpu())
        stack.enter_context(attention.chosen_offline(assume))
        yield assumed


@contextlib.contextmanager
def named_gpu() -> Iterator[None]:
    """Make PyTorch return the GPU's name and no other property: TorchBench queries it before it builds a model."""
    with torch_internals.replaced_attribute(torch.cuda, "get_device_name", lambda device=None: NAME):
        yield


def _answers() -> Iterator[tuple[Any, str, Any]]:
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: CAPABILITY,
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda new_state, device="cuda": None,
    }
    for attribute, answer in answers.items():
        yield torch.cuda, attribute, answer
        # Dynamo's device interface took its own references when it was imported.
        if attribute in vars(torch_internals.CudaInterface):
            yield torch_internals.CudaInterface, attribute, staticmethod(answer)
    # This property is queried to create streams, which needs a real GPU; without an accelerator none is used.
    yield torch.accelerator, "is_available", lambda: False


def _padding_not_worth_it(assume: Callable[[str], None]) -> Callable[..., bool]:
    def should_pad(*match: Any, **options: Any) -> bool:
        assume(
            "Inductor pads unaligned matrix products if a benchmark on the GPU finds that faster; here none is padded"
        )
        return False

    return should_pad


@contextlib.contextmanager
def _real_tensors_on_the_cpu() -> Iterator[None]:
    """Allocate GPU tensors in CPU memory: Inductor folds constants by computing a few real elements."""

    def empty(
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format | None = None,
        **where: Any,
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)

    def empty_strided(
        size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **where: Any
    ) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    with overridden("CUDA", {"empty.memory_format": empty, "empty_strided": empty_strided}):
        yield


@contextlib.contextmanager
def _triton_driver() -> Iterator[None]:
    """Replace Triton's driver, which code generation queries for the target; there is none without a GPU."""
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], WARP_SIZE)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": _PROPERTIES.shared_memory_per_block_optin}
        ),
    )
    triton.runtime.driver.set_active(driver)
    try:
        yield
    finally:
        triton.runtime.driver.set_active(None)
