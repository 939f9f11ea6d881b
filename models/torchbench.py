"""Any model of an installed TorchBench as a workload: `torchbench:NAME` for inference, `torchbench:NAME-train`.

The model is built as TorchBench's own runner builds it, where it will run, with its own example inputs and the batch of
its class, and measured by the published runner's rules: bfloat16 in inference, automatic mixed precision and Adam in
training, the mean as loss.

Note [TorchBench's interface]. A `Model` takes (test: "train" | "eval", device: "cpu" | "cuda", batch_size) and compares
`device` with these very strings. No default device is set around it, so that what it leaves on the CPU stays there and
its data loaders draw from CPU generators. `get_module()` gives an `nn.Module` and its inputs: a tuple, a list, a single
tensor, or a mapping of keyword arguments. A class with `ALLOW_CUSTOMIZE_BSIZE = False` refuses any batch but its own; a
test that a model does not have raises `NotImplementedError`. An unknown name raises `ModelNotFoundError`, which is a
`RuntimeError`. Importing or building a model may set global flags of PyTorch (cuDNN's choice of algorithms, the default
device; `torch.manual_seed` is replaced by one that ignores its argument): they are put back.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import pkgutil
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from models.registry import DtypePolicy, Inputs, Size, Task, UnknownWorkload, Workload

if TYPE_CHECKING:
    import torch

PREFIX = "torchbench"
TRAINING_SUFFIX = "-train"
TINY_BATCH = 1

INFERENCE_DTYPE_EXCEPTIONS: Mapping[str, DtypePolicy] = {
    "DALLE2_pytorch": "amp",
    "pyhpc_turbulent_kinetic_energy": "amp",
    "vision_maskrcnn": "fp16",
}
"""Models that the published runner does not convert to bfloat16."""


class TorchBenchUnavailable(UnknownWorkload):
    """TorchBench, or what one of its models needs, is not installed; the message says how to get it."""


class TorchBenchRefuses(RuntimeError):
    """A model of TorchBench cannot be built like this; the message has TorchBench's own reason."""


def workload(name: str) -> Workload:
    """The workload `NAME` or `NAME-train` of TorchBench.

    Raises:
        TorchBenchUnavailable: `torchbenchmark`, or a package this model needs, cannot be imported.
        UnknownWorkload: TorchBench has no such model, or not this test of it; the message names what there is.
    """
    model_name = name.removesuffix(TRAINING_SUFFIX)
    training = name != model_name
    model_class = _model_class(model_name)
    model_name = getattr(model_class, "name", model_name)  # TorchBench finds names in any case
    task: Task = "training" if training else "inference"
    batches = {test: getattr(model_class, f"DEFAULT_{test.upper()}_BSIZE", None) for test in ("train", "eval")}
    test, other = ("train", "eval") if training else ("eval", "train")
    if batches[test] is None and batches[other] is not None:
        instead = f"{PREFIX}:{model_name}{'' if training else TRAINING_SUFFIX}"
        raise UnknownWorkload(f"TorchBench's {model_name} is not made for {task}; use {instead}")
    program = _Program(model_name, model_class, test, batches[test])
    return Workload(
        acronym=f"{PREFIX}:{model_name}{TRAINING_SUFFIX if training else ''}",
        name=model_name,
        suite=PREFIX,
        task=task,
        batch=batches[test] or 1,
        dtype_policy="amp" if training else INFERENCE_DTYPE_EXCEPTIONS.get(model_name, "bf16"),
        build=program.build,
        inputs=program.inputs,
        stochastic=training,
        optimizer="adam" if training else None,
        builds_on_device=True,
        notes="" if batches[test] else "TorchBench gives no default batch; 1 stands for what its example inputs hold",
    )


class _Program:
    """Builder and input maker of one TorchBench model, which come from one object there."""

    def __init__(self, name: str, model_class: Any, test: str, batch: int | None) -> None:
        self._name = name
        self._model_class = model_class
        self._test = test
        self._batch = batch
        self._examples: dict[tuple[Size, str], Any] = {}

    def build(self, variant: str, size: Size, device: torch.device) -> torch.nn.Module:
        """The module, built for `device`; the tiny size is a batch of one, where the model takes one.

        Raises:
            TorchBenchRefuses: the model has no such test, not on this device, or no module to hand out.
        """
        from torch import nn

        with _global_state_kept():
            model = self._model(size, device.type)
            try:
                module, example = model.get_module()
            except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
                raise self._refusal("hands out no module", error) from error
        if not isinstance(module, nn.Module):
            raise self._refusal(f"hands out a {type(module).__name__} and no nn.Module")
        self._examples[size, device.type] = example
        return module

    def _model(self, size: Size, device: str) -> Any:
        # The batch is always given: left to itself, TorchBench picks another one on some GPUs.
        own = self._batch if getattr(self._model_class, "ALLOW_CUSTOMIZE_BSIZE", True) else None
        wanted = TINY_BATCH if size == "tiny" and own is not None else own
        for batch in dict.fromkeys((wanted, own)):
            try:
                return self._model_class(test=self._test, device=device, batch_size=batch)
            except NotImplementedError as error:
                if batch == own:
                    raise self._refusal(f"has no test {self._test!r} on {device}", error) from error
        raise AssertionError("the last batch either is built or raises")

    def _refusal(self, what: str, error: BaseException | None = None) -> TorchBenchRefuses:
        reason = "" if error is None else f": {_reason(error)}"
        return TorchBenchRefuses(f"TorchBench's model {self._name} {what}{reason}")

    def inputs(self, variant: str, size: Size, generator: torch.Generator) -> Inputs:
        """TorchBench's example inputs; floating tensors hold the same values rolled by an offset of `generator`'s.

        Integers are repeated as they are: indices, lengths and labels need not make sense in another order.
        """
        import torch

        from models.nests import map_tensors

        offsets = random.Random(generator.initial_seed())

        def another(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach()
            if not tensor.is_floating_point() or tensor.numel() < 2:
                return tensor.clone()
            return torch.empty_like(tensor).copy_(tensor.roll(offsets.randrange(tensor.numel())))

        example = map_tensors(self._examples[size, torch.get_default_device().type], another)
        if isinstance(example, Mapping):
            return Inputs(kwargs=example)
        return Inputs(args=tuple(example) if isinstance(example, (list, tuple)) else (example,))


@contextlib.contextmanager
def _global_state_kept() -> Iterator[None]:
    """What importing and building a model sets for the whole process is put back, and what it prints is log."""
    import torch

    values: dict[Callable[[Any], object], Any] = {
        torch.set_default_dtype: torch.get_default_dtype(),
        torch.set_grad_enabled: torch.is_grad_enabled(),
        torch.set_float32_matmul_precision: torch.get_float32_matmul_precision(),
        torch.set_num_threads: torch.get_num_threads(),
        torch.autograd.set_detect_anomaly: torch.is_anomaly_enabled(),
        torch.backends.cuda.enable_flash_sdp: torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.enable_mem_efficient_sdp: torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.enable_math_sdp: torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.enable_cudnn_sdp: torch.backends.cuda.cudnn_sdp_enabled(),
    }
    cudnn = torch.backends.cudnn
    flags = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")}
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    manual_seed, default_device = torch.manual_seed, torch.get_default_device()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        torch.manual_seed = manual_seed
        if torch.get_default_device() != default_device:
            torch.set_default_device(None)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for name, value in flags.items():
            setattr(cudnn, name, value)
        for restore, value in values.items():
            restore(value)


def _model_class(name: str) -> Any:
    """TorchBench's `Model` class of this name."""
    try:
        torchbenchmark = importlib.import_module("torchbenchmark")
    except ImportError as error:
        raise TorchBenchUnavailable(
            f"{PREFIX}:{name} needs TorchBench, which cannot be imported ({error}); get it by "
            "`git clone https://github.com/pytorch/benchmark && cd benchmark && pip install -e . && "
            f"python install.py models {name}`"
        ) from error
    try:
        with _global_state_kept():
            model_class = torchbenchmark.load_model_by_name(name)
    except Exception as error:
        if isinstance(error, getattr(torchbenchmark, "ModelNotFoundError", ())):
            raise _unknown(name) from error
        if name.lower() not in map(str.lower, _model_names()):  # TorchBench went on to its lists of further models
            raise _unknown(name, f", and its lists of further models cannot be read ({_reason(error)})") from error
        raise TorchBenchUnavailable(
            f"TorchBench's model {name} cannot be imported ({_reason(error)}); install what it needs by "
            f"`python install.py models {name}` in TorchBench's folder"
        ) from error
    if model_class is None:  # what TorchBench has no class for, it gives None for
        raise _unknown(name)
    return model_class


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _unknown(name: str, more: str = "") -> UnknownWorkload:
    near = difflib.get_close_matches(name, _model_names(), n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "its folder torchbenchmark/models lists them"
    return UnknownWorkload(f"TorchBench has no model {name!r}{more}; {hint}")


def _model_names() -> list[str]:
    models = importlib.import_module("torchbenchmark.models")
    return [module.name for module in pkgutil.iter_modules(models.__path__)]
