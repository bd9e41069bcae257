"""Trainers of libraries, with fp8watch's adapters to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from training_families import llama
from training_loops import adamw, lm, text
from training_models import tokens
from training_registry import scenario
from training_run import Run


class _Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, length: int) -> None:
        self.ids = tokens("cpu", 64, length, 1)[0][0]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


@scenario(weight=3, needs="transformers", apart=True)
def hf_trainer(run: Run) -> None:
    """transformers' Trainer with the callback, bf16, two micro-batches in a step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from fp8watch.integrations.transformers import Fp8WatchCallback

    class Measure(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if own is not None:
                run.watches.append(own.watch)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            run.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.end()

    own = Fp8WatchCallback(**run.adapter_arguments()) if run.watched else None
    arguments = TrainingArguments(
        output_dir=str(run.folder / "hf"), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=run.num_steps, learning_rate=1e-3, logging_steps=1, report_to=[], use_cpu=not run.cuda, bf16=True,
        seed=3, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=run.cuda, max_grad_norm=1.0,
    )  # fmt: skip
    model = llama(run, torch.float32)
    run.keep(model)
    callbacks = [Measure()] if own is None else [own, Measure()]
    trainer = Trainer(model=model, args=arguments, train_dataset=_Sentences(run.size(256, 32)), callbacks=callbacks)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            run.loss(float(entry["loss"]))


@scenario(weight=3, needs="lightning", apart=True)
def lightning_trainer(run: Run) -> None:
    """Lightning's Trainer with the callback, bf16-mixed, gradients clipped."""
    import lightning

    from fp8watch.integrations.lightning import Fp8Watch

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = lm(run)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(*batch)
            run.loss(loss)
            return loss

        def configure_optimizers(self) -> Any:
            return adamw(self)

    class Measure(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, *_: Any) -> None:
            if own is not None:
                run.watches.append(own.watch)

        def on_train_batch_start(self, *_: Any) -> None:
            run.begin()

        def on_train_batch_end(self, *_: Any) -> None:
            run.end()

    own = Fp8Watch(**run.adapter_arguments()) if run.watched else None
    module = Module()
    run.keep(module)
    trainer = lightning.Trainer(
        max_steps=run.num_steps, accelerator="gpu" if run.cuda else "cpu", devices=1, precision="bf16-mixed",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=1.0, default_root_dir=str(run.folder), callbacks=[Measure()] if own is None else [own, Measure()],
    )  # fmt: skip
    data = [(ids, labels) for ids, labels in tokens("cpu", 4, run.size(256, 32), run.num_steps)]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))


@scenario(needs="accelerate", apart=True)
def accelerated(run: Run) -> None:
    """accelerate's loop with the tracker."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from fp8watch.integrations.accelerate import Fp8WatchTracker

    AcceleratorState._reset_state(reset_partial_state=True)
    tracker = Fp8WatchTracker(**run.adapter_arguments()) if run.watched else None
    accelerator = Accelerator(mixed_precision="bf16", cpu=not run.cuda, log_with=[] if tracker is None else [tracker])
    if tracker is not None:
        accelerator.init_trackers("trainings")
    model = lm(run)
    run.keep(model)
    optimizer: Any = adamw(model)
    called, optimizer = accelerator.prepare(model, optimizer)
    if tracker is not None:
        run.watches.append(tracker.attach(accelerator, called))
    data = text(run)
    for i in run.each():
        loss = called(*data[i])
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        run.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    if tracker is not None:
        run.notes["watch"] = "of the tracker"
