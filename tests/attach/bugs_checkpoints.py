"""Bugs in what is known of checkpoints."""

from __future__ import annotations

from support.planted import Bug

_T = "tests/attach/test_checkpoints.py::"
CHECKPOINT_BUGS = [
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
