"""Reading results: strict, in a fixed order, with the place of what is wrong."""

from __future__ import annotations

import json

import pytest
from fixtures.synthetic_results import cell, environment, explanation, failed_cell, write_explanations, write_run

from suite.errors import WrongUse
from suite.report import provenance
from suite.report.load import is_as_published, load_explanations, load_run, row_label
from suite.schema import Status
from suite.store import InvalidResults


def test_cells_come_by_workload_and_mode_whatever_the_order_they_ended_in(tmp_path):
    cells = [cell("ST", "graph"), cell("EOS", "graph"), cell("ST", "compile"), cell("EOS", "eager")]
    run = load_run(write_run(tmp_path, cells))
    assert [(item.workload, item.mode) for item in run.cells] == [
        ("EOS", "eager"),
        ("EOS", "graph"),
        ("ST", "compile"),
        ("ST", "graph"),
    ]
    assert run.modes == ("eager", "compile", "graph")
    assert run.labels == ("EOS", "ST")


def test_a_mode_this_version_does_not_know_is_kept_and_comes_last(tmp_path):
    run = load_run(write_run(tmp_path, [cell("EOS", "a-new-mode"), cell("EOS", "graph")]))
    assert run.modes == ("graph", "a-new-mode")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"surprise": 1}, "surprise"), ({"status": "fine"}, "status"), ({"blocks": 3}, "blocks")],
)
def test_wrong_fields_are_refused_with_file_and_line(tmp_path, change, message):
    write_run(tmp_path, [cell("EOS", "compile"), cell("EOS", "graph")])
    path = tmp_path / "cells.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(InvalidResults, match=rf"cells\.jsonl line 2.*{message}"):
        load_run(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(WrongUse, match=r"environment\.json"):
        load_run(tmp_path)


def test_cells_the_run_has_not_come_to_are_known(tmp_path):
    settings = {"workloads": ["EOS", "ST"], "modes": ["compile"]}
    run = load_run(write_run(tmp_path, [cell("EOS", "compile")], environment(settings=settings)))
    assert run.missing == (("ST", "compile"),)


@pytest.mark.parametrize(
    ("parts", "label"),
    [
        (("ST", "published", "full"), "ST"),
        (("ST", "current", "full"), "ST (current)"),
        (("ST", "current", "tiny"), "ST (current, tiny)"),
        (("ST", None), "ST"),
    ],
)
def test_labels_name_what_differs_from_the_published_program(parts, label):
    assert row_label(*parts) == label


def test_published_values_belong_to_the_published_program_in_full_size():
    assert is_as_published(cell())
    for change in ({"variant": "current"}, {"size": "tiny"}, {"with_optimizer": True}):
        assert not is_as_published(cell(**change))


def test_failed_cells_are_those_that_did_not_pass(tmp_path):
    run = load_run(write_run(tmp_path, [cell("EOS", "compile"), failed_cell("EOS", "graph", Status.TIMEOUT)]))
    assert [item.mode for item in run.failed] == ["graph"]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, None),
        ({"size": "tiny"}, "SMOKE RUN in tiny size: these numbers say nothing about performance"),
        ({"device": "cpu"}, "SMOKE RUN on the CPU: these numbers say nothing about performance"),
        (
            {"device": "cpu", "size": "tiny"},
            "SMOKE RUN on the CPU and in tiny size: these numbers say nothing about performance",
        ),
    ],
)
def test_smoke_runs_are_labelled(tmp_path, changes, warning):
    run = load_run(write_run(tmp_path, [cell("EOS", "compile", **changes), cell("ST", "compile")]))
    assert provenance.of_run(run).warning == warning


def test_caption_names_gpu_version_run_and_commit(tmp_path):
    run = load_run(write_run(tmp_path, [cell()], environment().model_copy(update={"git_dirty": True})))
    assert provenance.of_run(run).caption == (
        "SYNTHETIC GPU, PyTorch 0.0+synthetic, run synthetic, commit 0123456789 + changes"
    )


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_does_not_claim_the_gpu(tmp_path):
    run = load_run(write_run(tmp_path, [cell(device="cpu")]))
    assert provenance.of_run(run).caption.startswith("CPU SYNTHETIC CPU,")


def test_analyses_of_tiny_models_are_labelled():
    assert provenance.of_explanations((explanation(),)).warning is None
    assert "TINY MODELS" in provenance.of_explanations((explanation(), explanation("EOS", size="tiny"))).warning


def test_explanations_come_by_target(tmp_path):
    write_explanations(tmp_path, [explanation("ST"), explanation("EOS"), explanation("ST", variant="current")])
    assert [(item.target, item.variant) for item in load_explanations(tmp_path)] == [
        ("EOS", "published"),
        ("ST", "current"),
        ("ST", "published"),
    ]


def test_an_empty_or_missing_folder_of_explanations_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(WrongUse, match="encore explain --all --out"):
            load_explanations(folder)


@pytest.mark.parametrize(
    ("change", "message"), [({"surprise": 1}, "surprise"), ({"schema_version": 99}, "99"), ({"graphs": 1}, "graphs")]
)
def test_a_wrong_explanation_is_refused_with_its_file(tmp_path, change, message):
    content = json.loads(explanation().model_dump_json()) | change
    (tmp_path / "ST.json").write_text(json.dumps(content))
    with pytest.raises(InvalidResults, match=rf"ST\.json.*{message}"):
        load_explanations(tmp_path)


def test_one_model_explained_twice_is_refused(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(explanation().model_dump_json())
    with pytest.raises(InvalidResults, match=r"b\.json.*ST"):
        load_explanations(tmp_path)
