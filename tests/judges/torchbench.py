"""Judges TorchBench's models by the suite: first whether each gives eager's results, then how long some of them take.

    tests/judges/run.sh torchbench OUT --checkout DIR --jobs 3 --timed-seconds 200

Models that nothing must be downloaded for are run in the variant `random-weights`. In the first part `--jobs` runs of
the suite go on at once, each with a part of the models (OUT/part1 and so on); their times are no times. In the second
part one run has the GPU to itself (OUT/run); it finds the kernels compiled. Both go on where they ended.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT_FILE = "not_importable.json"
MODES = {"compile": "compile", "stock": "graph", "encore": "encore"}
"""The suite's modes by the judges' names of compilers."""

TIMED = (
    "pyhpc_turbulent_kinetic_energy", "pyhpc_equation_of_state", "BERT_pytorch", "dcgan-train", "hf_Bert", "resnet18",
    "nanogpt", "LearningToPaint-train", "lennard_jones", "functorch_dp_cifar10", "hf_DistilBert", "llama", "alexnet",
    "squeezenet1_1", "tts_angular", "phlippe_resnet", "mobilenet_v2", "hf_GPT2", "timm_vision_transformer", "demucs",
)  # fmt: skip
"""Models that are timed, in this order, as far as the time goes."""

MODELS = (
    *TIMED,
    "pyhpc_isoneutral_mixing", "nvidia_deeprecommender", "hf_T5", "hf_Albert", "resnet50", "vgg16", "mnasnet1_0",
    "mobilenet_v3_large", "resnet18-train", "hf_Bart", "shufflenet_v2_x1_0", "timm_vovnet", "hf_Whisper", "dlrm",
    "microbench_unbacked_tolist_sum", "resnext50_32x4d", "timm_regnet", "timm_resnest", "pytorch_unet", "hf_Reformer",
    "timm_efficientnet", "hf_Roberta_base", "phlippe_densenet", "hf_BigBird", "hf_Longformer", "timm_nfnet",
    "densenet121", "resnet152", "hf_Bert_large", "simple_gpt", "timm_vision_transformer_large",
)  # fmt: skip
"""Models that build without network from a checkout, timm, torchvision and transformers, those of most interest first.
"""

OWN = ("EOS", "TKE")
"""The same programs as two of TorchBench's, as the suite has them: judged next to these, and not timed here."""


def measure(
    out: Path,
    checkout: Path,
    names: Sequence[str],
    compilers: Sequence[str],
    device: str,
    jobs: int,
    seconds: float,
    timed: float,
) -> int:
    """Judge the models, then time some for `timed` of the `seconds`. Return 1 if Encore fails where compile passes."""
    end = time.monotonic() + seconds
    out, checkout = out.resolve(), checkout.resolve()
    missing = not_importable(checkout, names)
    (out / LEFT_OUT_FILE).write_text(json.dumps(missing), "utf-8")
    own_too = names is MODELS
    names = [name for name in names if name not in missing]
    modes = [MODES[name] for name in compilers if device == "cuda" or name == "compile"]
    where = [] if device == "cuda" else ["--device", device, "--size", "tiny"]
    where += ["--timeout", "3m"]
    once = ["--processes", "1", "--blocks", "1", "--samples", "1", "--measure-s", "0"]
    parts = [
        _Run(out / f"part{part + 1}", checkout, names[part::jobs], modes, [*where, *once])
        for part in range(min(jobs, len(names)))
    ]
    own = [_Run(out / "own", checkout, OWN, modes, [*where, *once])] if own_too else []
    _go_on([*parts, *own], end - timed)
    write_rows(out)
    chosen = [name for name in names if name in TIMED] or names
    alone = [*where, "--processes", "1", "--measure-s", "2"]
    _go_on([_Run(out / "run", checkout, chosen, ["eager", *modes], alone)] if chosen else [], end)
    return write_rows(out)


def not_importable(checkout: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the models whose modules cannot be imported here, with the error; `encore run` would refuse to start."""
    program = (
        "import importlib, json, sys\n"
        "errors = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: importlib.import_module('torchbenchmark.models.' + name.removesuffix('-train'))\n"
        "    except Exception as error: errors[name] = f'{type(error).__name__}: {error}'\n"
        "print(json.dumps(errors))\n"
    )
    environment = {**os.environ, "PYTHONPATH": _path(checkout), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", "-c", program, *names]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    found: dict[str, str] = json.loads(output.splitlines()[-1])
    return found


def _path(checkout: Path) -> str:
    return os.pathsep.join([str(checkout), str(ROOT), os.environ.get("PYTHONPATH", "")])


class _Run:
    """Start a run of the suite, or go on with it."""

    def __init__(
        self, folder: Path, checkout: Path, names: Sequence[str], modes: Sequence[str], settings: Sequence[str]
    ) -> None:
        if names is OWN:
            chosen = list(names)
        else:
            chosen = [*(f"torchbench:{name}" for name in names), "--variant", "random-weights"]
        first = [*chosen, "--modes", ",".join(modes), "--warm-cache", *settings]
        there = (folder / "environment.json").exists()
        where = ["--resume", str(folder)] if there else [*first, "--out", str(folder)]
        self.command = [sys.executable, "-P", "-m", "suite", "run", *where]
        self.environment = {**os.environ, "PYTHONPATH": _path(checkout), "HF_HUB_OFFLINE": "1"}
        self.log = folder.with_suffix(".log")


def _go_on(runs: Sequence[_Run], end: float) -> None:
    """Run all at once, and interrupt them at `end`: what is measured until then is kept."""
    if end <= time.monotonic():
        return
    started = []
    for run in runs:
        with run.log.open("a", encoding="utf-8") as log:
            started.append(subprocess.Popen(run.command, env=run.environment, stdout=log, stderr=log, cwd=ROOT))
    for one in started:
        try:
            one.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.send_signal(signal.SIGINT)
    for one in started:
        try:
            one.wait(20)
        except subprocess.TimeoutExpired:
            one.kill()


def write_rows(out: Path) -> int:
    """Write OUT/rows.jsonl and OUT/summary.txt of what the runs have; return 1 if there is a finding, or nothing."""
    from . import rows as rows_of

    rows = rows_of_runs(sorted(path.parent for path in out.glob("*/environment.json")))
    missing = json.loads((out / LEFT_OUT_FILE).read_text("utf-8")) if (out / LEFT_OUT_FILE).exists() else {}
    rows += [
        {"task": f"torchbench|{name}", "compiler": "eager", "skipped": f"it cannot be imported: {error}"}
        for name, error in missing.items()
    ]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    text = f"{rows_of.summary(rows)}\n\n{brief(rows)}"
    (out / "summary.txt").write_text(text + "\n", "utf-8")
    print(text)
    return 1 if rows_of.findings(rows) or not any("passed" in row for row in rows) else 0


def rows_of_runs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each model and compiler, of the last folder that has it, with times of the folder `run` only."""
    from suite.results import store

    found: dict[tuple[str, str], dict[str, Any]] = {}
    facts = None
    for folder in folders:
        recorded = store.read_run(folder)
        environment = recorded.environment
        facts = {
            "device": environment.gpu.name if environment.gpu else "cpu",
            "commit": environment.git_commit,
            "code_changed": environment.git_dirty,
            "torch": environment.torch,
            "triton": environment.packages.get("triton"),
            "python": environment.python or platform.python_version(),
        }
        cells = {(cell.workload, cell.mode): cell for cell in recorded.cells}
        for (workload, mode), cell in cells.items():
            compiler = {value: key for key, value in MODES.items()}.get(mode)
            if compiler is not None:
                alone = folder.name == "run" and mode != MODES["compile"]
                reference = cells.get((workload, MODES["compile"])) if alone else None
                found[workload, compiler] = _row(cell, compiler, reference)
    return [{"run": facts}, *found.values()] if facts else []


def _row(cell: Any, compiler: str, reference: Any) -> dict[str, Any]:
    """Return the row of a cell. `reference`: plain compile's, which took turns with it."""
    from suite.results.schema import Status
    from suite.results.stats import speed_up

    prefix, _, name = cell.workload.rpartition(":")
    name = name if prefix else f"{name} of the suite"
    row: dict[str, Any] = {"task": f"torchbench|{name}", "compiler": compiler, "passed": cell.status is Status.PASS}
    metrics = cell.metrics
    row["replays"] = metrics.coverage.graph_launches if metrics and metrics.coverage else 0
    row["seconds"] = cell.wall_s
    if cell.status is not Status.PASS:
        row["wrong"] = f"{cell.status}: {cell.first_error_line}"[:400]
        row["crashed"] = cell.status is Status.CRASH
    if metrics and metrics.kernels:
        row["kernels"] = sum(metrics.kernels.values())
        row["generated"] = sum(count for key, count in metrics.kernels.items() if key.startswith("triton_"))
    if metrics and metrics.coverage and metrics.coverage.percent is not None:
        row["in_graphs"] = round(metrics.coverage.percent, 1)
    if reference is not None and reference.blocks and cell.blocks:
        ratio = speed_up([[block.host_us for block in reference.blocks]], [[block.host_us for block in cell.blocks]])
        row["over_compile"] = [round(each, 3) for each in (ratio.value, ratio.low, ratio.high)]
        row["others_cores"] = cell.others.cpu_cores if cell.others else None
    return row


def brief(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return paragraphs of all models: kernels, of Triton and in graphs in per cent; and times of those that have."""
    from .rows import by_task

    models, timed = [], []
    for task, of in by_task(rows).items():
        judge, name = task.split("|", 1)
        plain, stock, encore = (of.get(compiler, {}) for compiler in MODES)
        if judge != "torchbench" or not plain.get("kernels"):
            continue
        shares = [100 * plain["generated"] / plain["kernels"], *(one.get("in_graphs") for one in (stock, encore))]
        numbers = ["?" if one is None else f"{one:.0f}" for one in shares]
        models.append(f"{name} {'/'.join([str(plain['kernels']), *numbers])}")
        if "over_compile" in stock and "over_compile" in encore:
            timed.append(f"{name} {stock['over_compile'][0]:.2f}/{encore['over_compile'][0]:.2f}")
    parts = ["Kernels / per cent of them Triton's / in stock's graphs / in Encore's: " + ", ".join(models) + "."]
    if timed:
        cores = max(row.get("others_cores") or 0 for row in rows)
        how = f"Stock / Encore over plain compile, while other programs used up to {cores:.1f} cores: "
        parts += [how + ", ".join(timed) + ".", " ".join(_gains(rows))]
    return "\n\n".join(parts)


def _gains(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines that say in which models graphs help and in which they hurt, by the interval of the ratio."""
    lines = []
    for compiler, text in (("stock", "Stock's graphs"), ("encore", "Encore")):
        timed = {row["task"].split("|")[1]: row["over_compile"] for row in rows if row.get("compiler") == compiler
                 and "over_compile" in row}  # fmt: skip
        faster = [name for name, (_, low, _) in timed.items() if low > 1]
        slower = [name for name, (_, _, high) in timed.items() if high < 1]
        lines.append(
            f"{text}: {len(faster)} of {len(timed)} timed are faster than plain compile by the interval of blocks, "
            f"slower {', '.join(slower) or 'none'}."
        )
    return lines
