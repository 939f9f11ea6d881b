"""Programs of many kinds on a GPU: Encore computes what eager does, and fails only where stock does, in the same way.

Where stock, Encore and `torch.compile` without graphs agree on something else than eager, the program says so
(`unlike_eager`). Where it does not, the test ends as an expected failure that tells how stock differs.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from kinds import KINDS
from kinds.world import Outcome, differences, eager, outcome

import optimizations
from optimizations import torch_internals

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("ENCORE_KINDS_DEVICE", "cuda")
SELECTED = (
    "a_checkpoint_with_cpu_attributes",
    "a_module_parallelized_over_one",
    "adapters_added_merged_and_dropped",
    "all_sizes_dynamic",
    "arrays_of_numpy",
    "attention_that_is_trained",
    "attention_with_a_score_function",
    "attention_with_masks_that_change",
    "backwards_that_run_the_forward_again",
    "backwards_under_compiled_autograd",
    "branches_by_a_cpu_tensor",
    "branches_by_a_tensor",
    "branches_that_are_trained",
    "checkpoints_around_compiled_modules",
    "compiled_layers_that_are_sharded",
    "compiled_optimizers",
    "compiled_optimizers_with_rates_on_the_cpu",
    "complex_tensors",
    "counters_on_both_sides",
    "custom_operators_next_to_cpu_tables",
    "custom_operators_that_write",
    "distributed_tensors_as_inputs",
    "gradients_of_compiled_gradients",
    "gradients_of_gradients",
    "graphs_of_stock_and_of_the_backend_in_turns",
    "inputs_and_views_of_them",
    "inputs_that_share_memory",
    "inputs_written_over_and_over",
    "kernels_inside_operators",
    "kernels_of_the_users_own",
    "loops_while",
    "maps_over_rows",
    "modes_of_gradients_in_turns",
    "modules_on_two_devices",
    "narrow_and_unsigned_numbers",
    "narrow_matrix_products",
    "nested_tensors",
    "numbers_in_cpu_tensors",
    "pairs_that_are_trained",
    "quantized_weights",
    "recurrent_states_carried_on",
    "results_changed_beyond_their_values",
    "results_in_backwards_of_others",
    "results_on_the_cpu",
    "saved_tensors_packed_otherwise",
    "scans",
    "scans_associatively",
    "sizes_from_an_item",
    "sizes_from_nonzero",
    "streams_inside_and_outside",
    "strided_inputs_and_outputs",
    "training_in_threads",
    "sparse_inputs_and_attributes",
    "vmap_grad_and_jvp",
    "weights_brought_by_hooks",
    "weights_in_one_vector",
    "weights_that_stream_from_pinned_memory",
)
"""Programs in which a GPU shows what the simulated driver does not. `ENCORE_ALL_KINDS=1` adds all others."""
ALL = tuple(name for name, kind in KINDS.items() if kind.on_gpu)


def compiled(name: str, **how: Any) -> Outcome:
    """The outcome of a program whose graphs and compiled functions are gone afterwards."""
    forget()
    try:
        return outcome(name, DEVICE, lambda target, **keywords: torch.compile(target, **how, **keywords))
    finally:
        forget()


def forget() -> None:
    optimizations.reset()
    torch.compiler.reset()


@pytest.mark.parametrize("name", ALL if os.environ.get("ENCORE_ALL_KINDS") == "1" else SELECTED)
def test_a_program_is_like_eager_or_fails_as_stock_does(name: str) -> None:
    # Programs with random numbers draw eager's.
    with torch_internals.inductor_config.patch(fallback_random=True):
        expected = outcome(name, DEVICE, eager)
        stock = compiled(name, mode="reduce-overhead")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = compiled(name, backend="encore")
    defects = [str(one.message) for one in warned if "defect of Encore" in str(one.message)]
    unlike_eager = differences(found, expected, rtol=1e-3, atol=1e-4)
    unlike_stock = differences(found, stock)
    assert not defects
    if not unlike_eager or (KINDS[name].unlike_eager and not differences(found, compiled(name))):
        return
    assert not unlike_stock, f"unlike eager: {unlike_eager[:3]}; unlike stock: {unlike_stock[:3]}"
    if not KINDS[name].unlike_eager:
        pytest.xfail(f"stock is not like eager either: {unlike_eager[:3]}")


def test_the_selected_programs_are_there() -> None:
    assert set(SELECTED) <= set(ALL)
