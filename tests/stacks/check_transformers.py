"""Hugging Face Trainer with the callback: its numbers, its steps, its resumes; nothing of training changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fp8watch.integrations.transformers import Fp8WatchCallback

WINDOW = 4  # micro-batches in a step


class Tokens(torch.utils.data.Dataset):
    """26 sequences: with two in a batch and four batches in a step, the last window of an epoch has one batch."""

    def __init__(self) -> None:
        self.ids = torch.randint(0, 64, (26, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        labels = self.ids[i].clone()
        labels[: i % 7] = -100  # sequences differ in what counts
        return {"input_ids": self.ids[i], "labels": labels}


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def trainer(folder: Path, callback: Fp8WatchCallback | None, **more) -> Trainer:
    arguments = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": WINDOW,
        "max_steps": 10, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "use_cpu": True, "seed": 3,
        "save_strategy": "steps", "save_steps": 5, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return Trainer(
        model=more.pop("model", None) or model(),
        args=TrainingArguments(**(arguments | more)),
        train_dataset=Tokens(),
        callbacks=[] if callback is None else [callback],
    )


def logged(of: Trainer, name: str) -> dict[int, float]:
    return {entry["step"]: entry[name] for entry in of.state.log_history if name in entry}


def test_loss_norm_rate_and_step_are_the_trainers_own_and_nothing_changes(kept, tmp_path):
    plain = trainer(tmp_path / "plain", None)
    plain.train()
    watched = trainer(tmp_path / "watched", Fp8WatchCallback(recipe="observe"), run_name="tiny llama")
    watched.train()
    assert logged(watched, "loss") == logged(plain, "loss")
    for name, other in plain.model.state_dict().items():
        assert torch.equal(watched.model.state_dict()[name], other)
    assert kept.steps() == list(range(1, 11))
    assert kept.losses() == pytest.approx(logged(watched, "loss"), abs=1e-4)
    assert kept.norms() == pytest.approx(logged(watched, "grad_norm"), rel=1e-5)
    (recorder,) = kept
    rates = {int(h["step"]): float(h["lr"]) for h, *_ in recorder.steps}
    assert rates == pytest.approx(logged(watched, "learning_rate"), rel=1e-5)
    assert recorder.session.run_name == "tiny llama"
    assert recorder.closed
    assert type(watched.model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_the_loss_of_smoothed_labels_is_the_trainers_own_and_nothing_changes(kept, tmp_path):
    """The Trainer takes the labels from the model, which returns no loss then."""
    smoothed = {"label_smoothing_factor": 0.1}
    plain = trainer(tmp_path / "plain", None, **smoothed)
    plain.train()
    watched = trainer(tmp_path / "watched", Fp8WatchCallback(recipe="observe"), **smoothed)
    watched.train()
    assert logged(watched, "loss") == logged(plain, "loss")
    assert kept.losses() == pytest.approx(logged(watched, "loss"), abs=1e-4)


@pytest.mark.parametrize("recipe", ["observe", "delayed"])
def test_a_resumed_training_goes_on_with_its_run_its_steps_and_its_scales(kept, tmp_path, recipe):
    first = trainer(tmp_path, Fp8WatchCallback(recipe=recipe), max_steps=5)
    first.train()
    callback = Fp8WatchCallback(recipe=recipe)
    again = trainer(tmp_path, callback)
    seen = {}
    begin = callback._held.begin

    def look(*args, **kwargs):
        begin(*args, **kwargs)
        seen.update(callback.watch.state_dict())

    callback._held.begin = look
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert kept.steps() == list(range(1, 11))
    assert len(kept.run_ids()) == 1
    assert kept.losses() == pytest.approx(logged(again, "loss"), abs=1e-4)
    assert seen["step"] == 6
    if recipe == "delayed":
        saved = torch.load(tmp_path / "checkpoint-5" / "fp8watch-rank0.pt", weights_only=True)["amax_histories"]
        assert {k: v["scale"].item() for k, v in seen["amax_histories"].items()} == {
            k: v["scale"].item() for k, v in saved.items()
        }
    json.loads((tmp_path / "checkpoint-10" / "trainer_state.json").read_text())


def test_a_checkpoint_that_was_moved_keeps_its_run(kept, tmp_path):
    trainer(tmp_path / "a", Fp8WatchCallback(recipe="observe"), max_steps=5).train()
    (tmp_path / "a" / "checkpoint-5").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "fp8watch-rank0.pt").unlink()
    trainer(tmp_path / "b", Fp8WatchCallback(recipe="observe"), max_steps=7).train(str(tmp_path / "elsewhere"))
    assert kept.steps() == list(range(1, 8))
    assert len(kept.run_ids()) == 1


def test_fp8watch_run_begins_a_run_of_its_own(kept, tmp_path, monkeypatch):
    trainer(tmp_path, Fp8WatchCallback(recipe="observe"), max_steps=5).train()
    monkeypatch.setenv("FP8WATCH_RUN", "fork")
    trainer(tmp_path, Fp8WatchCallback(recipe="observe"), max_steps=6).train(resume_from_checkpoint=True)
    assert [k.session.run_id for k in kept][1] == "fork"
    assert kept.steps() == [1, 2, 3, 4, 5, 6]


def test_an_argument_that_attach_does_not_have_is_refused_where_the_callback_is_made():
    with pytest.raises(TypeError, match="attach has no such argument; it has run, "):
        Fp8WatchCallback(recipee="observe")
    with pytest.raises(TypeError, match="the trainer's own is taken"):
        Fp8WatchCallback(start_step=3)
