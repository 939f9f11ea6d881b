"""Bytes that stock CUDA graphs copy in one iteration, from fake tensors, and what the papers print.

Copied are the inputs of a call, and in training the gradients that come into the backward graph: one for every output
that can have one, zeros included. `Published.nbytes` is what the papers print (GraCE, Table 3), exact where it is
explained to the byte; what the programs here copy besides or do not copy is `more`, and `why` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from models.instance import autocast_dtype, instantiate
from models.registry import Workload, find, sets
from suite.measure.known_values import KnownValuesMode
from suite.measure.results import named_tensors
from suite.report.published import load_published

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Published:
    nbytes: int
    more: int = 0
    why: str = ""


TWICE = "the published runner clones every input, so that one tensor passed twice is copied twice"
HIDDEN = "a graph break in front of the loss or the head makes the last hidden states an input of the next graph there"

GRACE = {
    "ALNET": Published(602_112),
    "BERT": Published(163_913_856),
    "BSCG": Published(1_680_834_564, -(64 * 128 * 8) - 64 * 128 * 512 * 4, f"{TWICE}; {HIDDEN}"),
    "DALLE2": Published(4_096, -2_048, "the text is copied into two graphs there"),
    "DBV2": Published(4_112),
    "DCGAN": Published(1_572_928),
    "DGPT2": Published(974_536_708 + 16 * 512 * 768 * 4, -(16 * 512 * 768 * 4), HIDDEN),
    "DLRM": Published(15_335_424),
    "DMLM": Published(575_414_276),
    "DNET": Published(19_267_584),
    "DR-I": Published(3_243_229_184),
    "DR-T": Published(304_052_736),
    "EOS": Published(4_328_116),
    "LCNET": Published(77_070_336),
    "MBERT": Published(133_120),
    "MMC": Published(320_768),
    "MTCG-I": Published(32_768),
    "MTCG-T": Published(1_079_033_860, -(16 * 128 * 8), TWICE),
    "ST": Published(1_307_360),
    "STCLM": Published(890_765_316, -(256 * 128 * 256 * 4), HIDDEN),
    "TEFD": Published(6_449_716),
    "TKE": Published(182_454_752),
    "VM": Published(1_639_680),
    "XLNET-I": Published(8_192),
    "XLNET-T": Published(
        262_209_540 + 117_379_123,
        -117_379_123,
        "112 MB in 25 pieces are not explained; each is as large as a parameter of one layer",
    ),
}

# where the table prints more than what goes into the main graphs: there, what is left is not explained
PRINTED_OTHERWISE = {"MMC": ("313.2 KB", "314.0 KB"), "ST": ("1.2 MB", "1.3 MB")}

# PyGraph prints none; in MiB, from an analysis of the same programs with fake tensors
PYGRAPH_TANGENTS_MIB = {"CBERT": 2000.3, "DBMLM": 953.8, "ECML": 1907.6, "GFNET": 1000.0}


PRINTED = {acronym: copies["before"] for acronym, copies in load_published().bytes_copied["grace"].items()}


def printed(nbytes: int) -> str:
    unit = next(power for power in (3, 2, 1) if nbytes >= 1024**power)
    return f"{nbytes / 1024**unit:.1f} {' KMG'[unit]}B"


def copied_bytes(acronym: str) -> int:
    workload = find(acronym)
    if workload.task == "training":
        return sum(copied_by_training(workload))
    instance = instantiate(workload, device="meta", seed=0)
    return instance.input_bytes(instance.inputs(0))


def copied_by_training(workload: Workload) -> tuple[int, int]:
    """Bytes of the inputs, and of one gradient for each output that can have one, of an eager forward on fake CUDA
    tensors. Needs no GPU; takes seconds."""
    mode = KnownValuesMode()
    with mode:
        instance = instantiate(workload, device="cuda", seed=0)
        with mode.random_values():
            made = instance.inputs(0)
        with _autocast(workload):
            output: Any = instance.module(*made.args, **made.kwargs)
        given = (tensor for _, tensor in named_tensors([*made.args, dict(made.kwargs)]) if tensor.device.type == "cuda")
        inputs = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in given}
        outputs = {id(tensor): tensor for _, tensor in named_tensors(output) if tensor.requires_grad}
        return sum(inputs.values()), _bytes(outputs.values())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def _autocast(workload: Workload) -> Iterator[None]:
    """Use autocast under an amp policy, as on a GPU: `torch.autocast` does nothing where there is none."""
    dtype = autocast_dtype(workload.dtype_policy, "cuda")
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    if dtype is not None:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def test_all_of_the_papers_workloads_are_accounted_for() -> None:
    assert set(GRACE) == set(PRINTED) == {workload.acronym for workload in sets()["grace"]}
    assert all(bool(published.more) == bool(published.why) for published in GRACE.values())


@pytest.mark.parametrize("acronym", GRACE)
def test_published_bytes_are_copied_with_known_differences(acronym: str) -> None:
    published = GRACE[acronym]
    assert (printed(published.nbytes), PRINTED[acronym]) == PRINTED_OTHERWISE.get(acronym, (PRINTED[acronym],) * 2)
    assert copied_bytes(acronym) == published.nbytes + published.more


@pytest.mark.parametrize("acronym", PYGRAPH_TANGENTS_MIB)
def test_pygraphs_models_have_gradients_for_all_logits(acronym: str) -> None:
    assert round(copied_by_training(find(acronym))[1] / MIB, 1) == PYGRAPH_TANGENTS_MIB[acronym]
