"""Ranks decide alike, and none waits: votes as records, a ballot over a dictionary, and processes with recordings that
the CPU plays."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks_on_cpu import RankProgram
from torch.distributed import FileStore, HashStore, Store, TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from optimizations import torch_internals
from optimizations.ranks import (
    NO,
    YES,
    Ballot,
    Decision,
    StoreExchange,
    Topic,
    Vote,
    close_current,
    current_ballot,
    decide,
    read_vote,
)

RECORDED = Topic("f.0", (0, 1, 2))


@contextlib.contextmanager
def ranks(count: int) -> Iterator[None]:
    """A process group of this many ranks, of which only this one runs."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_all_record_or_none() -> None:
    yes, no = Vote(YES), Vote(NO, "out of memory")
    assert decide(RECORDED, {}) is None
    assert decide(RECORDED, {0: yes, 1: yes}) is None, "a slow rank: undecided"
    assert decide(RECORDED, {0: yes, 1: yes, 2: yes}) == Decision(YES)
    assert decide(RECORDED, {0: yes, 2: no}) == Decision(NO, "out of memory", 2), "one is enough, at once"
    assert decide(RECORDED, {0: yes, 1: yes, 2: yes, 7: no}) == Decision(YES), "no vote of a stranger"


VOTES = st.builds(Vote, st.sampled_from([YES, NO]), st.text(max_size=5))


@given(st.dictionaries(st.integers(0, 2), VOTES))
def test_order_of_votes_does_not_matter(votes: dict[int, Vote]) -> None:
    topic = Topic("f", (0, 1, 2))
    found = {decide(topic, dict(order)) for order in itertools.permutations(votes.items())}
    assert len(found) == 1
    if len(votes) > 1:
        fewer = dict(list(votes.items())[:-1])
        before, after = decide(topic, fewer), decide(topic, votes)
        assert before is None or (after is not None and after.choice == before.choice)


@given(VOTES)
def test_a_vote_is_read_as_it_was_written(vote: Vote) -> None:
    assert read_vote(vote.encode()) == vote


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"3", b'{"choice": "maybe", "reason": ""}', b"\xff", b'{"choice": "yes"}',
             b'{"choice": "yes", "reason": 3}']
)  # fmt: skip
def test_what_is_no_vote_counts_as_none(text: bytes) -> None:
    assert read_vote(text) is None


class Dictionary:
    """An exchange in one process. `broken`: what it raises."""

    def __init__(self) -> None:
        self.votes: dict[tuple[str, int], bytes] = {}
        self.posts = 0
        self.reads = 0
        self.broken: Exception | None = None

    def post(self, key: str, rank: int, vote: bytes) -> None:
        self.votes[key, rank] = vote
        self.posts += 1

    def read(self, key: str, rank: int) -> bytes | None:
        self.reads += 1
        return self.votes.get((key, rank))

    def news(self) -> int:
        if self.broken is not None:
            raise self.broken
        return self.posts


class Rank:
    """A rank with one function, and what it was told about it."""

    def __init__(self, number: int, exchange: Dictionary, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.ballot = Ballot(number, exchange, threaded=False)
        self.topic = self.ballot.topic(["all_reduce('sum', '0')"], ranks)
        self.told: list[Decision] = []

    def vote(self, choice: str, reason: str = "") -> None:
        self.ballot.vote(self.topic, Vote(choice, reason), self.told.append)


def test_ranks_learn_of_early_and_late_failures() -> None:
    exchange = Dictionary()
    first, second = Rank(0, exchange), Rank(1, exchange)
    assert first.topic == second.topic
    first.vote(YES)
    first.ballot.step()
    assert first.told == [] and first.ballot.decision(first.topic) is None, "the other one is slow"
    second.vote(YES)
    for _ in range(2):
        second.ballot.step()
        first.ballot.step()
    assert first.told == second.told == [Decision(YES)]
    second.vote(NO, "its address moved")
    second.ballot.step()
    first.ballot.step()
    assert first.told == [Decision(YES), Decision(NO, "its address moved", 1)]
    assert second.told == first.told


def test_silent_rank_leaves_the_others_to_stock() -> None:
    exchange = Dictionary()
    first = Rank(0, exchange)
    first.vote(YES)
    assert first.ballot.step()
    reads = exchange.reads
    assert not any(first.ballot.step() for _ in range(50))
    assert exchange.reads == reads, "without news nothing is read"
    assert first.told == []


def test_functions_are_named_by_their_collectives() -> None:
    first, second = (Ballot(rank, Dictionary(), threaded=False) for rank in range(2))
    first.topic(["other"], (0, 1))
    one, same = (each.topic(["all_reduce"], (1, 0)) for each in (first, second))
    assert one == same and one.ranks == (0, 1)
    assert first.topic(["all_reduce"], (0, 1)) != one, "the second function of this kind"
    assert first.topic(["all_reduce"], (0, 1, 2)).name == one.name


def test_an_exchange_that_fails_ends_it_and_nothing_else() -> None:
    exchange = Dictionary()
    first = Rank(0, exchange)
    exchange.broken = ConnectionError("the store is gone\nreally")
    first.vote(YES)
    assert not first.ballot.step()
    assert first.ballot.closed == "ConnectionError: the store is gone"
    first.vote(NO)
    assert first.told == []


def test_vote_does_not_wait_for_a_slow_exchange() -> None:
    let_on = threading.Event()

    class Slow(Dictionary):
        def news(self) -> int:
            assert let_on.wait(60)
            return super().news()

    exchange = Slow()
    ballot = Ballot(0, exchange)
    topic = ballot.topic(["all_reduce"], (0, 1))
    told: list[Decision] = []
    ballot.vote(topic, Vote(YES), told.append)
    let_on.set()
    exchange.post(topic.key, 1, Vote(NO, "no memory").encode())
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    ballot.close("the test is over")
    assert told == [Decision(NO, "no memory", 1)]


def eventually(holds: Callable[[], object]) -> bool:
    """Whether this came to hold within ten seconds."""
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


def test_looking_for_news_leaves_no_trace_in_a_file_store(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 1)
    exchange = StoreExchange(store)
    assert exchange.news() == 0
    exchange.post("f.0", 0, Vote(YES).encode())
    before = (tmp_path / "store").stat().st_size
    assert [exchange.news() for _ in range(100)] == [1] * 100
    assert exchange.read("f.0", 1) is None
    assert (tmp_path / "store").stat().st_size == before


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_destroyed_process_group_leaves_nothing_at_its_address(tmp_path: Path, kind: str) -> None:
    """Another one at the same address would find the keys of this one."""

    def made() -> Store:
        if kind == "file":
            return FileStore(str(tmp_path / "store"), 1)
        return TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.distributed.init_process_group("fake", store=made(), rank=0, world_size=2)
    try:
        ballot = current_ballot()
        assert ballot is not None
        topic = ballot.topic(["all_reduce"], (0, 1))
        ballot.vote(topic, Vote(NO, "of before"), lambda decision: None)
        assert eventually(lambda: ballot.decision(topic) is not None)
    finally:
        torch.distributed.destroy_process_group()
    assert ballot.closed == "the process group was destroyed"
    ballot.wait_for_end(10)
    if kind == "file":
        assert not (tmp_path / "store").exists()
    else:
        assert made().num_keys() <= 1, "the server is another one"


def test_a_forked_child_leaves_the_connection_to_its_parent(tmp_path: Path) -> None:
    """A file store says in its file that it ends, and the last one removes it."""
    store = FileStore(str(tmp_path / "store"), 1)
    ballot = Ballot(0, StoreExchange(store), threaded=False)
    ballot.step()
    before = (tmp_path / "store").stat().st_size
    child = os.fork()
    if child == 0:
        ballot.close("the child ends")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "store").stat().st_size == before
    assert ballot.closed is None and not ballot.step()


def test_there_is_one_ballot_of_a_store_whatever_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another would name its first function as this one has named a function before."""
    store = HashStore()
    monkeypatch.setattr(torch_internals, "default_store", lambda: store)
    with ranks(2):
        ballot = current_ballot()
        close_current("a function could not be told of", 10)
        assert current_ballot() is ballot is not None
        assert ballot.closed == "a function could not be told of"


class Unreachable(HashStore):
    """A store whose server does not answer those who connect."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def clone(self) -> Store:
        assert self.answers.wait(60)
        return HashStore()


def test_nobody_waits_for_a_store_that_cannot_be_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that serves it is stopped, in a debugger say."""
    store = Unreachable()
    monkeypatch.setattr(torch_internals, "default_store", lambda: store)
    with ranks(2):
        began = time.monotonic()
        ballot = current_ballot()
        assert ballot is not None and time.monotonic() - began < 30
        topic = ballot.topic(["all_reduce"], (0, 1))
        ballot.vote(topic, Vote(NO, "no memory"), lambda decision: None)
        assert ballot.decision(topic) is None and ballot.closed is None
        store.answers.set()
        assert eventually(lambda: ballot.decision(topic) is not None)
        close_current("the test is over", 10)


PROGRAM = """
import json, os, sys, time
import pytest, torch
import torch.distributed as distributed
from simulated_gpu.runtime import played_by_the_cpu
from rank_ends import leave
from simulated_gpu.trees import Compiled, Model, values
from optimizations.ranks import current_ballot
from optimizations.in_place.generated import GeneratedCode

rank = int(os.environ["RANK"])
behave = json.loads(os.environ["BEHAVE"])[rank]
patches = pytest.MonkeyPatch()
playing = played_by_the_cpu(patches)
cuda = next(playing)
distributed.init_process_group(
    "gloo", init_method=os.environ["METHOD"], rank=rank, world_size=int(os.environ["WORLD_SIZE"])
)
COLLECTIVES = ("_c10d_functional.all_reduce_('sum', '0')",)


class Reducing(Model):
    def __call__(self, inputs):
        if self.cuda.capturing is not None and behave == "fails":
            raise RuntimeError("this capture was told to fail")
        return super().__call__(inputs)


code = GeneratedCode("it takes part in a collective", collective=True, collectives=COLLECTIVES)
compiled = Compiled(Reducing(cuda, code=code))
w, longest, calls = values(7), 0.0, 0
if behave == "dies":
    print("DIES", flush=True)
    os._exit(9)
if behave == "slow":
    time.sleep(4.0)


def call():
    global longest, calls
    x, y = values(calls), values(-3 * calls)
    began = time.monotonic()
    result = compiled(x, y, w)[0]
    longest = max(longest, time.monotonic() - began)
    calls += 1
    assert torch.equal(result, 2 * x + y * w), calls


ends = time.monotonic() + float(os.environ["SECONDS"])
while time.monotonic() < ends:
    call()
    time.sleep(0.01)
    if behave == "leaves" and calls > 5:
        break
reasons = [each.reason for function in compiled.functions for each in function.uncaptured()]
ballot = current_ballot()
print("FOUND " + json.dumps({
    "longest": longest, "calls": calls, "replays": cuda.replays, "recorded": len(compiled.reports),
    "reasons": reasons, "closed": None if ballot is None else ballot.closed,
}), flush=True)
if behave == "leaves" or "leaves" in os.environ["BEHAVE"]:
    os._exit(0)
leave()
"""


def play(folder: Path, *behave: str, seconds: float = 2.0, tcp: bool = False) -> list[dict[str, object] | None]:
    """What each rank found; None of one that died as told."""
    method = f"file://{folder}/store"
    if tcp:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            method = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    program = RankProgram(folder, PROGRAM, len(behave), BEHAVE=json.dumps(behave), METHOD=method, SECONDS=str(seconds))
    found: list[dict[str, object] | None] = []
    for told, ended in zip(behave, program.ended(90), strict=True):
        if told == "dies":
            assert ended.code == 9
            found.append(None)
            continue
        assert "FOUND " in ended.output, ended.output[-3000:]
        assert ended.code == 0, ended.output[-3000:]
        found.append(json.loads(ended.output.rpartition("FOUND ")[2].splitlines()[0]))
    return found


def test_rank_that_fails_to_record_takes_the_graph_from_all(tmp_path: Path) -> None:
    first, second = play(tmp_path, "records", "fails", tcp=True)
    assert first is not None and second is not None
    assert "could not be recorded: RuntimeError: this capture was told to fail" in str(second["reasons"])
    assert first["reasons"] == [f"rank 1 runs it without a graph: {second['reasons'][0]}"]  # type: ignore[index]
    assert first["recorded"] == 1 and second["recorded"] == 0
    assert first["replays"] < first["calls"] / 2, "it had a graph, and left it"  # type: ignore[operator]


def test_ranks_that_all_record_replay_without_waiting(tmp_path: Path) -> None:
    first, second = play(tmp_path, "records", "slow", seconds=6.0)
    assert first is not None and second is not None
    for one in (first, second):
        assert one["reasons"] == [] and one["closed"] is None
        assert one["replays"] >= one["calls"] - 3, "as stock has it"  # type: ignore[operator]
    assert first["longest"] < 3.5, "no call waited for the other rank"  # type: ignore[operator]


def test_a_rank_that_dies_leaves_the_others_with_their_graphs(tmp_path: Path) -> None:
    first, _, third = play(tmp_path, "leaves", "dies", "leaves", seconds=3.0)
    for one in (first, third):
        assert one is not None
        assert one["reasons"] == []
        assert one["replays"] > 0  # type: ignore[operator]


ENDS = """
import sys, time
from datetime import timedelta
from torch.distributed import HashStore
from optimizations import ranks as store_exchange
from optimizations.ranks import Ballot
from optimizations.ranks import YES, Topic, Vote

store = HashStore()


class Slow:
    def post(self, key, rank, vote):
        print("ASKED", flush=True)
        store.wait(["never"], timedelta(milliseconds=800))


class Last:
    def __del__(self, sleep=time.sleep):  # the end of the interpreter takes longer than the answer
        sleep(1.5)


sys.last = Last()
ballot = Ballot(0, Slow())
store_exchange._current = (store, ballot)
ballot.vote(Topic("f.0", (0, 1)), Vote(YES), print)
time.sleep(0.2)
"""


def test_process_that_ends_while_voting_is_not_aborted(tmp_path: Path) -> None:
    (ended,) = RankProgram(tmp_path, ENDS, 1).ended(60)
    assert ended.code == 0 and "ASKED" in ended.output, ended.output[-2000:]
