"""Counts and reasons of what was not captured, from Inductor's own decisions."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import torch

from optimizations import torch_internals
from optimizations.torch_internals.outcome import NO_CUDA_WORK
from suite.measure.compile_times import restart_timers
from suite.measure.graphs import GraphLog, recorded_graphs
from suite.measure.iteration import callable_for
from suite.measure.modes import MODES

FRAME = 'File "/x/site-packages/mine/net.py", line 12, in forward\n    y = x + self.table\n'
LINE = "mine/net.py:12 in forward: y = x + self.table"


def reasons(log: GraphLog) -> list[tuple[str, str | None, int]]:
    return [(each.reason, each.source_line, each.count) for each in log.counts(0).not_captured]


def test_mutated_inputs_are_read_from_pytorchs_own_message():
    utils = torch_internals.cudagraph_utils
    placeholder = utils.PlaceholderInfo("arg0_1", None, [], mutating_use_stack_trace=FRAME)
    log = GraphLog(wants_cuda_graphs=True)
    with log.recording():
        utils.log_cudagraph_skip_and_bump_counter(utils.get_mutation_stack_trace([placeholder], [0]))
        utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to told elsewhere")
    utils.log_cudagraph_skip_and_bump_counter(utils.get_mutation_stack_trace([placeholder], [0]))
    assert reasons(log) == [("mutated inputs (1 instances)", LINE, 1)]


def scaled(x: torch.Tensor) -> torch.Tensor:
    return (x * 3.0).relu()  # the line that the reasons below must name


@torch.compiler.disable
def breaks_the_graph() -> None:
    pass


class Scale(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = scaled(x)
        breaks_the_graph()
        return y - 1.0


def test_cuda_graph_compilation_is_reported_with_reasons():
    """Real Inductor on the CPU: every node is left out, and PyTorch says so at the same places as on a GPU."""
    stock = torch_internals.CompiledFxGraph.post_compile, torch_internals.graph_partition
    handlers = list(torch_internals.cudagraph_utils.cudagraphs_log.handlers)
    log = GraphLog(wants_cuda_graphs=True)
    restart_timers()
    with torch_internals.inductor_config.patch(force_disable_caches=True), log.recording(), torch.no_grad():
        call = callable_for(MODES["graph"], Scale())
        torch.testing.assert_close(call(torch.ones(4)), torch.full((4,), 2.0))
    counts = log.counts(0)
    assert (counts.fx_graphs, counts.graph_breaks, counts.partitions) == (2, 1, 0)
    told = {(each.reason, each.source_line) for each in counts.not_captured}
    assert (NO_CUDA_WORK, None) in told
    assert any(
        reason == "cpu ops" and line.startswith("tests/suite/measure/test_graphs.py:") and "(x * 3.0).relu()" in line
        for reason, line in told
        if line
    )
    assert stock == (torch_internals.CompiledFxGraph.post_compile, torch_internals.graph_partition)
    assert torch_internals.cudagraph_utils.cudagraphs_log.handlers == handlers
    torch.compiler.reset()


def test_mode_without_cuda_graphs_misses_none():
    log = GraphLog(wants_cuda_graphs=False)
    restart_timers()
    stock = torch_internals.CompiledFxGraph.post_compile
    with log.recording(), torch.no_grad():
        assert torch_internals.CompiledFxGraph.post_compile is stock
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    counts = log.counts(0)
    assert (counts.fx_graphs, counts.partitions, counts.not_captured) == (1, None, [])
    torch.compiler.reset()


def test_recordings_are_found_in_all_branches_of_the_trees(monkeypatch):
    def node(name: str, *children: SimpleNamespace) -> SimpleNamespace:
        by_function = defaultdict(list)
        for number, child in enumerate(children):
            by_function[number % 2].append(child)
        return SimpleNamespace(graph=name, children=by_function)

    roots = [node("a", node("b", node("c")), node("d"), node("e")), node("f")]
    manager = SimpleNamespace(get_roots=lambda: iter(roots))
    monkeypatch.setattr(torch_internals.cudagraph_trees, "get_manager", lambda index, create: manager)
    assert sorted(recorded_graphs(torch.device("cuda", 0))) == ["a", "b", "c", "d", "e", "f"]
    assert recorded_graphs(torch.device("cpu")) == []
    monkeypatch.setattr(torch_internals.cudagraph_trees, "get_manager", lambda index, create: None)
    assert recorded_graphs(torch.device("cuda", 0)) == []
