"""Obstacles of published programs exist, and are gone in the current variants; `tests/suite/explain` has more of them.

Devices are seen with fake CUDA tensors: a program made for a GPU that touches a CPU tensor says so in the devices of
its operations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_workloads import without_dropout
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode
from transformers import DebertaForMaskedLM

from models.instance import Instance, instantiate
from models.nests import tensors_of
from models.registry import find
from optimizations import torch_internals


class CpuOperations(TorchFunctionMode):
    """Collect the names of called functions that take or return a CPU tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = tensors_of((list(args), kwargs or {}, result))
        # Asking a tensor for its device or type is no operation.
        if func.__name__ != "__get__" and any(tensor.device.type == "cpu" for tensor in tensors):
            self.names.append(func.__name__)
        return result


class DrawnNumbers(TorchFunctionMode):
    """Shapes of what `torch.rand` gives under it on the CPU. `instead`: drawn, and given in its place."""

    def __init__(self, instead: float | None = None) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.rand:
            assert result.device.type == "cpu"
            self.shapes.append(tuple(result.shape))
            if self.instead is not None:
                result.fill_(self.instead)
        return result


def cpu_operations(acronym: str, variant: str) -> list[str]:
    """Functions that touch a CPU tensor in one forward of the tiny size on a fake GPU."""
    with torch_internals.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        instance = instantiate(find(acronym), variant=variant, size="tiny", device="cuda", seed=0)
        made = instance.inputs(0)
        with CpuOperations() as seen:
            instance.module(*made.args, **made.kwargs)
    return seen.names


def tiny(acronym: str, variant: str) -> Instance:
    return instantiate(find(acronym), variant=variant, size="tiny", device="cpu", seed=0)


def dynamo_graphs(instance: Instance) -> int:
    """Return the number of Dynamo's graphs of one forward, which are run as they are."""
    torch.compiler.reset()
    counter, made = CompileCounter(), instance.inputs(0)
    with torch.no_grad():
        torch.compile(instance.module, backend=counter)(*made.args, **made.kwargs)
    return counter.frame_count


@pytest.mark.parametrize("acronym", ["DALLE2", "XLNET-I", "XLNET-T", "MMC", "ST"])
def test_current_programs_touch_no_cpu_tensor(acronym: str) -> None:
    assert cpu_operations(acronym, "current") == []


@pytest.mark.parametrize(
    "acronym",
    [
        *("ALNET", "ALNET-128", "BERT", "CBERT", "DBMLM", "DCGAN", "DLRM", "DNET", "DR-I", "DR-I-256", "DR-T"),
        *("DR-T-4096", "ECML", "EOS", "GFNET", "LCNET", "LP", "MBERT", "MTCG-I", "MTCG-T", "TEFD", "TKE"),
    ],
)
def test_programs_without_an_obstacle_touch_no_cpu_tensor(acronym: str) -> None:
    assert cpu_operations(acronym, "published") == []


@pytest.mark.parametrize("acronym", ["XLNET-I", "MMC", "ST"])
def test_published_and_current_programs_compute_the_same(acronym: str) -> None:
    outputs = []
    for variant in ("published", "current"):
        instance = tiny(acronym, variant)
        made = instance.inputs(3)
        with torch.no_grad():
            outputs.append(list(tensors_of(instance.module(*made.args, **made.kwargs))))
    assert len(outputs[0]) > 1
    for published, current in zip(*outputs, strict=True):
        assert torch.equal(published, current)


@pytest.mark.parametrize(
    ("acronym", "variant"),
    [
        *((acronym, "published") for acronym in ("ALNET", "BERT", "CBERT", "DBMLM", "DBV2", "DGPT2", "DLRM", "DNET")),
        *((acronym, "published") for acronym in ("DR-I", "ECML", "EOS", "GFNET", "LCNET", "LP", "MBERT", "MMC")),
        *((acronym, "published") for acronym in ("MTCG-I", "MTCG-T", "TEFD", "TKE")),
        *((acronym, variant) for acronym in ("DMLM", "XLNET-I") for variant in ("published", "current")),
        ("ST", "current"),
    ],
)
def test_programs_without_a_host_read_are_one_graph(acronym: str, variant: str) -> None:
    assert dynamo_graphs(tiny(acronym, variant)) == 1


def trained(instance: Instance, seed: int, instead: float | None = None) -> list[torch.Tensor]:
    """The loss and the gradients of one iteration."""
    instance.module.zero_grad()
    torch.manual_seed(seed)
    with DrawnNumbers(instead) as drawn:
        loss = instance.loss(instance.module(**instance.inputs(0).kwargs))
    assert set(drawn.shapes) == {()}
    loss.backward()
    gradients = [one.grad for one in instance.module.parameters() if one.grad is not None]
    assert len(gradients) > 20
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("acronym", ["BSCG", "STCLM"])
def test_declared_host_draws_do_not_change_results(acronym: str) -> None:
    instance = tiny(acronym, "published")
    assert instance.workload.host_draws_unused
    (rate,) = {part.layerdrop for part in instance.module.modules() if hasattr(part, "layerdrop")}
    assert rate == 0
    # The least and the greatest number that is ever drawn; dropout draws from the same generator on a CPU.
    least, greatest = trained(instance, 1, 0.0), trained(instance, 1, 1 - 2**-24)
    assert all(torch.equal(one, other) for one, other in zip(least, greatest, strict=True))
    without_dropout(instance.module)
    one, other = trained(instance, 1), trained(instance, 2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_each_deberta_layer_makes_its_scale_on_the_cpu() -> None:
    assert cpu_operations("DMLM", "published").count("sqrt") == 2
    assert cpu_operations("DBV2", "published"), "in a scripted function there, which hides its operations"


def test_library_mt5_breaks_where_it_makes_its_cache() -> None:
    published, current = tiny("MTCG-I", "published"), tiny("MTCG-I", "current")
    assert dynamo_graphs(current) > 1
    assert current.module.lm_head.weight is current.module.shared.weight
    assert published.module.lm_head.weight is not published.module.shared.weight
    for stack in (published.module.encoder, published.module.decoder):
        assert stack.embed_tokens.weight is published.module.shared.weight
    made = published.inputs(0)
    published.module.lm_head.weight = published.module.shared.weight
    published.module.load_state_dict(current.module.state_dict())
    with torch.no_grad():
        outputs = [module(**made.kwargs) for module in (published.module, current.module)]
    assert torch.equal(*(output.logits for output in outputs))
    caches = [output.past_key_values.self_attention_cache.layers for output in outputs]
    assert all(torch.equal(one.keys, other.keys) for one, other in zip(*caches, strict=True))


def test_deberta_attends_as_the_library_does_and_hides_padding() -> None:
    instance = tiny("DMLM", "published")
    module = instance.module.eval()
    library = DebertaForMaskedLM(module.config).eval()
    # The same weights by name: the substitute keeps the library's names.
    library.load_state_dict(module.state_dict())
    ids = instance.inputs(0).kwargs["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, 10:] = 0
    with torch.no_grad():
        ours, theirs = (model(ids, attention_mask=mask).logits for model in (module, library))
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="without overflow"):
        library(ids, attention_mask=mask)
