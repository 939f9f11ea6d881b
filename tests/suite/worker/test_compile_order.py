"""One mode compiles first, and the others wait for it at the first kernel of each graph, and never for ever."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_cells import Mlp, cell

import suite.worker.compile_order
from optimizations import torch_internals
from optimizations.torch_internals.generated_modules import before_kernels, when_launched
from suite.measure.compile_times import restart_timers, start_toolchain, timer_seconds
from suite.results.schema import CompileConditions
from suite.worker.compile_order import REAL, TRIAL, Place

__all__ = ["cell"]

WAIT_S = 1.0

LEADING = """
import sys
from pathlib import Path
from suite.worker.compile_order import Place
place = Place(Path(sys.argv[1]), leads=True, follows=False)
with place.built():
    print("leads", flush=True)
    sys.stdin.readline()
    if "fail" in sys.argv:
        raise SystemExit(1)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Triton kernels that a generated module asks for, where nothing compiles them."""
    asked: list[str] = []
    owner, name = torch_internals.holder_of("compile_triton_kernel")
    monkeypatch.setattr(owner, name, lambda self, kernel, *_: asked.append(kernel))
    return asked


def module(*kernels: str) -> None:
    """What a generated module does when it is loaded."""
    compiler = torch_internals.holder_of("compile_triton_kernel")[0]()
    for kernel in kernels:
        compiler.triton(kernel, "source")
    compiler.wait({})


def compilation() -> None:
    """What PyTorch says when one begins."""
    with torch_internals.compilation_callbacks.install_callbacks(None, "0"):
        pass


def test_compile_order_waits_before_the_first_kernel_of_a_module(kernels: list[str]) -> None:
    seen: list[tuple[int, list[str]]] = []
    with before_kernels(lambda loaded: seen.append((loaded, list(kernels)))):
        module("a", "b")
        module()
        module("c", "d")
    assert seen == [(0, []), (2, ["a", "b"])], "a module without kernels counts, and waits for nothing"
    module("e")
    assert (len(seen), kernels) == (2, ["a", "b", "c", "d", "e"])


def test_modules_count_as_launched_at_the_next_compilation() -> None:
    launched: list[int] = []
    with when_launched(launched.append):
        compilation()
        module("a")
        assert launched == [0]
        compilation()
        module("b")
        module("c")
        compilation()
    compilation()
    module("d")
    assert launched == [0, 1, 3]


def test_what_forgets_all_callbacks_is_no_error() -> None:
    with when_launched(lambda loaded: None):
        torch_internals.compilation_callbacks.clear()


def test_two_graphs_and_their_backwards_are_counted_one_by_one() -> None:
    """As PyTorch compiles it: a backward that is compiled when it first runs begins a compilation of its own."""

    def program(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).sin()
        torch._dynamo.graph_break()
        return (y * 3).cos().sum()

    launched: list[int] = []
    torch.compiler.reset()
    with when_launched(launched.append), torch_internals.inductor_config.patch(force_disable_caches=True):
        torch.compile(program)(torch.randn(8, requires_grad=True)).backward()
    assert launched[0] == 0
    assert launched == sorted(launched)
    assert len(launched) >= 4 and launched[-1] >= 2, "by the last backward both forwards and one backward were launched"


@contextlib.contextmanager
def leader(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LEADING, str(folder), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "leads\n"
            yield process
        finally:
            process.kill()


def goes_on(folder: Path, name: str = REAL, then: Callable[[], object] = lambda: None) -> bool:
    """Whether one that follows goes on: at once, or once `then` has happened."""
    follower = Place(folder, leads=False, follows=True, most_wait_s=suite.worker.compile_order.MOST_WAIT_S)
    began, went = threading.Event(), threading.Event()

    def call() -> None:
        with follower.first_call(name):
            began.set()
            module("kernel")
            went.set()

    thread = threading.Thread(target=call)
    thread.start()
    began.wait()
    at_once = went.wait(0.2)
    then()
    thread.join()
    assert went.is_set()
    return at_once


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.worker.compile_order, "MOST_WAIT_S", WAIT_S)


def test_followers_wait_until_the_leader_launched_that_graph(tmp_path: Path) -> None:
    first, follower = Place(tmp_path, leads=True, follows=False), Place(tmp_path, leads=False, follows=True)
    seen: list[str] = []
    waits, goes = threading.Semaphore(0), threading.Semaphore(0)

    def follow() -> None:
        with follower.first_call(REAL) as place:
            for name in ("a", "b", "c"):
                waits.release()
                module(name)
                seen.append(f"{name} of the other")
                goes.release()
            assert place.waited_s > 0

    with first.built():
        pass
    thread = threading.Thread(target=follow)
    # The hooks of both are in one process here. They count for themselves: what the leader loads is told by hand.
    leading = first._leaders[REAL]
    thread.start()
    for launched, name in enumerate("abc"):
        assert waits.acquire(timeout=5)
        time.sleep(0.05)
        seen.append(f"{name} of the leader")
        leading._launched(launched + 1)
        assert goes.acquire(timeout=5)
    thread.join()
    assert seen == [f"{name} of the {who}" for name in "abc" for who in ("leader", "other")]
    leading.end()


def test_nobody_waits_for_one_that_has_made_its_first_call(tmp_path: Path) -> None:
    first = Place(tmp_path, leads=True, follows=False)
    with first.built():
        assert not goes_on(tmp_path, TRIAL, lambda: first._end(TRIAL))
    assert goes_on(tmp_path, TRIAL), "there was none"

    def ends() -> None:
        with first.first_call(REAL):
            pass

    assert not goes_on(tmp_path, REAL, ends)
    assert goes_on(tmp_path, REAL)
    with first.first_call(REAL) as place:
        module("again")
    assert place.waited_s == 0


def test_nobody_waits_for_one_that_fails_or_is_killed(tmp_path: Path) -> None:
    with leader(tmp_path) as process:
        assert not goes_on(tmp_path, REAL, process.kill)
    with leader(tmp_path, "fail") as process:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
        process.wait()
    assert goes_on(tmp_path, REAL)
    first = Place(tmp_path, leads=True, follows=False)
    with pytest.raises(KeyError), first.built():
        raise KeyError
    assert goes_on(tmp_path, REAL), "its process lives on"


@pytest.mark.usefixtures("short")
def test_a_leader_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with leader(tmp_path):
        assert not goes_on(tmp_path)
    assert "has not launched graph 1; going on without it" in capsys.readouterr().out


def test_a_child_that_the_leader_forks_holds_nobody_up(tmp_path: Path) -> None:
    first = Place(tmp_path, leads=True, follows=False)
    with first.built():
        pass
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        with first.first_call(REAL):
            pass
        assert goes_on(tmp_path)
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_one_that_neither_leads_nor_follows_leaves_no_file(tmp_path: Path) -> None:
    place = Place(tmp_path, leads=False, follows=False)
    with place.built(), place.first_call(TRIAL), place.first_call(REAL):
        module("kernel")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short")
def test_waiting_is_in_no_timer(tmp_path: Path) -> None:
    first = Place(tmp_path, leads=True, follows=False)
    with first.built():
        pass

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        time.sleep(0.05)
        module("kernel")
        return graph.forward

    torch.compiler.reset()
    restart_timers()
    with Place(tmp_path, leads=False, follows=True, most_wait_s=WAIT_S).first_call(REAL) as place:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    first._end(REAL)
    assert place.waited_s >= WAIT_S
    found = timer_seconds()
    assert 0.05 <= found["backend_compile"] < WAIT_S
    assert found["backend_compile"] <= found["entire_frame_compile"] < found["backend_compile"] + WAIT_S
    assert min(found.values()) >= 0


def test_cell_leads_until_all_it_compiled_was_launched(cell, tmp_path: Path) -> None:
    spec = {"cache_dir": str(tmp_path), "leads": True}
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec=spec)
    followed: list[bool] = []
    trial = live._judge._trial
    live._judge._trial = lambda eager: (
        followed.append(goes_on(tmp_path, TRIAL, lambda: live._compilation.place._end(TRIAL))) or trial(eager)
    )
    live.build()
    assert followed == [False]
    with goes_on_after(tmp_path, REAL):
        live.compile(CompileConditions.COLD_FOLLOWED)
    live._compilation.compile_again()
    assert goes_on(tmp_path, REAL), "it leads once"
    assert live.settle().compile.waited_s == 0


def test_nobody_waits_for_a_cell_that_fails_before_it_compiles(cell, monkeypatch, tmp_path: Path) -> None:
    live = cell(Mlp, "compile", spec={"cache_dir": str(tmp_path), "leads": True})
    monkeypatch.setattr(live._program, "build", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        live.build()
    assert goes_on(tmp_path, REAL) and goes_on(tmp_path, TRIAL)


def test_following_cell_waits_in_both_compilations_untimed(cell, monkeypatch, tmp_path: Path) -> None:
    compiler = torch_internals.holder_of("compile_triton_kernel")[0]
    load = compiler.cpp_pybinding

    def with_a_triton_kernel(self, *arguments, **named):
        self.triton("kernel", "source")
        return load(self, *arguments, **named)

    monkeypatch.setattr(compiler, "cpp_pybinding", with_a_triton_kernel)
    start_toolchain(torch.device("cpu"))  # or the trial's compilation would be long enough to wait for nobody
    spec = {"cache_dir": str(tmp_path), "follows": True}
    live = cell(lambda: Mlp(0.5), "compile", task="training", stochastic=True, spec=spec)
    waits: list[tuple[int, float]] = []
    wait = suite.worker.compile_order.Follower._wait_for
    begun = threading.Event()

    def noted(self, descriptor: int, graphs: int) -> None:
        begin = time.monotonic()
        begun.set()
        wait(self, descriptor, graphs)
        waits.append((graphs, time.monotonic() - begin))

    monkeypatch.setattr(suite.worker.compile_order.Follower, "_wait_for", noted)
    with leader(tmp_path) as process:
        assert process.stdin is not None
        with later(begun, lambda: print(file=process.stdin, flush=True)):
            live.build()
        assert max(seconds for _, seconds in waits) >= WAIT_S / 2
        waits.clear()
        begin = time.perf_counter()
        begun.clear()
        with later(begun, process.kill):
            live.compile(CompileConditions.KERNELS_SIDE_BY_SIDE)
        took = time.perf_counter() - begin
    times = live._compilation._compile_times
    assert WAIT_S / 2 <= times.waited_s == pytest.approx(sum(seconds for _, seconds in waits), abs=0.05)
    assert times.first_call_s < times.warm_up_s <= took - times.waited_s
    assert max(times.parts.values()) <= times.first_call_s


@contextlib.contextmanager
def later(begun: threading.Event, do: Callable[[], object]) -> Iterator[None]:
    """`do`, `WAIT_S` after the block began to wait for it, or where it ends without."""

    def when_it_is_time() -> None:
        begun.wait()
        time.sleep(WAIT_S)
        do()

    thread = threading.Thread(target=when_it_is_time)
    thread.start()
    try:
        yield
    finally:
        begun.set()
        thread.join()


@contextlib.contextmanager
def goes_on_after(folder: Path, name: str) -> Iterator[None]:
    """One that follows waits when the block begins, and goes on by its end."""
    went = threading.Event()

    def call() -> None:
        descriptor = suite.worker.compile_order._opened(folder / name)
        try:
            suite.worker.compile_order.Follower(folder / name, 60.0)._wait_for(descriptor, 10)
        finally:
            os.close(descriptor)
        went.set()

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    assert not went.is_set()
    yield
    thread.join(5)
    assert went.is_set()
