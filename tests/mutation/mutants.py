"""Small changes to source files that named tests must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Named:
    """A change that once survived. `old` stands in the file once; `tests` are what must notice it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def text(self, repository: Path = REPOSITORY) -> str:
        """Return the changed file.

        Raises:
            ValueError: the file does not hold `old` exactly once: the list is to be brought up to date.
        """
        text = (repository / self.file).read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} holds {self.old!r} {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


NAMED = (
    Named("suite/results/stats.py", "variance = max(own, ", "variance = (", ("tests/suite/results/test_stats.py",)),
    Named("suite/results/stats.py", "if beyond_chance <= 0:", "if True:", ("tests/suite/results/test_stats.py",)),
    Named("suite/results/stats.py", "stdtrit(self.freedom, (1 + confidence) / 2)", "stdtrit(1e9, (1 + confidence) / 2)",
          ("tests/suite/results/test_stats.py",)),
    Named("suite/report/compare.py", "return stats.spread_of(by_process, len(modes))", "return stats.UNKNOWN",
          ("tests/suite/report/test_compare.py",)),
    Named("suite/run/group.py", "return  # they will be measured in smaller groups", "pass  # they will be measured in",
          ("tests/suite/run/test_runner.py",)),
    Named("suite/results/stats.py", "TRIMMED = (0.1, 0.5)", "TRIMMED = (0.1, 0.9)",
          ("tests/suite/results/test_stats.py",)),
    Named("suite/results/stats.py", "MINIMUM_PROCESSES = 3", "MINIMUM_PROCESSES = 1",
          ("tests/suite/results/test_stats.py",)),
    Named("suite/results/stats.py", "EQUIVALENCE_CONFIDENCE = 0.90", "EQUIVALENCE_CONFIDENCE = 0.5",
          ("tests/suite/results/test_stats.py", "tests/suite/results/test_stats_recorded_noise.py")),
    Named("suite/worker/captured_iteration.py", "            self._copy(inputs)\n", "            pass\n",
          ("tests/suite/worker/test_captured_iteration.py",)),
    Named("suite/worker/captured_iteration.py", "            parameter.grad = gradient\n", "            pass\n",
          ("tests/suite/worker/test_captured_iteration.py",)),
    Named("suite/results/run_writer.py", "os.ftruncate(file.fileno(), size)", "pass",
          ("tests/suite/results/test_store.py",)),
    Named("suite/report/compare.py", "if cell.other_kernels or reference.other_kernels:", "if cell.other_kernels:",
          ("tests/suite/report/test_compare.py", "tests/suite/report/test_paper.py")),
    Named("suite/report/two_runs/pairs.py", "if change.high < slower:", "if change.value < slower:",
          ("tests/suite/report/two_runs/test_compare.py", "tests/suite/report/two_runs/test_recorded_runs.py")),
    Named("suite/results/stats.py", "math.fsum(1 / len(side) for side in sides)", "(1 / sum(map(len, sides)))",
          ("tests/suite/results/test_stats.py",)),
    Named("suite/measure/profiling.py", "if len(found) == 1", "if found",
          ("tests/suite/measure/test_profiling.py",)),
    Named("suite/worker/compilation.py", "max(spec.warm_up, self.calls_to_replay - 1 + spec.input_sets)", "1",
          ("tests/suite/worker/test_compilation.py",)),
    Named("suite/worker/judge.py", "for inputs, state in others:", "for inputs, state in []:",
          ("tests/suite/worker/test_judge.py",)),
    Named("suite/worker/measured_once.py", "if self._on_gpu and self._mode.needs_gpu else None", "if False else None",
          ("tests/suite/worker/test_measured_once.py",)),
    Named("suite/measure/memory.py", "torch.cuda.reset_peak_memory_stats(device)", "pass",
          ("tests/suite/measure/test_compile_times.py",)),
    Named("suite/run/group.py", '"cache_dir": str(cache.of_rank(rank))',
          '"cache_dir": str(cache.folder / member.mode.name)', ("tests/suite/run/test_runner.py",)),
    Named("suite/run/group.py", "key=lambda mode: mode.name != REFERENCE_MODE",
          "key=lambda mode: mode.name == REFERENCE_MODE", ("tests/suite/run/test_runner.py",)),
    Named("suite/worker/gpu_turns.py", "self._turn(fcntl.LOCK_EX, most", "self._turn(fcntl.LOCK_SH, most",
          ("tests/suite/worker/test_gpu_turns.py",)),
    Named("suite/worker/judge.py", "return near and digests == self._program.spec.known_digests", "return near",
          ("tests/suite/worker/test_eager_comparison.py",)),
    Named("suite/worker/judge.py", "sketched_error(found[name], sketch) <= tolerance", "True",
          ("tests/suite/worker/test_eager_comparison.py",)),
    Named("suite/measure/metrics/floor.py", "samples_of(cell.largest(waited_us(iterate, wait)))",
          "samples_of(waited_us(iterate, wait))", ("tests/suite/measure/test_metrics_floor.py",)),
    Named("suite/worker/compilation.py", "mark_graphs(self.mode.name)", "pass",
          ("tests/suite/worker/test_compilation.py",)),
    Named("suite/measure/correctness.py", "MOST_ERROR = 0.5", "MOST_ERROR = 50.0",
          ("tests/suite/measure/test_verdicts.py",)),
    Named("suite/measure/kernels.py", 'return " ".join((name.replace(" ", "_"), "x".join(map(str, grid)), ',
          'return " ".join((name.replace(" ", "_"), ', ("tests/suite/measure/test_kernels.py",)),
    Named("models/networks/clip.py", "torch.sigmoid(1.702 * x)", "torch.sigmoid(1.0 * x)",
          ("tests/models/test_networks.py",)),
    Named("models/networks/speech_transformer.py", "torch.relu(self.widen(x))", "nn.functional.gelu(self.widen(x))",
          ("tests/models/test_networks.py",)),
    Named("models/networks/dcgan.py", "nn.LeakyReLU(0.2)]", "nn.LeakyReLU(0.1)]",
          ("tests/models/test_networks.py",)),
    Named("optimizations/trees/fast_path.py", "if hook.at_rest_now:", "if False:",
          ("tests/optimizations/trees/test_fast_path.py",)),
    Named("optimizations/calls/turns.py", "torch_internals.set_multithreading_enabled(False)", "pass",
          ("tests/optimizations/test_backend.py",)),
    Named("optimizations/trees/fast_path.py", "if running and inside_another(turn):", "if False:",
          ("tests/optimizations/trees/test_fast_path.py",)),
    Named("optimizations/trees/fast_path.py", "if manager.running:", "if False:",
          ("tests/optimizations/trees/test_fast_path.py",)),
    Named("optimizations/trees/fast_path.py", '"backward" if is_backward else "forward"', '"backward"',
          ("tests/optimizations/trees/test_fast_path.py",)),
    Named("optimizations/trees/fast_path.py", "(device_index) != streams.last:", "(device_index) is None:",
          ("tests/optimizations/trees/test_fast_path.py",)),
    Named("optimizations/trees/fast_path.py", "if manager.held_in_generation is not None:", "if False:",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/fast_path.py", "one.dead_before and any_alive", "False and any_alive",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/fast_path.py", "current.children and current.children.get(function_id)", "False",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/fast_path.py", "if tracker is not None and tracker.pending:", "if False:",
          ("tests/optimizations/trees/test_fast_path.py",)),
    Named("optimizations/trees/fast_path.py", "backwards and not steps.mark_step_counter:", "backwards:",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/fast_path.py",
          "(session.stage is not done or session.unusable)", "session.stage is not done",
          ("tests/optimizations/trees/test_not_launched.py",)),
    Named("optimizations/trees/node.py", " if not self.preserved_aliased_inputs[index]]", "]",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/node.py", " or self.graph is None\n", "\n",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/liveness.py", "0 if still_unused is None else 2", "0 if still_unused is None else 3",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/liveness.py",
          "list(map(_storage_use_count, map(_cdata, weak)))", "None",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/trees/liveness.py", "and _references(storages, place) == _UNUSED_STORAGE\n        and _tensor",
          "and _tensor",
          ("tests/optimizations/trees/test_fast_path_live_results.py",)),
    Named("optimizations/calls/shortcut.py", "if metadata.is_rng_op_functionalized:", "if False:",
          ("tests/optimizations/calls/test_plain_function.py",)),
    Named("optimizations/calls/shortcut.py", "if metadata.tokens:", "if False:",
          ("tests/optimizations/calls/test_plain_function.py",)),
    Named("optimizations/calls/shortcut.py", "if metadata.grad_enabled_mutation is not None:", "if False:",
          ("tests/optimizations/calls/test_plain_function.py",)),
    Named("optimizations/calls/bound.py",
          "id(given[-1]) if only_root else tuple(map(id, given[first_root:]))", "id(given[-1])",
          ("tests/optimizations/calls/test_binding.py",)),
    Named("optimizations/placement/rewrite.py",
          "    if surgery.keep_copies(after):\n        after = surgery.check()\n    surgery.protect(after)\n", "",
          ("tests/fuzz/test_fuzz.py",)),
    Named("optimizations/placement/guards.py", "        for index, at, before, known in self.scalars:\n",
          "        return False\n        for index, at, before, known in self.scalars:\n",
          ("tests/fuzz/test_fuzz.py",)),
    Named("optimizations/placement/staging.py",
          "direct = [position for position, is_direct in enumerate(pinned) if is_direct]", "direct = list[int]()",
          ("tests/fuzz/test_fuzz.py",)),
    Named("optimizations/placement/plan.py", "in_graph = kept + cost <=", "in_graph = cost <=",
          ("tests/fuzz/test_fuzz.py",)),
)  # fmt: skip
