"""torchtitan's Trainer with the override: its steps, losses, norms and rates, its experts, its checkpoints; nothing changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import titan_on_cpu
import torch
from torchtitan.components.metrics import MetricsProcessor

from fp8watch.integrations import torchtitan as adapter
from fp8watch_agent.record import StepStatus

OVERRIDE = "fp8watch.integrations.torchtitan.watch"


@pytest.fixture(autouse=True)
def _no_group_is_left():
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(
    family: str, folder: Path, *, watched: bool, attach=None, checkpoints=None, breaks_at=None, seen=None, recomputes=True,
    **training,
):  # fmt: skip
    """(what torchtitan logged of each step, its model)"""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    config = titan_on_cpu.config(family, folder, **training)
    if not recomputes:
        config.activation_checkpoint = None
    config.checkpoint.enable = checkpoints is not None
    config.checkpoint.interval = checkpoints or 1000
    config.override.imports = [(OVERRIDE, {"recipe": "observe"})] if watched and attach is None else []
    trainer = config.build()
    if attach is not None:
        attach(trainer)
    logged = {} if seen is None else seen

    def log(self, step, loss, _max, norm, extra_metrics=None):
        logged[step] = (loss, norm, next(v for k, v in extra_metrics.items() if k.startswith("lr")))
        if step == breaks_at:
            raise ZeroDivisionError

    trainer.metrics_processor.log = log.__get__(trainer.metrics_processor, MetricsProcessor)
    try:
        trainer.train()
    finally:
        trainer.close()
    return logged, trainer


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("family", ["llama3", "deepseek_v3"])
def test_steps_losses_norms_and_rates_are_torchtitans_and_nothing_changes(kept, tmp_path, family):
    more = {"global_batch_size": 4}  # of two micro-batches
    plain, before = train(family, tmp_path, watched=False, **more)
    logged, trainer = train(family, tmp_path, watched=True, **more)
    assert logged == plain
    assert same(trainer.model_parts[0], before.model_parts[0])
    assert kept.steps() == list(logged) == [1, 2, 3, 4, 5, 6]
    assert kept.losses() == pytest.approx({step: loss for step, (loss, *_) in logged.items()}, abs=1e-4)
    assert kept.norms() == pytest.approx({step: norm for step, (_, norm, _) in logged.items()}, rel=1e-5)
    (recorder,) = kept
    rates = {int(h["step"]): float(h["lr"]) for h, *_ in recorder.steps}
    assert rates == pytest.approx({step: rate for step, (*_, rate) in logged.items()}, rel=1e-5)
    assert recorder.closed
    assert recorder.session.run_name.startswith(family)
    assert not {"train", "train_step", "forward_backward_step"}.intersection(vars(trainer))
    silent = recorder.facts.get("silent", "")
    assert "expert" not in silent, silent


def test_fp8_computes_the_same_with_its_selective_checkpointing_and_without(kept, tmp_path):
    """Products of what observes are none of those that it keeps."""
    attach = adapter.attach_torchtitan  # at the defaults
    logged, trainer = train("llama3", tmp_path, watched=True, attach=attach)
    wrapped = [m for m in trainer.model_parts[0].modules() if hasattr(m, "_checkpoint_wrapped_module")]
    assert wrapped, "torchtitan's debug model recomputes some of its products"
    whole, other = train("llama3", tmp_path, watched=True, attach=attach, recomputes=False)
    assert logged == whole
    assert same(trainer.model_parts[0], other.model_parts[0])
    for recorder in kept:
        assert {s.recipe for s in recorder.sites if s.operand == "weight"} == {"blockwise"}
        assert "recompute" not in " ".join(recorder.facts)


def test_the_experts_of_grouped_gemms_are_observed(kept, tmp_path):
    train("deepseek_v3", tmp_path, watched=True, steps=3)
    (recorder,) = kept
    arrived = {int(i) for _, ids, *_ in recorder.steps for i in ids}
    seen = {(s.module.split(".")[-1], s.operand) for s in recorder.sites if s.id in arrived and "experts" in s.module}
    for name in ("w1_EFD", "w2_EDF", "w3_EFD"):
        assert {(name, "input"), (name, "weight"), (name, "grad_output")} <= seen


def test_a_resumed_training_goes_on_with_its_run_and_its_steps(kept, tmp_path):
    train("llama3", tmp_path, watched=True, checkpoints=2, steps=4)
    logged, _ = train("llama3", tmp_path, watched=True, checkpoints=2, steps=6)
    assert list(logged) == [5, 6]
    assert kept.steps() == [1, 2, 3, 4, 5, 6]
    assert len(kept.run_ids()) == 1
    assert kept[1].facts["checkpoint.session"] == kept[0].session.session
    assert kept[0].facts["checkpoints"] == "2 4"


def test_a_script_of_ones_own_attaches_to_its_trainer_and_what_raises_gives_it_back(kept, tmp_path):
    held = []

    def attach(trainer):
        held.append(adapter.attach_torchtitan(trainer, recipe="observe", run="mine"))

    with pytest.raises(ZeroDivisionError):
        train("llama3", tmp_path, watched=True, attach=attach, breaks_at=3)
    assert kept.steps() == [1, 2, 3]
    assert [int(h["status"]) for h, *_ in kept[0].steps] == [StepStatus.OK] * 3
    assert kept[0].session.run_name == "mine"
    assert kept[0].closed
    assert held[0].watch is None


def test_arguments_that_attach_does_not_have_are_refused_before_the_model_is_built(tmp_path):
    config = titan_on_cpu.config("llama3", tmp_path)
    config.override.imports = [(OVERRIDE, {"recipee": "observe"})]
    with pytest.raises(TypeError, match="attach has no such argument"):
        config.build()
    with pytest.raises(TypeError, match="must be a torchtitan Trainer"):
        adapter.attach_torchtitan(object())
