"""What `import encore` offers is enough to use it: what its functions raise can be caught by public names."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import encore
import optimizations
from optimizations.report import GraphReport
from optimizations.report.recordings import CountedCalls

FUNCTIONS = [name for name in optimizations.__all__ if inspect.isfunction(getattr(optimizations, name))]
EXCEPTIONS = {
    name
    for name in optimizations.__all__
    if inspect.isclass(found := getattr(optimizations, name)) and issubclass(found, Exception)
}


def told(function: str) -> set[str]:
    """The exceptions that the docstring of a public function says it raises."""
    text = inspect.getdoc(getattr(optimizations, function)) or ""
    listed = re.findall(r"^    ([A-Z]\w+(?:, [A-Z]\w+)*):", text.partition("Raises:\n")[2], re.MULTILINE)
    return {name for names in listed for name in names.split(", ")} | set(re.findall(r"raises `(\w+)`", text))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_documented_exceptions_can_be_imported(function: str) -> None:
    assert {name for name in told(function) if not hasattr(builtins, name)} <= EXCEPTIONS


def test_refused_step_and_wrong_order_raise_public_exceptions() -> None:
    from optimizations.capture.callables.order import live_at_once

    assert told("graph_step") >= {"StepChanged"} and told("graph_callables") >= {"StepRefused", "WrongOrder"}
    with pytest.raises(optimizations.WrongOrder):
        live_at_once([1, -1, -1], 1)
    refusal = optimizations.Refusal("reads a value of the GPU on the host", "return the tensor", "train.py:3 in step")
    with pytest.raises(RuntimeError, match=r"host \(train\.py:3 in step\); return the tensor") as raised:
        raise optimizations.StepRefused(refusal)
    assert raised.value.refusal is refusal


@pytest.mark.parametrize("name", encore.__all__)
def test_encore_has_each_public_name(name: str) -> None:
    assert getattr(encore, name) is getattr(optimizations, name)
    assert name in dir(encore)


def test_encore_and_optimizations_have_the_same_names() -> None:
    assert encore.__all__ == optimizations.__all__


def test_importing_encore_imports_neither_torch_nor_the_suite() -> None:
    code = (
        "import sys, encore; encore.Options.parse(None), encore.report(), encore.settled(); "
        "print({'torch', 'suite'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_slow_calls_have_their_old_name_and_warn() -> None:
    """Renamed report fields keep their old names for one release."""
    slow = CountedCalls("inference", "the program holds a result", 3)
    nothing: Any = None
    report = GraphReport(0, nothing, (), slow_calls=(slow,))
    with pytest.warns(DeprecationWarning, match="slow_calls"):
        assert report.full_ways == (slow,)
