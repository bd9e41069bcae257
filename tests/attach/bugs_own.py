"""Bugs in what looks at products with own parameters."""

from __future__ import annotations

from planted import Bug

_T = "tests/attach/test_own_gemms.py::"
_V = "tests/attach/test_expert_vectors.py::"
OWN_TILES = f"{_T}test_each_expert_has_tiles_of_its_own_and_rows_of_nobody_count_nowhere"
_W = "tests/attach/test_wrapped_forward.py::"
OWN_BUGS = [
    Bug("a forward on the module calls the class that it has now", "wrapped_forward:lead_to_class",
        "cell.cell_contents = ", "", f"{_W}test_what_the_forward_on_a_module_calls_is_observed_and_nothing_changes"),
    Bug("a forward that stands in for the class is left alone", "wrapped_forward:replaces_forward",
        "and _cell(module) is None", "and False",
        f"{_W}test_a_forward_that_stands_in_for_the_class_is_left_alone_with_the_reason"),
    Bug("columnwise tiles are of one expert", "expert_groups:ExpertGroups.columnwise",
        "first_rows = (tiles.cumsum(0) - tiles) * tile", "first_rows = self._first_rows", OWN_TILES),
    Bug("rows of nobody count nowhere", "expert_groups:ExpertGroups.rowwise", "Frame(x[: self._num_valid],", "Frame(x,", OWN_TILES),
    Bug("padding is taken off the counts", "observe_gemm:_take_off", "if plan.slab is None or (", "if True or (", OWN_TILES),
    Bug("empty tiles are taken off where nothing is read back", "slab:Slab.take_off_zeros",
        'for name in ("num_tiles", "num_zero_tiles"):', "for name in ():",
        f"{_T}test_where_nothing_may_be_read_back_the_counts_are_the_same"),
    Bug("a weight is measured once in a forward", "own_gemms:GemmMode._see", "self._measured.add(path)", "pass",
        f"{_T}test_the_ways_to_multiply_with_experts_say_the_same_of_them"),
    Bug("gathered experts are sorted", "observe_gemm:_tokens_by_outputs", "[gemm.order]", "",
        f"{_T}test_the_ways_to_multiply_with_experts_say_the_same_of_them"),
    Bug("a row belongs to the expert that begins there", "expert_rows:expert_of", 'side="right"', 'side="left"',
        f"{_T}test_a_nan_that_an_expert_reads_is_named_with_the_expert_and_its_token"),
    Bug("attention of torch is looked into", "own_gemms:GemmMode.__torch_function__", "if name == _INSIDE and", "if False and",
        f"{_T}test_observing_changes_no_number_and_detach_leaves_the_module_as_it_was"),
    Bug("what is silent leaves the observed", "silent_sites:Silence.ask", "announced - share)", "announced)",
        f"{_T}test_a_parameter_whose_product_is_not_recognised_leaves_the_observed_with_its_reason"),
    Bug("what comes later is observed again", "site_registration:SiteRegistration.see",
        "len(self._registered) != self._asked_at:", "self._asked_at < 0:", f"{_T}test_what_comes_later_is_observed_again"),
    Bug("a recomputation counts once", "observe_gemm:_operand", "if not plan.step.recount(asked.asks_column):", "if False:",
        f"{_T}test_what_checkpointing_computes_again_counts_once"),
    Bug("weights are hashed when nothing else is looked at", "observe_gemm:observe_gemm",
        "if gemm.weight and plan.hash_due(first):", "if False:",
        f"{_T}test_weights_are_hashed_in_steps_in_which_nothing_else_of_them_is_looked_at"),
    Bug("copies of what is watched are plain", "own_class:watched_class", "if k not in KEYS", "if k",
        f"{_T}test_a_copy_and_a_pickle_are_plain"),
    Bug("a GEMM that is only observed says so", "session.sites:describe", ", observe=s.as_it_is", "",
        f"{_T}test_where_linears_compute_in_fp8_experts_stay_as_they_are_and_are_observed"),
    Bug("a Linear off the FP8 path is named although it is observed", "own_parameters:select_own",
        " or (converts and m.fqn in own_forward)", "",
        "tests/attach/test_refusals.py::test_what_is_left_out_is_said_with_the_reason"),
    Bug("the expert is told", "nonfinite:_expert", "if expert is None or", "if True or",
        "tests/detect/test_reports.py::test_an_inf_in_an_expert_is_told_with_the_expert_and_its_own_row"),
    Bug("the tile of a weight tells the expert", "families.experts:context", "// rows_each}", "}",
        "tests/detect/test_reports.py::test_a_tile_of_a_weight_is_told_with_the_expert_whose_rows_it_has"),
    Bug("what is observed in high precision is no suspect", "unobserved:with_unobserved", "name not in seen and ", "",
        "tests/detect/test_reports.py::test_what_is_left_out_of_fp8_and_observed_is_no_suspect"),
    Bug("tiles count at their expert", "observer.expert_layout:experts_of", "right=True) - 1", "right=False)",
        f"{_V}test_each_expert_says_its_amax_and_its_tokens"),
    Bug("experts have turns", "observer.expert_vectors:ExpertVectors._next", "entries < MAX_ENTRIES", "True",
        f"{_V}test_experts_have_turns_where_there_are_many"),
    Bug("tokens are those of each expert", "observer.expert_vectors:ExpertVectors.add", "layout.sizes.double()", "layout.sizes.double() + 1",
        f"{_V}test_each_expert_says_its_amax_and_its_tokens"),
    Bug("halves of a batch keep their experts", "batch:split", "if v.step in mine]", "if False]",
        "tests/agent/test_expert_vectors.py::test_halves_of_a_batch_that_is_too_large_and_another_key_keep_them"),
]  # fmt: skip
