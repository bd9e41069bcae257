"""Bugs in which something is held that training has let go of, or something of the guest's own calls is lost."""

from __future__ import annotations

from support.planted import Bug

_K = "tests/attach/test_nothing_is_kept.py::"
_G = "tests/attach/test_calls_as_they_are.py::"
_S = "tests/attach/test_sharded_later.py::"

BUGS = [
    Bug("an output is not kept for its hook", "observe_gemm:_observe", "gemm.y.new_empty((0,))", "gemm.y[:0].detach()",
        f"{_K}test_an_output_that_nobody_needs_is_gone_before_backward"),
    Bug("a turn that is over holds nothing", "foreign_turn:Turn.close",
        "        if self.plan.turns.get(self.first) is self:\n            del self.plan.turns[self.first]\n", "",
        f"{_K}test_what_a_turn_holds_is_gone_with_the_step"),
    Bug("a turn without a backward ends with its step", "observation_plan:ObservationPlan.begin_step",
        "            turn.close()\n", "            pass\n", f"{_K}test_what_a_turn_holds_is_gone_with_the_step[False]"),
    Bug("a turn ends with its watch", "custom_ops:remove_plan", "        turn.close()", "        pass",
        f"{_K}test_what_a_turn_holds_is_gone_with_the_watch"),
    Bug("a step that raised keeps no optimizer", "nested_steps:NestedSteps.begins",
        "_Stepping(weakref.ref(optimizer), ", "_Stepping(lambda: optimizer, ",
        f"{_K}test_an_optimizer_whose_step_raised_is_let_go"),
    Bug("a step that is open keeps no watch", "watch:Watch._on_optimizer",
        "at_forward(weakref.WeakMethod(self._close))", "at_forward(lambda: self._close)",
        f"{_K}test_a_watch_whose_optimizers_step_in_backward_goes_with_its_model"),
    Bug("first passes are kept without end", "recompute_values:RecomputeValues.keep",
        "if len(kept) <= MAX_KEPT:", "if True:", f"{_K}test_first_passes_are_kept_while_they_can_be_compared"),
    Bug("a Linear of its own kind is called as it takes its input", "foreign_linear:ForeignLinear.forward",
        "(name := _first_name(own)) in kwargs", "(name := 'input') in kwargs",
        f"{_G}test_a_linear_with_its_own_forward_is_called_by_keyword"),
    Bug("a closure is given what its optimizer gives it", "step_boundary:_then_look",
        "loss = closure(*args, **kwargs)", "loss = closure()", f"{_G}test_a_closure_is_called_as_its_optimizer_calls_it"),
    Bug("a module is no closure", "step_boundary:_before_optimizer", " and not isinstance(closure, nn.Module)", "",
        f"{_G}test_a_module_that_a_step_is_given_is_no_closure"),
    Bug("gradients of another device are left", "nonfinite_checks:gradients_of",
        "gradient.device != device", "gradient.device.type != device.type",
        f"{_G}test_gradients_on_another_device_of_the_kind_are_left"),
    Bug("a look that fails costs no step", "step_flush:StepFlush.take",
        'self.guard.swallow("gradients", error)', "raise",
        f"{_G}test_a_look_at_gradients_that_fails_costs_no_step"),
    Bug("numbers that cannot be put together cost no step", "step_flush:StepFlush.take",
        'self.guard.run("values", side_by_side, waiting)', "side_by_side(waiting)",
        f"{_G}test_numbers_of_a_device_that_cannot_be_put_together_cost_no_step"),
    Bug("a turn that is over is over for its gradient", "foreign_turn:Turn.saw_gradient", " and not self.closed", "",
        f"{_K}test_a_gradient_that_comes_in_a_later_step_is_of_no_turn"),
    Bug("a Linear that is sharded later computes as before", "fp8_linear:WatchedLinear.forward",
        "and is_dtensor(self.weight):", "and False:", f"{_S}test_what_is_sharded_behind_attach_trains_as_before_and_is_said_to_be_blind"),
    Bug("so does one with a forward of its own", "fp8_linear:observed", "if is_dtensor(weight) or is_dtensor(y):", "if False:",
        f"{_S}test_what_is_sharded_behind_attach_trains_as_before_and_is_said_to_be_blind"),
    Bug("of a sharded Linear is said why it is blind", "silent_sites:Silence._reasons",
        "found[fqn] = SHARDED", "pass", f"{_S}test_what_is_sharded_behind_attach_trains_as_before_and_is_said_to_be_blind"),
    Bug("parts of a number are not added up", "step_scalars:StepScalars._here",
        "if all(placement.is_replicate() for placement in sharded.placements):", "if True:",
        f"{_S}test_a_number_of_which_each_rank_has_a_part_is_not_waited_for"),
    Bug("the end of a forward asks no op", "module_hooks:ForwardEnd.__call__",
        "None if torch.compiler.is_compiling() else self._number", "None",
        f"{_S}test_an_output_that_is_shared_over_ranks_ends_a_forward"),
]  # fmt: skip
