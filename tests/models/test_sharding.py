"""Workloads split over two processes compute what the whole ones do, with the expected number of all-reduces."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from ranks_on_cpu import run_ranks

from models.registry import workloads
from models.sharding.by_hand import part, share_of

SCRIPT = """
import json, os
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from models.instance import instantiate
from models.registry import find
from rank_ends import leave
from suite.measure.iteration import seed_all

torch.set_num_threads(1)
torch.distributed.init_process_group(
    "gloo", init_method="file://" + os.environ["RENDEZVOUS"], rank=int(os.environ["RANK"]), world_size=2
)
mesh = init_device_mesh("cpu", (2,))
found = {}


class Counted(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it is made of comes here next
        self.count += "all_reduce" in str(func) or "allreduce" in str(func)
        return func(*args, **(kwargs or {}))


def tensors(value):
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


for name in os.environ["NAMES"].split(","):
    workload = find(f"{name}@tp2")

    def run(module, inputs):
        seed_all(3)
        with torch.no_grad():
            output = module(*inputs.args, **inputs.kwargs)
        output = workload.compared(output) if workload.compared else output
        return tensors(output.to_tuple() if hasattr(output, "to_tuple") else output)

    whole = instantiate(workload, size="tiny", device="cpu", seed=5)
    split = instantiate(workload, size="tiny", device="cpu", seed=5)
    whole.module.float(), split.module.float()
    inputs = whole.inputs(1)
    inputs = type(inputs)(
        torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, inputs.args
        ),
        dict(inputs.kwargs),
    )
    workload.sharding.shard(split.module, mesh)
    expected, calls = run(whole.module, inputs), []
    with Counted() as counted:
        got = run(split.module, inputs)
    pairs = list(zip(got, expected, strict=True))
    found[name] = {
        "error": max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-12)) for a, b in pairs),
        "tensors": len(pairs),
        "held": sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in split.module.parameters()),
        "whole": whole.parameters,
        "collectives": counted.count,
        "sum": sum(float(a.double().sum()) for a in got),
    }
    print(name, found[name], flush=True)
print("FOUND " + json.dumps(found), flush=True)
leave()
"""

NAMES = ("DALLE2", "DECODER", "ST", "VM", "XLNET-I")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, float]]]:
    folder = tmp_path_factory.mktemp("sharding")
    outputs = run_ranks(folder, SCRIPT, NAMES=",".join(NAMES))
    return [json.loads(output.rpartition("FOUND ")[2].splitlines()[0]) for output in outputs]


def test_all_splittable_workloads_are_tested_here() -> None:
    assert tuple(name for name, row in workloads().items() if row.sharding is not None) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_compute_what_one_does(name: str, found: list[dict[str, dict[str, float]]]) -> None:
    for rank in found:
        assert rank[name]["tensors"] > 0
        assert rank[name]["error"] < 1e-4, rank[name]
        assert rank[name]["held"] < rank[name]["whole"], "each holds a part"
    assert found[0][name]["sum"] == found[1][name]["sum"], "both have the same results"


@pytest.mark.parametrize(
    ("name", "collectives"),
    [("DECODER", 2 * 2), ("ST", 2 * 2 + 3 * 2), ("VM", 1), ("XLNET-I", 2 * 2)],
)
def test_iteration_has_the_stated_number_of_all_reduces(
    name: str, collectives: int, found: list[dict[str, dict[str, float]]]
) -> None:
    assert found[0][name]["collectives"] == collectives


def mesh(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


def test_share_is_a_contiguous_copy_of_each_group() -> None:
    whole = torch.arange(8.0).reshape(8, 1)
    assert part(whole, 0, mesh(1, 2)).flatten().tolist() == [4, 5, 6, 7]
    share = part(whole, 0, mesh(1, 2), groups=2)
    assert share.flatten().tolist() == [2, 3, 6, 7]
    assert share.data_ptr() != whole.data_ptr()
    assert share.untyped_storage().nbytes() == 16


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(6, 1\) cannot be split over 4 processes"):
        part(torch.zeros(6, 1), 0, mesh(0, 4))
    with pytest.raises(ValueError, match="5 heads cannot be shared by 2"):
        share_of(5, mesh(0, 2), "heads")
