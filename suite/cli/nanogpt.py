"""`encore run nanogpt`: the options of `encore run` that it takes, and what it prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from suite.results.errors import EXIT_FINDING, EXIT_OK, WrongUse

NAME = "nanogpt"
TAKES = frozenset({"modes", "samples", "seed", "device", "size", "timeout", "out", "tag", "quick", "as_json"})
ROUNDS, QUICK_ROUNDS = 20, 2
RESULTS, TABLES = "nanogpt.json", "nanogpt.md"


def is_wanted(workloads: Sequence[str] | None) -> bool:
    """Whether the program is what `encore run` was asked for.

    Raises:
        WrongUse: it is asked for with workloads.
    """
    names = [name.lower() for name in workloads or ()]
    if NAME in names and len(set(names)) > 1:
        raise WrongUse("nanogpt has its own tables and runs alone: `encore run nanogpt`")
    return NAME in names


def run(parameters: Mapping[str, Any], given: Callable[[str], bool]) -> int:
    """Measure and print; the exit code. `given` tells whether an option was written on the command line.

    Raises:
        WrongUse: an option is given that the program has no use for, or there is no GPU for --device cuda.
    """
    needless = sorted(name for name in parameters.keys() - TAKES - {"workloads"} if given(name))
    if needless:
        options = ", ".join("--set" if name == "workload_set" else f"--{name.replace('_', '-')}" for name in needless)
        raise WrongUse(
            f"nanogpt has no use for {options}; it takes --modes (its paths), --samples (rounds), --seed, --device, "
            "--size, --timeout, --out, --tag, --quick and --json"
        )
    from suite.cli.console import console
    from suite.measure import environment
    from suite.measure.gpu import require_gpu
    from suite.nanogpt.paths import select_paths
    from suite.nanogpt.records import NanoGptRun
    from suite.nanogpt.run import run_paths
    from suite.nanogpt.tables import grids
    from suite.report.published import load_published
    from suite.results.store import RUNS, describe, make_folder, new_folder, write_atomically
    from suite.run.launch import require_tag
    from suite.settings import parse_duration, require_seed

    device, size, seed = str(parameters["device"]), str(parameters["size"]), parameters["seed"]
    names = parameters["modes"]
    paths = select_paths(None if names is None else [name.strip() for name in names.split(",") if name.strip()], device)
    timeout_s = parse_duration(parameters["timeout"], "--timeout")
    require_tag(parameters["tag"])
    require_seed(seed)
    if device == "cuda":
        require_gpu()
    published = load_published()
    rounds = parameters["samples"] if given("samples") else QUICK_ROUNDS if parameters["quick"] else ROUNDS
    tag = f"-{parameters['tag']}" if parameters["tag"] else ""
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{NAME}{tag}"
    # Some versions of typer give a command its own values only, and the context those of the command line, as text.
    named = parameters["out"]
    folder = new_folder(RUNS, run_id, "--out") if named is None else Path(named)
    if (folder / RESULTS).exists():
        raise WrongUse(f"--out {folder} holds results already; name another folder")
    make_folder(folder, "--out")
    settings = {"paths": [path.name for path in paths], "rounds": rounds, "seed": seed, "size": size, "device": device}

    def save(made: NanoGptRun) -> None:
        write_atomically(folder / RESULTS, made.model_dump_json(indent=1) + "\n")
        write_atomically(folder / TABLES, "\n".join(grid.markdown() for grid in grids(made, published)))

    finished = run_paths(
        paths,
        environment.collect(run_id, ("encore", *sys.argv[1:]), settings),
        device=device,
        size="tiny" if size == "tiny" else "full",
        seed=seed,
        rounds=rounds,
        timeout_s=timeout_s,
        save=save,
        say=lambda text: print(text, file=sys.stderr, flush=True),
    )
    if parameters["as_json"]:
        print(finished.model_dump_json(indent=2))
    else:
        shown = console()
        for grid in grids(finished, published):
            shown.print(grid.rich(shown.width), f"\n{grid.note}\n")
    print(f"{describe(folder / RESULTS)} and {TABLES}", file=sys.stderr)
    findings = finished.findings()
    for finding in findings:
        print(f"encore: {finding}", file=sys.stderr)
    return EXIT_FINDING if findings else EXIT_OK
