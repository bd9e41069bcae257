"""Bugs in what computes experts in FP8."""

from __future__ import annotations

from support.planted import Bug

_T = "tests/attach/test_expert_gemms.py::"
_R = "tests/attach/test_own_ranks.py::test_experts_in_fp8_compute_on_ranks_what_they_compute_alone"
_P = "tests/attach/test_expert_precision.py::"
_ORACLE = f"{_T}test_experts_compute_what_a_loop_of_linears_in_fp8_computes"
_STAYS = f"{_P}test_experts_that_stay_in_high_precision_say_why_and_change_nothing"
_PART = f"{_T}test_a_part_of_a_parameter_and_a_bias_are_multiplied_as_they_are"
_NOBODY = f"{_T}test_rows_of_nobody_are_neither_read_nor_computed"
EXPERT_BUGS = [
    Bug("experts compute in FP8", "own_gemms:GemmMode.__torch_function__", "product is not None and self._gemms.computes", "False",
        _ORACLE),
    Bug("a weight gradient is of each expert without its padding", "expert_operands:quantise_rows",
        "begin = frame.first_rows.tolist()", "begin = [start for start, _ in groups]", _ORACLE),
    Bug("tokens that were sorted come back to their places", "expert_products:multiply", "y = y[torch.argsort(gemm.order)]", "pass",
        _ORACLE),
    Bug("weights are quantised from their own precision", "expert_linear:_as_it_lies", "if one.shape ==", "if False and one.shape ==",
        f"{_T}test_under_autocast_weights_are_quantised_from_their_own_precision"),
    Bug("rows of nobody are zero", "emulated_grouped:fprop", "torch.zeros(shape", "torch.ones(shape", _NOBODY),
    Bug("gradients of nobody's rows are zero", "emulated_grouped:dgrad", "torch.zeros(shape", "torch.ones(shape", _NOBODY),
    Bug("a part of a weight is measured whole", "expert_linear:expert_linear", "elif gemm.weight and count:", "elif False:", _PART),
    Bug("a bias is added to a product in FP8", "expert_products:multiply", "(y + bias.float())", "y", _PART),
    Bug("evaluation of experts counts nothing", "own_gemms:GemmMode._in_fp8", "count=self._counts", "count=True",
        f"{_T}test_evaluation_computes_in_fp8_and_counts_nothing"),
    Bug("compiled experts compute in FP8", "own_class:watched_class", "_outside_of_graphs if self.__dict__.get(COMPUTES_KEY) else _plain",
        "_plain", f"{_P}test_inside_compiled_code_they_compute_in_fp8_too"),
    Bug("transforms are refused", "own_class:_compute", "if tracing or torch._C._functorch.peek_interpreter_stack() is not None:",
        "if tracing:", f"{_T}test_what_cannot_follow_is_refused_in_words"),
    Bug("without statistics experts compute the same", "session.attach:attach", "plan.slab is not None or watched.computing",
        "plan.slab is not None", f"{_P}test_without_statistics_it_computes_the_same"),
    Bug("experts that are not observed compute the same", "plan_rows:look_at_own", " and not computes:", ":",
        f"{_P}test_without_statistics_it_computes_the_same"),
    Bug("a filter leaves experts out", "expert_precision:_filtered", '"filter_fn" if wanted is False else None', "None", _STAYS),
    Bug("a filter for Linears leaves experts out", "expert_precision:_filtered", "return FOR_LINEARS", "return None", _STAYS),
    Bug("a recipe leaves experts out by their names", "expert_precision:computing_experts", "kept is None and any(", "False and any(",
        _STAYS),
    Bug("one scale for all experts is refused", "expert_precision:refused", "spec.tile is None or spec.tile == ROW or spec", "spec",
        _STAYS),
    Bug("a warm-up of experts is in high precision", "own_gemms:GemmMode._in_fp8", "if plan is not None and plan.step.warming:",
        "if False:", f"{_P}test_a_warm_up_is_in_high_precision"),
    Bug("what stays in high precision unannounced is told", "silent_sites:Silence.ask", '"not_in_fp8": joined(high)', '"not_in_fp8": ""',
        f"{_P}test_a_product_that_stays_in_high_precision_all_the_same_is_told"),
    Bug("experts that compute are not taken for Linears that are gone", "replaced_modules:ReplacedModules.look",
        "if not table[row].is_own]", "if not table[row].as_it_is]", f"{_P}test_training_in_fp8_holds"),
    Bug("a comparison has its experts in FP8", "model_copies:make_copies", "plan_rows.look_at_own(made, watched, table)", "pass",
        f"{_P}test_copies_for_a_comparison_have_their_experts_in_fp8"),
    Bug("what nobody asks for is not quantised", "expert_linear:expert_linear", "w.requires_grad and grad, x_SK",
        "grad, x_SK", f"{_T}test_a_gradient_that_nobody_asks_for_is_not_computed"),
    Bug("sharded experts that are checkpointed count once", "expert_operands:_numbers",
        "return None, plan.passes.forward if plan.step.recount(asked.asks_column) else None",
        "return plan.passes.forward, plan.passes.forward", f"{_R}[fsdp-blockwise-after]"),
]  # fmt: skip
