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
        "left = budget - cost.light", "left = budget",
        f"{A}/test_overhead.py::test_full_statistics_get_what_each_step_leaves_of_the_budget"),
    Bug("one unlucky step decides", "fp8watch/overhead.py",
        "len(self._costs) == self._costs.maxlen", "True",
        f"{A}/test_overhead.py::test_the_median_of_several_spread_steps_decides"),
    Bug("what was unlucky is for good", "fp8watch/overhead.py",
        "max(self._asked, choose_every(self._median(), self._budget))",
        "max(self.every, choose_every(self._median(), self._budget))",
        f"{A}/test_overhead.py::test_it_is_measured_again_and_goes_down_when_it_was_unlucky_but_not_below_what_was_asked_for"),
    Bug("a device is read before it came there", "fp8watch/stopwatch.py",
        "if self._event is not None and not all(end.query() for *_, end, _ in self._spans[-1:]):", "if False:",
        f"{A}/test_overhead.py::test_on_a_device_its_events_count_and_are_read_when_it_has_passed_them"),
    Bug("an operand is quantised to be thrown away", "fp8watch/quantizers.py",
        "return [q.measure(x_MK, heavy=heavy) for q in used]",
        "return [q(x_MK, stats=True, heavy=heavy)[1] for q in used]",
        f"{A}/test_overhead.py::test_observing_never_makes_what_nobody_multiplies"),
    Bug("sites that are left alone are looked at", "fp8watch/plan.py",
        "if not observing or self.unobserved:", "if not observing:",
        f"{A}/test_overhead.py::test_what_is_not_observed_is_not_looked_at"),
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
]  # fmt: skip


def test_every_planted_bug_still_fits():
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_every_planted_bug_is_seen(tree, bug):
    seen_to_fail(tree, bug)
