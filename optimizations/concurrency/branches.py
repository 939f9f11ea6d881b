"""Time one recorded graph as the captured chain against the same graph with branches.

1. *waiting*: nothing happens until the recording has been replayed a few times (its session decides when).
2. *prepare*: the captured graph is read, and its launches are ordered. If no two of them may run concurrently, the
   chain is kept.
3. *race*: the chain and the branches each run some of the program's own calls, timed by events that nothing waits for.
   The branches are kept if they are clearly faster, else the chain's edges are restored.

Both orders are correct, so a race that ends early leaves a correct graph. Everything that changes nodes of the graph
(inputs read in place) comes after the race, because the graph is instantiated again whenever its edges change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from optimizations.concurrency.edges import EdgesRefused, GraphEdges
from optimizations.concurrency.hidden_memory import with_hidden_memory, with_moving_inputs
from optimizations.concurrency.launch_log import IS_NARROW, LaunchLog
from optimizations.concurrency.order import LaunchOrder, Span, order_launches
from optimizations.graph.driver import CudaCallFailed
from optimizations.graph.records import CapturedGraph, Node
from optimizations.race import Race
from optimizations.report.concurrency import ConcurrencyReport, OrderedLaunch
from optimizations.stack_trace import one_line
from optimizations.torch_internals.generated_modules import line_of, source_line

CHAIN, BRANCHES = "chain", "branches"

Result = TypeVar("Result")


class Graph(Protocol):
    """Define the methods used of a `torch.cuda.CUDAGraph` with `keep_graph=True`."""

    def raw_cuda_graph(self) -> int: ...

    def instantiate(self) -> None: ...


class Branches:
    """Choose between a chain and branches for one recorded graph, as the module describes.

    Args:
        log: the launches of the capture.
        graph: the captured graph, instantiated as a chain or not yet.
        driver: the module `cuda.bindings.driver`.
        race: creates the race between these alternatives.
        mark: records an event on the stream of the calls.

    Attributes:
        unusable: why the graph must no longer be launched; None if it may be.
        is_narrow: whether the graph stays a chain because of its longest path (`LaunchLog.is_narrow`).
    """

    def __init__(
        self,
        log: LaunchLog,
        graph: Graph,
        driver: Any,
        race: Callable[[Sequence[str]], Race],
        mark: Callable[[], Any],
    ) -> None:
        self._log: LaunchLog | None = log
        self.is_narrow = log.is_narrow
        self._kept_bytes = log.kept_bytes
        self._graph = graph
        self._driver = driver
        self._make_race = race
        self._mark = mark
        self._launched: tuple[Any, Any] | None = None
        self._race: Race | None = None
        self._edges: GraphEdges | None = None
        self._order: LaunchOrder | None = None
        self._captured: CapturedGraph | None = None
        self._times: dict[str, float] = {}
        self._decision: str | None = None
        self._reason = "it has not been replayed often enough yet"
        self.unusable: str | None = None

    @property
    def pending(self) -> bool:
        """Return whether the choice is not made yet."""
        return self._decision is None

    @property
    def is_racing(self) -> bool:
        """Return whether calls must use `run` now."""
        return self._race is not None

    def prepare(self, captured: CapturedGraph, pool: Iterable[Span]) -> None:
        """Order the launches and begin the race; keep the chain if no launches, or too few, can overlap.

        Args:
            captured: the graph as records.
            pool: the segments of its memory pool.

        Raises:
            CudaCallFailed: the driver does not give the graph's edges.
        """
        log, self._log = self._log, None
        if log is None or not self.pending:
            return
        launches = [one.launch for one in log.logged]
        if sum(one.count for one in launches) != len(captured.nodes):
            self._finish(CHAIN, "not all nodes of the graph were noted when it was captured")
            return
        if not _is_chain(captured):
            self._finish(CHAIN, "it was captured from several streams")
            return
        launches = with_hidden_memory(log.logged, captured, pool, log.never_freed, log.inputs, log.lifetimes)
        self._order = order_launches(with_moving_inputs(log.logged, launches, log.inputs))
        self._captured = captured
        if self._order.branches < 2:
            self._finish(CHAIN, "each kernel needs the result of the one before it")
            return
        if self.is_narrow:
            self._finish(CHAIN, IS_NARROW)
            return
        try:
            self._edges = GraphEdges(
                self._driver, self._driver.CUgraph(self._graph.raw_cuda_graph()), self._order.node_edges()
            )
        except EdgesRefused as error:
            self._finish(CHAIN, str(error))
            return
        self._race = self._make_race((CHAIN, BRANCHES))
        self._reason = "the chain and the branches are being timed on the program's calls"

    def run(self, replay: Callable[[], Result]) -> Result:
        """Run one of the program's calls by the race's current alternative."""
        race = self._race
        if race is None:
            return replay()

        def call(alternative: str) -> tuple[Result, tuple[Any, Any] | None]:
            is_switched, self._launched = self._use(alternative), None
            result = replay()
            return result, self._launched if is_switched else None

        result = race.run(call)
        if race.winner is not None and self._race is not None:
            self._decide(race)
        return result

    def launch(self, launch: Callable[[], None]) -> None:
        """Launch the graph for a call of `run`. Only the launch is timed, without the CPU work around it."""
        start = self._mark()
        launch()
        self._launched = start, self._mark()

    def stop(self, reason: str) -> None:
        """Leave the graph as it is now. Both orders are right."""
        if self.pending:
            branched = self._edges is not None and self._edges.is_branched
            self._finish(BRANCHES if branched else CHAIN, reason)

    def report(self) -> ConcurrencyReport:
        """Return the report of the graph."""
        decision: Any = self._decision or ("measuring" if self.is_racing else "waiting")
        times = self._race.median_us if self._race is not None else self._times
        order, captured = self._order, self._captured
        if order is None or captured is None:
            return ConcurrencyReport(decision, self._reason, kept_bytes=self._kept_bytes)
        return ConcurrencyReport(
            decision,
            self._reason,
            launches=len(order.launches),
            barriers=sum(one.barrier is not None for one in order.launches),
            longest_path=1 + max(order.levels(), default=-1),
            width=order.branches,
            chain_us=times.get(CHAIN),
            branches_us=times.get(BRANCHES),
            kept_bytes=self._kept_bytes,
            order=_ordered(order, captured),
        )

    def _use(self, alternative: str) -> bool:
        """Return whether the graph runs that way now."""
        edges = self._edges
        if edges is None or not self.pending:
            return False
        branched = alternative == BRANCHES
        if edges.is_branched == branched:
            return True
        self.unusable = "its edges were changed, and it was not instantiated again"
        try:
            edges.use(branched=branched)
        except EdgesRefused as error:
            self.unusable = None if error.is_whole else str(error)
            self._finish(BRANCHES if edges.is_branched else CHAIN, str(error))
            return False
        try:
            self._graph.instantiate()
        except (CudaCallFailed, RuntimeError) as error:
            self._back_to_the_chain(one_line(error))
            return False
        self.unusable = None
        return True

    def _back_to_the_chain(self, reason: str) -> None:
        edges = self._edges
        assert edges is not None
        try:
            edges.use(branched=False)
            self._graph.instantiate()
        except (EdgesRefused, CudaCallFailed, RuntimeError) as error:
            self.unusable = one_line(error)
        else:
            self.unusable = None
        self._finish(CHAIN, reason)

    def _decide(self, race: Race) -> None:
        times = race.median_us
        told = f"{times.get(BRANCHES, 0):.1f} us with branches and {times.get(CHAIN, 0):.1f} us as a chain"
        if race.winner == BRANCHES and self._use(BRANCHES):
            self._finish(BRANCHES, f"a replay takes {told}")
        elif self.pending and self._use(CHAIN):
            self._finish(CHAIN, f"branches are not 3 % faster: a replay takes {told}")

    def _finish(self, decision: str, reason: str) -> None:
        if self._race is not None:
            self._times = dict(self._race.median_us)
        self._decision, self._reason = decision, reason
        self._race = self._edges = self._log = None


def _is_chain(captured: CapturedGraph) -> bool:
    """Return whether each node waits for the one before it.

    Work on several streams may be ordered by events, which memory accesses do not show.
    """
    edges = {(edge.source, edge.target) for edge in captured.edges}
    return all((index, index + 1) in edges for index in range(len(captured.nodes) - 1))


def _ordered(order: LaunchOrder, captured: CapturedGraph) -> tuple[OrderedLaunch, ...]:
    """Return the launches as they are reported."""
    return tuple(
        OrderedLaunch(
            launch.name,
            tuple(map(_name, captured.nodes[launch.first : launch.last + 1])),
            waits,
            launch.barrier,
            source_line(*line_of(*launch.place)) if launch.place is not None else None,
        )
        for launch, waits in zip(order.launches, order.waits_for, strict=True)
    )


def _name(node: Node) -> str:
    name: str | None = getattr(node, "name", None)
    return name or str(getattr(node, "type_name", node.kind)).lower().replace("_", " ")
