"""Hold every private PyTorch name that Encore uses, and what it is needed for.

Other modules write `torch_internals.CUDAGraphNode`; the name is resolved on first use, so importing this module costs
nothing. A name that this PyTorch does not have raises `UnsupportedTorch`, which says what was tried and which versions
are known.
Only names live here. What is done with them lives with its part of the design.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.fx

SUPPORTED = ("2.11", "2.16")
"""First supported minor version, and the first one that is not (not checked yet)."""


class UnsupportedTorch(RuntimeError):
    """Report that this PyTorch is not one whose internals Encore knows."""


@dataclass(frozen=True, slots=True)
class Private:
    """Hold where a private name lives, "module:attribute" or "module", and what Encore needs it for."""

    path: str
    why: str

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    @property
    def attributes(self) -> list[str]:
        """Return the attributes that lead from the module to the object; none where it is the module itself."""
        return [part for part in self.path.partition(":")[2].split(".") if part]


NAMES: dict[str, Private] = {
    "inductor_config": Private("torch._inductor.config", "switch CUDA graphs and graph partition"),
    "dynamo_config": Private("torch._dynamo.config", "recompile limits, compile-time settings"),
    "dynamo_utils": Private("torch._dynamo.utils", "counters and compile-time timers"),
    "cudagraph_trees": Private("torch._inductor.cudagraph_trees", "CUDAGraph Trees: nodes, managers"),
    # fake tensors: programs for a GPU on a machine without one
    "FakeTensorMode": Private("torch._subclasses.fake_tensor:FakeTensorMode", "build models without a GPU"),
    "OpOverload": Private("torch._ops:OpOverload", "tell single operators from those that run whole graphs"),
    # placement: reading and rewriting Dynamo's graphs, feeding what they need
    "clone_that_stays": Private("torch:ops.prims.clone.default", "copy where Inductor would take `clone` away"),
    "ConstantSource": Private("torch._dynamo.source:ConstantSource", "name an added input in AOTAutograd's cache key"),
    "HigherOrderOperator": Private("torch._ops:HigherOrderOperator", "see operators that run whole graphs"),
    "TorchDispatchMode": Private(
        "torch.utils._python_dispatch:TorchDispatchMode", "see which operators a node really runs"
    ),
    "list_mode_options": Private("torch._inductor:list_mode_options", "take Inductor's modes"),
    # explanations, which trace and compile nothing
    "input_codes": Private("torch._dynamo.convert_frame:input_codes", "see what was traced"),
    "cache_entries": Private("torch._C._dynamo.eval_frame:_debug_get_cache_entry_list", "see what was compiled before"),
    "reset_code": Private("torch._C._dynamo.eval_frame:reset_code", "forget traces of an explanation"),
    "sizes_seen": Private("torch._dynamo.pgo:get_code_state", "forget sizes that it saw"),
    # results on the CPU: Inductor's pass that moves CPU scalars to the GPU, and how its cache tells passes apart
    "ConstructorMoverPass": Private(
        "torch._inductor.fx_passes.post_grad:ConstructorMoverPass", "leave CPU results on the CPU"
    ),
    "move_constructors_to_gpu": Private(
        "torch._inductor.fx_passes.post_grad:move_constructors_to_gpu", "run the corrected pass instead"
    ),
    "CustomGraphPass": Private(
        "torch._inductor.custom_graph_pass:CustomGraphPass", "keep such graphs apart in the cache"
    ),
    "preserve_node_ordering": Private(
        "torch._inductor.fx_passes.control_dependencies:preserve_node_ordering",
        "keep a graph's random numbers in eager's order",
    ),
    "compile_fx_inner": Private("torch._inductor.compile_fx:compile_fx_inner", "see what became of a graph"),
    "current_autograd_node": Private("torch:_C._current_autograd_node", "see that a backward runs"),
    "current_device": Private("torch._C:_cuda_getDevice", "see cheaply which device is the current one"),
    "current_raw_stream": Private("torch._C:_cuda_getCurrentRawStream", "notice a change of stream cheaply"),
    # several processes: letting go of them
    "abort_process_group": Private(
        "torch.distributed.distributed_c10d:_abort_process_group", "end kernels that wait for a process that is gone"
    ),
    "detect_fake_mode": Private("torch._guards:detect_fake_mode", "describe inputs that do not exist yet"),
    "device_constructors": Private(
        "torch.utils._device:_device_constructors", "know the functions that make tensors on a device"
    ),
    "disable_current_modes": Private(
        "torch.utils._python_dispatch:_disable_current_modes", "compute a constant while others trace"
    ),
    "enter_autocast": Private("torch.amp.autocast_mode:_enter_autocast", "see autocast inside of a graph"),
    "exit_autocast": Private("torch.amp.autocast_mode:_exit_autocast", "see autocast inside of a graph"),
    "foreach_copy_": Private("torch:_foreach_copy_", "copy several tensors in one launch"),
    "has_kernel_for": Private("torch:_C._dispatch_has_computed_kernel_for_dispatch_key", "know what a GPU can run"),
    "innermost_fn": Private("torch._dynamo.eval_frame:innermost_fn", "keep Dynamo out of a function once, not twice"),
    "is_from_global_source": Private("torch._dynamo.source:is_from_global_source", "tell attributes from arguments"),
    "is_from_nonlocal_source": Private(
        "torch._dynamo.source:is_from_nonlocal_source", "tell attributes from arguments"
    ),
    "begin_allocating": Private(
        "torch._C:_cuda_beginAllocateCurrentThreadToPool", "give a capture its own memory pool"
    ),
    "end_allocating": Private("torch._C:_cuda_endAllocateToPool", "end that"),
    "release_pool": Private("torch._C:_cuda_releasePool", "give the pool back"),
    "take_memory_snapshot": Private(
        "torch._C:_cuda_memorySnapshot", "see whether asking about memory drops references"
    ),
    # steps: what a call is told, and when PyTorch's compiler is at work
    "compilation_callbacks": Private(
        "torch._dynamo.callback:callback_handler", "notice compilations while a step is observed"
    ),
    "inductor_benchmarker": Private(
        "torch._inductor.runtime.benchmarking:InductorBenchmarker", "time a kernel as Inductor does"
    ),
    "cuda_graphs": Private("torch.cuda.graphs", "tell code whether it is captured"),
    "set_grad_enabled": Private("torch:_C._set_grad_enabled", "see that a graph switches gradients on"),
    "storage_of_weak": Private("torch:UntypedStorage._new_with_weak_ptr", "find a storage that has other references"),
    "storage_use_count": Private("torch:_C._storage_Use_Count", "see that a value is saved for backward"),
    "tensor_use_count": Private("torch:Tensor._use_count", "see that a value is saved for backward"),
    # replay: recording with, and next to, CUDAGraph Trees
    "CachingAutotuner": Private(
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner", "find Triton kernels in generated code, tune once"
    ),
    "CompileContext": Private("torch._guards:CompileContext", "name a recording after its compilation"),
    "clone_preserve_strides": Private(
        "torch._inductor.utils:clone_preserve_strides", "stand in for a misaligned input"
    ),
    "data_ptrs_equal": Private("torch:_C._tensors_data_ptrs_at_indices_equal", "see in C++ whether an input moved"),
    "get_manager": Private(
        "torch._inductor.cudagraph_trees:get_manager", "tell the right manager that a backward runs"
    ),
    "get_obj_in_tls": Private("torch:_C._get_obj_in_tls", "reach a thread's managers from its autograd threads"),
    "maybe_realign_inputs": Private(
        "torch._inductor.output_code:maybe_realign_inputs", "see what is compiled without graphs"
    ),
    "is_key_in_tls": Private("torch:_C._is_key_in_tls", "reach a thread's managers from its autograd threads"),
    "is_view_replay_enabled": Private("torch:_C._is_view_replay_enabled", "call autograd functions as stock does"),
    "set_view_replay_enabled": Private("torch:_C._set_view_replay_enabled", "call autograd functions as stock does"),
    "set_cached_tensors_enabled": Private(
        "torch._inductor.cudagraph_trees:_set_cached_tensors_enabled", "run on after stock's managers were ended"
    ),
    "new_over": Private("torch:Tensor._make_subclass", "return a new tensor over the same memory in each call"),
    "add_cached_tensor": Private("torch._C:_add_cached_tensor", "tell autograd of a tensor that is kept"),
    "remove_cached_tensor": Private("torch._C:_remove_cached_tensor", "tell it that one is kept no more"),
    "stash_obj_in_tls": Private("torch:_C._stash_obj_in_tls", "reach a thread's managers from its autograd threads"),
    # binding: what Dynamo's call of a graph passes
    "GraphArg": Private("torch._dynamo.variables.builder:GraphArg", "let Dynamo's bytecode load a module for a graph"),
    "GuardManagerType": Private(
        "torch._dynamo.guards:GuardManagerType", "ask C++ whether modules hold the same tensors"
    ),
    "TensorGuards": Private("torch._C._dynamo.guards:TensorGuards", "see what callers did to results they were given"),
    "RootGuardManager": Private(
        "torch._C._dynamo.guards:RootGuardManager", "ask C++ whether modules hold the same tensors"
    ),
    "GlobalStateGuard": Private(
        "torch._C._dynamo.guards:GlobalStateGuard", "ask C++ whether settings are as they were"
    ),
    "empty_strided_cuda": Private("torch._C._dynamo.guards:_empty_strided_cuda", "allocate results in one call of C++"),
    "increment_version": Private("torch:_C._increment_version", "tell autograd what a graph wrote"),
    "fp32_precision": Private(
        "torch:_C._get_fp32_precision_getter", "see the precision of products, however it was set"
    ),
    "cublas_allows_fp16_reduction": Private(
        "torch:_C._get_cublas_allow_fp16_reduced_precision_reduction", "see the precision of sums in products"
    ),
    "cublas_allows_bf16_reduction": Private(
        "torch:_C._get_cublas_allow_bf16_reduced_precision_reduction", "see the precision of sums in products"
    ),
    "cudnn_enabled": Private("torch:_C._get_cudnn_enabled", "see which kernels are chosen"),
    "cudnn_benchmark": Private("torch:_C._get_cudnn_benchmark", "see which kernels are chosen"),
    "cudnn_deterministic": Private("torch:_C._get_cudnn_deterministic", "see which kernels are chosen"),
    "flash_enabled": Private("torch:_C._get_flash_sdp_enabled", "see which kernels are chosen"),
    "memory_efficient_enabled": Private("torch:_C._get_mem_efficient_sdp_enabled", "see which kernels are chosen"),
    "math_enabled": Private("torch:_C._get_math_sdp_enabled", "see which kernels are chosen"),
    "math_in_half": Private("torch:_C._get_math_sdp_allow_fp16_bf16_reduction", "see the precision of attention"),
    "cudnn_attention_enabled": Private("torch:_C._get_cudnn_sdp_enabled", "see which kernels are chosen"),
    "dispatch_keys": Private("torch:_C._dispatch_keys", "compare what a tensor goes through"),
    "neg_view": Private("torch:_neg_view", "give a result that stands for negatives of an argument"),
    "lazy_clone": Private("torch:_lazy_clone", "try out whether it is seen that memory is shared until one writes"),
    "torch_obj_rule_map": Private(
        "torch._dynamo.trace_rules:get_torch_obj_rule_map", "fill tables that know functions"
    ),
    "tensor_method": Private("torch._dynamo.trace_rules:get_tensor_method", "fill tables that know functions"),
    "get_function_stack_at": Private("torch:_C._get_function_stack_at", "see the modes around a step"),
    "len_torch_dispatch_stack": Private("torch:_C._len_torch_dispatch_stack", "see the modes around a step"),
    "len_torch_function_stack": Private("torch:_C._len_torch_function_stack", "see the modes around a step"),
    "top_saved_tensors_hooks": Private(
        "torch:_C._autograd._top_saved_tensors_default_hooks", "see hooks of saved tensors around a step"
    ),
    "clear_functorch_levels": Private(
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack", "let go of histories inside of transforms"
    ),
    "disable_torch_function": Private("torch:_C.DisableTorchFunction", "let go of histories unseen by modes"),
    "functorch_level": Private("torch:_C._functorch.peek_interpreter_stack", "see that a function is transformed"),
    "is_batched": Private("torch:_C._functorch.is_legacy_batchedtensor", "see that a gradient stands for several"),
    "forward_ad": Private("torch.autograd.forward_ad", "see derivatives in forward mode"),
    "module_hooks": Private("torch.nn.modules.module", "see hooks of all modules"),
    "optimizer_hooks": Private("torch.optim.optimizer", "see hooks of all optimizers"),
    "dynamo_source_kinds": Private("torch._dynamo.source", "see which module holds an input"),
    "dynamo_thread_state": Private("torch._dynamo.symbolic_convert:tls", "find the trace that a graph is compiled for"),
    # shortcut: the wrappers around a compiled function
    "InferenceMode": Private("torch:_C._InferenceMode", "leave inference mode without Python code"),
    "DisableAutocast": Private("torch:_C._DisableAutocast", "switch autocast off as stock does"),
    "SerializableCompiledFunction": Private(
        "torch._functorch._aot_autograd.runtime_wrappers:SerializableCompiledFunction",
        "find Inductor's function in AOTAutograd's wrappers",
    ),
    "aot_module_simplified": Private(
        "torch._functorch.aot_autograd:aot_module_simplified", "pass arguments on as one list"
    ),
    "autograd_profiler": Private("torch.autograd.profiler", "see that a profiler is on"),
    "call_func_at_runtime_with_args": Private(
        "torch._functorch._aot_autograd.utils:call_func_at_runtime_with_args",
        "see that a wrapper is the one that was looked at",
    ),
    "create_runtime_wrapper": Private(
        "torch._functorch._aot_autograd.runtime_wrappers:_create_runtime_wrapper",
        "see that a wrapper is the one that was looked at",
    ),
    "OutputType": Private("torch._functorch._aot_autograd.schemas:OutputType", "see what a trained graph needs"),
    "PlainTensorMeta": Private(
        "torch._functorch._aot_autograd.schemas:PlainTensorMeta", "see what a trained graph needs"
    ),
    "are_functorch_transforms_active": Private(
        "torch:_C._are_functorch_transforms_active", "call autograd functions as stock does"
    ),
    "coerce_to_expected_memory_format": Private(
        "torch._functorch._aot_autograd.runtime_wrappers:coerce_to_expected_memory_format",
        "bring tangents to their strides as stock does",
    ),
    "eval_frame_callback": Private(
        "torch:_C._dynamo.eval_frame.get_eval_frame_callback", "keep Dynamo out where it is not"
    ),
    "graph_task_keeps_graph": Private(
        "torch:_C._autograd._get_current_graph_task_keep_graph", "see that a graph is retained"
    ),
    "skip_code": Private("torch._dynamo.eval_frame:skip_code", "keep Dynamo out of a frame without a wrapper"),
    "unwrap_dead_wrappers": Private(
        "torch._functorch.utils:unwrap_dead_wrappers", "call autograd functions as stock does"
    ),
    "autograd_function_post_compile": Private(
        "torch._functorch._aot_autograd.runtime_wrappers:AOTDispatchAutograd.post_compile",
        "see that the autograd function around a graph is the one that was looked at",
    ),
    "effect_tokens_post_compile": Private(
        "torch._functorch._aot_autograd.runtime_wrappers:EffectTokensWrapper.post_compile",
        "see that a wrapper is the one that was looked at",
    ),
    "inductor_debug": Private("torch._inductor.debug", "see that calls of graphs are noted"),
    "rng_wrapper_post_compile": Private(
        "torch._functorch._aot_autograd.runtime_wrappers:FunctionalizedRngRuntimeWrapper.post_compile",
        "see that a wrapper is the one that was looked at",
    ),
    "runtime_wrapper_post_compile": Private(
        "torch._functorch._aot_autograd.runtime_wrappers:RuntimeWrapper.post_compile",
        "pass by AOTAutograd's wrappers of a graph that needs none",
    ),
    # suite: what a worker measures
    "cpu_vec_isa": Private("torch._inductor.cpu_vec_isa", "find out once what C++ for this CPU can use"),
    "codecache": Private("torch._inductor.codecache", "compile the headers of C++ kernels once for all processes"),
    "pytree": Private("torch.utils._pytree", "name the tensors in a model's output"),
    "TorchDynamoException": Private("torch._dynamo.exc:TorchDynamoException", "tell a failed compilation"),
    "fresh_cache": Private("torch._inductor.utils:fresh_cache", "compile as if nothing was cached"),
    "clear_caches": Private("torch._inductor.utils:clear_caches", "forget what was loaded from a folder of caches"),
    "CompiledFxGraph": Private("torch._inductor.output_code:CompiledFxGraph", "count graphs and partitions"),
    "graph_partition": Private(
        "torch._inductor.scheduler:Scheduler.graph_partition", "see what a graph was split at, and why"
    ),
    "partition_fn": Private("torch._inductor.compile_fx:partition_fn", "save no lazy conjugates for a backward"),
    "should_partition": Private(
        "torch._inductor.scheduler:Scheduler.should_partition", "leave out results with their operator"
    ),
    "MultiOutput": Private("torch._inductor.ir:MultiOutput", "tell one of several results of an operator"),
    "cudagraph_utils": Private("torch._inductor.cudagraph_utils", "read why a graph was not captured"),
    # suite: explain, which compiles for a GPU that is not there
    "CudaInterface": Private("torch._dynamo.device_interface:CudaInterface", "describe the GPU to Inductor"),
    "DataDependentOutputException": Private(
        "torch._subclasses.fake_tensor:DataDependentOutputException", "see that a value would be needed"
    ),
    "DynamicOutputShapeException": Private(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException", "see that a shape depends on values"
    ),
    "FakeTensor": Private("torch._subclasses.fake_tensor:FakeTensor", "tensors without data"),
    "NopKernelSchedulerNode": Private(
        "torch._inductor.scheduler:NopKernelSchedulerNode", "pass over nodes that launch nothing"
    ),
    "PyCodeCache": Private("torch._inductor.codecache:PyCodeCache", "load the source of a generated kernel"),
    "RestartAnalysis": Private("torch._dynamo.exc:RestartAnalysis", "let Dynamo trace a frame again"),
    "attention_math": Private(
        "torch:ops.aten._scaled_dot_product_attention_math", "express attention in plain operations"
    ),
    "conj_operator": Private("torch:ops.aten._conj.default", "recognize lazy conjugates among saved tensors"),
    "neg_operator": Private("torch:ops.aten._neg_view.default", "recognize lazy negatives among saved tensors"),
    "avoid_device_init": Private(
        "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init", "keep constants on the CPU"
    ),
    "compile_fx": Private("torch._inductor.compile_fx", "lower a graph as stock PyTorch does"),
    "IndentedBuffer": Private("torch._inductor.utils:IndentedBuffer", "keep the lines of a partition"),
    "LineContext": Private("torch._inductor.utils:LineContext", "keep the lines of a partition"),
    "define_partition": Private(
        "torch._inductor.codegen.wrapper:PythonWrapperCodegen.define_subgraph_launcher_fn",
        "keep the lines of a partition",
    ),
    "compile_to_module_lines": Private(
        "torch._inductor.graph:GraphLowering._compile_to_module_lines", "stop before code is loaded"
    ),
    "create_compile_meta": Private(
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner._create_compile_meta", "compile a kernel"
    ),
    "create_compile_options": Private(
        "torch._inductor.runtime.triton_heuristics:CachingAutotuner._create_compile_options",
        "compile a kernel with the options Inductor uses",
    ),
    "cuda_lazy_init": Private("torch.cuda:_lazy_init", "leave the driver alone"),
    "cudagraphify": Private("torch._inductor.compile_fx:cudagraphify", "see what would be recorded"),
    "describe_skipped_frame": Private(
        "torch._dynamo.convert_frame:format_error_msg", "see which functions Dynamo leaves to Python"
    ),
    "efficient_attention": Private(
        "torch:ops.aten._scaled_dot_product_efficient_attention", "name the kernel attention would take"
    ),
    "ensure_cuda_device_guard_set": Private(
        "torch:_C._ensureCUDADeviceGuardSet", "index fake CUDA tensors without a driver"
    ),
    "engine_run_backward": Private(
        "torch.autograd:_engine_run_backward", "follow a call that differentiates without a GPU"
    ),
    "exchange_device": Private("torch.cuda:_exchange_device", "enter a device context without a driver"),
    "flash_attention": Private(
        "torch:ops.aten._scaled_dot_product_flash_attention", "name the kernel attention would take"
    ),
    "functorch_config": Private(
        "torch._functorch.config", "switch AOTAutograd's cache off, and have backwards lowered at once"
    ),
    "fx_traceback": Private("torch.fx.traceback", "note the user's line in a backward that is traced without a GPU"),
    "get_cpp_compiler": Private(
        "torch._inductor.cpp_builder:get_cpp_compiler", "lower CPU operations without a C++ compiler"
    ),
    "maybe_exchange_device": Private("torch.cuda:_maybe_exchange_device", "leave a device context without a driver"),
    "maybe_handle_backward_generation": Private(
        "torch._inductor.output_code:maybe_handle_backward_generation",
        "lower a backward that is not captured, without the manager of its forward's CUDA graph",
    ),
    "module_apply": Private(
        "torch.nn.modules.module:Module._apply", "move modules of fake parameters, shared ones too"
    ),
    "post_compile": Private(
        "torch._inductor.output_code:CompiledFxGraph.post_compile", "read why a graph is not recorded"
    ),
    "reset_dynamo": Private("torch._dynamo:reset", "trace from the beginning"),
    "scoped_library": Private("torch.library:_scoped_library", "override an operator for a while"),
    "set_driver_to_gpu": Private(
        "torch._inductor.runtime.triton_helpers:set_driver_to_gpu", "load kernels without a GPU"
    ),
    "should_pad": Private("torch._inductor.fx_passes.pad_mm:_should_pad", "answer without a benchmark"),
    "valid_vec_isa_list": Private(
        "torch._inductor.cpu_vec_isa:valid_vec_isa_list", "lower CPU operations without a C++ compiler"
    ),
}

PURE_OPERATORS = ("aten", "prims", "inductor", "inductor_prims")
"""Namespaces of PyTorch whose operators keep no state of their own, and declare in their schemas what they write.
Random ones keep their state in the generator."""

_NOTES = ("_dynamo_source", "_param_name_to_source")
"""Attributes that Dynamo sets on FX nodes and graph modules, which copies of these do not take along."""


def resolve(name: str) -> Any:
    """Return the object behind an entry of `NAMES`.

    Raises:
        UnsupportedTorch: this PyTorch does not have it.
    """
    private = NAMES[name]
    try:
        return functools.reduce(getattr, private.attributes, _imported(private.module))
    except (ImportError, AttributeError) as error:
        import torch

        where = private.path.replace(":", ".")
        raise UnsupportedTorch(
            f"PyTorch {torch.__version__} has no {where}, which Encore needs to {private.why}. "
            f"Encore knows PyTorch {SUPPORTED[0]} up to but not including {SUPPORTED[1]}; install one of these."
        ) from error


def _imported(module: str) -> Any:
    if module.startswith("torch._functorch._aot_autograd"):
        importlib.import_module("torch._dynamo")  # imported in another order they fail
    return importlib.import_module(module)


def holder_of(name: str) -> tuple[Any, str]:
    """Return the object that holds an entry, and the attribute it has there.

    Raises:
        UnsupportedTorch: this PyTorch does not have it.
    """
    resolve(name)
    *owners, attribute = NAMES[name].attributes
    return functools.reduce(getattr, owners, _imported(NAMES[name].module)), attribute


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
"""Stands for an attribute that the owner has of a base class only, or not at all."""
_layers: dict[tuple[int, str], list[_Layer]] = {}
_layers_lock = threading.RLock()  # a finalizer may replace something in a thread that holds it


@contextlib.contextmanager
def replaced_attribute(owner: Any, attribute: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class by `value` while the block runs; it may be one of a base class.

    Blocks of several threads may end in another order than they began. What others put there meanwhile stays.
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
    if index < len(layers):  # another block is to put back what this one would
        if layers[index].before is layer.value:
            layers[index].before = layer.before
    elif vars(owner).get(attribute, _ABSENT) is not layer.value:
        return
    elif layer.before is _ABSENT:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, layer.before)


def dynamo_source(node: torch.fx.Node) -> Any:
    """Return where Dynamo got an input of a graph from, or None for a node that is not such an input."""
    return getattr(node, _NOTES[0], None)


def has_names(tensor: torch.Tensor) -> bool:
    """Return whether dimensions of a tensor are named, which no tensor can be since PyTorch 2.13."""
    names = getattr(tensor, "has_names", None)
    return names is not None and bool(names())


def static_input_type(node: torch.fx.Node) -> str | None:
    """Return how Dynamo marked a graph input whose address is fixed (parameters and buffers), else None."""
    marked: str | None = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return marked


def describe_input(node: torch.fx.Node, source: Any, *, static: bool) -> None:
    """Note on an input added to a graph what Dynamo notes itself: a source, and whether its address is fixed."""
    setattr(node, _NOTES[0], source)
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if static else {}


def copy_notes(original: Any, copied: Any) -> None:
    """Give a copied FX node or graph module what Dynamo noted on the original."""
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
