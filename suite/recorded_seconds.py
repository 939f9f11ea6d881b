"""How long each workload took in all modes on one H200: what shards are made even by, and budgets go by."""

from __future__ import annotations

from collections.abc import Mapping

RECORDED_S: Mapping[str, int] = {
    "ALNET": 65,
    "ALNET-128": 41,
    "BERT": 116,
    "BSCG": 208,
    "DALLE2": 296,
    "DBV2": 99,
    "DCGAN": 69,
    "DGPT2": 112,
    "DLRM": 58,
    "DMLM": 136,
    "DMLM-16": 144,
    "DNET": 113,
    "DR-I": 143,
    "DR-I-256": 38,
    "DR-T": 59,
    "DR-T-4096": 190,
    "EOS": 40,
    "GFNET": 111,
    "LCNET": 56,
    "LP": 74,
    "MBERT": 93,
    "MMC": 58,
    "MTCG-I": 85,
    "MTCG-T": 201,
    "ST": 75,
    "STCLM": 90,
    "TEFD": 1039,
    "TKE": 50,
    "VM": 506,
    "XLNET-I": 84,
    "XLNET-I-8": 111,
    "XLNET-T": 270,
}
"""Seconds by workload in full size, from the first `started_at` of its rows to the last `started_at` + `wall_s`, with
compilation; eight modes, three processes each, `--measure-s 5` or 3. Of the newest recorded run in which all modes have
a row: LP of 20261126-094053-h200; GFNET and DMLM-16 of 20261126-070532-h200; ALNET-128, DR-I-256, DR-T-4096 and
XLNET-I-8 of 20261126-064328-h200; the others of 20261126-101044-h200, where four GPUs of a host were used at the same
time. `tests/test_schedule.py` holds it to the rows."""

RECORDED_MODES = 8
"""Modes that these seconds are of."""
