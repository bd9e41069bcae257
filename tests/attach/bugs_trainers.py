"""Bugs in what trainers' adapters stand on: runs that go on, numbers of steps, norms, mirrors."""

from __future__ import annotations

from planted import Bug

A = "tests/attach"
BUGS = [
    Bug("a run goes on by its id", "identity:identify",
        "if run_id is not None:", "if False:", f"{A}/test_going_on.py::test_a_state_is_enough_to_go_on_with_its_run"),
    Bug("a watch that was switched off has no run", "watch:Watch.state_dict",
        "if self._plan is not None:", "if True:",
        f"{A}/test_going_on.py::test_a_watch_that_was_switched_off_has_no_run_to_go_on_with"),
    Bug("a trainer numbers its steps", "step_cycle:StepCycle.renumber",
        "self.step = int(step)", "pass", f"{A}/test_going_on.py::test_a_step_has_the_number_that_a_trainer_gives_it"),
    Bug("optimizers of a list end a step together", "step_optimizer:torch_optimizers",
        "list(given) if isinstance(given, (list, tuple)) and given else [given]", "[given]",
        f"{A}/test_going_on.py::test_optimizers_that_are_named_together_end_the_first_step_together"),
    Bug("a loss in a dict is one", "module_hooks:LossHook._look",
        'loss = output.get("loss")', "pass", f"{A}/test_going_on.py::test_a_loss_in_a_dict_is_seen"),
    Bug("a generator of parameters is not used up", "gradient_norm:wrap_clipping",
        "else list(parameters)", "else parameters",
        f"{A}/test_gradient_norm.py::test_the_norm_before_clipping_is_recorded_and_nothing_changes"),
    Bug("norms of another order are left alone", "gradient_norm:wrap_clipping",
        'norm_type not in (2, 2.0, "2")', "False",
        f"{A}/test_gradient_norm.py::test_the_norm_before_clipping_is_recorded_and_nothing_changes"),
    Bug("parts of the gradients are one norm", "gradient_norm:GradientNorm.take",
        "if len(norms) < 2:", "if True:", f"{A}/test_gradient_norm.py::test_parts_that_are_clipped_apart_are_one_norm"),
    Bug("the norm of another model is not ours", "gradient_norm:GradientNorm.see",
        "            if first not in self._ids:\n                return\n", "",
        f"{A}/test_gradient_norm.py::test_the_norm_of_another_model_is_not_ours_and_that_of_copies_is"),
    Bug("a list may be called buffers", "foreign_fp8:foreign_fp8",
        "*module._buffers.values()", "*module.buffers(recurse=False)",
        f"{A}/test_foreign_fp8.py::test_a_module_may_call_a_list_of_its_own_buffers"),
    Bug("a mirror is called on a thread of its own", "mirror:Mirror._hand_over",
        "self._window = Window()", "self._window = Window(); self._tell_waiting()",
        f"{A}/test_mirror.py::test_at_most_ten_scalars_of_a_window_reach_the_function_on_a_thread_of_its_own"),
    Bug("a mirror leaves out what the cast did where nobody saw it", "mirror:Window.add",
        "Measured.COUNTS | Measured.CAST, 0", "Measured.COUNTS, 0",
        f"{A}/test_mirror.py::test_a_window_holds_extremes_and_sums_and_leaves_out_what_was_not_measured"),
    Bug("a mirror is told at once of what broke", "mirror:Mirror.see",
        "if broken or ", "if ", f"{A}/test_mirror.py::test_what_broke_is_told_at_once"),
    Bug("a mirror that raises is given up", "mirror:Mirror._tell_waiting",
        " and self._failures < MAX_FAILURES", "", f"{A}/test_mirror.py::test_a_function_that_raises_or_hangs_costs_training_nothing"),
]  # fmt: skip
