"""Where several processes compute together they keep the same way to serve calls, or select nothing."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu import CudaOnCpu, cuda_on_cpu
from hypothesis import given
from hypothesis import strategies as st
from ranks_on_cpu import RankProgram
from selection_on_cpu import make, pair, run, run_pair, selection
from selection_on_cpu import ranks as process_group
from test_agreement import Dictionary
from trees_on_cpu import Compiled, Model

import optimizations
from optimizations.agreement.ballot import Ballot
from optimizations.agreement.store_exchange import current_ballot
from optimizations.agreement.votes import NO, YES, Question, Topic, Vote, decide
from optimizations.recording.generated import GeneratedCode
from optimizations.selection import ranks
from optimizations.selection.identity import graph_digest
from optimizations.selection.served import LOOK_EVERY
from optimizations.selection.validity import WINDOW
from optimizations.selection.verdict import Compared

__all__ = ["cuda_on_cpu", "make"]

CANDIDATES = ("none", "copy", "indirection")


def test_a_rank_alone_decides(make: Any) -> None:
    with process_group(1):
        _, compiled = make()
        run(compiled, 400)
    assert selection(compiled).state == "decided"


def test_ranks_that_cannot_exchange_votes_select_nothing(make: Any) -> None:
    """The store of this process group cannot be used by two at a time."""
    with process_group(2):
        prices, compiled = make()
        run(compiled, 10)
        ballot = current_ballot()
        assert ballot is not None
        ballot.wait_for_end(60)  # its thread finds out, while calls go on
        assert ballot.closed is not None
        run(compiled, 32)  # each look that finds it undecided is followed by twice as many calls without one
    report = selection(compiled)
    assert report.state == "off"
    assert report.reason.startswith("2 ranks compute together, and they cannot exchange votes")
    assert prices.timed == 0


def test_ranks_take_no_stored_verdict_of_one_alone(make: Any) -> None:
    _, compiled = make(plain=5e-6)
    run(compiled, 400)
    with process_group(2):
        _, again = make()
        run(again, 30)
    assert "2 ranks" in selection(again).reason


def test_ranks_that_come_while_it_is_measured_end_it(make: Any) -> None:
    _, compiled = make()
    run(compiled, 60)
    assert selection(compiled).state == "measuring"
    with process_group(8):
        run(compiled, 5)
    assert "8 ranks" in selection(compiled).reason


class Rank:
    """This process is rank 0 of 2; the other one is a ballot that a test votes with."""

    def __init__(self) -> None:
        self.exchange = Dictionary()
        self.count = 2
        self.ballot = Ballot(0, self.exchange, threaded=False)
        self.other = Ballot(1, self.exchange, threaded=False)
        self.topics: dict[str, Topic] = {}

    def exchanged(self) -> None:
        """Both look for votes, as their threads do."""
        self.ballot.step()
        self.other.step()

    def vote(self, names: list[str], choice: str = YES, reason: str = "", **costs: float) -> None:
        key = ",".join(names)
        if key not in self.topics:
            self.topics[key] = self.other.topic(Question.FASTEST, names, range(2))
        self.other.vote(self.topics[key], Vote(choice, reason, costs), lambda decision: None)
        self.exchanged()
        self.exchanged()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    found = Rank()
    monkeypatch.setattr(ranks, "current_ballot", lambda: found.ballot)
    monkeypatch.setattr(ranks, "count", lambda: found.count)
    yield found


def test_nothing_is_kept_before_all_ranks_have_voted_and_nobody_waits(make: Any, rank: Rank) -> None:
    prices, compiled = make(plain=50e-6)
    run(compiled, 400)
    rank.exchanged()
    report = selection(compiled)
    assert (report.state, report.reason, report.kept) == ("waiting", ranks.NOT_YET, None)
    assert compiled.functions[0].without_graph is None, "served as without selection"
    assert optimizations.settled(), "more calls change nothing"
    timed = prices.timed
    run(compiled, 200)
    assert prices.timed == timed
    assert report.calls > 0


def test_nothing_is_measured_before_it_is_known_that_ranks_can_exchange_votes(make: Any, rank: Rank) -> None:
    rank.ballot.works = False
    prices, compiled = make(plain=50e-6)
    run(compiled, 100)
    assert (selection(compiled).state, selection(compiled).reason) == ("waiting", ranks.not_ready())
    assert prices.timed == 0
    rank.ballot.works = True
    run(compiled, 100)
    assert selection(compiled).state == "measuring"
    rank.ballot.works = False  # the process group is another one
    run(compiled, 2)
    assert (selection(compiled).state, selection(compiled).reason) == ("waiting", ranks.not_ready())
    rank.ballot.works = True
    run(compiled, 400)
    assert selection(compiled).reason == ranks.NOT_YET


@pytest.mark.parametrize(
    ("plain", "costs", "kept"),
    [
        (50e-6, {"none": 60.0, "copy": 16.0}, "copy"),
        (50e-6, {"none": 15.0, "copy": 16.0}, "copy"),
        (50e-6, {"none": 15.0, "copy": 200.0}, "none"),
        (5e-6, {"none": 60.0, "copy": 16.0, "indirection": 18.0}, "copy"),
        (5e-6, {"none": 15.0, "copy": 16.0}, "none"),
    ],
)
def test_what_is_kept_is_the_fastest_on_the_slowest_rank(
    make: Any, rank: Rank, plain: float, costs: dict[str, float], kept: str
) -> None:
    _, compiled = make(plain=plain)
    run(compiled, 400)
    rank.vote(["a" * 64], **costs)
    run(compiled, 80)
    report = selection(compiled)
    assert (report.state, report.kept) == ("decided", kept)
    assert report.reason.startswith("2 ranks agreed on it: ")
    assert report.not_stored == "it suits all ranks, and not this one alone"
    own = compiled.functions[0]
    assert (own.without_graph is not None, own.copies_inputs) == (kept == "none", kept == "copy")


def test_a_rank_that_does_not_select_makes_all_select_nothing(make: Any, rank: Rank) -> None:
    _, compiled = make(plain=5e-6)
    run(compiled, 400)
    rank.vote(["a" * 64], NO, "several threads call it")
    run(compiled, 80)
    report = selection(compiled)
    assert (report.state, report.reason) == ("off", "rank 1 does not select: several threads call it")
    assert compiled.functions[0].without_graph is None


def test_a_rank_that_cannot_measure_tells_the_others(
    make: Any, rank: Rank, cuda_on_cpu: CudaOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, compiled = make(plain=5e-6)
    run(compiled, 6)
    monkeypatch.setattr(cuda_on_cpu.tools, "free_bytes", lambda: 64)
    run(compiled, 100)
    assert selection(compiled).state == "off"
    rank.vote(["a" * 64], none=1.0)
    (topic,) = rank.topics.values()
    decision = rank.other.decision(topic)
    assert decision is not None
    assert (decision.choice, decision.by) == (NO, 0)
    assert decision.reason.startswith("memory:")


def test_a_vote_that_changes_is_followed(make: Any, rank: Rank) -> None:
    """Circumstances changed on the other rank, and it measured again."""
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    rank.vote(["a" * 64], none=60.0, copy=16.0)
    run(compiled, 80)
    assert selection(compiled).kept == "copy"
    rank.vote(["a" * 64], none=15.0, copy=500.0)
    run(compiled, 300)
    assert selection(compiled).kept == "none"
    rank.vote(["a" * 64], NO, "its graphs are gone")
    run(compiled, 300)
    assert (selection(compiled).state, selection(compiled).kept) == ("off", None)


def test_a_verdict_of_one_alone_is_its_vote_and_nothing_is_measured(make: Any, rank: Rank) -> None:
    rank.count = 1
    _, compiled = make(plain=5e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "none"
    rank.count = 2
    for mode in ("stored", "measure"):
        prices, again = make(mode=mode)
        timed = prices.timed
        run(again, 30)
        assert selection(again).reason == ranks.NOT_YET
        rank.topics.clear()
        rank.vote(["a" * 64], none=15.0, copy=16.0)
        run(again, 80)
        assert (selection(again).kept, prices.timed) == ("none", timed)


@pytest.mark.parametrize("change", ["another vote", "inputs rest"])
def test_what_ranks_agreed_on_by_stored_verdicts_is_looked_at(make: Any, rank: Rank, change: str) -> None:
    rank.count = 1
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "copy"
    rank.count = 2
    _, again = make()
    run(again, 30)
    rank.vote(["a" * 64], none=60.0, copy=16.0)
    run(again, 80)
    assert (selection(again).state, selection(again).source) == ("decided", "stored")
    if change == "another vote":
        rank.vote(["a" * 64], NO, "it ran out of memory")
    run(again, 2 * LOOK_EVERY + 4 * WINDOW, moving=change != "inputs rest")
    report = selection(again)
    if change == "another vote":
        assert (report.state, report.reason) == ("off", "rank 1 does not select: it ran out of memory")
    else:
        assert (report.state, report.source) != ("decided", "stored"), "inputs moved when it was stored"


@pytest.mark.parametrize("mode", ["measure", "stored"])
def test_a_rank_whose_inputs_rest_now_votes_by_the_verdict_for_that(make: Any, rank: Rank, mode: str) -> None:
    rank.count = 1
    for moving, plain in ((False, 5e-6), (True, 50e-6)):
        prices, compiled = make(plain=plain)
        run(compiled, 900, moving=moving)
    rank.count = 2
    timed = prices.timed
    _, again = make(mode=mode)
    run(again, 30)
    rank.vote(["a" * 64], none=60.0, copy=16.0)
    run(again, 80)
    assert (selection(again).state, selection(again).kept) == ("decided", "copy")
    run(again, 2 * LOOK_EVERY + 4 * WINDOW, moving=False)
    assert again.functions[0].member.group.stored.kept == "none", "what this rank voted by"
    rank.vote(["a" * 64], none=15.0, copy=16.0)
    run(again, 80, moving=False)
    assert (selection(again).state, prices.timed) == ("decided", timed)


def test_without_a_stored_verdict_the_option_stored_selects_nothing_on_any_rank(make: Any, rank: Rank) -> None:
    _, compiled = make(mode="stored", digest="c" * 64)
    run(compiled, 60)
    assert (selection(compiled).state, selection(compiled).reason) == ("off", "there is no stored verdict for it")
    rank.vote(["c" * 64], none=1.0)
    (topic,) = rank.topics.values()
    decision = rank.other.decision(topic)
    assert decision is not None and decision.choice == NO


def test_a_verdict_of_one_alone_ends_when_others_come_and_that_of_all_when_they_go(make: Any, rank: Rank) -> None:
    rank.count = 1
    _, compiled = make(plain=50e-6)
    run(compiled, 400)
    assert selection(compiled).kept == "copy"
    rank.count = 2
    run(compiled, 2 * LOOK_EVERY + 2 * WINDOW)  # the first look may be over
    assert selection(compiled).state != "decided"
    run(compiled, 500)
    assert selection(compiled).reason == ranks.NOT_YET
    rank.ballot.close("the process group is gone")
    rank.count = 1
    run(compiled, 100)
    assert (selection(compiled).state, selection(compiled).kept) == ("decided", "copy")


@pytest.mark.parametrize("plain", [5e-6, 50e-6])
def test_a_stored_verdict_on_several_functions_ends_for_all_of_them_when_others_come(
    make: Any, rank: Rank, cuda_on_cpu: CudaOnCpu, plain: float
) -> None:
    """Of those without graphs it is not known that they belong together, and only one of them is known to lead."""
    rank.count = 1
    _, first, second = pair(make, cuda_on_cpu, plain=plain)
    run_pair(first, second, 500)
    _, first, second = pair(make, cuda_on_cpu, plain=plain)
    run_pair(first, second, 30)
    assert [(selection(one).state, selection(one).source) for one in (first, second)] == [("decided", "stored")] * 2
    rank.count = 2
    run_pair(first, second, 2 * LOOK_EVERY + 4 * WINDOW)
    assert [(selection(one).state, selection(one).reason) for one in (first, second)] == [
        ("waiting", ranks.NOT_YET)
    ] * 2
    assert len({selection(one).group for one in (first, second)}) == 1


def test_others_that_come_are_seen_though_the_leader_is_gone(make: Any, rank: Rank, cuda_on_cpu: CudaOnCpu) -> None:
    rank.count = 1
    _, first, second = pair(make, cuda_on_cpu, plain=50e-6)
    run_pair(first, second, 500)
    assert selection(second).state == "decided"
    first.functions[0].member.leave()
    rank.count = 2
    run(second, 4 * LOOK_EVERY)
    assert selection(second).state != "decided"


def test_a_function_that_holds_collectives_is_not_selected_for(make: Any, rank: Rank, cuda_on_cpu: CudaOnCpu) -> None:
    code = GeneratedCode("it takes part in a collective", collective=True, collectives=("all_reduce('sum', '0')",))
    prices, compiled = make(model=Model(cuda_on_cpu, code=code))
    run(compiled, 100)
    report = selection(compiled)
    assert report.state == "off"
    assert "none can measure for itself how long its collectives take" in report.reason
    assert prices.timed == 0


def test_a_function_without_source_has_no_name_on_other_ranks(make: Any, rank: Rank) -> None:
    _, compiled = make(digest=None)
    run(compiled, 400)
    assert (selection(compiled).state, selection(compiled).reason) == ("off", ranks.NO_NAME)


RATIOS = st.floats(0.3, 3.0)


@st.composite
def own_verdicts(draw: st.DrawFn) -> tuple[str, list[Compared]]:
    """A rank's verdict as `decide` leaves it: no simpler one is as fast, and no other is faster by 1.25 %."""
    kept = draw(st.sampled_from(CANDIDATES))
    found = []
    for other in CANDIDATES:
        if other != kept:
            simpler = CANDIDATES.index(other) < CANDIDATES.index(kept)
            ratio = draw(st.floats(1.02, 3.0) if simpler else st.floats(0.99, 3.0))
            wide = draw(st.booleans())
            low, high = (None, None) if wide else (max(ratio * 0.99, 1.001 if simpler else 0.9), ratio * 1.01)
            found.append(Compared(candidate=other, ratio=ratio, low=low, high=high, rounds=12))
    return kept, found


@given(own_verdicts(), st.integers(2, 5))
def test_ranks_that_decide_alike_for_themselves_decide_so_together(own: tuple[str, list[Compared]], size: int) -> None:
    kept, comparisons = own
    costs = ranks.costs_us(kept, CANDIDATES, comparisons, 20e-6)
    assert set(costs) == set(CANDIDATES)
    topic = Topic(Question.FASTEST, "f", tuple(range(size)))
    found = decide(topic, {number: Vote(YES, "", costs) for number in range(size)})
    assert found is not None and found.choice == kept


@pytest.mark.parametrize(("low", "high", "chosen"), [(1.47, 1.5, "copy"), (1.1, 1.2, "indirection")])
def test_of_two_that_a_rank_does_not_keep_the_simpler_wins_unless_they_are_told_apart(
    low: float, high: float, chosen: str
) -> None:
    """One rank keeps no graph, which takes three times as long on the other: what noise says of the graphs decided."""
    own = {
        "none": [
            Compared(candidate="copy", ratio=1.51, low=1.48, high=1.53, rounds=12),
            Compared(candidate="indirection", ratio=(low + high) / 2, low=low, high=high, rounds=12),
        ],
        "copy": [
            Compared(candidate="none", ratio=3.0, low=2.9, high=3.1, rounds=12),
            Compared(candidate="indirection", ratio=1.0, low=0.99, high=1.01, rounds=12),
        ],
    }
    votes = {
        number: Vote(YES, "", ranks.costs_us(kept, CANDIDATES, comparisons, 20e-6))
        for number, (kept, comparisons) in enumerate(own.items())
    }
    found = decide(Topic(Question.FASTEST, "f", (0, 1)), votes)
    assert found is not None and found.choice == chosen


def test_equal_ways_keep_the_simplest_on_all_ranks() -> None:
    """Intervals that reach over 1 say that nothing was told apart, whatever the estimates are."""
    same = [Compared(candidate=name, ratio=0.995, low=0.98, high=1.01, rounds=12) for name in ("copy", "indirection")]
    costs = ranks.costs_us("none", CANDIDATES, same, 20e-6)
    exactly = ranks.costs_us("none", CANDIDATES, [one.model_copy(update={"high": 1.0}) for one in same], 20e-6)
    topic = Topic(Question.FASTEST, "f", (0, 1))
    found = decide(topic, {0: Vote(YES, "", costs), 1: Vote(YES, "", exactly)})
    assert found is not None and found.choice == "none"


def test_code_is_named_alike_on_all_devices(tmp_path: Path) -> None:
    source = """
def call(args):
    with torch.cuda._DeviceGuard({0}):
        torch.cuda.set_device({0})
        buf0 = empty_strided_cuda((64, 3), (3, 1), torch.float32)
        stream{0} = get_raw_stream({0})
        kernel.run(args, 192, stream=stream{0})
        return assert_size_stride(buf0.to('cuda:{0}'), DeviceProperties(type='cuda', index={0}, cc=90))
"""
    digests, others = [], []
    for device in (0, 7):
        path = tmp_path / f"code{device}.py"
        path.write_text(source.replace("{0}", str(device)))
        call = runpy.run_path(str(path))["call"]
        digests.append(graph_digest(call, (), (), ranks.without_device))
        others.append(graph_digest(call, (), ()))
    assert digests[0] == digests[1] is not None
    assert others[0] != others[1], "stored verdicts are of one device's code"
    assert ranks.without_device("empty_strided_cuda((64, 3)") == "empty_strided_cuda((64, 3)"


PROGRAM = """
import itertools, json, os, time
from pathlib import Path
import pytest, torch.distributed as distributed
from rank_ends import leave
from selection_on_cpu import maker, run, selection
import cuda_on_cpu as harness

patch = pytest.MonkeyPatch()
cuda = next(playing := harness.played_by_the_cpu(patch))
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
distributed.init_process_group("gloo", init_method=os.environ["METHOD"], rank=rank, world_size=size)
_, compiled = maker(cuda, patch, Path(os.environ["FOLDER"]) / str(rank))(plain=[5e-6, 50e-6][rank])
ends = time.monotonic() + 60
while selection(compiled).state not in ("decided", "off") if compiled.functions else True:
    assert time.monotonic() < ends, selection(compiled)
    run(compiled, 20)
own = selection(compiled)
print("FOUND " + json.dumps({"kept": own.kept, "reason": own.reason, "state": own.state}), flush=True)
distributed.barrier()
leave()
"""


def test_two_processes_keep_the_same(tmp_path: Path) -> None:
    """One would keep no graph for itself; on the other that takes three times as long."""
    program = RankProgram(tmp_path, PROGRAM, 2, METHOD=f"file://{tmp_path}/store", FOLDER=str(tmp_path))
    found = []
    for ended in program.ended(90):
        assert ended.code == 0, ended.output[-3000:]
        found.append(json.loads(ended.output.rpartition("FOUND ")[2].splitlines()[0]))
    assert [one["state"] for one in found] == ["decided", "decided"]
    assert [one["kept"] for one in found] == ["copy", "copy"]
    assert all(one["reason"].startswith("2 ranks agreed on it: ") for one in found)


def test_a_program_without_selection_has_no_votes(rank: Rank, cuda_on_cpu: CudaOnCpu) -> None:
    run(Compiled(Model(cuda_on_cpu)), 20)
    assert rank.exchange.posts == 0
