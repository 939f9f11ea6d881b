"""How long each workload took in all modes on one H200: what shards are made even by, and budgets go by."""

from __future__ import annotations

from collections.abc import Mapping

RECORDED_S: Mapping[str, int] = {
    "ALNET": 72,
    "ALNET-128": 74,
    "BERT": 141,
    "BSCG": 238,
    "CBERT": 711,
    "DALLE2": 389,
    "DBMLM": 113,
    "DBV2": 112,
    "DCGAN": 50,
    "DECODER": 62,
    "DGPT2": 117,
    "DLRM": 50,
    "DMLM": 168,
    "DMLM-16": 182,
    "DNET": 118,
    "DR-I": 161,
    "DR-I-256": 46,
    "DR-T": 63,
    "DR-T-4096": 193,
    "ECML": 113,
    "EOS": 43,
    "GFNET": 146,
    "LCNET": 53,
    "LLAMA-G": 416,
    "LP": 76,
    "MBERT": 119,
    "MMC": 71,
    "MTCG-I": 116,
    "MTCG-T": 201,
    "ST": 106,
    "STCLM": 101,
    "TEFD": 1235,
    "TKE": 75,
    "VM": 433,
    "XLNET-I": 96,
    "XLNET-I-8": 100,
    "XLNET-T": 270,
}
"""Seconds by workload in full size, from the first `started_at` of its rows to the last `started_at` + `wall_s`, with
compilation; eight modes, three processes each (CBERT and ECML: two), `--measure-s 5` or 3. Of the newest recorded run
in which all modes were timed: DBMLM, STCLM, XLNET-I and XLNET-I-8 of 20261126-173020-h200; CBERT and ECML of
20261126-193319-h200; MTCG-T and XLNET-T of 20261126-101044-h200; the others of 20261126-125144-h200. Two or four GPUs
of a host were used at the same time. `tests/test_schedule.py` holds it to the rows."""

RECORDED_MODES = 8
"""Modes that these seconds are of."""
