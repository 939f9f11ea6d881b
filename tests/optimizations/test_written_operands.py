"""Written operands are found by the operator's schema, or despite a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optimizations.written_operands import written

ops = torch.ops.aten
X, MEAN, VAR, OUT = (torch.zeros(2, 2), *(torch.zeros(2) for _ in range(2)), torch.zeros(2, 2))
STATISTICS = [MEAN, VAR]


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (ops.relu.default, (X,), {}, []),
        (ops.mm.out, (X, X), {"out": OUT}, [OUT]),
        (ops._foreach_add_.Scalar, ([X, OUT], 1), {}, [[X, OUT]]),
        (ops.native_batch_norm.default, (X, None, None, MEAN, VAR, True, 0.1, 1e-5), {}, STATISTICS),
        (ops.native_batch_norm.default, (X, None, None, MEAN, VAR, False, 0.1, 1e-5), {}, []),
        (ops.cudnn_batch_norm.default, (X, X, None, MEAN, VAR, True, 0.1, 1e-5), {}, STATISTICS),
        (ops._native_batch_norm_legit.default, (X, None, None, MEAN, VAR, True, 0.1, 1e-5), {}, STATISTICS),
        (ops.batch_norm_update_stats.default, (X, MEAN, VAR, 0.1), {}, STATISTICS),
        (ops.batch_norm_gather_stats_with_counts.default, (X, X, X, MEAN, VAR, 0.1, 1e-5, X), {}, STATISTICS),
        (ops._native_batch_norm_legit_no_training.default, (X, None, None, MEAN, VAR, 0.1, 1e-5), {}, []),
        (ops.native_batch_norm_backward.default, (X, X, None, MEAN, VAR, None, None, True, 1e-5, [True]), {}, []),
    ],
)
def test_written_operands_are_found(func: Any, args: tuple[Any, ...], kwargs: Any, expected: list[Any]) -> None:
    found = list(written(func, args, kwargs))
    assert len(found) == len(expected)
    assert all(one is other or isinstance(one, list) for one, other in zip(found, expected, strict=True))
