from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from models import registry
from suite.report.published import load_published

# acronym: suite, task, batch, dtype policy, optimizer, dropout or noise in an iteration, variants
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "ALNET": ("torchvision", "inference", 2, "bf16", None, False, ("published",)),
    "ALNET-128": ("torchvision", "inference", 128, "bf16", None, False, ("published",)),
    "BERT": ("torchbench", "training", 16, "amp", "sgd", True, ("published",)),
    "BSCG": ("huggingface", "training", 64, "amp", "sgd", True, ("published",)),
    "CBERT": ("huggingface", "training", 64, "amp", "sgd", True, ("published",)),
    "DALLE2": ("torchbench", "inference", 1, "amp", None, True, ("published", "current")),
    "DBMLM": ("huggingface", "training", 128, "amp", "sgd", True, ("published",)),
    "DBV2": ("huggingface", "inference", 1, "bf16", None, False, ("published",)),
    "DCGAN": ("torchbench", "training", 32, "amp", "sgd", False, ("published",)),
    "DGPT2": ("huggingface", "training", 16, "amp", "adam", True, ("published",)),
    "DLRM": ("torchbench", "inference", 2048, "bf16", None, False, ("published",)),
    "DMLM": ("huggingface", "training", 8, "amp", "adam", True, ("published", "current")),
    "DMLM-16": ("huggingface", "training", 16, "amp", "adam", True, ("published", "current")),
    "DNET": ("torchvision", "inference", 64, "bf16", None, False, ("published",)),
    "DR-I": ("torchbench", "inference", 8192, "bf16", None, False, ("published",)),
    "DR-I-256": ("torchbench", "inference", 256, "bf16", None, False, ("published",)),
    "DR-T": ("torchbench", "training", 256, "amp", "adam", True, ("published",)),
    "DR-T-4096": ("torchbench", "training", 4096, "amp", "adam", True, ("published",)),
    "ECML": ("huggingface", "training", 64, "amp", "sgd", True, ("published",)),
    "EOS": ("torchbench", "inference", 1048576, "bf16", None, False, ("published",)),
    "GFNET": ("huggingface", "training", 16, "fp32", "sgd", True, ("published",)),
    "LCNET": ("timm", "inference", 256, "bf16", None, False, ("published",)),
    "LP": ("torchbench", "training", 16, "amp", "sgd", False, ("published",)),
    "MBERT": ("huggingface", "inference", 128, "bf16", None, False, ("published",)),
    "MMC": ("torchbench", "inference", 1, "bf16", None, False, ("published", "current")),
    "MTCG-I": ("huggingface", "inference", 16, "bf16", None, False, ("published", "current")),
    "MTCG-T": ("huggingface", "training", 16, "amp", "adam", True, ("published", "current")),
    "ST": ("torchbench", "inference", 1, "bf16", None, False, ("published", "current")),
    "STCLM": ("huggingface", "training", 256, "amp", "sgd", True, ("published",)),
    "TEFD": ("torchbench", "training", 1, "amp", "sgd", True, ("published",)),
    "TKE": ("torchbench", "inference", 1048576, "amp", None, False, ("published",)),
    "VM": ("torchbench", "inference", 1, "fp16", None, False, ("published",)),
    "XLNET-I": ("huggingface", "inference", 1, "bf16", None, False, ("published", "current")),
    "XLNET-I-8": ("huggingface", "inference", 8, "bf16", None, False, ("published", "current")),
    "XLNET-T": ("huggingface", "training", 8, "amp", "adam", True, ("published", "current")),
}

GRACE = (
    "ALNET BERT BSCG DALLE2 DBV2 DCGAN DGPT2 DLRM DMLM DNET DR-I DR-T EOS LCNET MBERT MMC MTCG-I MTCG-T ST STCLM TEFD "
    "TKE VM XLNET-I XLNET-T"
)
PYGRAPH = (
    "ALNET-128 CBERT DALLE2 DBMLM DGPT2 DLRM DMLM-16 DR-I-256 DR-T-4096 ECML EOS GFNET LCNET LP MMC ST TKE VM "
    "XLNET-I-8 XLNET-T"
)


@pytest.mark.parametrize("acronym", PUBLISHED)
def test_a_row_says_what_was_published(acronym: str) -> None:
    row = registry.find(acronym)
    described = (row.suite, row.task, row.batch, row.dtype_policy, row.optimizer, row.stochastic, row.variants)
    assert described == PUBLISHED[acronym]


@pytest.mark.parametrize(("name", "members"), [("grace", GRACE), ("pygraph", PYGRAPH)])
def test_a_set_holds_the_workloads_of_its_paper(name: str, members: str) -> None:
    assert [workload.acronym for workload in registry.find_set(name)] == members.split()
    assert registry.find_set(name.upper()) == registry.find_set(name)


@pytest.mark.parametrize("name", ["grace", "pygraph"])
def test_a_sets_rows_are_those_that_the_paper_prints(name: str) -> None:
    printed = load_published().workloads[name]
    found = {row.acronym: (row.name, row.task, row.batch) for row in registry.find_set(name)}
    assert found == {acronym: (row.name, row.task, row.batch) for acronym, row in printed.items()}


def test_all_is_a_set_and_unknown_sets_list_the_known() -> None:
    assert registry.find_set("all") == list(registry.workloads().values())
    with pytest.raises(registry.UnknownWorkload, match=r"unknown set 'gracee'; known: .*grace, nanogpt, pygraph.*all"):
        registry.find_set("gracee")


def test_all_published_rows_are_registered_in_alphabetical_order() -> None:
    assert [name for name in registry.workloads() if name in PUBLISHED] == sorted(PUBLISHED)


def test_listing_workloads_imports_no_torch() -> None:
    program = (
        "import sys; from models.registry import workloads; assert 'MMC' in workloads(); "
        "print(*(name for name in ('torch', 'torchvision', 'timm', 'transformers') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_names_are_found_in_any_case() -> None:
    assert registry.find("xlnet-i") is registry.find("XLNET-I")


@pytest.mark.parametrize(("wrong", "near"), [("XLNETI", "XLNET-I"), ("dnett", "DNET"), ("DRT", "DR-T")])
def test_an_unknown_name_is_answered_with_near_ones(wrong: str, near: str) -> None:
    with pytest.raises(registry.UnknownWorkload, match=rf"unknown workload '{wrong}'; did you mean .*{near}"):
        registry.find(wrong)


def test_a_name_like_no_other_is_answered_with_all() -> None:
    with pytest.raises(registry.UnknownWorkload, match=r"known: ALNET, .*XLNET-T"):
        registry.find("?")


def test_an_acronym_cannot_be_registered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", {})
    fields: dict[str, Any] = {
        "acronym": "TWICE",
        "name": "twice",
        "suite": "torchbench",
        "task": "inference",
        "batch": 1,
        "dtype_policy": "fp32",
    }

    def build(variant: str, size: registry.Size) -> Any:
        raise NotImplementedError

    def inputs(variant: str, size: registry.Size, generator: Any) -> registry.Inputs:
        raise NotImplementedError

    registry.register(inputs=inputs, **fields)(build)
    with pytest.raises(ValueError, match="'TWICE' is registered twice"):
        registry.register(inputs=inputs, **fields)(build)
    assert registry.register(inputs=inputs, **{**fields, "acronym": "OTHER"})(build) is build
    assert set(registry._REGISTRY) == {"TWICE", "OTHER"}
