"""Provide any model of an installed TorchBench as a workload: `torchbench:NAME` for inference, `torchbench:NAME-train`.

The model is built as TorchBench's own runner builds it, where it will run, with its own example inputs and the batch of
its class, and measured by the rules of PyTorch's published runner (`benchmarks/dynamo`): bfloat16 in inference,
automatic mixed precision and Adam in training, the mean as loss, and its exceptions from these.

Note [TorchBench's interface]. A `Model` takes (test: "train" | "eval", device: "cpu" | "cuda", batch_size) and compares
`device` with these very strings. No default device is set around it, so that what it leaves on the CPU stays there and
its data loaders draw from CPU generators. `get_module()` gives an `nn.Module` and its inputs: a tuple, a list, a single
tensor, or a mapping of keyword arguments. A class with `ALLOW_CUSTOMIZE_BSIZE = False` refuses any batch but its own; a
test that a model does not have raises `NotImplementedError`. Importing or building a model may change what later code
of any process relies on: the default device and dtype, whether gradients are enabled, `torch.manual_seed` (replaced by
one that ignores its argument), variables of the environment that PyTorch reads (modded_nanogpt: the allocator's) and
the working directory. These are put back. Other flags of PyTorch and its compilers (cuDNN's, attention's; some of
`torch._inductor.config` in simple_gpt_tp_manual) belong to the model, and the runner of TorchBench leaves them, too.
All modes have them, and no other workload meets them: a process that builds a model, for a cell, a trial or an
analysis, never builds one of another workload. Some models call `sys.exit` where something is missing.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import pkgutil
import random
import shlex
import sys
from collections.abc import Iterator, Mapping, MutableSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.losses import mean_loss
from models.registry import DtypePolicy, Inputs, Size, UnknownWorkload, Workload
from models.torchbench_offline import VARIANT, without_downloads

if TYPE_CHECKING:
    import torch

PREFIX = "torchbench"
TRAINING_SUFFIX = "-train"
VARIANTS = ("published", VARIANT)
STDOUT, STDERR = 1, 2

_INFERENCE_UNDER_AMP = (
    "DALLE2_pytorch", "Super_SloMo", "detectron2_fcos_r_50_fpn", "doctr_det_predictor", "doctr_reco_predictor",
    "pyhpc_turbulent_kinetic_energy", "sam_fast", "tts_angular",
)  # fmt: skip

INFERENCE_DTYPE_EXCEPTIONS: Mapping[str, DtypePolicy] = {
    **dict.fromkeys(_INFERENCE_UNDER_AMP, "amp"),
    "vision_maskrcnn": "fp16",
}
"""Models that the published runner does not convert to bfloat16."""

TRAINED_WITH_SGD = frozenset({
    "BERT_pytorch", "LearningToPaint", "alexnet", "dcgan", "demucs", "densenet121", "dlrm", "fastNLP_Bert", "hf_T5",
    "mobilenet_v2", "phlippe_densenet", "phlippe_resnet", "pytorch_stargan", "resnet18", "shufflenet_v2_x1_0",
    "speech_transformer", "squeezenet1_1", "stable_diffusion_text_encoder", "timm_efficientdet", "timm_nfnet",
    "timm_regnet", "timm_vision_transformer", "timm_vovnet", "vgg16",
})  # fmt: skip
"""Models that the published runner trains with SGD; the sparse gradients of dlrm are nothing for Adam."""

TRAINED_IN_BFLOAT16 = frozenset({"modded_nanogpt"})
"""Models that the published runner trains under autocast to bfloat16, and not to float16."""

GRADIENTS_IN_INFERENCE = frozenset({"maml"})
"""Models for whose inference the published runner enables gradients: their forward differentiates."""

EXAMPLE_SHAPES: Mapping[str, tuple[int, ...]] = {"yolov3": (3, 384, 512)}
"""Shape without the batch of the uniform example input that the published runner makes for a model in place of the
model's own: yolov3 gives a data loader in training."""

SETTING_PREFIXES = ("PYTORCH_", "TORCH", "TRITON_", "CUDA_", "CUBLAS_", "NCCL_", "OMP_", "MKL_")
"""Of variables of the environment by which PyTorch, its libraries and its compilers are set."""


class TorchBenchUnavailable(UnknownWorkload):
    """Report that TorchBench, or a package of one of its models, is not installed, with instructions."""


class TorchBenchRefuses(RuntimeError):
    """Report that a model of TorchBench cannot be built with these options; the message has TorchBench's reason."""


def published_loss(output: Any) -> torch.Tensor:
    """Return the published runner's loss, as a scalar.

    It is `mean_loss`, but of three of Hugging Face's outputs that of the logits alone, and of a distribution over
    actions (drq, soft_actor_critic) the sum of its means.

    Raises:
        TypeError: as `mean_loss`.
    """
    kind = type(output).__name__
    if kind in ("MaskedLMOutput", "Seq2SeqLMOutput", "CausalLMOutputWithCrossAttentions"):
        return mean_loss(output.logits)
    if kind == "SquashedNormal":
        total: torch.Tensor = output.mean.sum()
        return total
    return mean_loss(output)


def workload(name: str) -> Workload:
    """Return the workload `NAME` or `NAME-train` of TorchBench.

    Raises:
        TorchBenchUnavailable: `torchbenchmark`, or a package this model needs, cannot be imported.
        UnknownWorkload: TorchBench has no such model, or not this test of it; the message names what there is.
    """
    training = name.lower().endswith(TRAINING_SUFFIX)
    model_name = name[: -len(TRAINING_SUFFIX)] if training else name
    if not model_name:
        raise UnknownWorkload(
            f"{PREFIX}: must be followed by the name of one of TorchBench's models, as in {PREFIX}:alexnet"
        )
    model_class = _model_class(model_name)
    model_name = getattr(model_class, "name", model_name)  # names are found in any case
    batches = {test: getattr(model_class, f"DEFAULT_{test.upper()}_BSIZE", None) for test in ("train", "eval")}
    test, other = ("train", "eval") if training else ("eval", "train")
    if batches[test] is None and batches[other] is not None:
        instead = f"{PREFIX}:{model_name}{'' if training else TRAINING_SUFFIX}"
        task = "training" if training else "inference"
        raise UnknownWorkload(f"TorchBench's {model_name} is not made for {task}; use {instead}")
    return row(model_name, test, batches[test], _Program(model_name, model_class, test, batches[test]))


def row(name: str, test: str, batch: int | None, program: Any, sets: tuple[str, ...] = ()) -> Workload:
    """Return the record of a model's test ("train" or "eval"), with the published runner's dtypes and optimizers.

    `program` has the methods `build` and `inputs` of a workload.
    """
    training = test == "train"
    policy: DtypePolicy = INFERENCE_DTYPE_EXCEPTIONS.get(name, "bf16")
    if training:
        policy = "amp-bf16" if name in TRAINED_IN_BFLOAT16 else "amp"
    return Workload(
        acronym=f"{PREFIX}:{name}{TRAINING_SUFFIX if training else ''}",
        name=name,
        suite=PREFIX,
        task="training" if training else "inference",
        batch=batch or 1,
        dtype_policy=policy,
        build=program.build,
        inputs=program.inputs,
        loss=published_loss,
        stochastic=training,
        optimizer=("sgd" if name in TRAINED_WITH_SGD else "adam") if training else None,
        gradients_in_inference=not training and name in GRADIENTS_IN_INFERENCE,
        builds_on_device=True,
        variants=VARIANTS,
        sets=sets,
        notes="" if batch else "TorchBench gives no default batch; 1 stands for what its example inputs hold",
    )


class _Program:
    """Build one TorchBench model and its inputs, which are made by one object there."""

    def __init__(self, name: str, model_class: Any, test: str, batch: int | None) -> None:
        self._name = name
        self._model_class = model_class
        self._test = test
        self._batch = batch
        self._examples: dict[tuple[str, Size, str], Any] = {}

    def build(self, variant: str, size: Size, device: torch.device) -> torch.nn.Module:
        """Return the module, built for `device` with the batch of its class, in any size.

        Raises:
            TorchBenchRefuses: the model has no such test, not on this device, or no module to return, or gives example
                inputs of which no others can be made.
        """
        import torch
        from torch import nn

        offline = without_downloads() if variant == VARIANT else contextlib.nullcontext()
        with _global_state_kept(), offline:
            try:
                model = self._model(device.type)
            except SystemExit as error:
                raise self._refusal("ends the process instead of being built", error) from error
            try:
                module, example = model.get_module()
            except (NotImplementedError, AttributeError, TypeError, ValueError, SystemExit) as error:
                raise self._refusal("returns no module", error) from error
        if not isinstance(module, nn.Module):
            raise self._refusal(f"returns a {type(module).__name__} and no nn.Module")
        if self._name in EXAMPLE_SHAPES:
            shape = (getattr(model, "batch_size", None) or self._batch or 1, *EXAMPLE_SHAPES[self._name])
            example = (torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(device),)
        if unfit := _unfit(example):
            raise self._refusal(f"gives example inputs that cannot be varied: {unfit}")
        self._examples[variant, size, device.type] = example
        return module

    def _model(self, device: str) -> Any:
        # The batch is always passed, because TorchBench's default depends on the GPU.
        batch = self._batch if getattr(self._model_class, "ALLOW_CUSTOMIZE_BSIZE", True) else None
        try:
            return self._model_class(test=self._test, device=device, batch_size=batch)
        except NotImplementedError as error:
            raise self._refusal(f"has no test {self._test!r} on {device}", error) from error

    def _refusal(self, what: str, error: BaseException | None = None) -> TorchBenchRefuses:
        reason = "" if error is None else f": {_reason(error)}"
        return TorchBenchRefuses(f"TorchBench's model {self._name} {what}{reason}")

    def inputs(self, variant: str, size: Size, generator: torch.Generator) -> Inputs:
        """Return TorchBench's example inputs, floating and complex ones rolled by an offset of `generator`'s.

        Integers are repeated as they are: indices, lengths and labels need not make sense in another order. So are
        objects that are no containers, tensors in their attributes included: the published runner leaves them, too.
        """
        import torch

        from models.nests import map_tensors

        offsets = random.Random(generator.initial_seed())

        def another(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() < 2:
                return tensor.clone()
            return torch.empty_like(tensor).copy_(tensor.roll(offsets.randrange(tensor.numel())))

        example = map_tensors(self._examples[variant, size, torch.get_default_device().type], another)
        if isinstance(example, Mapping):
            return Inputs(kwargs=dict(example))
        return Inputs(args=tuple(example) if isinstance(example, (MutableSequence, tuple)) else (example,))


def _unfit(example: Any) -> str | None:
    """Return why no other inputs can be made like these; None if they can."""
    import torch

    from models.nests import CannotRebuild, leaves_of, map_tensors

    leaves = list(leaves_of(example))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if isinstance(leaf, Iterator):
            return f"a {type(leaf).__name__} can be read only once"
    for tensor in tensors:
        if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
            return f"a {kind} {type(tensor).__name__} does not lie in memory as one array of numbers"
    if not tensors:
        return f"there is no tensor in a {type(example).__name__}"
    try:
        map_tensors(example, lambda tensor: tensor)
    except CannotRebuild as error:
        return str(error)
    return None


@contextlib.contextmanager
def _global_state_kept() -> Iterator[None]:
    """Restore global settings after importing and building a model, and log its output."""
    import torch

    dtype, gradients = torch.get_default_dtype(), torch.is_grad_enabled()
    manual_seed, default_device = torch.manual_seed, torch.get_default_device()
    folder, settings = Path.cwd(), _settings()
    try:
        with _stdout_on_stderr():
            yield
    finally:
        os.chdir(folder)
        for name in _settings().keys() - settings:
            del os.environ[name]
        os.environ.update(settings)
        torch.manual_seed = manual_seed
        if torch.get_default_device() != default_device:
            torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send to stderr what Python prints, and what C libraries and other processes write to the same descriptor."""
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    try:
        os.dup2(STDERR, STDOUT)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, STDOUT)
        os.close(kept)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(SETTING_PREFIXES)}


def _model_class(name: str) -> Any:
    """Return TorchBench's `Model` class of this name."""
    try:
        with _global_state_kept():
            torchbenchmark = importlib.import_module("torchbenchmark")
    except (Exception, SystemExit) as error:
        raise TorchBenchUnavailable(
            f"{PREFIX}:{name} needs TorchBench, which cannot be imported ({_reason(error)}); name a checkout that is "
            "there already, PYTHONPATH=PATH before the command, or get it by "
            "`git clone https://github.com/pytorch/benchmark && cd benchmark && pip install -e . && "
            f"python install.py models {shlex.quote(name)}`"
        ) from error
    found = _names().get(name.lower())
    if found is None:
        raise _unknown(name)
    try:
        with _global_state_kept():
            model_class = torchbenchmark.load_model_by_name(found)
    except (Exception, SystemExit) as error:
        raise TorchBenchUnavailable(
            f"TorchBench's model {name} cannot be imported ({_reason(error)}); install what it needs by "
            f"`python install.py models {shlex.quote(name)}` in TorchBench's folder"
        ) from error
    if model_class is None:  # what TorchBench has no class for, it gives None for
        raise _unknown(name)
    return model_class


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _unknown(name: str) -> UnknownWorkload:
    near = difflib.get_close_matches(name, _names().values(), n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "its folder torchbenchmark/models lists them"
    return UnknownWorkload(f"TorchBench has no model {name!r}; {hint}")


def _names() -> dict[str, str]:
    """Return names of the models in TorchBench's folder of models, by their lower case."""
    try:
        package = importlib.import_module("torchbenchmark.models")
    except ImportError:
        return {}
    return {module.name.lower(): module.name for module in pkgutil.iter_modules(package.__path__)}
