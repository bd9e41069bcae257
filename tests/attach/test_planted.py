"""The bugs that the tests of this room were seen to find."""

from __future__ import annotations

import pytest
from planted import Bug, all_fit, seen_to_fail

A = "tests/attach"
BUGS = [
    Bug("a step on its way is not read before it arrived", "fp8watch/closing.py",
        "if not everything and not left.copy.ready() and len(self._on_the_way) <= MAX_ON_THE_WAY:",
        "if False:", f"{A}/test_arrival.py::test_a_step_is_consumed_a_step_later_and_nothing_is_waited_for"),
    Bug("what is on its way goes out where training ends", "fp8watch/watch.py",
        'self.guard.run("death", self._closing.settle, everything=True)', "pass",
        f"{A}/test_arrival.py::test_what_is_on_its_way_goes_out_where_training_ends"),
    Bug("a hang of the device does not keep the process", "fp8watch/slab_copy.py",
        "if time.monotonic() >= until:", "if time.monotonic() >= until + 15.0:",
        f"{A}/test_arrival.py::test_a_device_that_hangs_does_not_keep_the_process_from_ending"),
    Bug("a signal while a step ends hands it over once", "fp8watch/watch.py",
        "if self._ending:", "if False:", f"{A}/test_arrival.py::test_sigterm_in_the_middle_of_a_step_hands_it_over_once"),
    Bug("no step ends while a graph is captured", "fp8watch/watch.py",
        "or step_end.is_capturing()", "", f"{A}/test_arrival.py::test_nothing_ends_while_a_graph_is_captured"),
    Bug("every bit of a weight is hashed", "fp8watch/weight_hash.py",
        "torch.arange(1, 2 * CHUNK, 2,", "torch.arange(0, 2 * CHUNK, 2,",
        f"{A}/test_weight_hash.py::test_a_thousand_flips_of_one_bit_are_all_seen"),
    Bug("weights are hashed once a step", "fp8watch/plan.py",
        "self.hashed.add(row)", "self.hashing = False",
        f"{A}/test_weight_hash.py::test_weights_are_hashed_as_the_gemm_reads_them_in_their_steps"),
    Bug("the output of a GEMM is looked at", "fp8watch/linear.py",
        "look_at_output(dw, site, GRAD_OUTPUT, True)", "pass",
        f"{A}/test_provenance.py::test_the_gemm_that_makes_a_nan_of_finite_operands_is_named"),
    Bug("an overflow of float16 is no fault", "fp8watch/provenance.py",
        "overflows = y.dtype == torch.float16", "overflows = False",
        f"{A}/test_provenance.py::test_finite_operands_may_overflow_float16_but_make_no_nan"),
    Bug("what stays in each step costs nothing", "fp8watch/overhead.py",
        "left = self._budget - light", "left = self._budget",
        f"{A}/test_overhead.py::test_full_statistics_get_what_each_step_leaves_of_the_budget"),
    Bug("a recomputation is the same", "fp8watch/recompute.py",
        "before is not None and before != now", "False",
        f"{A}/test_provenance.py::test_a_recomputation_in_another_precision_is_told"),
    Bug("probes do not count evaluation", "fp8watch/probes.py",
        "        if module.training:\n            y = first_tensor(output)", "        if True:\n            y = first_tensor(output)",
        f"{A}/test_probes.py::test_evaluation_and_recomputation_are_not_counted"),
    Bug("what led up to an event leaves with it", "fp8watch/closing.py",
        "if self._num_broken[row] == 1:", "if False:",
        f"{A}/test_lead_up.py::test_what_led_up_to_an_event_leaves_with_it_in_the_order_of_steps"),
    Bug("held tiles stay within their bytes", "fp8watch/tile_history.py",
        "if self._bytes + size <= limit or", "if True or", f"{A}/test_lead_up.py::test_held_tiles_stay_within_their_bytes"),
    Bug("outside of windows nothing is measured", "fp8watch/plan.py",
        "and not self.outside", "", f"{A}/test_schedule.py::test_outside_of_windows_not_even_what_is_broken_is_measured"),
    Bug("a damaged scale is not loaded", "fp8watch/quantize/per_tensor.py",
        'if not 0 < scale < float("inf"):', "if False:",
        f"{A}/test_resume.py::test_a_scale_that_no_operand_can_have_is_not_loaded"),
    Bug("a mesh that cannot be read costs the mesh only", "fp8watch/session_start.py",
        'guard.call("mesh", lambda: mesh_coordinates(model), {})', "mesh_coordinates(model)",
        f"{A}/test_mesh.py::test_a_mesh_that_cannot_be_read_costs_the_mesh_only"),
    Bug("an optimizer of copies is adopted", "fp8watch/step_owner.py",
        "if not at_once and count + 1 < ADOPT_AFTER_STEPS:", "if True:",
        f"{A}/test_step_owner.py::test_the_optimizer_of_float32_copies_ends_each_step_from_the_first_on"),
    Bug("copies are found by main_param", "fp8watch/step_owner.py",
        'getattr(p, "main_param", None)', "None",
        f"{A}/test_step_owner.py::test_megatron_leaves_the_copy_on_its_parameter"),
    Bug("a stranger is not the owner at once", "fp8watch/step_owner.py",
        "if not at_once and count + 1 < ADOPT_AFTER_STEPS:", "if False:",
        f"{A}/test_steps.py::test_an_optimizer_of_something_else_ends_nothing"),
    Bug("that no step ends is said", "fp8watch/plan.py",
        "if self.num_passes == STUCK_AFTER_PASSES and", "if False and",
        f"{A}/test_step_owner.py::test_that_no_step_ends_is_said_once_and_unsaid_when_one_does"),
    Bug("shares of a loss are added", "fp8watch/ops.py",
        "plan.losses_add_up |= adds_up", "pass",
        f"{A}/test_steps.py::test_losses_that_are_shares_of_the_step_are_added_and_others_averaged"),
    Bug("a model without Linears is recorded", "fp8watch/_attach.py",
        "    if observe:\n        first =", "    if observe and table:\n        first =",
        f"{A}/test_coverage.py::test_without_linears_and_probes_steps_end_all_the_same"),
    Bug("experts count by the tokens that they see", "fp8watch/coverage.py",
        "return min(1.0, top_k / num_experts), False", "return 1.0, False",
        f"{A}/test_coverage.py::test_experts_count_by_the_tokens_that_they_see_and_lookups_and_biases_do_not"),
    Bug("a head is one at any depth", "fp8watch/roles.py",
        "role = role_of(fqn)\n", 'role = role_of(fqn) if fqn.count(".") <= 1 else None\n',
        f"{A}/test_roles.py::test_a_head_is_one_at_any_depth"),
    Bug("the gate of an MLP is taken", "fp8watch/roles.py",
        "elif role == ROUTER and not _routes(fqn, module, children):", "elif False:",
        f"{A}/test_roles.py::test_the_gate_of_an_mlp_is_no_router"),
    Bug("what is not called is a fact of the session", "fp8watch/watch.py",
        'self._tell({"not_called": "; ".join(silent)[:2000]})', "pass",
        f"{A}/test_coverage.py::test_modules_that_were_not_called_are_a_fact_of_the_session_too"),
]  # fmt: skip


def test_every_planted_bug_still_fits():
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_planted_bug_is_seen(tree, bug):
    seen_to_fail(tree, bug)
