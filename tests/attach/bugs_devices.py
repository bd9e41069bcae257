"""Bugs in what is on another device than it was, or than its rows."""

from __future__ import annotations

from support.planted import Bug

_T = "tests/attach/test_devices.py::"
_MOVED = f"{_T}test_a_model_that_is_moved_behind_attach_trains_as_before_and_says_that_it_is_blind"
_PLACE = f"{_T}test_a_default_device_of_the_users_changes_nothing"
_ELSEWHERE = f"{_T}test_operands_elsewhere_are_not_looked_at"
_REPLICAS = "tests/attach/test_replicas.py::test_replicas_run_as_without_us"

BUGS = [
    Bug("a Linear that is moved computes as before", "fp8_linear:WatchedLinear.forward",
        "if input.device != self.__dict__[DEVICE_KEY] and is_moved(self):", "if False:", _MOVED),
    Bug("that a Linear that is moved ran is noted", "moved_linear:note_unseen",
        "note_rest(plan, number, y, local_part(y))", "pass",
        f"{_T}test_steps_of_linears_alone_that_are_moved_end"),
    Bug("a loss that is not read is said", "step_flush:StepFlush._split", "self._leave_there(name, value)", "pass",
        f"{_T}test_a_number_on_another_device_is_not_read_and_that_is_said_once"),
    Bug("experts that are moved compute as before", "own_class:watched_class",
        "if computes and is_moved(self):", "if False:", f"{_MOVED}[blockwise]"),
    Bug("that it was moved is said", "silent_sites:Silence._reasons", "elif is_moved(module) and", "elif False and", _MOVED),
    Bug("a mark of where it was goes with detach", "layers.fp8_linear", "COMPUTES_KEY, *MARKS)", "COMPUTES_KEY)", _MOVED),
    Bug("an operand elsewhere is not looked at", "observation_plan:ObservationPlan.observe",
        " and not self.elsewhere(x_MK)", "", _ELSEWHERE),
    Bug("scales with a history see operands elsewhere", "observation_plan:ObservationPlan.observe",
        "if not asked.stateful:", "if True:", f"{_T}test_in_a_warm_up_scales_with_a_history_see_operands_that_are_elsewhere"),
    Bug("what is on another device than the rows is told as such", "site_placement:elsewhere",
        "first.device == slab.device", "True", f"{_T}test_what_is_on_another_device_than_the_rows_is_told_as_such"),
    Bug("a module of Transformer Engine that is elsewhere has no turn", "site_placement:turns_of",
        "if elsewhere(plan, m.module) is None", "", f"{_T}test_a_module_of_transformer_engine_that_is_elsewhere_has_no_turn"),
    Bug("a probe elsewhere is not looked at", "observation_plan:ObservationPlan.note_probe",
        " or self.elsewhere(y):", ":", _ELSEWHERE),
    Bug("each GPU is a device of its own", "observation_plan:ObservationPlan.elsewhere", "x.device != slab.device", "x.is_cpu",
        f"{_T}test_each_gpu_is_a_device_of_its_own"),
    Bug("a module on another GPU is moved", "moved_linear:is_moved", "first.device != known", "first.device.type != known.type",
        f"{_T}test_each_gpu_is_a_device_of_its_own"),
    Bug("what was measured elsewhere is not merged", "observation_plan:ObservationPlan.record",
        "if not self.elsewhere(stats.amax):", "if True:", f"{_T}test_what_was_measured_elsewhere_is_not_merged"),
    Bug("replicas have no site", "moved_linear:without_site", "replica.__dict__.pop(key, None)", "pass", f"{_REPLICAS}_and_are_told_as_not_observed[blockwise]"),
    Bug("that there are replicas is said", "silent_sites:Silence._reasons", "REPLICATED_KEY in module.__dict__", "False",
        f"{_REPLICAS}_and_are_told_as_not_observed"),
    Bug("rows of the reference have a place of their own", "row_fold:sections",
        "dtype=torch.int32, device=stats.amax.device", "dtype=torch.int32", f"{_PLACE}[reference-blockwise]"),
    Bug("numbers of an optimizer's steps have a place of their own", "update_turns:_times",
        'torch.tensor(num, device="cpu")', "torch.tensor(num)",
        f"{_T}test_a_default_device_changes_nothing_of_an_optimizer_that_counts_by_numbers"),
    Bug("ops on the host stay out of graphs", "host_op:host_op", "**_TAGS", "tags=()",
        f"{_T}test_an_op_that_works_on_the_host_stays_out_of_graphs_that_a_device_replays[observe]"),
]  # fmt: skip
