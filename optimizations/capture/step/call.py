"""Describe calls of a step: arguments and settings and, if no recording fits, the state that the step reaches.

A signature is a hashable value with the metadata of each tensor and all settings. `Arguments` stores these for a
recording. So the fast path compares the structure of the arguments, the tensors in bulk, and the current settings. A
call that differs takes the slow path, which looks its signature up.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optimizations import torch_internals
from optimizations.capture.signature import alias_pattern, flatten, named_arguments, parts, refused_tensor
from optimizations.capture.step.gradients import gradients
from optimizations.capture.step.host_state import HostState
from optimizations.capture.step.observer import storage
from optimizations.capture.step.user_code import line_with
from optimizations.report.steps import Refusal
from optimizations.torch_internals.geometry import same_metadata

Key = tuple[Hashable, ...]
"""The signature of a call, the settings, and what `key=` returned."""


class _Inside(threading.local):
    """Record in `step` whether this thread warms up, observes or captures a step. Steps called in it are part of it."""

    step = False


inside = _Inside()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    inside.step = True
    try:
        yield
    finally:
        inside.step = False


def modes() -> tuple[Hashable, ...]:
    """Return the active torch function modes, including a default device. Usually there are none."""
    if not (count := _functions()):
        return ()
    held = [torch_internals.get_function_stack_at(index) for index in range(count)]
    # Re-entering a mode may make a new object: some functions of PyTorch do so with a default device.
    return tuple([(type(mode), str(getattr(mode, "device", ""))) for mode in held])


_functions: Callable[[], int] = torch_internals.len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch_internals.len_torch_dispatch_stack
_transforms: Callable[[], object] = torch_internals.functorch_level
_forward_mode: Any = torch_internals.forward_ad
_saved_tensor_hooks: Callable[[bool], object] = torch_internals.top_saved_tensors_hooks


def watched_by_others() -> bool:
    """Return whether modes, transforms or hooks are active, which would not see the operators of a graph.

    Counters and loggers are dispatch modes; `vmap`, `grad` and forward-mode derivatives are transforms. Hooks are those
    of tensors that autograd saves for a backward: a checkpoint repeats its calls and counts these tensors.
    """
    if _dispatch_modes() or _transforms() is not None or _forward_mode._current_level >= 0:
        return True
    return _saved_tensor_hooks(False) is not None


SETTINGS: tuple[Callable[[], Hashable], ...] = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    functools.partial(torch.is_autocast_enabled, "cuda"),
    functools.partial(torch.is_autocast_enabled, "cpu"),
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch_internals.cublas_allows_fp16_reduction,
    torch_internals.cublas_allows_bf16_reduction,
    torch.is_anomaly_enabled,
    # `torch.get_float32_matmul_precision` raises if it was set by `torch.backends`.
    *(functools.partial(torch_internals.fp32_precision, "cuda", of) for of in ("matmul", "conv", "rnn")),
    torch_internals.cudnn_enabled,
    torch_internals.cudnn_benchmark,
    torch_internals.cudnn_deterministic,
    torch_internals.flash_enabled,
    torch_internals.memory_efficient_enabled,
    torch_internals.math_enabled,
    torch_internals.math_in_half,
    torch_internals.cudnn_attention_enabled,
    torch.is_autocast_cache_enabled,
    *(functools.partial(torch.get_autocast_dtype, of) for of in ("cuda", "cpu")),
)
"""Settings of operators: modes of autograd and autocast with its default dtypes; precision of products, convolutions
and recurrent networks; cuDNN; attention backends."""


def ambient() -> Hashable:
    """Return the settings on which operators depend."""
    return modes(), *[get() for get in SETTINGS]


DDP_WARM_UP = 11
"""Calls that DistributedDataParallel needs before a capture: it rebuilds its buckets and times itself until then
(PyTorch's notes on CUDA graphs)."""
_SPARSE_LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Arguments:
    """Store the structure, metadata and settings of a recording's arguments.

    The check of metadata in C++ includes dispatch keys.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors: list[torch.Tensor] = []
        self._structure = flatten((args, kwargs), tensors)
        self._aliases = alias_pattern(tensors)
        self._same_metadata = same_metadata(_distinct(tensors))
        self._settings = ambient()

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """Return the tensors of a call that has the recording's signature; None if it may have a different one."""
        found: list[torch.Tensor] = []
        if flatten((args, kwargs), found) != self._structure or alias_pattern(found) != self._aliases:
            return None
        return found if self._same_metadata(_distinct(found)) and ambient() == self._settings else None


def _distinct(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


class Call:
    """Describe a call: its arguments, the tensors among them with their names, and the state that the step reaches.

    Attributes:
        labels: names of `tensors`.
        parameters: those that the step reaches.
        before: the gradients of `parameters` at the beginning of the call. Empty if the call runs eagerly, so that
            only the program references them.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor], state: HostState
    ) -> None:
        self.args, self.kwargs, self.tensors, self.state = args, kwargs, tensors, state
        nests = [part for name, nest in named_arguments(args, kwargs) for part in parts(nest, name)]
        self.labels = [label for label, one, _ in nests if isinstance(one, torch.Tensor)]
        self.parameters = state.parameters()
        self.before = gradients(self.parameters)

    def known(self, batch: Iterable[torch.Tensor]) -> dict[int, str]:
        """Return names of tensors that live throughout the call, by the addresses of their storages.

        `batch` replaces the tensors of the call, in the same order. Those that share memory have one name. This object
        keeps the state alive and, in a capture, the earlier gradients. So no other tensor gets their memory during the
        call.
        """
        first = {storage(tensor): path for path, tensor in self.state.tensors.items()}
        found = {**first, **{storage(gradient): name for name, gradient in self.named_gradients().items()}}
        for tensor, label, one in zip(self.tensors, self.labels, batch, strict=True):
            found[storage(one)] = first.setdefault(storage(tensor), label)
        found.pop(0, None)  # the address of all tensors without memory
        return found

    def parameter_names(self) -> list[str]:
        """Return the expression by which the program refers to each parameter."""
        paths = {id(tensor): path for path, tensor in self.state.tensors.items()}
        return [paths[id(parameter)] for parameter in self.parameters]

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """Return the earlier gradients, by path."""
        found = zip(self.parameter_names(), self.before, strict=True)
        return {f"{name}.grad": one for name, one in found if one is not None}


def refused_call(call: Call, holds: Callable[[torch.Tensor], bool]) -> Refusal | None:
    """Return a refusal of a call before it is observed. `holds`: whether a tensor is on the GPU."""
    for name, tensor in zip(call.labels, call.tensors, strict=False):
        if (refusal := refused_tensor(name, tensor, holds)) is not None:
            return refusal
    state = call.state
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in call.before):
        reason = "finds a sparse gradient in a `.grad`, whose size depends on values"
        return Refusal(reason, "make the embedding without sparse=True")
    if (refusal := refused_sources(state)) is not None:
        return refusal
    devices = {str(t.device) for t in [*state.tensors.values(), *call.tensors] if t.device.type == "cuda"}
    if len(devices) > 1:
        return Refusal(
            f"works on several GPUs ({', '.join(sorted(devices))})", "capture the part on each GPU as its own step"
        )
    return _refused_modules(state.modules)


def refused_sources(state: HostState) -> Refusal | None:
    """Return a refusal if the state has something that no graph can read."""
    if sparse := [path for path, tensor in state.tensors.items() if tensor.layout in _SPARSE_LAYOUTS]:
        return Refusal(
            f"reaches a sparse tensor, {sparse[0]}, which has no memory of its own that a launch could compare",
            "make it dense, or keep its indices and values, and use `index_add_` or `scatter_add_`",
        )
    if scripts := [path for path, module in state.modules.items() if isinstance(module, torch.jit.ScriptModule)]:
        return Refusal(
            f"uses a module of TorchScript, {scripts[0]}, whose values C++ keeps: a change of them does not show",
            "use the module that it was made of",
        )
    return None


def refused_iterators(state: HostState, is_named: Callable[[str], bool]) -> Iterator[Refusal]:
    """Yield a refusal for each iterator or random generator that code names: its value changes on every call."""
    for path in filter(is_named, state.iterators):
        yield Refusal(
            f"reads from an iterator or a random generator, {path}",
            "call it before the step and pass its value as an argument",
            line_with(state.code, path),
        )


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Return whether a module is one of FSDP's, without importing FSDP."""
    kind = type(module).__qualname__
    return "FullyShardedDataParallel" in kind or kind.startswith("FSDP")


def _refused_modules(modules: Mapping[str, torch.nn.Module]) -> Refusal | None:
    for path, module in modules.items():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            if module.find_unused_parameters:
                return Refusal(
                    f"uses {path} with find_unused_parameters=True, which reads on the host what was used",
                    "make every parameter take part, and leave the option off",
                )
            backend = torch.distributed.get_backend(module.process_group)
            if backend != "nccl":
                return Refusal(f"uses {path} over {backend}, whose collectives run on the host", "use the backend nccl")
        elif isinstance(module, torch.nn.DataParallel):
            return Refusal(
                f"uses {path}, a DataParallel, which copies the module in each call", "use DistributedDataParallel"
            )
        elif is_fully_sharded(module):
            return Refusal(
                f"uses {path}, a fully sharded module, whose streams and freed memory were not tried in a graph",
                "use DistributedDataParallel, or capture what lies between its collectives",
            )
    return None
