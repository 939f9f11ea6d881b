"""List the models of an installed TorchBench from its folders, without importing it, for `--set torchbench`.

Importing a hundred models takes minutes, and many cannot be imported. A model that cannot be imported, or built,
becomes a failed cell with its reason when its turn comes.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from models import torchbench
from models.registry import Inputs, Size, Workload
from models.torchbench import PREFIX, TRAINING_SUFFIX, TorchBenchUnavailable

if TYPE_CHECKING:
    import torch

TESTS = ("eval", "train")
_BATCH = re.compile(r"^    DEFAULT_(EVAL|TRAIN)_BSIZE\b[^=\n]*= *(\d+) *(?:#.*)?$", re.MULTILINE)
INTERNAL = "fb"
"""A folder of models that is not public."""


def listed() -> list[Workload]:
    """Return a workload for each test of each model, in alphabetical order.

    A model's tests are those it gives a batch for; both, if it gives none. What is not in the class itself (a batch
    that a base class gives, a test that is refused) shows when the model is built.

    Raises:
        TorchBenchUnavailable: there is no TorchBench, or it holds no models.
    """
    folder = _folder()
    found = [
        torchbench.row(name, test, batches.get(test), _Later(name + TRAINING_SUFFIX * (test == "train")), (PREFIX,))
        for source in sorted(folder.glob("*/__init__.py"), key=lambda path: path.parent.name.lower())
        if (name := source.parent.name) != INTERNAL
        for test, batches in ((test, _batches(source)) for test in TESTS)
        if test in batches or not batches
    ]
    if not found:
        raise TorchBenchUnavailable(f"the set {PREFIX} is empty: TorchBench's folder {folder.name} holds no models")
    return found


def _folder() -> Path:
    try:
        spec = importlib.util.find_spec("torchbenchmark")
    except (ImportError, ValueError):
        spec = None
    for place in (spec.submodule_search_locations if spec else None) or ():
        if (Path(place) / "models").is_dir():
            return Path(place) / "models"
    raise TorchBenchUnavailable(
        f"the set {PREFIX} needs TorchBench, which is not installed; get it by "
        "`git clone https://github.com/pytorch/benchmark`, and name the checkout: "
        "`./run_all.sh --with-torchbench PATH`, or PYTHONPATH=PATH before `encore run`"
    )


@functools.cache
def _batches(source: Path) -> Mapping[str, int]:
    """Return the batch by test, where the model's class gives a number; none where the file cannot be read."""
    try:
        _, *rest = re.split(r"^class Model\b", source.read_text(), maxsplit=1, flags=re.MULTILINE)
    except (OSError, ValueError):
        return {}
    # The class ends at the module's next statement.
    of_class, *_ = re.split(r"^\w", "".join(rest), maxsplit=1, flags=re.MULTILINE)
    return {test.lower(): int(batch) for test, batch in _BATCH.findall(of_class)}


class _Later:
    """Build a model and its inputs; the model is imported at the first call of either."""

    def __init__(self, name: str) -> None:
        self._name = name

    @functools.cached_property
    def _workload(self) -> Workload:
        return torchbench.workload(self._name)

    def build(self, variant: str, size: Size, device: torch.device) -> torch.nn.Module:
        return self._workload.build(variant, size, device)

    def inputs(self, variant: str, size: Size, generator: torch.Generator) -> Inputs:
        return self._workload.inputs(variant, size, generator)
