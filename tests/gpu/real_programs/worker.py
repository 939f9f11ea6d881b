"""One program in one mode, in a process of its own: `python -m real_programs.worker PROGRAM MODE DEVICE SIZE RESULTS`.

It answers JSON lines to JSON lines. What the program prints is log. The first line comes unasked, when the calls that
are compared are through; then {"settle": SECONDS} is answered after a few rounds more, and when Encore has nothing
pending, but after so much time at most (a graph that is not called any more never gets there), {"time": SECONDS} with
times, {"end": true} with memory.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from real_programs.record import Body, Program, Setting, Skipped, programs
from tests.support.json_worker import Say, channel

COMPARED_ROUNDS = 6
"""Rounds before anything is timed; the results of the first and of the last one are compared. The same number in every
mode, for a program that trains is elsewhere after each call."""

ROUNDS_AS_TIMED = 3
"""Untimed rounds of each mode before it is timed. As in timed rounds, results are not read: the tensors that a program
frees decide the addresses of its next ones, and so what is recorded."""


def main(arguments: list[str]) -> int:
    name, mode, device, size, results = arguments
    say = channel()
    try:
        say(_run(programs()[name], Setting(mode, device, size == "tiny"), Path(results), say))
    except Skipped as reason:
        say({"skipped": str(reason)})
    except Exception as error:  # whatever a program raises is its result
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


def _run(program: Program, setting: Setting, results: Path, say: Say) -> Mapping[str, Any]:
    """Run the program until the last command. Return the last answer."""
    import torch

    if program.missing():
        raise Skipped(f"not installed: {', '.join(program.missing())}")
    if setting.mode == "encore" and "encore" not in torch._dynamo.list_backends(exclude_tags=()):
        from optimizations.backend import encore

        torch._dynamo.register_backend(encore, name="encore")
    meter = _Meter(setting)
    body = program.build(setting)
    meter.restart()

    seen: dict[str, Any] = {}
    begun = time.perf_counter()
    for number in range(COMPARED_ROUNDS):
        outcome = _round(program, body, number)
        if number in (0, COMPARED_ROUNDS - 1):
            seen[f"round {number}"] = outcome
    seen["final"] = _read(body.final())
    recording = learning = meter.peak()
    first_s = time.perf_counter() - begun
    _save(seen, results)
    gc.collect()
    device = torch.cuda.get_device_name() if meter.cuda else "cpu"
    say({"prepared": True, "first_rounds_s": first_s, "device": device})

    meter.restart()
    number = COMPARED_ROUNDS
    for line in sys.stdin:
        command = json.loads(line)
        if "end" in command:
            break
        if "settle" in command:
            settled = _settled()
            end, least = time.perf_counter() + command["settle"], number + ROUNDS_AS_TIMED
            while number < least or (settled is False and time.perf_counter() < end):
                _timed(program, body, number, 0.0, meter)
                number, settled = number + 1, _settled()
            learning = meter.peak()
            say({"settled": settled, "rounds_before_timing": number})
            meter.restart()
            continue
        timed = _timed(program, body, number, command["time"], meter)
        number += len(timed)
        say({"rounds": timed})
    steady = meter.peak()
    if not program.trains:
        seen["after timing"] = _round(program, body, 0)
        _save(seen, results)
    return {"ended": True, "recording": recording, "learning": learning, "steady": steady}


def _round(program: Program, body: Body, number: int) -> list[Any]:
    """Results of one round, copied to the CPU: of each call before the next, or at the end if the caller keeps them."""
    first = 0 if not program.trains else number * program.calls
    kept = []
    for i in range(first, first + program.calls):
        result = body.step(i)
        kept.append(result if program.keeps else _read(result))
    return [_read(result) for result in kept]


def _timed(program: Program, body: Body, number: int, seconds: float, meter: _Meter) -> list[list[float]]:
    """[issue, whole] in seconds per call of each round: until the last call returned, and until the device was done.

    Rounds are repeated for `seconds`, one at least. Results are not read; they are kept to the end of their round if
    the program's caller does so.
    """
    times = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        first = 0 if not program.trains else number * program.calls
        kept: list[Any] = []
        meter.synchronize()
        begun = time.perf_counter()
        for i in range(first, first + program.calls):
            result = body.step(i)
            if program.keeps:
                kept.append(result)
        issued = time.perf_counter() - begun
        meter.synchronize()
        times.append([issued / program.calls, (time.perf_counter() - begun) / program.calls])
        number += 1
    return times


class _Meter:
    """The allocator's peaks in bytes; on a CPU there are none."""

    def __init__(self, setting: Setting) -> None:
        import torch

        self.cuda = torch.cuda if setting.device.type == "cuda" else None

    def synchronize(self) -> None:
        if self.cuda:
            self.cuda.synchronize()

    def restart(self) -> None:
        self.synchronize()
        if self.cuda:
            self.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, int | None]:
        self.synchronize()
        allocated, reserved = (
            (self.cuda.max_memory_allocated(), self.cuda.max_memory_reserved()) if self.cuda else (None, None)
        )
        return {"allocated_bytes": allocated, "reserved_bytes": reserved}


def _settled() -> bool | None:
    """Return whether Encore has nothing pending; None where it is not in use."""
    import optimizations

    return optimizations.settled() if "optimizations.backend" in sys.modules else None


def _read(nest: Any) -> list[Any]:
    """The leaves of a nest as tensors on the CPU, in memory of their own."""
    from models.nests import leaves_of

    return [_copied(leaf) for leaf in leaves_of(nest) if leaf is not None]


def _copied(leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("cpu", copy=True).contiguous()
    return torch.tensor(leaf, dtype=torch.int64 if isinstance(leaf, int) else torch.float64)


def _save(seen: Mapping[str, Any], path: Path) -> None:
    from safetensors.torch import save_file

    from models.nests import leaves_of

    leaves = {f"{part}: {index}": leaf for part, nest in seen.items() for index, leaf in enumerate(leaves_of(nest))}
    save_file(leaves, str(path))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
