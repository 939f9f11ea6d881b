#!/usr/bin/env python3
"""Kernels side by side on every workload: bits, times, memory, the chain against itself, and delayed kernels.

    python tests/gpu/concurrency_proof.py --out proof.jsonl --minutes 8     on a GPU; again: continues
    python tests/gpu/concurrency_proof.py --out proof.jsonl --only MMC TKE  these alone
    python tests/gpu/concurrency_proof.py --dry-run                         what would run, anywhere
    python tests/gpu/concurrency_proof.py --table proof.jsonl               the table of rows that were written before

1. prepare: each workload is compiled without branches, in several processes at a time, so that the kernels are in one
   cache.
2. chain, branches: what the allocator reserves in another process, which finds the kernels there, without and with
   branches. A process that tunes kernels takes other memory.
3. measure: the workload is compiled with branches, and measured while no other is (a lock). Its graphs are served by
   the chain or the branches as the script says (`steered`).

A row is a line of JSON. Workloads that fail, for lack of memory perhaps, are run once more, alone. Exit codes: 0 fine;
1 other bits, or a failed workload; 2 wrong use; 3 time was over, the same command goes on; 130 interrupted.

The table of times in processes of their own is the suite's:

    encore run MMC DALLE2 TKE ST ... --variant current --modes lean,lanes --processes 3
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent
sys.path[:0] = [str(SOURCES), str(SOURCES.parent / "support"), str(SOURCES.parents[1])]

from row_files import RowFile, facts, read_rows  # noqa: E402
from worker_pool import Pool, serve  # noqa: E402

DELAYED = ("MMC", "DALLE2", "TKE", "ST", "XLNET-I", "DCGAN", "LP", "DR-T")
"""Workloads whose kernels are delayed."""
PHASES = ("prepare", "chain", "branches", "measure")
SEED = 0
WARM_UP = 6
MOST_CALLS = 60
"""Calls until all graphs are raced."""
PHASE_S = 4.0
"""Most time for races of a workload's chain with itself, and for its delayed replays."""
LONGEST_S = 400.0
"""Most time for one process."""
INTERRUPTED, TIME_IS_OVER = 130, 3
CACHE = Path(tempfile.gettempdir()) / "encore-concurrency-proof"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A workload in a variant."""

    name: str
    variant: str

    def __str__(self) -> str:
        return self.name if self.variant == "published" else f"{self.name}/{self.variant}"


def chosen_workloads(only: Sequence[str]) -> list[Chosen]:
    """Return these workloads, or all, in the variant `current` where they have it.

    Raises:
        UnknownWorkload: there is no such workload.
    """
    from models.registry import find, workloads

    wanted = dict.fromkeys(map(find, only) if only else workloads().values())
    return [Chosen(one.acronym, "current" if "current" in one.variants else one.variants[0]) for one in wanted]


# In a process for one workload


class Workload:
    """A compiled workload. Its bits and results are those of a call from a state and seed that are always the same."""

    def __init__(self, chosen: Chosen, *, branches: bool) -> None:
        import torch

        from models.instance import instantiate
        from models.registry import find
        from optimizations.torch_internals.tuning import mark_graphs
        from suite.measure.iteration import callable_for, iteration, seed_all, set_numerics
        from suite.measure.modes import MODES
        from suite.measure.results import State

        mark_graphs("concurrency_proof")
        set_numerics()
        seed_all(SEED)
        self.instance = instantiate(find(chosen.name), variant=chosen.variant, size="full", device="cuda", seed=SEED)
        call = callable_for(MODES["lanes" if branches else "lean"], self.instance.module)
        self._iterate = iteration(self.instance, call, marks_steps=True)
        self._sets = [self.instance.inputs(index) for index in range(2)]
        self._state = State(self.instance.module, self._sets[0])
        self.synchronize = torch.cuda.synchronize

    def iterate(self, number: int) -> None:
        self._iterate(self._sets[number % len(self._sets)])

    def bits(self) -> Mapping[str, str]:
        from suite.measure.results import bits_of_run

        return bits_of_run(self.instance, self._iterate, self._sets[0], self._state, SEED)[0]

    def results(self) -> Mapping[str, Any]:
        from suite.measure.results import run_checked

        found = run_checked(self.instance, self._iterate, self._sets[0], self._state, SEED)
        return {**found.uncompared, **found.tensors}


def reserved_bytes(program: Any, calls: int = WARM_UP) -> int:
    """Return the most that the allocator reserves in calls after the first, which compiles."""
    import torch

    from suite.measure.memory import peak, release, restart_peak

    device = torch.device("cuda", torch.cuda.current_device())
    program.iterate(0)
    release(device)
    restart_peak(device)
    for number in range(1, calls):
        program.iterate(number)
    program.synchronize()
    found = peak(device)
    return found.reserved_bytes if found is not None else 0


def measure(chosen: Chosen, lock: Path, *, delays: bool) -> dict[str, Any]:
    """Measure a workload both ways."""
    from steered import NotedOrders, Steering, compare_bits, compare_times, decide, race_itself, replay_delayed

    import optimizations
    from optimizations.trees import node
    from optimizations.trees.containers import managers

    steering = Steering()
    node.Race = steering.race  # type: ignore[assignment, misc]
    with NotedOrders() as orders:
        program = Workload(chosen, branches=True)
        row: dict[str, Any] = {}
        for number in range(MOST_CALLS):
            program.iterate(number)
            sessions = [one.session for manager in managers() for one in manager.nodes() if one.session is not None]
            found = [one.branches for one in sessions if one.branches is not None]
            if number >= WARM_UP and all(one.is_racing or not one.pending for one in found):
                break
        for one in found:
            if one._race is not None:
                one._race.branches = one  # type: ignore[attr-defined]
        program.synchronize()
        row["recordings"] = [recording_row(one) for one in optimizations.recordings()]
        row["orders"] = [{"paths": one.paths(), "hidden": one.hidden()} for one in orders.found]
        if not any(one.is_racing for one in found):
            return row
        with locked(lock):
            row["bits"] = compare_bits(program, steering)
            row["times"] = compare_times(program, steering)
            row["decisions"] = decide(program, steering, "race")
            row["self"] = race_itself(program, steering, PHASE_S)
            if delays:
                row["delays"] = replay_delayed(program, steering, 4 * PHASE_S)
    return row


def recording_row(recording: Any) -> dict[str, Any]:
    """Return what the report says of a recording, without its launches."""
    found = recording.concurrency
    if found is None:
        return {"direction": recording.direction}
    barriers: dict[str, int] = {}
    for one in found.order:
        if one.barrier is not None:
            barriers[f"{one.name}: {one.barrier}"] = barriers.get(f"{one.name}: {one.barrier}", 0) + 1
    return {
        "direction": recording.direction,
        "decision": found.decision,
        "reason": found.reason,
        "launches": found.launches,
        "nodes": sum(len(one.nodes) for one in found.order),
        "edges": sum(len(one.waits_for) + len(one.nodes) - 1 for one in found.order),
        "width": found.width,
        "longest_path": found.longest_path,
        "kept_bytes": found.kept_bytes,
        "barriers": barriers,
    }


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def work() -> int:
    """Be the process for one workload in one phase: answer with its row."""

    def rows(name: str, phases: Sequence[str], say: Callable[[Any], None]) -> Iterator[dict[str, Any]]:
        (phase,), (chosen,), begun = phases, chosen_workloads([name]), time.monotonic()
        say({"begin": phase})
        try:
            if phase == "measure":
                found = measure(chosen, CACHE / "gpu.lock", delays=name in DELAYED)
            else:
                found = {"reserved_bytes": reserved_bytes(Workload(chosen, branches=phase == "branches"))}
            row = {"status": "ok", **found}
        except Exception as error:
            traceback.print_exc()
            row = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:300]}
        yield {"task": name, "compiler": phase, "seconds": time.monotonic() - begun, **row}

    return serve(lambda: None, rows, lambda: None)


# In the process that starts the others


def run(
    wanted: Sequence[Chosen],
    rows: RowFile,
    command: Sequence[str],
    *,
    cache: Path,
    jobs: int,
    deadline: float,
    facts: Mapping[str, Any],
) -> bool:
    """Prepare and measure workloads, each as soon as it is prepared; False if time was over."""
    named = {one.name: one for one in wanted}
    unprepared = missing(rows.rows, "prepare", wanted)
    left = [(one.name, (phase,)) for phase in PHASES[1:] for one in missing(rows.rows, phase, wanted)]
    left = [(name, phases) for name, phases in left if named[name] not in unprepared]

    def tell(found: dict[str, Any]) -> None:
        name, phase = found.pop("task"), found.pop("compiler")
        if ended := found.get("wrong") or found.get("skipped"):
            found = {"seconds": 0.0, "status": "failed", "error": ended}
        rows.add({"phase": phase, "workload": str(named[name]), **found, "run": facts})
        print(f"{phase} {named[name]}: {found['status']}, {found['seconds']:.0f} s", file=sys.stderr, flush=True)
        if phase == "prepare" and found["status"] == "ok":
            pool.jobs.extendleft((name, (phase,)) for phase in reversed(PHASES[1:]))

    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "2"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
    }
    pool = Pool(
        command,
        [*left, *((one.name, ("prepare",)) for one in unprepared)],
        tell,
        size=jobs,
        log=cache / "workers.log",
        timeout_s=LONGEST_S,
        deadline=deadline,
        environment=environment,
        once=True,
    )
    pool.run()
    return not pool.jobs and time.monotonic() < deadline


def missing(rows: Sequence[Mapping[str, Any]], phase: str, wanted: Sequence[Chosen]) -> list[Chosen]:
    """Return the workloads that have no good row of a phase."""
    done = {(row["phase"], row["workload"]) for row in rows if row["status"] == "ok"}
    return [one for one in wanted if (phase, str(one)) not in done]


def is_row(row: Mapping[str, Any]) -> bool:
    return {"phase", "workload", "status"} <= row.keys()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table, with a geometric mean."""
    from math import exp, log

    newest = {(row["phase"], row["workload"]): row for row in rows}
    lines = [
        f"{'workload':18} {'launches':>8} {'path':>5} {'width':>5} {'chain us':>9} {'branches':>9} {'gain':>6} "
        f"{'itself':>6} {'delays':>7} {'memory':>6}  bits"
    ]
    gains = []
    for (phase, name), row in newest.items():
        if phase != "measure" and row["status"] == "ok":
            continue
        if row["status"] != "ok":
            lines.append(f"{name:18} {row['status']}: {row.get('error')}")
            continue
        graphs = [one for one in row["recordings"] if one.get("launches")]
        chain, branches = (newest.get((phase, name), {}).get("reserved_bytes") for phase in ("chain", "branches"))
        cells = [f"{name:18} {sum(one['launches'] for one in graphs):8} {_most(graphs, 'longest_path'):5} "]
        cells.append(f"{_most(graphs, 'width'):5} ")
        if "times" not in row:
            reasons = "; ".join(dict.fromkeys(one.get("reason", "no report") for one in row["recordings"]))
            lines.append(f"{cells[0]}{cells[1]}{'':39} chain: {reasons or 'no graph'}")
            continue
        times, itself, delays = row["times"]["graphs_us"], row["self"], row.get("delays")
        gains.append(max(1.0, row["times"]["gain"] or 1.0))
        cells.append(f"{times['chain']:9,.1f} {times['branches']:9,.1f} {row['times']['gain'] or 0:6.3f} ")
        cells.append(f"{itself['branches_won']}/{itself['races']}".rjust(6))
        cells.append(f"{len(delays['differing_seeds'])}/{delays['replays']}".rjust(8) if delays else " " * 8)
        cells.append(f"{branches / chain:7.3f}" if chain and branches else " " * 7)
        lines.append("".join(cells) + f"  {_bits(row['bits'])}")
    if gains:
        mean = exp(sum(map(log, gains)) / len(gains))
        lines.append(f"geometric mean of {len(gains)}, the chain where it is faster: {mean:.3f}")
    return "\n".join(lines)


def _most(graphs: Sequence[Mapping[str, Any]], name: str) -> int:
    return max((one[name] for one in graphs), default=0)


def _bits(found: Mapping[str, Any]) -> str:
    varying = len(found["chain_differs_from_itself"])
    own = f", {varying} of {found['tensors']} differ in the chain itself" if varying else ""
    if found["equal"]:
        return f"equal{own}"
    return f"NOT EQUAL: {', '.join(found['branches_differ'][:3]) or 'beyond the spread of the chain'}{own}"


def is_bad(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a finding."""
    if row["status"] != "ok":
        return True
    bits, delays = row.get("bits"), row.get("delays")
    return (bits is not None and not bits["equal"]) or bool(delays and delays["differing_seeds"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of rows (JSON lines); rows that are there are not made again")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORKLOAD", help="these workloads (all)")
    parser.add_argument("--minutes", type=float, default=60.0, help="time for all of it (60)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a file of rows")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        return work()
    try:
        if given.table is not None:
            print(table(read_rows(given.table, is_row)))
            return 0
        wanted = chosen_workloads(given.only)
        rows = RowFile(given.out, is_row)
    except (LookupError, OSError, ValueError) as error:
        parser.error(str(error))
    if given.minutes <= 0:
        parser.error("--minutes must be above 0")
    if given.dry_run:
        for one in wanted:
            left = [phase for phase in PHASES if missing(rows.rows, phase, [one])]
            delays = ", delayed kernels" if one.name in DELAYED and "measure" in left else ""
            print(f"{one!s:20} {', '.join(left) or 'done'}{delays}")
        return 0
    if given.out is None:
        parser.error("name the file of rows: --out FILE")
    import torch

    CACHE.mkdir(parents=True, exist_ok=True)
    command = (str(Path(__file__).resolve()), "--worker")
    settings = {"cache": CACHE, "deadline": time.monotonic() + 60 * given.minutes}
    settings["facts"] = facts(torch.cuda.get_device_name())
    several = max(1, min(8, (os.cpu_count() or 2) // 2))
    try:
        whole = all(run(wanted, rows, command, jobs=jobs, **settings) for jobs in (several, 1))
    except KeyboardInterrupt:
        return INTERRUPTED
    print(table(rows.rows))
    if not whole:
        print("time was over; the same command goes on", file=sys.stderr)
        return TIME_IS_OVER
    newest = {(row["phase"], row["workload"]): row for row in rows.rows}
    return int(
        any((phase, str(one)) not in newest or is_bad(newest[phase, str(one)]) for phase in PHASES for one in wanted)
    )


if __name__ == "__main__":
    sys.exit(main())
