"""Bytes of what one call of a workload takes in: its inputs, and in training the gradients of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from models.instance import autocast_dtype, instantiate
from models.registry import Workload
from suite.measure.known_values import KnownValuesMode
from suite.measure.results import named_tensors


def copied_by_training(workload: Workload) -> tuple[int, int]:
    """Bytes of the inputs, and of one gradient for each output that can have one, of an eager forward on fake CUDA
    tensors. Needs no GPU; takes seconds."""
    mode = KnownValuesMode()
    with mode:
        instance = instantiate(workload, device="cuda", seed=0)
        with mode.random_values():
            made = instance.inputs(0)
        with _autocast(workload):
            output: Any = instance.module(*made.args, **made.kwargs)
        given = (tensor for _, tensor in named_tensors([*made.args, dict(made.kwargs)]) if tensor.device.type == "cuda")
        inputs = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in given}
        outputs = {id(tensor): tensor for _, tensor in named_tensors(output) if tensor.requires_grad}
        return sum(inputs.values()), _bytes(outputs.values())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _autocast(workload: Workload) -> Iterator[None]:
    """Use autocast under an amp policy, as on a GPU: `torch.autocast` does nothing where there is none."""
    dtype = autocast_dtype(workload.dtype_policy, "cuda")
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    if dtype is not None:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
