"""Encore's managers on host memory: one per device, freed with the last function."""

from __future__ import annotations

import _thread
import gc
import queue
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from simulated_gpu.runtime import CudaOnCpu
from simulated_gpu.trees import Compiled, Model, Training, check, nodes, own_container, values

from optimizations import torch_internals
from optimizations.trees import graphed_function, manager, reasons
from optimizations.trees.containers import free_all, managers
from optimizations.uncollected import uncollected


def test_stocks_container_is_unchanged(cuda_on_cpu: CudaOnCpu) -> None:
    compiled = Compiled(Model(cuda_on_cpu))
    check(compiled, values(7))
    assert torch_internals.cudagraph_trees.get_manager(0, create_if_none_exists=False) is None
    assert isinstance(own_container(0).tree_manager, manager.EncoreManager)


def in_a_thread_of_the_engine(run: Callable[[], Any]) -> Any:
    """Return what it returns in a thread that Python has not made."""
    found: queue.Queue[Any] = queue.Queue()
    _thread.start_new_thread(lambda: found.put(run()), ())
    return found.get(timeout=60)


def test_threads_record_with_one_manager(cuda_on_cpu: CudaOnCpu) -> None:
    """A function is compiled in one thread, and first called in one of the autograd engine's."""
    training: list[Training] = []
    threads = ThreadPoolExecutor(max_workers=1)
    threads.submit(lambda: training.append(Training(Model(cuda_on_cpu), Model(cuda_on_cpu)))).result()
    in_a_thread_of_the_engine(lambda: [training[0].step(step) for step in range(4)] and None)
    assert managers() == [own_container(0).tree_manager]
    threads.shutdown()


def test_manager_is_freed_with_its_last_function(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w)
    container = own_container(0)
    assert container.tree_manager is not None
    gc.collect()
    with uncollected():
        del compiled
        assert container.tree_manager is None


def test_functions_record_again_after_a_shutdown(cuda_on_cpu: CudaOnCpu) -> None:
    compiled, w = Compiled(Model(cuda_on_cpu)), values(7)
    check(compiled, w)
    (node,) = nodes()
    held = [weakref.ref(thing) for thing in (node, node.graph, node.tracker)]
    gc.collect()
    with uncollected():
        del node
        free_all()
        assert [thing() for thing in held] == [None, None, None]
    assert managers() == []
    check(compiled, w)
    assert len(compiled.reports) == 2


def test_call_that_waited_for_a_reset_runs_without_a_graph(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a thread that waits for the manager while another one shuts it down."""
    compiled, w, forget = Compiled(Model(cuda_on_cpu)), values(7), graphed_function.GraphedFunction.forget
    check(compiled, w)

    def forget_later(function: Any) -> None:
        if function is compiled.function:  # functions of other tests may still be there
            compiled.checked(values(1), values(2), w)
        forget(function)

    monkeypatch.setattr(graphed_function.GraphedFunction, "forget", forget_later)
    free_all()
    assert compiled.uncaptured() == {reasons.RESET: 1}
    check(compiled, w)
    assert not managers()[0].current_node.function.uncaptured()


def test_reset_during_a_first_call_lets_later_calls_record(
    cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another thread, before the call has noted what it recorded."""
    compiled, w, on_fast_path = Compiled(Model(cuda_on_cpu)), values(7), graphed_function.on_fast_path

    def reset_before(*arguments: Any) -> Any:
        free_all()
        return on_fast_path(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(graphed_function, "on_fast_path", reset_before)
        compiled.checked(values(1), values(2), w)
    check(compiled, w)
    assert not compiled.uncaptured()
    assert cuda_on_cpu.replays
