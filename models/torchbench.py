"""Any model of an installed TorchBench as a workload: `torchbench:NAME` for inference, `torchbench:NAME-train`.

The model is built where it runs, with its own example inputs and its own default batch, and measured by the published
runner's rules: bfloat16 in inference, automatic mixed precision and Adam in training, the mean as loss.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from models.registry import DtypePolicy, Inputs, Size, Task, UnknownWorkload, Workload

if TYPE_CHECKING:
    import torch

PREFIX = "torchbench"
TRAINING_SUFFIX = "-train"

INFERENCE_DTYPE_EXCEPTIONS: Mapping[str, DtypePolicy] = {
    "DALLE2_pytorch": "amp",
    "pyhpc_turbulent_kinetic_energy": "amp",
    "vision_maskrcnn": "fp16",
}
"""Models that the published runner does not convert to bfloat16."""


class TorchBenchUnavailable(UnknownWorkload):
    """TorchBench, or what one of its models needs, is not installed; the message says how to get it."""


def workload(name: str) -> Workload:
    """The workload `NAME` or `NAME-train` of TorchBench.

    Raises:
        TorchBenchUnavailable: `torchbenchmark`, or a package this model needs, cannot be imported.
        UnknownWorkload: TorchBench has no such model; the message names the nearest ones.
    """
    model_name = name.removesuffix(TRAINING_SUFFIX)
    training = name != model_name
    model_class = _model_class(model_name)
    task: Task = "training" if training else "inference"
    batch = getattr(model_class, "DEFAULT_TRAIN_BSIZE" if training else "DEFAULT_EVAL_BSIZE", None)
    program = _Program(model_class, "train" if training else "eval")
    return Workload(
        acronym=f"{PREFIX}:{name}",
        name=model_name,
        suite=PREFIX,
        task=task,
        batch=batch or 1,
        dtype_policy="amp" if training else INFERENCE_DTYPE_EXCEPTIONS.get(model_name, "bf16"),
        build=program.build,
        inputs=program.inputs,
        stochastic=training,
        optimizer="adam" if training else None,
        builds_on_device=True,
        notes="" if batch else "TorchBench gives no default batch; 1 stands for what its example inputs hold",
    )


class _Program:
    """Builder and input maker of one TorchBench model, which come from one object there."""

    def __init__(self, model_class: Any, test: str) -> None:
        self._model_class = model_class
        self._test = test
        self._examples: dict[tuple[Size, torch.device], Any] = {}

    def build(self, variant: str, size: Size) -> torch.nn.Module:
        """The module on the default device; the tiny size is TorchBench's own model with a batch of one."""
        import torch

        device = torch.get_default_device()
        batch = None if size == "full" else 1
        model = self._model_class(test=self._test, device=str(device), batch_size=batch)
        module, self._examples[size, device] = model.get_module()
        return module

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

        example = map_tensors(self._examples[size, torch.get_default_device()], another)
        if isinstance(example, Mapping):
            return Inputs(kwargs=example)
        return Inputs(args=tuple(example) if isinstance(example, (list, tuple)) else (example,))


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
        model_class = torchbenchmark.load_model_by_name(name)
    except ImportError as error:
        raise TorchBenchUnavailable(
            f"TorchBench's model {name} cannot be imported ({error}); install what it needs by "
            f"`python install.py models {name}` in TorchBench's folder"
        ) from error
    if model_class is None:
        near = difflib.get_close_matches(name, _model_names(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(near)}?" if near else "its folder torchbenchmark/models lists them"
        raise UnknownWorkload(f"TorchBench has no model {name!r}; {hint}")
    return model_class


def _model_names() -> list[str]:
    models = importlib.import_module("torchbenchmark.models")
    return [module.name for module in pkgutil.iter_modules(models.__path__)]
