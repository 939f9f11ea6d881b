"""The set `torchbench`: every model of an installed TorchBench, found without importing it; one that cannot be imported
is a row with its reason, not an error of the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.fake_torchbench import install

from models import registry, torchbench_models
from models.instance import instantiate
from suite.results import store
from suite.results.errors import WrongUse
from suite.run.matrix import select_workloads

POISON = 'raise SystemExit("listing imports nothing")\n'

SPARSE = """
import torch
from ...util.model import BenchmarkModel

class Model(BenchmarkModel):
    DEFAULT_EVAL_BSIZE = 3

    def get_module(self):
        return torch.nn.Linear(3, 3), (torch.eye(3).to_sparse(),)
"""

CLASSES = {
    "Both": "class Model:\n    DEFAULT_EVAL_BSIZE = 3\n    DEFAULT_TRAIN_BSIZE: int = 5\n",
    "eval_only": "class Other:\n    DEFAULT_TRAIN_BSIZE = 9\nclass Model:\n    DEFAULT_EVAL_BSIZE = 2\n",
    "train_only": "class Model:\n    DEFAULT_TRAIN_BSIZE = 4\n    DEFAULT_EVAL_BSIZE = None\n",
    "of_a_base": "class Model(Base):\n    def __init__(self):\n        self.DEFAULT_EVAL_BSIZE = 7\n",
    "cut_off": "class Model(\n",
    "fb": "class Model:\n    DEFAULT_EVAL_BSIZE = 1\n",
}


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TorchBench that ends the process that imports it, or one of its models."""
    models = tmp_path / "torchbenchmark" / "models"
    for name, source in CLASSES.items():
        (models / name).mkdir(parents=True)
        (models / name / "__init__.py").write_text(POISON + source)
    (models / "no_package").mkdir()
    for package in (models, models.parent):
        (package / "__init__.py").write_text(POISON)
    monkeypatch.syspath_prepend(str(tmp_path))
    return models


def test_listing_models_imports_none_of_them(poisoned: Path):
    found = {row.acronym: (row.task, row.batch, row.dtype_policy) for row in registry.find_set("TorchBench")}
    assert found == {
        "torchbench:Both": ("inference", 3, "bf16"),
        "torchbench:Both-train": ("training", 5, "amp"),
        "torchbench:cut_off": ("inference", 1, "bf16"),
        "torchbench:cut_off-train": ("training", 1, "amp"),
        "torchbench:eval_only": ("inference", 2, "bf16"),
        "torchbench:of_a_base": ("inference", 1, "bf16"),
        "torchbench:of_a_base-train": ("training", 1, "amp"),
        "torchbench:train_only-train": ("training", 4, "amp"),
    }


def test_selected_models_are_not_imported_again(poisoned: Path):
    chosen = select_workloads(["torchbench:Both-train", "EOS"], None, planned=True)
    assert [(row.acronym, variant) for row, variant in chosen] == [
        ("torchbench:Both-train", "published"), ("EOS", "published"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torchbench:Both-train", "SystemExit: listing imports nothing"),
        ("torchbench:Bothh", r"^(?!.*`encore list` shows all)"),
        ("EOSS", "`encore list` shows all"),
    ],
)
def test_wrong_names_of_models_are_refused(poisoned: Path, name: str, words: str):
    with pytest.raises(WrongUse, match=words):
        select_workloads([name], None)


def test_listed_model_is_built_as_the_named_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        (row,) = [row for row in torchbench_models.listed() if row.acronym == "torchbench:ranking_net"]
        named = registry.find("torchbench:ranking_net")
        assert replace(row, build=named.build, inputs=named.inputs, sets=()) == named
        instance = instantiate(row, size="tiny", device="cpu", seed=0)
        assert instance.inputs(0).args[0].shape == (4, 5)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchbenchmark"]:
            del sys.modules[name]


def install_alone(folder: Path, *kept: str, **sources: str) -> None:
    """Install a TorchBench with these models of the fake one, and models of these sources."""
    install(folder)
    models = folder / "torchbenchmark" / "models"
    for model in models.iterdir():
        if model.is_dir() and model.name not in kept:
            shutil.rmtree(model)
    for name, source in sources.items():
        (models / name).mkdir()
        (models / name / "__init__.py").write_text(source)


def encore(torchbench: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with a TorchBench in this folder."""
    path = os.pathsep.join([str(torchbench), str(store.REPOSITORY)])
    command = [sys.executable, "-P", "-m", "suite", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=280)


def test_run_records_failures_and_measures_the_rest(tmp_path: Path):
    needs_more = "import package_that_is_missing\nclass Model:\n    DEFAULT_EVAL_BSIZE = 1\n"
    install_alone(tmp_path, "ranking_net", needs_more=needs_more, sparse_inputs=SPARSE)
    out = tmp_path / "run"
    options = ["--device", "cpu", "--size", "tiny", "--samples", "5", "--warm-up", "1", "--out", str(out)]
    done = encore(tmp_path, "run", "--set", "torchbench", "--modes", "eager", *options)
    assert done.returncode == 1, done.stderr
    cells = {cell.workload: cell for cell in store.read_run(out).cells}
    failed = cells.pop("torchbench:needs_more")
    assert failed.status == "model_fail_to_load"
    assert "package_that_is_missing" in (failed.error or "")
    refused = cells.pop("torchbench:sparse_inputs")
    assert refused.status == "model_fail_to_load"
    assert "sparse_inputs gives example inputs that cannot be varied: a torch.sparse_coo" in (refused.error or "")
    assert {name: cell.status for name, cell in cells.items()} == {
        "torchbench:ranking_net": "pass",
        "torchbench:ranking_net-train": "pass",
    }
    done = encore(tmp_path, "run", "--resume", str(out))
    assert "nothing to run" in done.stderr, done.stderr


def test_explaining_all_continues_after_an_import_error(tmp_path: Path):
    install_alone(
        tmp_path,
        ends_it="import os\nclass Model:\n    DEFAULT_EVAL_BSIZE = 2\nos._exit(7)\n",
        needs_more=POISON + "class Model:\n    DEFAULT_EVAL_BSIZE = 3\n",
    )
    out = tmp_path / "out"
    done = encore(tmp_path, "explain", "--set", "torchbench", "--out", str(out))
    assert done.returncode == 1, done.stderr
    explained = {each["target"]: each for each in (json.loads(path.read_text()) for path in out.iterdir())}
    assert {name: each["batch"] for name, each in explained.items()} == {
        "torchbench:ends_it": 2,
        "torchbench:needs_more": 3,
    }
    assert "ended with exit code 7" in explained["torchbench:ends_it"]["error"]
    assert "listing imports nothing" in explained["torchbench:needs_more"]["error"]
    assert {path.name for path in out.iterdir()} == {"torchbench.ends_it.json", "torchbench.needs_more.json"}
