"""Operators that cannot be captured, on a GPU: results are eager's, and no capture fails on those that are listed.

Each way runs in a process of its own, since a capture that fails may spoil a library for the calls after it. A way is
an operator and the kind of its input, as in `python tests/gpu/test_uncapturable_operators_gpu.py eigh single`.
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
TRIED: dict[str, Callable[[Tensor], Tensor]] = {
    "solve": lambda x: torch.linalg.solve(x, x.mT + 1),
    "inv": torch.linalg.inv,
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
    "qr": lambda x: torch.linalg.qr(x).R.abs(),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x).L,
    "inside": eigenvalues,
}
"""Operators whose capture works for some sizes, or that are not seen in the generated code. A capture may fail."""

CALLS = 16
KINDS = {
    "single": [name for name in (*LISTED, *TRIED) if name != "masked_scatter"],
    "trained": ["eigh", "svd", "pinv_hermitian", "lu_factor", "cholesky", "masked_scatter", "solve"],
    "batch": ["eigh", "svd", "lu", "matrix_exp", "solve", "inside"],
    "complex": ["eigh", "svd", "pinv_hermitian", "cholesky"],
}
"""Kinds of input, and the operators that are given one. `masked_scatter` is listed for its backward."""


def positive_definite(call: int, kind: str) -> Tensor:
    shape = (3, 6, 6) if kind == "batch" else (6, 6)
    dtype = torch.complex64 if kind == "complex" else torch.float32
    root = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(call))
    spread = torch.diag(torch.arange(1.0, 7.0))
    return (root @ root.mH / 10 + spread).cuda()


def run(name: str, kind: str) -> dict[str, Any]:
    """Call a program that works before and after the operator; return what is wrong, and what ran without a graph."""
    operator = {**LISTED, **TRIED}[name]

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        before = (x * 2).mul(0.5)
        found = operator(before)
        return found * 3 + 1, before.mT + found.sum()

    compiled = torch.compile(program, backend="encore", options={"selection": "off"})
    wrong, kept = [], []
    for call in range(CALLS):
        torch.compiler.cudagraph_mark_step_begin()
        x = positive_definite(call, kind).requires_grad_(kind == "trained")
        kept.append(x)  # no later call gets its address
        results = []
        for one in (compiled, program):
            found = one(x)
            gradient = (
                torch.autograd.grad(torch.stack([part.abs().sum() for part in found]).sum(), x)
                if kind == "trained"
                else ()
            )
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


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in KINDS.items() for name in names])
def test_factorization_has_eagers_results(name: str, kind: str) -> None:
    # Cached code does not say what was left out.
    found = run_script(Path(__file__), name, kind, TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert not found["wrong"], found
    if name in LISTED:
        assert found["left_out"], found
        assert not [reason for reason in found["uncaptured"] if "could not be recorded" in reason], found
        assert found["replays"] > 0 or kind == "complex", "what is around the operator has a graph"


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
        x = positive_definite(call, "single")
        torch.testing.assert_close(graphed(x), train(weights[1], x))
    torch.testing.assert_close(weights[0], weights[1])
    print(json.dumps({"compared": CALLS}))


if __name__ == "__main__":
    if sys.argv[1:] == ["step"]:
        step()
    else:
        print(json.dumps(run(*sys.argv[1:])))
