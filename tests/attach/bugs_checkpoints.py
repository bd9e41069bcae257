"""Bugs in what is known of checkpoints."""

from __future__ import annotations

from support.planted import Bug

_T = "tests/attach/test_checkpoints.py::"
_S = "tests/attach/test_standing_state.py::"
_BOTH = f"{_S}test_what_two_optimizers_say_of_a_step_is_put_together"
_EVERY = f"{_S}test_moments_of_every_optimizer_are_held_against_the_checkpoint"
_ZERO = f"{_S}test_second_moments_that_are_0_are_counted_with_eps"
CHECKPOINT_BUGS = [
    Bug("what several optimizers say of a step adds up", "standing_state:merge", "known.update(out)", "known.update(more)", _BOTH),
    Bug("names of several optimizers are told apart", "standing_state:StandingState._begin", "begin = len(self.names)", "begin = 0",
        _BOTH),
    Bug("moments of the second optimizer are compared", "checkpoint_load:CheckpointLoad.before", "if again or all(", "if True or all(",
        f"{_EVERY}[wrong-AdamW] {_EVERY}[right-SGD]"),
    Bug("weights are held against what was left though moments are gone", "standing_state:StandingState._changes",
        "return self._weights_alone(optimizer, _Weights.of(kept))", "return {}",
        f"{_S}test_what_changes_between_two_steps_is_named_in_that_step_and_in_no_other[loaded_start]"),
    Bug("weights are held against what the optimizer before has left", "standing_state:StandingState.before",
        "return {} if self._left is None else self._weights_alone(optimizer, self._left)", "return {}",
        f"{_S}test_weights_are_held_against_what_an_optimizer_left_that_another_one_follows[True]"),
    Bug("second moments are looked at where they are new", "standing_state:StandingState._changes", "if same and not kept.is_new", "if same",
        _ZERO),
    Bug("a second moment of 0 counts where the first is not", "standing_state:_zeros", "(moving & (second == 0))", "(~moving & (second == 0))",
        _ZERO),
    Bug("how far an update moves is that of two steps", "standing_state:StandingState._keep", "kept.last, kept.values = kept.values, kept.elements.read(spare=kept.last)",
        "kept.last = kept.values = kept.elements.read(spare=kept.last)", f"{_S}test_how_far_an_update_moves_a_weight_is_known_of_its_elements"),
    Bug("where clipping stops the norm is measured", "gradient_norm:GradientNorm.take_limit", "MEASURED_STEPS if", "0 if",
        "tests/attach/test_gradient_norm.py::test_where_clipping_stops_the_norm_is_measured_for_some_steps_and_never_before"),
    Bug("a norm is measured of our parameters", "gradient_norm:GradientNorm.measure", "or not (id(held[0]) in self._ids or self._holds(id(held[0])))", "",
        "tests/attach/test_gradient_norm.py::test_where_clipping_stops_the_norm_is_measured_for_some_steps_and_never_before"),
    Bug("a checkpoint that training writes is noticed", "checkpoint_hooks:wrap_saving",
        'undo = [_wrap(torch, "save", tell)]', "undo = []",
        f"{_T}test_a_checkpoint_that_training_writes_is_noticed_and_told"),
    Bug("what holds no weights of ours is no checkpoint", "checkpoint_hooks:_holds",
        "and _is_one(key, names)", "", f"{_T}test_a_checkpoint_that_training_writes_is_noticed_and_told"),
    Bug("a save that fails is no checkpoint", "checkpoint_hooks:_wrap",
        "        result = original(*args, **kwargs)\n        written()\n", "        written()\n        result = original(*args, **kwargs)\n",
        f"{_T}test_a_save_that_fails_is_no_checkpoint_and_raises_as_it_would"),
    Bug("a skipped update poisons nothing", "checkpoint_steps:CheckpointSteps.arrived",
        "step if broken and status == StepStatus.OK else None", "step if broken else None",
        f"{_T}test_what_broke_in_a_step_without_an_update_poisons_nothing"),
    Bug("weights that are read broken were written before", "checkpoint_steps:CheckpointSteps.arrived",
        "bad = step - 1 if broken_weights else", "bad = step if broken_weights else",
        f"{_T}test_what_broke_in_a_step_without_an_update_poisons_nothing"),
    Bug("a poisoned checkpoint stays so where training goes back", "checkpoint_steps:CheckpointSteps.loaded",
        "self._left_behind.update(self.poisoned)", "pass",
        f"{_T}test_a_checkpoint_that_was_poisoned_stays_so_where_training_goes_back_until_it_is_written_anew"),
    Bug("weights may be loaded behind the state of the watch", "checkpoint_load:CheckpointLoad.begin",
        "self.pending = saved", "self._told({g: found[g] for g in OF_WEIGHTS if g in found})",
        f"{_T}test_what_is_loaded_as_it_was_saved_says_nothing"),
    Bug("weights that were loaded otherwise are named", "watch:Watch._before_optimizer",
        "self._load.before(optimizer, self._owns)", "pass", f"{_T}test_what_is_loaded_otherwise_is_named"),
    Bug("a history that was loaded otherwise is named", "checkpoint_load:CheckpointLoad.begin",
        "{DELAYED: found[DELAYED]} if DELAYED in found else {}", "{}", f"{_T}test_what_is_loaded_otherwise_is_named"),
]  # fmt: skip
