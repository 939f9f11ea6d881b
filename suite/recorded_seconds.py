"""How long each workload took in all modes on one H200: what shards are made even by, and budgets go by."""

from __future__ import annotations

from collections.abc import Mapping

RECORDED_S: Mapping[str, int] = {
    "ALNET": 37,
    "ALNET-128": 41,
    "BERT": 98,
    "BSCG": 188,
    "DALLE2": 355,
    "DBV2": 75,
    "DCGAN": 40,
    "DGPT2": 115,
    "DLRM": 36,
    "DMLM": 126,
    "DMLM-16": 144,
    "DNET": 98,
    "DR-I": 145,
    "DR-I-256": 38,
    "DR-T": 47,
    "DR-T-4096": 190,
    "EOS": 57,
    "GFNET": 111,
    "LCNET": 50,
    "LP": 62,
    "MBERT": 88,
    "MMC": 57,
    "MTCG-I": 80,
    "MTCG-T": 213,
    "ST": 81,
    "STCLM": 87,
    "TEFD": 1059,
    "TKE": 50,
    "VM": 357,
    "XLNET-I": 84,
    "XLNET-I-8": 111,
    "XLNET-T": 282,
}
"""Seconds by workload in full size, from the first `started_at` of its rows to the last `started_at` + `wall_s`, with
compilation; eight modes, three processes each, `--measure-s 5` or 3. Of the newest recorded run in which all modes have
a row: TEFD of 20261126-062544-h200; LP, GFNET and DMLM-16 of 20261126-070532-h200; ALNET-128, DR-I-256, DR-T-4096 and
XLNET-I-8 of 20261126-064328-h200; the others of 20261126-032041-h200. `tests/test_schedule.py` holds it to the rows."""

RECORDED_MODES = 8
"""Modes that these seconds are of."""
