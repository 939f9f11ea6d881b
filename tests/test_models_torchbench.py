"""A small package with TorchBench's interface stands in for TorchBench."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from models.instance import instantiate
from models.registry import UnknownWorkload, find
from models.torchbench import TorchBenchUnavailable

PACKAGE = """
import importlib
from pathlib import Path

def load_model_by_name(name):
    if not (Path(__file__).parent / "models" / name).is_dir():
        return None
    return importlib.import_module(f"torchbenchmark.models.{name}").Model
"""

RANKING = """
import torch

class Model:
    DEFAULT_TRAIN_BSIZE = 6
    DEFAULT_EVAL_BSIZE = 4

    def __init__(self, test, device, batch_size=None):
        self.test, self.device = test, device
        self.batch_size = batch_size or (self.DEFAULT_TRAIN_BSIZE if test == "train" else self.DEFAULT_EVAL_BSIZE)
        self.module = torch.nn.Linear(5, 2).to(device)
        self.module.built_on = device

    def get_module(self):
        scores = torch.rand(self.batch_size, 5, device=self.device)
        return self.module, (scores,)
"""

LANGUAGE = """
import torch

class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(9, 3)

    def forward(self, input_ids, labels):
        return {"words": self.words(input_ids), "labels": self.words(labels)}

class Model:
    DEFAULT_EVAL_BSIZE = None

    def __init__(self, test, device, batch_size=None):
        self.module = Reader().to(device)
        self.ids = torch.randint(9, (batch_size or 3, 4), device=device)

    def get_module(self):
        return self.module, {"input_ids": self.ids, "labels": self.ids}
"""

BROKEN = "import a_package_nobody_has"


@pytest.fixture
def fake_torchbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package = tmp_path / "torchbenchmark"
    for name, source in {
        "": PACKAGE,
        "models": "",
        "models/ranking_net": RANKING,
        "models/language_net": LANGUAGE,
        "models/vision_maskrcnn": RANKING,
        "models/broken_net": BROKEN,
    }.items():
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchbenchmark"]:
        del sys.modules[name]


@pytest.mark.usefixtures("fake_torchbench")
def test_a_name_is_an_inference_row_by_the_published_rules() -> None:
    row = find("torchbench:ranking_net")
    described = (row.acronym, row.name, row.suite, row.task, row.batch, row.dtype_policy, row.optimizer)
    assert described == ("torchbench:ranking_net", "ranking_net", "torchbench", "inference", 4, "bf16", None)
    assert find("torchbench:vision_maskrcnn").dtype_policy == "fp16"


@pytest.mark.usefixtures("fake_torchbench")
def test_the_suffix_makes_it_a_training_row() -> None:
    row = find("torchbench:ranking_net-train")
    described = (row.name, row.task, row.batch, row.dtype_policy, row.optimizer, row.stochastic)
    assert described == ("ranking_net", "training", 6, "amp", "adam", True)


@pytest.mark.usefixtures("fake_torchbench")
def test_a_model_trains_on_its_own_example_inputs() -> None:
    instance = instantiate(find("torchbench:ranking_net-train"), device="cpu", seed=0)
    made = instance.inputs(0)
    assert made.args[0].shape == (6, 5)
    with instance.autocast():
        loss = instance.loss(instance.module(*made.args))
    loss.backward()
    assert instance.module.weight.grad.isfinite().all()


@pytest.mark.usefixtures("fake_torchbench")
def test_other_indices_give_the_same_values_in_another_order() -> None:
    instance = instantiate(find("torchbench:ranking_net"), device="cpu", seed=0)
    first, again, other = (instance.inputs(index).args[0] for index in (0, 0, 1))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.flatten().sort().values, other.flatten().sort().values)


@pytest.mark.usefixtures("fake_torchbench")
def test_integers_are_repeated_and_one_object_stays_one() -> None:
    instance = instantiate(find("torchbench:language_net"), device="cpu", seed=0)
    first, other = instance.inputs(0).kwargs, instance.inputs(1).kwargs
    assert first["input_ids"] is first["labels"]
    assert first["input_ids"] is not other["input_ids"]
    assert torch.equal(first["input_ids"], other["input_ids"])
    assert set(instance.module(**first)) == {"words", "labels"}


@pytest.mark.usefixtures("fake_torchbench")
def test_a_model_without_a_default_batch_says_so() -> None:
    row = find("torchbench:language_net")
    assert row.batch == 1
    assert "no default batch" in row.notes


@pytest.mark.usefixtures("fake_torchbench")
def test_the_tiny_size_is_a_batch_of_one() -> None:
    instance = instantiate(find("torchbench:ranking_net"), size="tiny", device="cpu", seed=0)
    assert instance.inputs(0).args[0].shape == (1, 5)


@pytest.mark.usefixtures("fake_torchbench")
def test_a_model_is_built_where_it_runs() -> None:
    row = find("torchbench:ranking_net")
    on_meta, on_cpu = instantiate(row, device="meta", seed=0), instantiate(row, device="cpu", seed=0)
    assert (on_meta.module.built_on, on_cpu.module.built_on) == ("meta", "cpu")
    assert (on_meta.inputs(0).args[0].device.type, on_cpu.inputs(0).args[0].device.type) == ("meta", "cpu")


@pytest.mark.usefixtures("fake_torchbench")
def test_an_unknown_model_is_answered_with_near_ones() -> None:
    with pytest.raises(UnknownWorkload, match=r"no model 'rankingnet'; did you mean ranking_net"):
        find("torchbench:rankingnet")


@pytest.mark.usefixtures("fake_torchbench")
def test_a_model_that_misses_a_package_says_how_to_install_it() -> None:
    with pytest.raises(TorchBenchUnavailable, match=r"a_package_nobody_has.*install.py models broken_net"):
        find("torchbench:broken_net")


def test_without_torchbench_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchbenchmark", None)
    with pytest.raises(
        TorchBenchUnavailable, match=r"torchbench:alexnet needs TorchBench.*git clone https://github.com"
    ):
        find("torchbench:alexnet")
