"""Outputs of a mode against those of other modes, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from suite.measure.modes import GRAPH_MODE, Mode
from suite.results.schema import Correctness, Status
from suite.worker.protocol import Failed


def compare_bitwise(mode: Mode, own: Correctness, known: Mapping[str, Sequence[Correctness]]) -> Correctness:
    """`own` with the bitwise comparison filled in, where the mode has one to make.

    Modes with CUDA graphs are compared with `bitwise_with`, or for information with stock graphs; only if the other
    mode is deterministic with itself, since otherwise a difference would say nothing. It is enough to equal one of
    them. The verdict is None if it equals none of them and they differ from one another, too: then the bits depend on
    the process, because each tunes its kernels by itself or computes part of the program elsewhere.
    """
    others = mode.bitwise_with or ((GRAPH_MODE,) if mode.uses_cuda_graphs and mode.name != GRAPH_MODE else ())
    if not others:
        return own
    found = {name: [one.digests for one in known.get(name, ()) if one.deterministic] for name in others}
    equal = next((name for name in others if own.digests in found[name]), None)
    bits = [digests for several in found.values() for digests in several]
    agreed = bool(bits) and all(digests == bits[0] for digests in bits)
    if equal is not None:
        return own.model_copy(update={"bitwise_with": equal, "bitwise": True})
    compared = next((name for name in others if found[name]), others[0])
    return own.model_copy(update={"bitwise_with": compared, "bitwise": False if agreed else None})


def bitwise_failure(mode: Mode, correctness: Correctness) -> Failed | None:
    """The failure of a mode that must equal another one bit for bit and does not."""
    if not mode.bitwise_with or correctness.bitwise is not False:
        return None
    return Failed(
        status=Status.FAIL_ACCURACY,
        error=f"outputs must equal those of {' or '.join(mode.bitwise_with)} bit for bit (a mode that is deterministic "
        "with itself), and do not",
        correctness=correctness,
    )
