"""Captures of real graphs: exactly their pointers are found, and plans follow from them.

`data/captures` holds pairs of captures of the programs of `tests/gpu/test_indirection_gpu.py`, recorded on an NVIDIA
H200 (driver 580.159, CUDA 13.0; "13000" in the files) with torch 2.11.0+cu130 and Triton 3.6.0, as they were written
there; its folder `workloads` those of small workloads. In each pair the inputs lie at different addresses; where a
weight is a global of the program, it is an input too.

What is expected of the files was read off their bytes by `moved_places` below, which knows nothing of the search.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_tensor_map import make_tensor_map, replace_address
from pydantic import BaseModel, ConfigDict

from optimizations.graph.plan import (
    Available,
    Choice,
    limit,
    make_plan,
)
from optimizations.graph.pointers import Analysis, ReasonCode, UseKind, find_pointer_uses
from optimizations.graph.records import (
    Capture,
    CapturedGraph,
    KernelNode,
    MemcpyNode,
    MemoryRange,
    MemsetNode,
)
from tests.optimizations.graph.test_plan import assert_replay_sets_new_addresses

FOLDER = Path(__file__).parents[2] / "data" / "captures"
FILES = sorted(path.stem for path in FOLDER.glob("*.json"))
WORKLOADS = sorted(f"workloads/{path.stem}" for path in FOLDER.glob("workloads/*.json"))


class RecordedCaptures(BaseModel):
    """Two captures at different placeholder addresses and, where needed, a `control` at the addresses of the first and
    a `repeat` at those of the second. `provenance` names the program and the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_bytes="hex", val_json_bytes="hex")

    provenance: dict[str, str]
    first: Capture
    second: Capture
    control: Capture | None = None
    repeat: Capture | None = None


Place = tuple[int, int, int]
"""Node, parameter and byte offset in it of a word; a copy's source is (node, 0, 0)."""


def load(name: str) -> RecordedCaptures:
    return RecordedCaptures.model_validate_json((FOLDER / f"{name}.json").read_bytes())


def analyse(pair: RecordedCaptures) -> Analysis:
    """Analyse as a recording does; `replace_address` simulates the driver."""
    found = find_pointer_uses(pair.first, pair.second, further=[pair.control], replace_address=replace_address)
    return limit(found, pair.first.graph, ())


def words(graph: CapturedGraph, step: int) -> Iterator[tuple[Place, int]]:
    """Everything in the graph that may be an address: words of parameters at each multiple of `step` bytes, and the
    ends of copies (0 for the source, 1 for the destination) and fills."""
    for node, record in enumerate(graph.nodes):
        match record:
            case KernelNode():
                for index, parameter in enumerate(record.parameters):
                    for offset in range(0, parameter.size - 7, step):
                        yield (node, index, offset), int.from_bytes(parameter.data[offset : offset + 8], "little")
            case MemcpyNode():
                yield (node, 0, 0), record.source.address
                yield (node, 0, 1), record.destination.address
            case MemsetNode():
                yield (node, 0, 0), record.address


def moved_places(first: Capture, second: Capture) -> dict[int, list[Place]]:
    """Return by input the places whose value is in its placeholder in both captures and moved with it."""
    found: dict[int, list[Place]] = {}
    for one, other in zip(first.placeholders, second.placeholders, strict=True):
        found[one.input] = [
            place
            for (place, before), (_, after) in zip(words(first.graph, 1), words(second.graph, 1), strict=True)
            if before in one.memory
            and after in other.memory
            and after - before == displacement(one.memory, other.memory)
        ]
    return found


def displacement(one: MemoryRange, other: MemoryRange) -> int:
    return other.address - one.address


def found_places(analysis: Analysis) -> dict[int, list[Place]]:
    return {
        verdict.input: [
            (use.node, use.parameter, use.byte_offset + (use.kind is UseKind.MEMCPY_DESTINATION))
            for use in verdict.uses
        ]
        for verdict in analysis.verdicts
    }


def codes(analysis: Analysis) -> list[set[ReasonCode]]:
    return [{reason.code for reason in verdict.reasons} for verdict in analysis.verdicts]


# The search.


@pytest.mark.parametrize("name", [*FILES, *WORKLOADS])
def test_every_pointer_that_moved_with_an_input_is_found(name: str) -> None:
    pair = load(name)
    analysis = analyse(pair)
    expected = moved_places(pair.first, pair.second)
    assert found_places(analysis) == expected
    assert UseKind.TENSOR_MAP not in {use.kind for use in analysis.uses}
    assert codes(analysis) == [set() if places else {ReasonCode.NO_USE} for places in expected.values()]


def test_half_an_address_in_padding_is_explained() -> None:
    """`leftovers/MMC.json` is some nodes of MMC: cuDNN wrote 1.0 where the upper half of an address was.

    A control says nothing of it, for the address is the same there.
    """
    pair = load("leftovers/MMC")
    before, after, again = (
        one.graph.nodes[1].parameters[0].data[56:64] for one in (pair.first, pair.second, pair.control) if one
    )
    assert before == again != after
    address = {one.input: one.memory.address for one in pair.first.placeholders}[2]
    assert before == address.to_bytes(8, "little")[:4] + struct.pack("<f", 1.0)
    analysis = analyse(pair)
    assert not analysis.doubtful
    assert found_places(analysis)[2] == [(1, 1, 0)]
    assert codes(analysis) == [set(), set()]


# Tensor maps of NVIDIA's libraries.

LIVE_BYTES = 64


def map_at(capture: Capture, node: int, parameter: int, start: int) -> bytes:
    record = capture.graph.nodes[node]
    assert isinstance(record, KernelNode)
    return record.parameters[parameter].data[start : start + LIVE_BYTES]


def test_simulated_tensor_map_is_bit_identical_to_a_real_one() -> None:
    pair = load("matmul_bf16")
    (weights,) = (one.memory for one in pair.first.placeholders if one.input == 1)
    assert map_at(pair.first, 0, 0, 176) == make_tensor_map(weights.address)[:LIVE_BYTES]


# Plans.


@pytest.mark.parametrize("choice", [choice for choice in Choice if choice is not Choice.OFF])
@pytest.mark.parametrize("name", [*FILES, *WORKLOADS])
def test_plan_moves_the_first_capture_to_any_address(name: str, choice: Choice) -> None:
    pair = load(name)
    analysis = analyse(pair)
    plan = make_plan(pair.first.graph, analysis, choice, Available())
    places = moved_places(pair.first, pair.second)
    assert [one.input for one in plan.inputs if one.indirect] == [index for index, found in places.items() if found]
    assert_replay_sets_new_addresses(pair.first.graph, analysis, plan)
