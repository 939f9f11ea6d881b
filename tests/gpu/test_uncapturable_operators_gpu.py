"""Operators that cannot be captured, on a GPU: results are eager's, and no capture fails on those that are listed.

Each operator runs in a process of its own, since a capture that fails may spoil a library for the calls after it:
`python tests/gpu/test_uncapturable_operators_gpu.py eigh`. Other inputs, such as batches, are the judges'.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import optimizations

if __name__ != "__main__":  # as a script it finds no other modules of the tests
    from gpu_harness import run_script

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor


@torch.library.custom_op("left_out_gpu::eigenvalues", mutates_args=())
def eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(x)


@eigenvalues.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1])


def masked(x: Tensor) -> Tensor:
    return x.masked_scatter(x > 0.5, x.flatten() * 2)


def reduced(x: Tensor) -> Tensor:
    lengths = torch.tensor([2, x.shape[-2] - 2], device=x.device)
    return torch.segment_reduce(x.flatten(0, -2)[: x.shape[-2]], "sum", lengths=lengths)


LISTED: dict[str, Callable[[Tensor], Tensor]] = {
    "eigh": lambda x: torch.linalg.eigh(x).eigenvalues,
    "eigvalsh": torch.linalg.eigvalsh,
    "svd": lambda x: torch.linalg.svd(x).S,
    "svdvals": torch.linalg.svdvals,
    "eig": lambda x: torch.linalg.eig(x).eigenvalues.abs().sort().values,
    "pinv": torch.linalg.pinv,
    "pinv_hermitian": lambda x: torch.linalg.pinv(x, hermitian=True),
    "nuclear_norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "matrix_exp": torch.linalg.matrix_exp,
    "cholesky": torch.cholesky,
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x.tril()),
    "lu_factor": lambda x: torch.linalg.lu_factor(x).LU,
    "lu": lambda x: torch.linalg.lu(x).U,
    "ldl_factor": lambda x: torch.linalg.ldl_factor_ex(x).LD.diagonal(dim1=-2, dim2=-1),
    "masked_scatter": masked,
    "segment_reduce": reduced,
}
TRAINED = ("eigh", "svd", "pinv_hermitian", "lu_factor", "cholesky", "masked_scatter")
"""Operators whose backward runs as well; `masked_scatter` is listed for its backward."""

CALLS = 16


def positive_definite(call: int) -> Tensor:
    root = torch.randn(6, 6, generator=torch.Generator().manual_seed(call))
    return (root @ root.mT / 10 + torch.diag(torch.arange(1.0, 7.0))).cuda()


def run(name: str) -> dict[str, Any]:
    """Call a program that works before and after the operator; return what is wrong, and what ran without a graph."""
    operator = {**LISTED, "inside": eigenvalues}[name]
    is_trained = name in TRAINED

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        before = (x * 2).mul(0.5)
        found = operator(before)
        return found * 3 + 1, before.mT + found.sum()

    compiled = torch.compile(program, backend="encore", options={"selection": "off"})
    wrong, kept = [], []
    for call in range(CALLS):
        torch.compiler.cudagraph_mark_step_begin()
        x = positive_definite(call).requires_grad_(is_trained)
        kept.append(x)  # no later call gets its address
        results = []
        for one in (compiled, program):
            found = one(x)
            gradient = torch.autograd.grad(found[0].abs().sum() + found[1].abs().sum(), x) if is_trained else ()
            results.append([part.detach().clone() for part in (*found, *gradient)])
        for place, (mine, theirs) in enumerate(zip(*results, strict=True)):
            if not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3):
                wrong.append((call, place, float((mine - theirs).abs().max())))
    torch.testing.assert_close(torch.linalg.eigvalsh(torch.eye(4, device="cuda")), torch.ones(4, device="cuda"))
    reports = optimizations.report()
    return {
        "wrong": wrong,
        "replays": sum(one.replays for report in reports for one in report.recordings),
        "left_out": [one.reason for report in reports for graph in report.compiled for one in graph.left_out],
        "uncaptured": {one.reason: one.calls for report in reports for one in report.uncaptured},
    }


@pytest.mark.parametrize("name", [*LISTED, "inside"])
def test_factorization_has_eagers_results(name: str) -> None:
    # Cached code does not say what was left out.
    found = run_script(Path(__file__), name, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert not found["wrong"], found
    if name in LISTED:
        assert found["left_out"], found
        assert not [reason for reason in found["uncaptured"] if "could not be recorded" in reason], found
        assert found["replays"] > 0, "what is around the operator has a graph"


def test_failure_inside_a_step_leaves_state_intact() -> None:
    assert run_script(Path(__file__), "step") == {"compared": CALLS}


def step() -> None:
    """Let the capture of a training step fail in cuSOLVER, and compare the parameters with eager's."""
    weights = [torch.nn.Parameter(torch.ones(6, 6, device="cuda")) for _ in range(2)]

    def train(weight: Tensor, x: Tensor) -> Tensor:
        loss = torch.linalg.eigvalsh(weight @ weight.mT + x).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= 0.01 * gradient
        return loss

    graphed = optimizations.graph_step(lambda x: train(weights[0], x))
    for call in range(CALLS):
        x = positive_definite(call)
        torch.testing.assert_close(graphed(x), train(weights[1], x))
    torch.testing.assert_close(weights[0], weights[1])
    print(json.dumps({"compared": CALLS}))


if __name__ == "__main__":
    if sys.argv[1:] == ["step"]:
        step()
    else:
        print(json.dumps(run(*sys.argv[1:])))
