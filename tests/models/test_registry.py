from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from models import registry
from suite.report.published import load_published


@pytest.mark.parametrize("name", ["grace", "pygraph"])
def test_sets_rows_are_those_that_the_paper_prints(name: str) -> None:
    printed = load_published().workloads[name]
    found = {row.acronym: (row.name, row.task, row.batch) for row in registry.find_set(name)}
    assert found == {acronym: (row["name"], row["task"], row["batch"]) for acronym, row in printed.items()}


def test_listing_workloads_imports_no_torch() -> None:
    program = (
        "import sys; from models.registry import workloads; assert 'MMC' in workloads(); "
        "print(*(name for name in ('torch', 'torchvision', 'timm', 'transformers') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_name_without_similar_ones_lists_all() -> None:
    with pytest.raises(registry.UnknownWorkload, match=r"known: ALNET, .*XLNET-T"):
        registry.find("?")


def test_acronym_cannot_be_registered_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", {})
    fields: dict[str, Any] = {"suite": "torchbench", "task": "inference", "batch": 1, "dtype_policy": "fp32"}

    def build(variant: str, size: registry.Size) -> Any:
        raise NotImplementedError

    def register(acronym: str) -> Any:
        return registry.register(inputs=build, acronym=acronym, name="twice", **fields)(build)  # type: ignore[arg-type]

    register("TWICE")
    with pytest.raises(ValueError, match="'TWICE' is registered twice"):
        register("TWICE")
    assert register("OTHER") is build
    assert set(registry._REGISTRY) == {"TWICE", "OTHER"}
