"""Read the wrappers around a function that Inductor compiled, as they are in the checked PyTorch version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import CO_VARARGS, getclosurevars
from types import CodeType, FunctionType
from typing import Any

import torch

from optimizations import torch_internals

KNOWN_VERSION = (2, 11)
"""The version whose wrappers are skipped. Newer ones generate code for them, which does less in each call."""


def unknown_wrappers() -> str | None:
    """Return why no wrapper of this PyTorch is skipped; None if its wrappers are supported."""
    if torch_internals.version() == KNOWN_VERSION:
        return None
    return f"the wrappers of PyTorch {torch.__version__} are not known"


def graph_inside(compiled: Any) -> Any | None:
    """Return the `CompiledFxGraph` inside a function for AOTAutograd's last wrapper; None if one between may act.

    Looked through are what carries a function to a cache, what keeps Dynamo out, and what passes on effect tokens and
    the state of random numbers; the caller has found that there are none of these.
    """
    compiled = torch_internals.innermost_fn(compiled)
    if type(compiled) is torch_internals.SerializableCompiledFunction:
        compiled = compiled.compiled_fn
    looked_through = (
        *torch_internals.rng_wrapper_post_compile.__code__.co_consts,
        *torch_internals.effect_tokens_post_compile.__code__.co_consts,
    )
    while isinstance(compiled, FunctionType) and compiled.__code__ in looked_through:
        compiled = getattr(compiled, "__wrapped__", None)
    return compiled if type(compiled) is torch_internals.CompiledFxGraph else None


def autograd_function(compiled: Any) -> Any | None:
    """Return the autograd function whose `apply` AOTAutograd's last wrapper calls; None if it is something else."""
    function = getattr(compiled, "__self__", None)
    known = isinstance(function, type) and issubclass(function, torch.autograd.Function)
    return function if known and hasattr(function, "compiled_fw") and hasattr(function, "compiled_bw") else None


@dataclass(frozen=True, slots=True)
class Plain:
    """Hold what a forward and backward do around their compiled functions, of a graph that needs nothing special.

    Attributes:
        returned: how many of the compiled forward's results are returned, the first ones.
        saved_with_check, saved_without_check: which results are saved, with and without a later check of versions.
        without_gradient: positions of returned tensors that have no gradient.
        tangents: the places of those that have, each with the memory format that the backward was compiled for.
        compiled_for_nondeterminism: the backward is refused where deterministic algorithms are required.
    """

    returned: int
    saved_with_check: slice
    saved_without_check: slice
    without_gradient: tuple[int, ...]
    tangents: tuple[tuple[int, Any], ...]
    compiled_for_nondeterminism: bool


def plain_function(function: Any) -> Plain | None:
    """Return what an autograd function of AOTAutograd's does; None where there is more. It has been called before.

    Its methods are PyTorch's, or stand for them and refuse second derivatives.
    """
    known = _codes(torch_internals.autograd_function_post_compile.__code__)
    held = getclosurevars(function.forward).nonlocals
    metadata = function.metadata
    if function.forward.__code__ not in known or held.get("backward_state_indices") or not _is_plain(metadata):
        return None
    if function.maybe_subclass_metadata is not None or not getattr(function.compiled_fw, "_boxed_call", False):
        return None
    tensors = [
        (place, info) for place, info in enumerate(metadata.output_info) if issubclass(info.raw_type, torch.Tensor)
    ]
    places = [place for place, info in tensors if info.requires_grad]
    formats = metadata.subclass_tangent_meta
    if len(formats) != len(places) or not all(
        type(one) is torch_internals.PlainTensorMeta and one.memory_format for one in formats
    ):
        return None
    return Plain(
        returned=metadata.num_forward_returns,
        saved_with_check=metadata.tensors_saved_for_backwards_with_vc_check_slice,
        saved_without_check=metadata.tensors_saved_for_backwards_no_vc_check_slice,
        without_gradient=tuple(place for place, info in tensors if not info.requires_grad),
        tangents=tuple((place, one.memory_format) for place, one in zip(places, formats, strict=True)),
        compiled_for_nondeterminism=metadata.deterministic is not None and not metadata.deterministic,
    )


def _is_plain(metadata: Any) -> bool:
    """Return whether nothing is aliased, functionalized, or differs in size from call to call."""
    special = (
        metadata.num_mutated_inp_runtime_indices,
        metadata.num_outputs_aliased,
        metadata.num_unsafe_view_outputs,
        metadata.num_intermediate_bases,
        metadata.num_symints_saved_for_bw,
        metadata.num_opaque_objects_saved_for_bw,
        metadata.dynamic_saved_tensors_idxs,
        metadata.num_graphsafe_rng_states,
        metadata.is_rng_op_functionalized,
        metadata.tokens,
        metadata.num_backward_tokens,
    )
    plain = torch_internals.OutputType.non_alias
    return (
        not any(special)
        and metadata.num_forward_returns == len(metadata.output_info)
        and all(info.output_type is plain for info in metadata.output_info)
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield all code in it, however deep."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def saved_by(context: Any) -> list[torch.Tensor]:
    """Return the tensors that a forward of AOTAutograd's has saved by its end: with checked versions, and others."""
    return [*(context.to_save or ()), *getattr(context, "_tensors_no_vc_check", ())]


def disables_hooks_of_saved_tensors(wrapped: Any) -> bool:
    """Return whether AOTAutograd's last wrapper is in a further one, for compiled-in hooks of saved tensors."""
    return bool(wrapped.__code__ not in torch_internals.create_runtime_wrapper.__code__.co_consts) or (
        wrapped.__code__.co_name != "runtime_wrapper"
    )


def taking_a_list(compiled: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """Return `compiled` as a function of a list, which it may empty.

    What `compile_fx` returns takes arguments one by one and makes a list of them, after the parameters of the graph
    module if that has any. If it has none, the function that is given the list is the same.

    What keeps Dynamo out of the function is left away, as Dynamo does itself: it keeps out of the caller already.
    """
    compiled = torch_internals.innermost_fn(compiled)
    makes_list = torch_internals.aot_module_simplified.__code__.co_consts
    if isinstance(compiled, FunctionType) and compiled.__code__ in makes_list:
        held = getclosurevars(compiled).nonlocals
        known = set(held) == {"compiled_fn", "params_buffers_flat"} and "runtime_args" in compiled.__code__.co_varnames
        if known and compiled.__code__.co_flags & CO_VARARGS and not held["params_buffers_flat"]:
            inner: Callable[[list[Any]], Any] = held["compiled_fn"]
            return inner
    return lambda arguments: compiled(*arguments)
