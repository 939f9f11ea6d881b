"""Tell which modules that work with other processes a graph can hold, and what they need before."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optimizations.report.steps import Refusal

DDP_WARM_UP = 11
"""Calls that DistributedDataParallel needs before a capture: it rebuilds its buckets and times itself until then
(PyTorch's notes on CUDA graphs)."""


def refused_modules(modules: Mapping[str, torch.nn.Module]) -> tuple[Refusal | None, bool]:
    """Return why a step with these modules cannot be captured, and whether one of them is DistributedDataParallel."""
    distributed = False
    for path, module in modules.items():
        kind = type(module).__qualname__
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            distributed = True
            if module.find_unused_parameters:
                return Refusal(
                    f"uses {path} with find_unused_parameters=True, which reads on the host what was used",
                    "make every parameter take part, and leave the option off",
                ), True
            backend = torch.distributed.get_backend(module.process_group)
            if backend != "nccl":
                return Refusal(
                    f"uses {path} over {backend}, whose collectives run on the host", "use the backend nccl"
                ), True
        elif isinstance(module, torch.nn.DataParallel):
            return Refusal(
                f"uses {path}, a DataParallel, which copies the module in each call", "use DistributedDataParallel"
            ), distributed
        elif "FullyShardedDataParallel" in kind or kind.startswith("FSDP"):
            return Refusal(
                f"uses {path}, a fully sharded module, whose streams and freed memory were not tried in a graph",
                "use DistributedDataParallel, or capture what lies between its collectives",
            ), distributed
    return None, distributed
