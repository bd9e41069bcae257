"""Bugs in the steps of optimizers that step behind each other."""

from __future__ import annotations

from support.planted import Bug

_T = "tests/attach/test_companions.py::"
_ONE = f"{_T}test_an_update_of_several_is_one_step_whoever_sits_it_out"

BUGS = [
    Bug("one that steps behind the end of a step is a companion", "session.companions:Companions.follow",
        "if not ran and", "if False and", f"{_T}test_the_last_of_them_ends_the_step[always]"),
    Bug("one that steps behind another of the same backward is a companion", "session.companions:Companions.follow",
        "elif ran and others and same", "elif False", f"{_T}test_of_those_that_attach_was_given_all_are_waited_for_until_they_are_known[ends_early]"),
    Bug("who has a backward of its own is no companion", "session.companions:Companions.follow",
        "others and same", "others", f"{_T}test_two_that_have_a_backward_each_are_waited_for[True]"),
    Bug("both of two are companions", "session.companions:Companions.follow", "self._them.update((optimizer, *others))",
        "self._them.add(optimizer)", f"{_ONE}[every_other_ahead]"),
    Bug("the step of one whose companions sit it out ends at the next forward", "watch:Watch._on_optimizer",
        "elif not is_part and self._owner.may_end:", "elif False:", f"{_ONE}[every_third]"),
    Bug("a companion's step is none of the next", "step_optimizer:StepOwner.closes",
        "if goes_on or self._companions.all_of([optimizer]):", "if goes_on:", f"{_T}test_the_last_of_them_ends_the_step[always]"),
    Bug("what a forward ends is over for those that stepped", "step_optimizer:StepOwner.at_forward", "ends(it)", "pass",
        f"{_T}test_the_last_of_them_ends_the_step[every-other]"),
    Bug("the learning rate is always one optimizer's", "step_optimizer:StepOwner.scalars",
        " and not self._companions.tells_rate(optimizer):", " and False:", f"{_ONE}[in_turns]"),
    Bug("a rate that nobody steps with any more is not told for ever", "session.companions:Companions.tells_rate",
        "return self._passed_over > RATE_STAYS", "return False",
        f"{_T}test_the_rate_of_one_that_steps_no_more_is_told_no_longer"),
    Bug("a scaler that skips one of two skips no step", "watch:Watch._on_scaler", " and not self._cycle.end_before()", "",
        f"{_T}test_a_step_in_which_a_scaler_skips_one_of_two_has_ended"),
    Bug("what is saved behind an open step has its number", "watch:Watch._on_save", "self._cycle.end_before()", "pass",
        f"{_T}test_what_is_saved_has_the_number_of_the_step_that_is_still_open"),
    Bug("state that is saved behind an open step has the next number", "watch:Watch.state_dict",
        "self._cycle.end_before()", "pass", f"{_T}test_what_is_saved_has_the_number_of_the_step_that_is_still_open"),
    Bug("an open step keeps no watch alive", "step_optimizer:StepOwner.at_forward", "weakref.WeakMethod(self._ended)",
        "(lambda: self._ended)", f"{_T}test_a_step_that_is_still_open_keeps_no_watch_alive"),
]  # fmt: skip
