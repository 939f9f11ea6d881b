"""Make the papers' figures and tables from results alone: a registry, and one module for each kind."""

from __future__ import annotations

from collections.abc import Iterable

from suite.measure.modes import (
    DEFAULT_MODE,
    GRAPH_MODE,
    INDIRECTION_MODE,
    LANES_MODE,
    LEAN_MODE,
    PLACEMENT_MODE,
    UNPARTITIONED_MODE,
)
from suite.report.paper import costs, counts, nanogpt, speedups
from suite.report.paper.exhibit import Exhibit, Made, Results
from suite.results.errors import WrongUse, nearest

_MOVED = (
    f"The rewritten program is the variant {speedups.REWRITTEN} where a workload has one (measured in another group, "
    "so drift is in the ratio). The third bar is Encore's placement over "
    f"{UNPARTITIONED_MODE} with the program as it is. MMC is not in the paper's figure."
)
_UNIT = (
    f"Where mode {DEFAULT_MODE} timed its graphs, they are counted: each group that it judged together, timed on its "
    f"own calls ({GRAPH_MODE}: replayed as stock does, its inputs copied). Otherwise each workload of the run counts "
    "once. A workload measured under --tp too (@tp1: the same program on one GPU) counts once. Names of graphs are "
    "those of workloads, with the number of the group."
)
_COUNTED = f"The paper counts CUDA graphs. {_UNIT}"
_MIXED = f"Counted are workloads of which several groups of graphs were timed, by the estimates of their calls. {_UNIT}"
_CLASSED = f"{_COUNTED} Faster and slower mean by more than 2 %, by the estimate, whatever its interval."
_SERVED = (
    f"Counted are functions that graphs can be recorded of, in mode {DEFAULT_MODE}: enabled are those whose calls a "
    "graph serves, indirected those of them that read inputs in place, disabled those that are faster without, "
    "undecided those that are served as without selection."
)
_LATENCY = (
    "From encore micro indirection: time of one replay of a graph whose inputs have all moved, against their number; "
    "the paper shows the added latency of its two ways alone, and says that the prelude exceeds 10 \N{MICRO SIGN}s at "
    "many parameters. ptx is the rewritten kernel of release 0.1, copy stock's copy of the inputs, host sets the "
    "parameters of the instantiated graph."
)
_OVERALL = (
    f"The paper's CUDA graphs take a whole FX graph or nothing: {UNPARTITIONED_MODE}; {GRAPH_MODE} is today's stock. "
    "Inputs rotate over several addresses here, in the papers they stayed where they were. Bars of the papers' figures "
    "carry no numbers: a published value is here only where the text gives it."
)
_ADDED = (
    "Each step is its own mode: placement adds to stock's whole-graph capture, indirection to placement, "
    "lean replay to indirection, encore (which chooses) to that. Published values are those that the text gives, of a "
    "step over the one before."
)
_SPLIT = (
    "Times are of the slowest rank, sample by sample, all ranks having started together; the paper takes the largest "
    "of the ranks' medians. Which modules of DALLE2, ST and VM the paper splits is not published. Its bars carry no "
    "numbers, and of which bars the text's are is not recorded here. DECODER is of no paper."
)
_COMPILE = (
    f"Time is from the first call to the end of warm-up, recordings included, over that of {UNPARTITIONED_MODE}. It is "
    "one measurement per cell and has no interval. The paper's caches were cold: only where both modes' were, there is "
    "a bar. cached: the same ratio where the kernels had been compiled before."
)
_WORKLOADS = (
    "Models are built with random weights from the libraries of today, or written for the suite; inputs are drawn from "
    "a seed. Where a library changed a program, the variant published keeps the published one."
)
_COVERAGE = (
    f"The paper's stock is {UNPARTITIONED_MODE}. A copy of inputs that is a kernel counts as one outside of graphs, in "
    "the papers too. Today's kernels are others and fewer: only the shares can be set side by side."
)
_BYTES = (
    "Before is the paper's placement without indirection, after its pointers; in the suite placement and indirection. "
    "Library versions decide which outputs take part in differentiation, and with them what training copies. Counted "
    "where the copy is made; the papers' training includes the optimizer, the suite's does not unless asked."
)
_SHARE = (
    f"Measured is what indirection takes away: the host time of {PLACEMENT_MODE} that {INDIRECTION_MODE} does not "
    "need, in percent, with its 95 % interval; below 0 it costs more than it saves. The paper gives the share of "
    "copies for two workloads."
)
_MEMORY = (
    f"Peak bytes that PyTorch's allocator has reserved, over those of {GRAPH_MODE}. The paper gives the mean while "
    "compiling and the best case while replaying. Programs: those of tests/gpu/programs.py that both ran."
)
_CONCURRENCY = (
    f"No paper has this figure. {LANES_MODE}: whole iterations of this mode over {LEAN_MODE}, which has chains. "
    f"{speedups.GRAPHS.capitalize()}: device time of all graphs as chains over all of them with branches, in one "
    "process, without an interval (tests/gpu/concurrency_proof.py). Encore keeps the chain where branches are not 3 % "
    "faster. Bits that vary in the chain itself count as its own within the chain's spread."
)
_OVERHEAD = (
    f"Measured as what {INDIRECTION_MODE} saves of {PLACEMENT_MODE}'s time beyond its CUDA graphs alone (the metric "
    "floor), one iteration waited for at a time. Below 0, and above 100, other differences of the two modes outweigh "
    "the copies."
)
_DECODE = (
    f"The article's graph is mode {nanogpt.BY_HAND}; the others are compiled. A step is the time between two CUDA "
    "events around it (median over all steps), end to end the generation with its prompt. Over eager, the path with a "
    f"cache, and over {GRAPH_MODE}: how many times faster; end to end with the interval of the rows' processes. The "
    "article's own two tables do not agree everywhere: 0.99 and 1.21 end to end for one length."
)
_COSTS = (
    f"Of the {nanogpt.AMORTISED.name.replace('_', ' ')}, medians. Warm-up: until the first generation is through, "
    "compiling or capturing included. Tokens per second are of whole generations, prompt included, warm-up not. Paid "
    "for: generations until what the mode saves over eager makes up for its longer warm-up. The article gives none."
)
_UNKNOWN = "they are not known here."
_OVER = "stock CUDA graphs and {} over PyTorch 2 without graphs"
_COVERED, _COPIED = "coverage by CUDA graphs, before and after placement", "bytes copied, before and after indirection"
_HELP, _EACH = "how often CUDA graphs help", "what each optimisation adds"
_ENABLED, _LOCAL = "graphs that serve calls, and those that do not", "what moving a few tensors to the GPU is worth"

_GRACE = (
    ("fig3", "Fig. 3", _LOCAL, _MOVED, speedups.rewritten),
    ("fig4", "Fig. 4a", f"{_HELP} and hurt", _COUNTED, counts.distribution),
    ("fig4b", "Fig. 4b", "applications whose graphs help and hurt", _MIXED, counts.mixed),
    ("fig9", "Fig. 9", "latency of the ways to indirection", _LATENCY, costs.latency),
    ("fig10", "Fig. 10", _OVER.format("GraCE"), _OVERALL, speedups.overall),
    ("fig11", "Fig. 11", _EACH, _ADDED, speedups.steps),
    ("fig12", "Fig. 12", "tensor parallelism over one, two and four GPUs", _SPLIT, speedups.split),
    ("fig13", "Fig. 13", "compile time over that of stock CUDA graphs", _COMPILE, costs.compile_time),
    ("table1", "Table 1", "workloads", _WORKLOADS, counts.workloads),
    ("table2", "Table 2", _COVERED, _COVERAGE, counts.coverage),
    ("table3", "Table 3", _COPIED, _BYTES, counts.copies),
    ("memory", "section 5.3", "peak memory over that of stock CUDA graphs", _MEMORY, costs.memory),
    ("copy-share", "section 2.3.2", "what copying of inputs costs", _SHARE, counts.copy_share),
    ("concurrency", "workloads", "independent kernels at the same time", _CONCURRENCY, speedups.concurrency),
    ("graphs-enabled", "evaluation", "CUDA graphs that serve calls", _SERVED, counts.served),
)
_PYGRAPH = (
    ("fig2", "Fig. 2", _HELP, _CLASSED, counts.classes),
    ("fig7", "Fig. 7", _OVER.format("PyGraph"), _OVERALL, speedups.overall),
    ("fig8", "Fig. 8", _EACH, f"{_ADDED} The paper's text prints five values; {_UNKNOWN}", speedups.steps),
    ("table1", "Table 1", "workloads", _WORKLOADS, counts.workloads),
    ("table2", "Table 2", _COVERED, _COVERAGE, counts.coverage),
    ("table3", "Table 3", _COPIED, f"{_BYTES} The paper prints 40 values; {_UNKNOWN}", counts.copies),
    ("table4", "Table 4", _ENABLED, f"{_SERVED} The table's own counts are not known here.", counts.served),
    ("section3", "section 3", "what a graph's overhead is made of", _OVERHEAD, counts.overhead),
)
_NANOGPT = (
    ("table1", "first table", "time of a decode step", _DECODE, nanogpt.steps),
    ("table2", "second table", "speed-up by generated tokens", _DECODE, nanogpt.sweep),
    ("costs", "further numbers", "tokens per second, and what a mode costs first", _COSTS, nanogpt.costs),
)
"""Exhibits in the order of the report: name, number in the paper, what it shows, what differs, and how it is made."""

EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit
    for source, listed in (("grace", _GRACE), ("pygraph", _PYGRAPH), ("nanogpt", _NANOGPT))
    for name, number, shows, differs, content in listed
    for full_name in (name if source == "grace" else f"{source}-{name}",)
    for exhibit in (
        Exhibit(full_name, source, number, shows, differs, content, needs_runs=content is not counts.workloads),
    )
}
"""Exhibits by name: GraCE's are called as in the paper ("fig10"), others have the source in front ("pygraph-fig7")."""

__all__ = ["EXHIBITS", "Exhibit", "Made", "Results", "find_exhibits"]


def find_exhibits(names: Iterable[str]) -> tuple[Exhibit, ...]:
    """Return the exhibits of these names, each once, in the order of the registry.

    Raises:
        WrongUse: a name is unknown; the message lists the nearest ones.
    """
    wanted = [name.lower() for name in names]
    for name in wanted:
        if name not in EXHIBITS:
            raise WrongUse(f"--only {name!r}: {nearest(name, EXHIBITS)}")
    return tuple(exhibit for exhibit in EXHIBITS.values() if exhibit.name in wanted)
