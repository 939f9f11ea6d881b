"""A small package with TorchBench's interface replaces TorchBench: tests/support/fixtures/fake_torchbench.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from fixtures.fake_torchbench import install

from models import torchbench
from models.instance import Instance, instantiate
from models.nests import tensors_of
from models.registry import UnknownWorkload, find, find_set
from models.torchbench import TorchBenchRefuses, TorchBenchUnavailable
from suite.explain.build import build_workload
from suite.explain.run import explain_many
from suite.explain.targets import Target, find_targets
from suite.measure.iteration import iteration
from suite.results.errors import WrongUse


@pytest.fixture
def fake_torchbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchbenchmark"]:
        del sys.modules[name]


pytestmark = pytest.mark.usefixtures("fake_torchbench")


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("ranking_net", ("ranking_net", "torchbench", "inference", 4, "bf16", None)),
        ("vision_maskrcnn", ("vision_maskrcnn", "torchbench", "inference", 4, "fp16", None)),
        ("ranking_net-train", ("ranking_net", "torchbench", "training", 6, "amp", "adam")),
    ],
)
def test_name_is_a_row_by_the_published_rules(name: str, described: tuple[Any, ...]) -> None:
    row = find(f"torchbench:{name}")
    assert (row.name, row.suite, row.task, row.batch, row.dtype_policy, row.optimizer) == described
    assert (row.acronym, row.stochastic) == (f"torchbench:{name}", row.task == "training")


def test_random_weights_are_a_variant_without_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torchbench, "without_downloads", lambda: contextlib.nullcontext(asked.append("asked")))
    for row in (find("torchbench:ranking_net"), *find_set("torchbench")):
        assert row.variants == ("published", "random-weights")
    for variant, times in (("published", 0), ("random-weights", 1)):
        instance = instantiate(find("torchbench:ranking_net"), variant=variant, size="tiny", device="cpu", seed=0)
        assert list(tensors_of(instance.inputs(0)))
        assert len(asked) == times


def test_model_that_gives_a_distribution_trains_on_its_mean() -> None:
    instance = instantiate(find("torchbench:acting-train"), device="cpu", seed=0)
    output = instance.module(*instance.inputs(0).args)
    assert torch.equal(instance.loss(output), output.mean.sum())


def test_differentiating_forward_has_gradients_in_inference() -> None:
    row, listed = find("torchbench:maml"), {row.acronym: row for row in find_set("torchbench")}
    assert row.gradients_in_inference and listed["torchbench:maml"].gradients_in_inference
    assert not find("torchbench:ranking_net").gradients_in_inference
    assert not listed["torchbench:ranking_net"].gradients_in_inference
    instance = instantiate(row, device="cpu", seed=0)
    results = [iteration(instance, instance.module, marks_steps=False)(instance.inputs(index)) for index in (0, 1)]
    assert all(result.output.shape == (5, 3) for result in results)
    assert not torch.equal(results[0].output, results[1].output)


def test_explain_follows_a_model_whose_forward_differentiates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (found,) = [explanation for _, explanation in explain_many([Target("torchbench:maml", "published")])]
    assert found.error is None and found.graphs
    assert any("backward graphs" in limit for limit in found.limits)


@pytest.mark.parametrize(("name", "size", "batch"), [("", "full", 2), ("-train", "full", 3), ("-train", "tiny", 3)])
def test_yolov3_has_the_inputs_of_the_published_runner(name: str, size: Any, batch: int) -> None:
    instance = instantiate(find(f"torchbench:yolov3{name}"), size=size, device="cpu", seed=0)
    (first,), (other,) = instance.inputs(0).args, instance.inputs(1).args
    assert first.shape == (batch, 3, 384, 512)
    assert 0 <= first.min() < 0.1 < 0.9 < first.max() <= 1
    assert not torch.equal(first, other)
    with instance.autocast():
        assert instance.module(first).shape == (batch, 1, 12, 16)


def test_settings_from_the_environment_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("OF_ITS_OWN", "")
    find("torchbench:allocates_otherwise")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert os.environ["OF_ITS_OWN"] == "kept", "what the model's own libraries read may still be needed"


def test_model_trains_on_its_own_example_inputs() -> None:
    instance = instantiate(find("torchbench:ranking_net-train"), device="cpu", seed=0)
    made = instance.inputs(0)
    assert made.args[0].shape == (6, 5)
    with instance.autocast():
        loss = instance.loss(instance.module(*made.args))
    loss.backward()
    assert instance.module.linear.weight.grad.isfinite().all()


def test_other_indices_give_the_same_values_in_another_order() -> None:
    instance = instantiate(find("torchbench:ranking_net"), device="cpu", seed=0)
    first, again, other = (instance.inputs(index).args[0] for index in (0, 0, 1))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.flatten().sort().values, other.flatten().sort().values)


def given(example: Any) -> Instance:
    """A model whose example inputs are these."""
    row = find("torchbench:given_any")
    sys.modules["torchbenchmark.models.given_any"].Model.example = example
    return instantiate(row, device="cpu", seed=0)


@dataclasses.dataclass(frozen=True)
class Batch:
    dense: torch.Tensor
    lengths: torch.Tensor


FLOATS, COUNTS = torch.arange(12.0).view(4, 3), torch.arange(5)


@pytest.mark.parametrize(
    ("example", "args", "kwargs"),
    [(FLOATS, 1, []), ([FLOATS, 2], 2, []), ((FLOATS, COUNTS), 2, []), ({"x": FLOATS, "y": COUNTS}, 0, ["x", "y"])],
)
def test_example_inputs_are_the_arguments_of_a_call(example: Any, args: int, kwargs: list[str]) -> None:
    inputs = given(example).inputs(0)
    assert (len(inputs.args), list(inputs.kwargs)) == (args, kwargs)


def test_complex_numbers_vary_and_unordered_inputs_repeat() -> None:
    waves = torch.polar(torch.arange(1.0, 7), torch.arange(6.0))
    repeated = (torch.tensor([True, False]), torch.tensor(2.5), torch.empty(0, 3), torch.tensor([7.0]))
    instance = given((waves, *repeated, torch.ones(3).expand(2, 3)))
    first, other = instance.inputs(0).args, instance.inputs(1).args
    assert first[0].dtype == torch.complex64 and not torch.equal(first[0], other[0])
    for before, one, two in zip(repeated, first[1:], other[1:], strict=False):
        assert one.shape == before.shape and one is not two
        assert torch.equal(one.float(), before.float()) and torch.equal(one, two)


class Copyless(list[Any]):
    def __deepcopy__(self, memo: Any) -> Copyless:
        raise RuntimeError("no copies")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: (FLOATS, FLOATS.to_sparse()), r"a torch\.sparse_coo Tensor does not lie in memory as one array"),
        (lambda: {"x": Batch(FLOATS.to_mkldnn(), COUNTS)}, r"a torch\._mkldnn Tensor does not"),
        (lambda: (torch.nested.nested_tensor([FLOATS, FLOATS]),), r"a nested Tensor does not"),
        (lambda: (torch.quantize_per_tensor(FLOATS, 1.0, 0, torch.quint8),), r"a quantized Tensor does not"),
        (lambda: (FLOATS, (each for each in [FLOATS])), r"a generator can be read only once"),
        (lambda: (Copyless([FLOATS]),), r"a container cannot be copied \(RuntimeError: no copies\)"),
        (lambda: (numpy.ones(3),), r"there is no tensor in a tuple"),
    ],
)
def test_example_inputs_that_cannot_vary_are_refused_by_type(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(TorchBenchRefuses, match=rf"given_any gives example inputs that cannot be varied: {words}"):
        given(make())


@pytest.mark.parametrize(
    ("name", "size", "batch"),
    [("ranking_net", "full", 4), ("ranking_net", "tiny", 4), ("fixed_batch", "full", 7), ("fixed_batch", "tiny", 7)],
)
def test_batch_is_that_of_the_class_in_any_size(name: str, size: Any, batch: int) -> None:
    instance = instantiate(find(f"torchbench:{name}"), size=size, device="cpu", seed=0)
    made = instance.inputs(0)
    assert made.args[0].shape[0] == batch
    assert instance.module(made.args[0].to(next(instance.module.parameters()).dtype)) is not None


def test_cpu_tensors_of_a_model_stay_and_loaders_draw_there() -> None:
    """Under a default device of "cuda" the attribute would be made there, and the sampler's generator would not do."""
    instance = instantiate(find("torchbench:ranking_net"), device="meta", seed=0)
    assert instance.module.linear.weight.device.type == "meta"
    assert instance.module.table.device.type == "cpu"
    assert instance.inputs(0).args[0].device.type == "meta"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("exits_when_built", TorchBenchRefuses, "exits_when_built ends the process instead of being built: SystemExit"),
        ("exits_when_imported", TorchBenchUnavailable, r"cannot be imported \(SystemExit: ERROR: no"),
        ("language_net-train", UnknownWorkload, "Language_Net is not made for training; use torchbench:Language_Net"),
        ("no_training_inside-train", TorchBenchRefuses, "has no test 'train' on cpu: .*Training is not implemented"),
        ("without_get_module", TorchBenchRefuses, "without_get_module returns no module: AttributeError"),
        ("loads_data", TorchBenchRefuses, "inputs that cannot be varied: there is no tensor in a DataLoader"),
        ("given_nothing", TorchBenchRefuses, "given_nothing gives example .*: there is no tensor in a tuple"),
        ("a_pipeline", TorchBenchRefuses, r"a_pipeline returns a object and no nn\.Module"),
        ("broken_net", TorchBenchUnavailable, r"a_package_that_is_missing.*install.py models broken_net"),
        ("broken_library", TorchBenchUnavailable, r"OSError: libnothing.so.*install.py models broken_library"),
    ],
)
def test_model_that_cannot_be_used_gives_its_own_reason(name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        instantiate(find(f"torchbench:{name}"), device="cpu", seed=0)


GLOBAL: dict[str, Callable[[], Any]] = {
    "manual_seed": lambda: torch.manual_seed,
    "default device": torch.get_default_device,
    "default dtype": torch.get_default_dtype,
    "gradients": torch.is_grad_enabled,
    "working directory": Path.cwd,
    "settings": lambda: os.environ.get("PYTORCH_OF_INCONSIDERATE"),
}


def test_global_settings_of_a_model_are_restored(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {name: get() for name, get in GLOBAL.items()}
    was_set: set[str] = set()
    kept = torchbench._global_state_kept

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        with kept():
            yield
            was_set.update(name for name, get in GLOBAL.items() if get() != before[name])

    monkeypatch.setattr(torchbench, "_global_state_kept", noting)
    row = find("torchbench:inconsiderate")
    assert Path.cwd() == before["working directory"]
    instantiate(row, device="cpu", seed=0)
    for name, get in GLOBAL.items():
        assert get() == before[name], name
    assert was_set == GLOBAL.keys(), "what the model does not set is not tested here"
    torch.manual_seed(1)
    one = torch.rand(3)
    torch.manual_seed(2)
    assert not torch.equal(torch.rand(3), one), "TorchBench's own manual_seed ignores its argument"
    printed = capfd.readouterr()
    assert printed.out == "", "stdout is for JSON"
    assert all(f"{what} inconsiderate" in printed.err for what in ("importing", "downloading", "building"))


@pytest.mark.parametrize("name", ["rankingnet", "rankingnet-train"])
def test_unknown_model_lists_similar_ones(name: str) -> None:
    with pytest.raises(UnknownWorkload, match=r"no model 'rankingnet'; did you mean ranking_net"):
        find(f"torchbench:{name}")
    with pytest.raises(WrongUse, match="did you mean ranking_net"):
        find_targets([f"torchbench:{name}"])


@pytest.mark.parametrize("name", ["ranking_net", "ranking_net-train"])
def test_explain_builds_it_as_torchbench_does_on_a_gpu(name: str) -> None:
    program = build_workload(find(f"torchbench:{name}"), variant=None, size="full")
    assert {parameter.device for parameter in program.module.parameters()} == {torch.device("cuda", 0)}
    assert program.module.table.device.type == "cpu"
    assert program.args[0].device == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alexnet", r"torchbench:alexnet needs TorchBench.*PYTHONPATH=PATH.*git clone https://github.com"),
        ("$(reboot)", r"install.py models '\$\(reboot\)'`"),  # quoted for a shell
    ],
)
def test_error_without_torchbench_names_the_installation(
    monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "torchbenchmark", None)
    with pytest.raises(TorchBenchUnavailable, match=words):
        find(f"torchbench:{name}")
