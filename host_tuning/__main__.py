"""Run the command line `python -m host_tuning check|tune|restore`. Exit codes: 0 fine, 1 a finding, 2 wrong use."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from host_tuning.check import Disturbance, Finding, check
from host_tuning.errors import EXIT_FINDING, EXIT_OK, HostTuningError
from host_tuning.gpu import Nvml
from host_tuning.machine import Machine
from host_tuning.plan import Wishes
from host_tuning.state import STATE
from host_tuning.tune import restore, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Ignore a closed output pipe, as of `head`."""
    try:
        code = _run(_parser().parse_args(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return EXIT_FINDING
    return code


def _run(options: argparse.Namespace) -> int:
    machine, gpus = Machine(options.root), Nvml()
    state = options.state or (STATE if machine.is_real else options.root / STATE.relative_to("/"))
    try:
        if options.command == "check":
            return _check(check(machine, gpus, options.gpu), as_json=options.json)
        if options.command == "tune":
            names = ("governor", "frequency", "no_turbo", "c_states", "smt_off", "persistence", "gpu_clock")
            wishes = Wishes(**{name: getattr(options, name) for name in names}, gpu=options.gpu)
            changes = tune(wishes, machine, gpus, state, dry_run=options.dry_run)
            if changes and not options.dry_run:
                print(f"{len(changes)} changes made, noted in {state}; `python -m host_tuning restore` undoes them")
        else:
            restore(machine, gpus, state, dry_run=options.dry_run)
    except HostTuningError as error:
        print(f"host_tuning: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def _check(findings: Sequence[Finding], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        width = max(len(finding.item) for finding in findings)
        for finding in findings:
            print(f"{finding.verdict.value.upper():7} {finding.item:{width}}  {finding.value}")
            if finding.verdict is not Disturbance.OK:
                print(f"{'':{width + 8}}  {finding.why}{f' -> {finding.advice}' if finding.advice else ''}")
    return EXIT_FINDING if any(finding.verdict is Disturbance.WARN for finding in findings) else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m host_tuning", description="A quiet host for measurements.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="another tree than /, for tests")
    common.add_argument("--gpu", type=int, default=0, metavar="N", help="the GPU, counted along the bus (default: 0)")
    kept = argparse.ArgumentParser(add_help=False)
    kept.add_argument("--state", type=Path, metavar="FILE", help=f"the state file (default: {STATE})")
    kept.add_argument("--dry-run", action="store_true", help="print each write and make none")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", parents=[common], help="what disturbs measurements; only reads")
    checking.add_argument("--json", action="store_true", help="print JSON for programs")
    checking.set_defaults(state=None)
    tuning = commands.add_parser(
        "tune",
        parents=[common, kept],
        help="change the settings that are named, after noting what they were; needs root",
        epilog="Example: tune --governor --frequency base --c-states --gpu-clock 1410",
    )
    tuning.add_argument("--governor", action="store_true", help="cpufreq governor `performance`")
    tuning.add_argument("--frequency", metavar="base|MHZ", help="keep the CPU at one frequency")
    tuning.add_argument("--no-turbo", action="store_true", help="switch turbo (AMD: boost) off")
    tuning.add_argument("--c-states", action="store_true", help="disable sleep states that are slow to leave")
    tuning.add_argument("--smt-off", action="store_true", help="one thread per core")
    tuning.add_argument("--persistence", action="store_true", help="the GPU's persistence mode on")
    tuning.add_argument("--gpu-clock", type=int, metavar="MHZ", help="lock the GPU's graphics clock")
    commands.add_parser("restore", parents=[common, kept], help="put back what tune changed; needs root")
    return parser


if __name__ == "__main__":
    sys.exit(main())
