"""Every private PyTorch name that Encore uses, once, with the versions it was checked on.

Other modules write `torch_internals.CUDAGraphNode`; the name is resolved on first use, so importing this module costs
nothing. A name that this PyTorch does not have raises `UnsupportedTorch`, which says what was tried and which versions
are known.
Only names live here. What is done with them lives with its part of the design.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

SUPPORTED = ("2.11", "2.16")
"""First supported minor version, and the first one that is not (nobody has looked at it yet)."""


class UnsupportedTorch(RuntimeError):
    """This PyTorch is not one whose internals Encore knows."""


@dataclass(frozen=True, slots=True)
class Private:
    """Where a private name lives. `attribute` None means the module itself. `why` says what Encore needs it for."""

    module: str
    attribute: str | None
    checked: tuple[str, ...]
    why: str


_2_11 = ("2.11",)

NAMES: dict[str, Private] = {
    "inductor_config": Private("torch._inductor.config", None, _2_11, "switch CUDA graphs and graph partition"),
    "dynamo_config": Private("torch._dynamo.config", None, _2_11, "recompile limits, compile-time settings"),
    "dynamo_utils": Private("torch._dynamo.utils", None, _2_11, "counters and compile-time timers"),
    "cudagraph_trees": Private("torch._inductor.cudagraph_trees", None, _2_11, "CUDAGraph Trees: nodes, managers"),
    # fake tensors: programs for a GPU on a machine without one
    "FakeTensorMode": Private("torch._subclasses.fake_tensor", "FakeTensorMode", _2_11, "build models without a GPU"),
    # suite: what a worker measures
    "pytree": Private("torch.utils._pytree", None, _2_11, "name the tensors in a model's output"),
    "TorchDynamoException": Private("torch._dynamo.exc", "TorchDynamoException", _2_11, "tell a failed compilation"),
    "fresh_cache": Private("torch._inductor.utils", "fresh_cache", _2_11, "keep a trial compilation out of the caches"),
    "CompiledFxGraph": Private("torch._inductor.output_code", "CompiledFxGraph", _2_11, "count graphs and partitions"),
    "Scheduler": Private("torch._inductor.scheduler", "Scheduler", _2_11, "see what a partition was split at, and why"),
    "cudagraph_utils": Private("torch._inductor.cudagraph_utils", None, _2_11, "read why a graph was not captured"),
}


def resolve(name: str) -> Any:
    """The object behind an entry of `NAMES`.

    Raises:
        UnsupportedTorch: this PyTorch does not have it.
    """
    private = NAMES[name]
    try:
        value = importlib.import_module(private.module)
        if private.attribute is not None:
            for part in private.attribute.split("."):
                value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        import torch

        where = private.module if private.attribute is None else f"{private.module}.{private.attribute}"
        raise UnsupportedTorch(
            f"PyTorch {torch.__version__} has no {where}, which Encore needs to {private.why}. "
            f"Encore knows PyTorch {SUPPORTED[0]} up to but not including {SUPPORTED[1]}; install one of these."
        ) from error
    return value


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'optimizations.torch_internals' has no attribute {name!r}")
    value = globals()[name] = resolve(name)
    return value


def require_supported() -> None:
    """Check the version of the installed PyTorch.

    Raises:
        UnsupportedTorch: it is older or newer than the versions Encore was checked on.
    """
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = (tuple(int(part) for part in edge.split(".")) for edge in SUPPORTED)
    if not low <= version < high:
        raise UnsupportedTorch(
            f"PyTorch {torch.__version__} is not supported: Encore knows PyTorch {SUPPORTED[0]} up to but not "
            f"including {SUPPORTED[1]}, because it builds on internals that differ between versions. "
            "Install one of these."
        )
