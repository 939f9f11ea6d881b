"""Side streams: workspaces of captured matrix products are not used by any other work."""

from __future__ import annotations

import gc
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from simulated_gpu.allocator import DEFAULT, EXTERNAL, Block, Workspaces

from optimizations.calls.turns import wait_for_stream
from optimizations.capture import device
from optimizations.capture.device import Device
from optimizations.capture.side_stream import ATTEMPTS, SideStreams
from optimizations.capture.step.observing import RandomStates


def products(simulated: Workspaces, streams: SideStreams) -> list[Block]:
    """Return the workspaces of a product in a forward and one in a backward on the side stream."""
    found: list[Block] = []
    with simulated.on(streams.current):
        found.append(simulated.use())
        simulated.in_backward(0, lambda: found.append(simulated.use()))  # type: ignore[attr-defined]
    return found


def takes_all(simulated: Workspaces, streams: SideStreams) -> list[Block]:
    """Tensors that get all memory that is free, on every stream."""
    found = []
    for stream in (0, streams.current.cuda_stream):
        with simulated.on(stream):
            found += [simulated.allocate("a tensor") for _ in range(20)]
    return found


def test_owner_allocates_nothing_before_its_first_use(workspaces: Workspaces) -> None:
    """An owner may be created during a capture of the program."""
    count = workspaces.streams
    SideStreams(0)
    assert (workspaces.streams, workspaces.held, workspaces.waits) == (count, {}, [])


@pytest.mark.parametrize("in_backward", [False, True])
def test_workspace_elsewhere_is_noticed_in_either_thread(workspaces: Workspaces, in_backward: bool) -> None:
    streams = SideStreams(0)
    with workspaces.on(streams.current):
        if in_backward:
            workspaces.in_backward(0, workspaces.use)  # type: ignore[attr-defined]
        else:
            workspaces.use()
    assert not streams.ready()
    assert all(one.pool != DEFAULT for one in products(workspaces, streams))


def test_side_stream_waits_for_the_program_before_any_work(workspaces: Workspaces) -> None:
    """The program's stream may still read released memory that the side stream gets."""
    streams = SideStreams(0)
    side = streams.current.cuda_stream
    for current, waits in ((0, [0]), (0, [0]), (7, [0, 7]), (7, [0, 7]), (9, [0, 7, 9]), (0, [0, 7, 9])):
        workspaces.given.clear()
        with workspaces.on(current):
            assert streams.ready()
        assert workspaces.given == [*((side, "waits for", one) for one in waits), (side, "writes", 0)]
        workspaces.given.clear()
        with workspaces.on(current):
            streams.last.follow()
        assert workspaces.given == [(side, "waits for", one) for one in waits]


def test_possibly_destroyed_stream_is_not_awaited(workspaces: Workspaces) -> None:
    """One that PyTorch did not make; its handle would be a dangling pointer."""
    streams = SideStreams(0)
    side = streams.current.cuda_stream
    for current, waits in ((3, [3]), (EXTERNAL, [3, EXTERNAL]), (5, [3, 5]), (EXTERNAL, [3, 5, EXTERNAL]), (3, [3, 5])):
        workspaces.given.clear()
        with workspaces.on(current):
            streams.last.follow()
        assert sorted(workspaces.given) == [(side, "waits for", one) for one in waits]


def test_launch_waits_for_the_previous_one_on_another_stream(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Device(0)
    monkeypatch.setattr(device, "make_context_current", lambda index: None)
    for workspaces.stream in (0, 0, 7, 7, 0):
        assert found.follow()
    assert workspaces.waited == [(7, 0), (0, 7)]
    workspaces.capturing = {9, 0}
    for workspaces.stream in (9, 0):  # one that was made for it, and the one of the calls
        assert not found.follow() and not found.follow()
    workspaces.capturing.clear()
    assert found.follow() and workspaces.waited == [(7, 0), (0, 7)]


def test_unused_random_numbers_are_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes any state that is set for a seed, by which recurrent layers of cuDNN begin their dropout anew."""
    state, put_back = torch.arange(16, dtype=torch.uint8), []
    generator = SimpleNamespace(
        get_state=lambda: state.clone(), set_state=lambda found: put_back.append(found.tolist())
    )
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    before = RandomStates(Device(1))
    before.restore()
    assert put_back == []
    state += 1
    before.restore()
    assert put_back == [list(range(16))]


def test_each_thread_that_launches_has_a_context(workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, the driver's calls that set nodes of a graph end the process."""
    found = Device(0)
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(device, "make_context_current", lambda index: made.append((threading.get_ident(), index)))
    monkeypatch.setattr(device, "wait_for_stream", lambda stream, index: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def launches() -> None:
        assert found.follow() and found.follow()

    launches()
    other = threading.Thread(target=launches)
    other.start()
    other.join()
    assert [index for _, index in made] == [0, 0] and made[0] != made[1]


def test_thread_that_comes_later_gets_a_workspace_in_the_pool(workspaces: Workspaces) -> None:
    streams = SideStreams(0)
    assert streams.ready()
    found: list[Block] = []

    def other() -> None:
        assert streams.ready()
        found.extend(products(workspaces, streams))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert len(found) == 2 and all(one.pool != DEFAULT for one in found)
    assert found[0] is not products(workspaces, streams)[0]


def test_work_outside_retained_workspaces_is_reported(workspaces: Workspaces) -> None:
    streams = SideStreams(0)
    assert streams.keeps_workspace(), "nothing is kept yet"
    streams.ready()
    assert not streams.keeps_workspace(), "the default stream"
    with workspaces.on(streams.current):
        told = [streams.keeps_workspace()]
        workspaces.in_backward(0, lambda: told.append(streams.keeps_workspace()))  # type: ignore[attr-defined]
        thread = threading.Thread(target=lambda: told.append(_on(workspaces, streams)))
        thread.start()
        thread.join(10)
    with workspaces.on(7):
        told.append(streams.keeps_workspace())
    assert told == [True, True, False, False]


def _on(simulated: Workspaces, streams: SideStreams) -> bool:
    with simulated.on(streams.current):
        return streams.keeps_workspace()


def test_two_owners_use_different_workspaces(workspaces: Workspaces) -> None:
    one, other = SideStreams(0), SideStreams(0)
    assert one.ready() and other.ready()
    mine, others = products(workspaces, one), products(workspaces, other)
    assert not {*map(id, mine)} & {*map(id, others)}
    stream, count = one.current, len(workspaces.blocks)
    del one
    gc.collect()
    assert workspaces.waits == []
    again = SideStreams(0)
    assert again.current is stream
    assert workspaces.waits == [0], "graphs that compute there may still run"
    assert again.ready()
    assert products(workspaces, again) == mine
    assert len(workspaces.blocks) == count


def test_pytorch_without_retained_workspaces_is_supported(workspaces: Workspaces) -> None:
    workspaces.caches = False
    streams = SideStreams(0)
    assert not streams.ready()
    count = workspaces.streams
    assert count <= 100 + 1 + ATTEMPTS
    assert streams.ready() and streams.ready()
    assert workspaces.streams == count


def test_unusable_streams_do_not_hide_a_usable_one(workspaces: Workspaces) -> None:
    spoiled = [SideStreams(0) for _ in range(ATTEMPTS + 2)]
    for one in spoiled:
        products(workspaces, one)
    spoiled.clear()
    gc.collect()
    streams = SideStreams(0)
    assert not streams.ready()
    assert all(one.pool != DEFAULT for one in products(workspaces, streams))
    assert streams.ready()


def test_out_of_memory_leaves_no_redirected_pool(workspaces: Workspaces) -> None:
    streams = SideStreams(0)
    workspaces.full = True
    with pytest.raises(torch.OutOfMemoryError):
        streams.ready()
    workspaces.full = False
    assert workspaces.allocate("a tensor").pool == DEFAULT
    assert streams.ready()
    assert all(one.pool != DEFAULT for one in products(workspaces, streams))


@pytest.mark.parametrize("seed", range(12))
def test_captured_workspace_is_never_memory_of_a_tensor(workspaces: Workspaces, seed: int) -> None:
    chosen = random.Random(seed)
    owners = [SideStreams(0) for _ in range(3)]
    captured: list[Block] = []
    for _ in range(60):
        owner = chosen.choice(owners)
        what = chosen.choice(
            ["warm up", "warm up", "capture", "clear", "clear", "tensors", "elsewhere", "another owner"]
        )
        if what == "warm up":
            owner.ready()
            if chosen.random() < 0.3:
                workspaces.clear()
            products(workspaces, owner)
        elif what == "capture":
            owner.ready()
            captured += products(workspaces, owner)
        elif what == "clear":
            workspaces.clear()
        elif what == "tensors":
            takes_all(workspaces, owner)
        elif what == "elsewhere":
            with workspaces.on(chosen.randrange(4)):
                workspaces.use()
        else:
            owners[chosen.randrange(3)] = SideStreams(0)
        assert not any(one.owner == "a tensor" for one in captured)
        alive = {owner.current.cuda_stream for owner in owners}
        assert not any(one.gone for one in captured if one.stream in alive)
    assert captured


def test_stream_that_another_thread_captures_on_is_not_awaited(workspaces: Workspaces) -> None:
    """A stream that waits for it would join that capture."""
    streams, workspaces.capturing = SideStreams(0), {0}
    side = streams.current.cuda_stream
    streams.last.follow()
    with workspaces.on(7):
        streams.last.follow()
    assert workspaces.waited == [(side, 0), (side, 7)], "the current one in any case"


def test_stream_waits_neither_in_a_capture_nor_for_one(workspaces: Workspaces) -> None:
    workspaces.stream = 1
    for workspaces.capturing in (set(), {1}, {2}, {0}, {0, 1, 2}):
        wait_for_stream(2, 0)
        wait_for_stream(0, 0)
    assert workspaces.waited == [(1, 2), (1, 0), (1, 0), (1, 2)]
