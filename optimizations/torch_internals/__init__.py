"""Hold every private PyTorch name that Encore uses, and what it is needed for.

Other modules write `torch_internals.CUDAGraphNode`; the name is resolved on first use, so importing this module costs
nothing. A name that this PyTorch does not have raises `UnsupportedTorch`, whose message has the name, its purpose and
the supported versions.
This module has only names. The code that uses them is in the other modules.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.fx

SUPPORTED = ("2.11", "2.16")
"""First supported minor version, and the first one that is not (not checked yet)."""


class UnsupportedTorch(RuntimeError):
    """Report that Encore does not support the internals of this PyTorch."""


_WRAPPERS = "torch._functorch._aot_autograd.runtime_wrappers"

_PURPOSES: dict[str, dict[str, str]] = {
    "configure PyTorch's compiler, and forget what it compiled": {
        "inductor_config": "torch._inductor.config",
        "dynamo_config": "torch._dynamo.config",
        "dynamo_utils": "torch._dynamo.utils",
        "functorch_config": "torch._functorch.config",
        "list_mode_options": "torch._inductor:list_mode_options",
        "reset_dynamo": "torch._dynamo:reset",
        "fresh_cache": "torch._inductor.utils:fresh_cache",
        "clear_caches": "torch._inductor.utils:clear_caches",
        "compilation_callbacks": "torch._dynamo.callback:callback_handler",
        "CompileContext": "torch._guards:CompileContext",
    },
    "place the values of a graph": {
        "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
        "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
        "OpOverload": "torch._ops:OpOverload",
        "HigherOrderOperator": "torch._ops:HigherOrderOperator",
        "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
        "clone_that_stays": "torch:ops.prims.clone.default",
        "ConstantSource": "torch._dynamo.source:ConstantSource",
        "detect_fake_mode": "torch._guards:detect_fake_mode",
        "device_constructors": "torch.utils._device:_device_constructors",
        "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
        "set_grad_enabled": "torch:_C._set_grad_enabled",
        "enter_autocast": "torch.amp.autocast_mode:_enter_autocast",
        "exit_autocast": "torch.amp.autocast_mode:_exit_autocast",
        "has_kernel_for": "torch:_C._dispatch_has_computed_kernel_for_dispatch_key",
        "is_from_global_source": "torch._dynamo.source:is_from_global_source",
        "is_from_nonlocal_source": "torch._dynamo.source:is_from_nonlocal_source",
        "DataDependentOutputException": "torch._subclasses.fake_tensor:DataDependentOutputException",
        "ensure_cuda_device_guard_set": "torch:_C._ensureCUDADeviceGuardSet",
        "pytree": "torch.utils._pytree",
    },
    "explain a program without compiling it": {
        "input_codes": "torch._dynamo.convert_frame:input_codes",
        "cache_entries": "torch._C._dynamo.eval_frame:_debug_get_cache_entry_list",
        "reset_code": "torch._C._dynamo.eval_frame:reset_code",
        "sizes_seen": "torch._dynamo.pgo:get_code_state",
    },
    "compile a graph, and read what Inductor made of it": {
        "compile_fx": "torch._inductor.compile_fx",
        "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
        "cudagraphify": "torch._inductor.compile_fx:cudagraphify",
        "cudagraph_utils": "torch._inductor.cudagraph_utils",
        "CompiledFxGraph": "torch._inductor.output_code:CompiledFxGraph",
        "post_compile": "torch._inductor.output_code:CompiledFxGraph.post_compile",
        "partition_fn": "torch._inductor.compile_fx:partition_fn",
        "graph_partition": "torch._inductor.scheduler:Scheduler.graph_partition",
        "should_partition": "torch._inductor.scheduler:Scheduler.should_partition",
        "MultiOutput": "torch._inductor.ir:MultiOutput",
        "NopKernelSchedulerNode": "torch._inductor.scheduler:NopKernelSchedulerNode",
        "CustomGraphPass": "torch._inductor.custom_graph_pass:CustomGraphPass",
        "ConstructorMoverPass": "torch._inductor.fx_passes.post_grad:ConstructorMoverPass",
        "move_constructors_to_gpu": "torch._inductor.fx_passes.post_grad:move_constructors_to_gpu",
        "preserve_node_ordering": "torch._inductor.fx_passes.control_dependencies:preserve_node_ordering",
        "conj_operator": "torch:ops.aten._conj.default",
        "neg_operator": "torch:ops.aten._neg_view.default",
        "PyCodeCache": "torch._inductor.codecache:PyCodeCache",
        "IndentedBuffer": "torch._inductor.utils:IndentedBuffer",
        "LineContext": "torch._inductor.utils:LineContext",
        "define_partition": "torch._inductor.codegen.wrapper:PythonWrapperCodegen.define_subgraph_launcher_fn",
        "CachingAutotuner": "torch._inductor.runtime.triton_heuristics:CachingAutotuner",
        "inductor_debug": "torch._inductor.debug",
    },
    "record and replay with CUDAGraph Trees": {
        "cudagraph_trees": "torch._inductor.cudagraph_trees",
        "get_manager": "torch._inductor.cudagraph_trees:get_manager",
        "clone_preserve_strides": "torch._inductor.utils:clone_preserve_strides",
        "data_ptrs_equal": "torch:_C._tensors_data_ptrs_at_indices_equal",
        "set_cached_tensors_enabled": "torch._inductor.cudagraph_trees:_set_cached_tensors_enabled",
        "new_over": "torch:Tensor._make_subclass",
        "current_device": "torch._C:_cuda_getDevice",
        "current_raw_stream": "torch._C:_cuda_getCurrentRawStream",
        "begin_allocating": "torch._C:_cuda_beginAllocateCurrentThreadToPool",
        "end_allocating": "torch._C:_cuda_endAllocateToPool",
        "release_pool": "torch._C:_cuda_releasePool",
        "cuda_graphs": "torch.cuda.graphs",
        "foreach_copy_": "torch:_foreach_copy_",
        "storage_use_count": "torch:_C._storage_Use_Count",
        "tensor_use_count": "torch:Tensor._use_count",
    },
    "compare tensors and settings in C++": {
        "plain_guard_node": "torch._dynamo.guards:GuardManagerType.GUARD_MANAGER",
        "RootGuardManager": "torch._C._dynamo.guards:RootGuardManager",
        "TensorGuards": "torch._C._dynamo.guards:TensorGuards",
    },
    "bind the parameters of modules": {
        "GraphArg": "torch._dynamo.variables.builder:GraphArg",
        "dynamo_source_kinds": "torch._dynamo.source",
        "dynamo_thread_state": "torch._dynamo.symbolic_convert:tls",
    },
    "leave out wrappers around a compiled function": {
        "InferenceMode": "torch:_C._InferenceMode",
        "DisableAutocast": "torch:_C._DisableAutocast",
        "SerializableCompiledFunction": f"{_WRAPPERS}:SerializableCompiledFunction",
        "aot_module_simplified": "torch._functorch.aot_autograd:aot_module_simplified",
        "autograd_profiler": "torch.autograd.profiler",
        "create_runtime_wrapper": f"{_WRAPPERS}:_create_runtime_wrapper",
        "OutputType": "torch._functorch._aot_autograd.schemas:OutputType",
        "PlainTensorMeta": "torch._functorch._aot_autograd.schemas:PlainTensorMeta",
        "are_functorch_transforms_active": "torch:_C._are_functorch_transforms_active",
        "coerce_to_expected_memory_format": f"{_WRAPPERS}:coerce_to_expected_memory_format",
        "eval_frame_callback": "torch:_C._dynamo.eval_frame.get_eval_frame_callback",
        "is_multithreading_enabled": "torch:_C._is_multithreading_enabled",
        "set_multithreading_enabled": "torch:_C._set_multithreading_enabled",
        "graph_task_keeps_graph": "torch:_C._autograd._get_current_graph_task_keep_graph",
        "skip_code": "torch._dynamo.eval_frame:skip_code",
        "innermost_fn": "torch._dynamo.eval_frame:innermost_fn",
        "unwrap_dead_wrappers": "torch._functorch.utils:unwrap_dead_wrappers",
        "is_view_replay_enabled": "torch:_C._is_view_replay_enabled",
        "set_view_replay_enabled": "torch:_C._set_view_replay_enabled",
        "autograd_function_post_compile": f"{_WRAPPERS}:AOTDispatchAutograd.post_compile",
        "effect_tokens_post_compile": f"{_WRAPPERS}:EffectTokensWrapper.post_compile",
        "rng_wrapper_post_compile": f"{_WRAPPERS}:FunctionalizedRngRuntimeWrapper.post_compile",
        "runtime_wrapper_post_compile": f"{_WRAPPERS}:RuntimeWrapper.post_compile",
    },
    "capture whole steps and callables": {
        "current_autograd_node": "torch:_C._current_autograd_node",
        "next_sequence_number": "torch:autograd._get_sequence_nr",
        "storage_of_weak": "torch:UntypedStorage._new_with_weak_ptr",
        "increment_version": "torch:_C._increment_version",
        "torch_obj_rule_map": "torch._dynamo.trace_rules:get_torch_obj_rule_map",
        "tensor_method": "torch._dynamo.trace_rules:get_tensor_method",
        "get_function_stack_at": "torch:_C._get_function_stack_at",
        "len_torch_dispatch_stack": "torch:_C._len_torch_dispatch_stack",
        "len_torch_function_stack": "torch:_C._len_torch_function_stack",
        "top_saved_tensors_hooks": "torch:_C._autograd._top_saved_tensors_default_hooks",
        "clear_functorch_levels": "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        "disable_torch_function": "torch:_C.DisableTorchFunction",
        "functorch_level": "torch:_C._functorch.peek_interpreter_stack",
        "forward_ad": "torch.autograd.forward_ad",
        "module_hooks": "torch.nn.modules.module",
        "optimizer_hooks": "torch.optim.optimizer",
    },
    "see which kernels PyTorch chooses": {
        "fp32_precision": "torch:_C._get_fp32_precision_getter",
        "cublas_allows_fp16_reduction": "torch:_C._get_cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allows_bf16_reduction": "torch:_C._get_cublas_allow_bf16_reduced_precision_reduction",
        "cudnn_enabled": "torch:_C._get_cudnn_enabled",
        "cudnn_benchmark": "torch:_C._get_cudnn_benchmark",
        "cudnn_deterministic": "torch:_C._get_cudnn_deterministic",
        "flash_enabled": "torch:_C._get_flash_sdp_enabled",
        "memory_efficient_enabled": "torch:_C._get_mem_efficient_sdp_enabled",
        "math_enabled": "torch:_C._get_math_sdp_enabled",
        "math_in_half": "torch:_C._get_math_sdp_allow_fp16_bf16_reduction",
        "cudnn_attention_enabled": "torch:_C._get_cudnn_sdp_enabled",
    },
    "measure a compiled program": {
        "cpu_vec_isa": "torch._inductor.cpu_vec_isa",
        "codecache": "torch._inductor.codecache",
        "TorchDynamoException": "torch._dynamo.exc:TorchDynamoException",
        "DynamicOutputShapeException": "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    },
    "compile for a GPU that is not there": {
        "CudaInterface": "torch._dynamo.device_interface:CudaInterface",
        "RestartAnalysis": "torch._dynamo.exc:RestartAnalysis",
        "attention_math": "torch:ops.aten._scaled_dot_product_attention_math",
        "efficient_attention": "torch:ops.aten._scaled_dot_product_efficient_attention",
        "avoid_device_init": "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init",
        "compile_to_module_lines": "torch._inductor.graph:GraphLowering._compile_to_module_lines",
        "cuda_lazy_init": "torch.cuda:_lazy_init",
        "describe_skipped_frame": "torch._dynamo.convert_frame:format_error_msg",
        "engine_run_backward": "torch.autograd:_engine_run_backward",
        "exchange_device": "torch.cuda:_exchange_device",
        "maybe_exchange_device": "torch.cuda:_maybe_exchange_device",
        "get_cpp_compiler": "torch._inductor.cpp_builder:get_cpp_compiler",
        "valid_vec_isa_list": "torch._inductor.cpu_vec_isa:valid_vec_isa_list",
        "module_apply": "torch.nn.modules.module:Module._apply",
        "scoped_library": "torch.library:_scoped_library",
        "should_pad": "torch._inductor.fx_passes.pad_mm:_should_pad",
    },
}
"""Private names as "module:attribute" or "module", by the purpose for which Encore needs them."""

NAMES = {name: path for names in _PURPOSES.values() for name, path in names.items()}

PURE_OPERATORS = ("aten", "prims", "inductor", "inductor_prims")
"""Namespaces of PyTorch whose operators keep no state of their own, and declare in their schemas what they write.
Random ones keep their state in the generator."""

_NOTES = ("_dynamo_source", "_param_name_to_source")
"""Attributes that Dynamo sets on FX nodes and graph modules, and that copies of these do not have."""


def resolve(name: str) -> Any:
    """Return the object of an entry of `NAMES`.

    Raises:
        UnsupportedTorch: this PyTorch does not have it.
    """
    owner, attribute = holder_of(name)
    return getattr(owner, attribute) if attribute else owner


def holder_of(name: str) -> tuple[Any, str]:
    """Return the object that holds an entry, and its attribute name there; for a module, the module and "".

    Raises:
        UnsupportedTorch: this PyTorch does not have it.
    """
    module, _, attributes = NAMES[name].partition(":")
    *owners, attribute = attributes.split(".")
    try:
        if module.startswith("torch._functorch._aot_autograd"):
            importlib.import_module("torch._dynamo")  # must be imported first
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        if attribute:
            getattr(owner, attribute)
        return owner, attribute
    except (ImportError, AttributeError) as error:
        import torch

        where = NAMES[name].replace(":", ".")
        purpose = next(purpose for purpose, names in _PURPOSES.items() if name in names)
        raise UnsupportedTorch(
            f"PyTorch {torch.__version__} has no {where}, which Encore needs to {purpose}. "
            f"Encore knows PyTorch {SUPPORTED[0]} up to but not including {SUPPORTED[1]}; install one of these."
        ) from error


@contextlib.contextmanager
def replaced(name: str, value: Any) -> Iterator[None]:
    """Replace an entry of `NAMES` by `value`, where PyTorch reads it, while the block runs.

    Raises:
        UnsupportedTorch: this PyTorch does not have it.
    """
    with replaced_attribute(*holder_of(name), value):
        yield


@dataclass(eq=False, slots=True)
class _Layer:
    """Hold the value that an attribute has while a block runs, and the one it had before, in the owner itself."""

    value: Any
    before: Any


_ABSENT = object()
"""Marks an attribute that the owner inherits from a base class, or does not have."""
_layers: dict[tuple[int, str], list[_Layer]] = {}
_layers_lock = threading.RLock()  # a finalizer may replace something in a thread that holds it


@contextlib.contextmanager
def replaced_attribute(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class by `value` while the block runs; it may be one of a base class.

    Blocks of several threads may end in any order. Values that other code set meanwhile stay.
    """
    place = id(owner), attribute
    layer: _Layer | None = None
    try:
        with _layers_lock:
            layer = _Layer(value, vars(owner).get(attribute, _ABSENT))
            _layers.setdefault(place, []).append(layer)
            setattr(owner, attribute, value)
        yield
    finally:
        if layer is not None:
            with _layers_lock:
                _take_away(owner, attribute, layer, _layers[place])
                if not _layers[place]:
                    del _layers[place]


def _take_away(owner: Any, attribute: str, layer: _Layer, layers: list[_Layer]) -> None:
    index = layers.index(layer)
    del layers[index]
    if index < len(layers):  # another block now restores the value
        if layers[index].before is layer.value:
            layers[index].before = layer.before
    elif vars(owner).get(attribute, _ABSENT) is not layer.value:
        return
    elif layer.before is _ABSENT:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, layer.before)


class Replacing:
    """Replace entries of `NAMES` from the first block of any thread until the end of the last.

    Args:
        made: by name: a function from the original value to its replacement in the blocks.
    """

    def __init__(self, made: Mapping[str, Callable[[Any], Any]]) -> None:
        self._made = made
        # Reentrant: a finalizer may record in a thread that holds it, and restores its replacements before it returns.
        self._lock = threading.RLock()
        self._blocks = 0
        self._replaced = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock, contextlib.ExitStack() as replaced_now:
            if not self._blocks:
                for name, make in self._made.items():
                    replaced_now.enter_context(replaced(name, make(resolve(name))))
                self._replaced = replaced_now.pop_all()
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._replaced.close()


def dynamo_source(node: torch.fx.Node) -> Any:
    """Return Dynamo's source of a graph input, or None for a node that is no such input."""
    return getattr(node, _NOTES[0], None)


def static_input_type(node: torch.fx.Node) -> str | None:
    """Return how Dynamo marked a graph input whose address is fixed (parameters and buffers), else None."""
    marked: str | None = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return marked


def describe_input(node: torch.fx.Node, source: Any, *, static: bool) -> None:
    """Set on an added graph input what Dynamo sets on its own inputs: a source, and whether its address is fixed."""
    setattr(node, _NOTES[0], source)
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if static else {}


def copy_notes(original: Any, copied: Any) -> None:
    """Copy Dynamo's attributes from an FX node or graph module to its copy."""
    for name in _NOTES:
        if hasattr(original, name):
            setattr(copied, name, getattr(original, name))


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module 'optimizations.torch_internals' has no attribute {name!r}")
    value = globals()[name] = resolve(name)
    return value


def version() -> tuple[int, int]:
    """Return the minor version of the installed PyTorch, such as (2, 11)."""
    import torch

    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def unsupported() -> str | None:
    """Return why Encore does not run on the installed PyTorch, None where it does."""
    import torch

    low, high = (tuple(int(part) for part in edge.split(".")) for edge in SUPPORTED)
    if low <= version() < high:
        return None
    return (
        f"PyTorch {torch.__version__} is not supported: Encore knows PyTorch {SUPPORTED[0]} up to but not "
        f"including {SUPPORTED[1]}, because it builds on internals that differ between versions. "
        "Install one of these."
    )


def require_supported() -> None:
    """Check the version of the installed PyTorch.

    Raises:
        UnsupportedTorch: it is older or newer than the versions Encore was checked on.
    """
    if reason := unsupported():
        raise UnsupportedTorch(reason)
