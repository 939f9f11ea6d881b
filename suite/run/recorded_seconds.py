"""How long each workload took in all modes on one H200: what shards are made even by, and budgets go by."""

from __future__ import annotations

from collections.abc import Mapping

RECORDED_S: Mapping[str, int] = {
    "ALNET": 105,
    "ALNET-128": 97,
    "BERT": 193,
    "BSCG": 292,
    "CBERT": 988,
    "DALLE2": 571,
    "DBMLM": 193,
    "DBV2": 142,
    "DCGAN": 129,
    "DECODER": 137,
    "DGPT2": 236,
    "DLRM": 116,
    "DMLM": 222,
    "DMLM-16": 220,
    "DNET": 154,
    "DR-I": 509,
    "DR-I-256": 115,
    "DR-T": 139,
    "DR-T-4096": 234,
    "ECML": 319,
    "EOS": 87,
    "GFNET": 187,
    "LCNET": 129,
    "LLAMA-G": 522,
    "LLAMA-G-8": 571,
    "LP": 138,
    "MBERT": 145,
    "MMC": 153,
    "MTCG-I": 150,
    "MTCG-T": 349,
    "ST": 159,
    "STCLM": 187,
    "TEFD": 1433,
    "TKE": 135,
    "VM": 687,
    "WHISPER-G": 431,
    "XLNET-I": 168,
    "XLNET-I-8": 163,
    "XLNET-T": 448,
}
"""Seconds by workload in full size, from the first `started_at` of its rows to the last `started_at` + `wall_s`, with
compilation; eight modes (DMLM-16 and ECML: ten, with `step` and `callables`), three processes each, `--measure-s 3`. Of
the newest recorded run in which all modes were timed: DR-I of 20261127-083937-h200-dr-i, and DMLM-16, ECML and LLAMA-G
of 20261127-083937-h200, with four GPUs of a host used at the same time; all others of 20261127-013319-h200, with eight.
That is what shards of one host take. DR-I was measured in pairs, and ECML and DMLM-16 in halves. A GPU alone on its
host needs less: runs before, next to none to three others, took 0.6 of the seconds of the eight in the mean, 0.4
(DCGAN) to 0.9 (TEFD). So `--budget` may leave a workload for later there that it had time for, and starts none that it
had not.
`tests/suite/run/test_schedule.py` holds it to the rows."""

RECORDED_MODES = 8
"""Modes that these seconds are of."""
