"""Which kernels and operators work with other processes, by their names.

A kernel's name comes from the driver and may be mangled: `_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24nccl...`. So
names are searched, not compared from their start. Known by name are the kernels of NCCL and NVSHMEM, of PyTorch's
symmetric memory (namespace `c10d::symmetric_memory`), of libraries that bring their own (vLLM's `cross_device_reduce`,
Transformer Engine's user buffers, DeepEP, MSCCL++), and whatever is called after a collective. One too many costs a
copy of inputs; one too few could run a collective on one rank alone.
"""

from __future__ import annotations

import re

_KERNEL = re.compile(
    r"nccl|nvshmem|symmetric_?mem|symm_?mem|multimem|nvls|cross_?device|user_?buffers|deep_?ep|msccl"
    r"|quick_?reduce|(?:put|wait)_signal|barrier_kernel"
    r"|all_?(?:reduce|gather|to_?all)|reduce_?scatter",
    re.IGNORECASE,
)
_OPERATOR = re.compile(
    r"nccl|nvshmem|symm_?mem|multimem|cross_?device|all_?(?:reduce|gather|to_?all)|reduce_?scatter|wait_tensor"
    r"|(?:^|_)(?:broadcast|send|recv|isend|irecv|barrier)_?$",
    re.IGNORECASE,
)
_OF_INDUCTOR = re.compile(r"triton_[a-z]+_fused_")
"""Inductor names a fused kernel after the operators it came from, a collective next to it among them."""


def is_collective_kernel(name: str) -> bool:
    """Whether a kernel of this name, mangled or not, works with other processes."""
    return not _OF_INDUCTOR.match(name) and _KERNEL.search(name) is not None


def is_collective_operator(name: str) -> bool:
    """Whether an operator of this name, without its namespace, works with other processes."""
    return _OPERATOR.search(name) is not None
