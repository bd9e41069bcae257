"""Lightning with the callback: automatic, accumulated, manual and with two optimizers; resumed, and where it raises."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import warnings

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

import fp8watch
from fp8watch.integrations.lightning import Fp8Watch
from fp8watch_agent.record import StepStatus
from fp8watch_agent.training_names import OPTIMIZER

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Automatic(LightningModule):
    """Returns its loss, as a tensor or in a dict."""

    def __init__(self, *, as_dict: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.as_dict, self.seen = Net(), as_dict, []

    def training_step(self, batch, _):
        loss = (self.net(batch) - batch).square().mean()
        self.seen.append(float(loss.detach()))
        return {"loss": loss} if self.as_dict else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class BatchAlone(Automatic):
    def training_step(self, batch):
        return super().training_step(batch, 0)


class Manual(Automatic):
    """Two optimizers, of which each has half of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, _):
        loss = (self.net(batch) - batch).square().mean()
        self.seen.append(float(loss.detach()))
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.net.up, self.net.down)]


def batches(num: int = 12):
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.DataLoader([torch.randn(32, generator=generator) for _ in range(num * 16)], batch_size=16)


def fit(module, folder, *callbacks, ckpt=None, num=12, **more) -> Trainer:
    made = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks), default_root_dir=folder,
        callbacks=list(callbacks), **({"max_epochs": 1} | more),
    )  # fmt: skip
    safely = {"weights_only": True} if ckpt and "weights_only" in inspect.signature(made.fit).parameters else {}
    made.fit(module, batches(num), ckpt_path=ckpt, **safely)
    return made


def same_weights(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("how", ["automatic", "as a dict", "bf16-mixed"])
def test_each_step_has_its_number_and_loss_and_nothing_changes(kept, tmp_path, how):
    more = {"precision": "bf16-mixed"} if how == "bf16-mixed" else {}
    plain, watched = Automatic(as_dict=how == "as a dict"), Automatic(as_dict=how == "as a dict")
    fit(plain, tmp_path, **more)
    made = fit(watched, tmp_path, Fp8Watch(recipe="observe"), **more)
    assert watched.seen == plain.seen
    assert same_weights(plain, watched)
    assert kept.steps() == list(range(1, 13))
    assert made.global_step == 12
    assert list(kept.losses().values()) == pytest.approx(watched.seen, abs=1e-4)
    assert type(watched) is Automatic
    assert {site.module for site in kept[0].sites if site.recipe != "probe"} == {"up", "down"}


def test_a_step_is_given_what_it_takes_and_no_more(kept, tmp_path):
    """Lightning looks up whether `training_step` takes the number of the batch."""
    plain, watched = BatchAlone(), BatchAlone()
    fit(plain, tmp_path)
    fit(watched, tmp_path, Fp8Watch(recipe="observe"))
    assert watched.seen == plain.seen
    assert list(kept.losses().values()) == pytest.approx(watched.seen, abs=1e-4)


def test_accumulated_batches_are_one_step_with_the_mean_of_their_losses(kept, tmp_path):
    plain, watched = Automatic(), Automatic()
    fit(plain, tmp_path, accumulate_grad_batches=5, gradient_clip_val=0.1)
    made = fit(watched, tmp_path, Fp8Watch(recipe="observe"), accumulate_grad_batches=5, gradient_clip_val=0.1)
    assert watched.seen == plain.seen
    assert same_weights(plain, watched)
    assert kept.steps() == [1, 2, 3]
    assert made.global_step == 3
    means = [sum(part) / len(part) for part in (watched.seen[:5], watched.seen[5:10], watched.seen[10:])]
    assert list(kept.losses().values()) == pytest.approx(means, abs=1e-4)
    assert len(kept.norms()) == 3
    assert min(kept.norms().values()) > 0.1, "before it is clipped"


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_training_that_is_well_has_no_news_of_its_optimizer_and_its_gradients_are_looked_at(
    kept, tmp_path, accumulated
):
    """Lightning gives the optimizer's step a closure, with the backward in it."""
    fit(
        Automatic(),
        tmp_path,
        Fp8Watch(),
        num=24 * accumulated,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.1,
    )
    news = {name for *_, logs, _ in kept[0].steps for name in logs if name.startswith(OPTIMIZER)}
    assert not [name for name in news if not name.endswith(("clip_norm", "beta2"))], news
    assert len(kept[0].steps) == 24
    assert "gradients_unseen" not in kept[0].facts


@pytest.mark.parametrize("steps", ["global_step", "logger"])
def test_two_optimizers_end_one_step_under_the_trainers_number(kept, tmp_path, steps):
    plain, watched = Manual(), Manual()
    fit(plain, tmp_path)
    made = fit(watched, tmp_path, Fp8Watch(recipe="observe", steps=steps))
    assert watched.seen == plain.seen
    assert same_weights(plain, watched)
    assert made.global_step == 24
    assert kept.steps() == (list(range(2, 25, 2)) if steps == "global_step" else list(range(12)))
    assert list(kept.losses().values()) == pytest.approx(watched.seen, abs=1e-4)


def test_the_norm_is_of_all_gradients(kept, tmp_path):
    norms = []

    class Norms(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))

    fit(Manual(), tmp_path, Norms(), Fp8Watch(recipe="observe"))
    assert list(kept.norms().values()) == pytest.approx(norms[::2], rel=1e-5)


@pytest.mark.parametrize("recipe", ["observe", "delayed"])
def test_a_resumed_training_goes_on_with_its_run_and_its_steps(kept, tmp_path, recipe):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="last", every_n_train_steps=5)
    fit(Automatic(), tmp_path, Fp8Watch(recipe=recipe), saved, max_steps=5)
    watched = Automatic()
    made = fit(watched, tmp_path, Fp8Watch(recipe=recipe), ckpt=tmp_path / "last.ckpt")
    assert made.global_step >= 12, "some versions take the last batch of the checkpoint again"
    assert kept.steps() == list(range(1, made.global_step + 1))
    assert len(kept.run_ids()) == 1
    assert list(kept.losses().values())[5:] == pytest.approx(watched.seen, abs=1e-4)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["Fp8Watch"]
    assert state["step"] == 6
    assert ("amax_histories" in state) == (recipe == "delayed")


def test_a_checkpoint_that_is_written_behind_the_training_goes_on_too(kept, tmp_path):
    fit(Automatic(), tmp_path, Fp8Watch(recipe="observe"), max_steps=5).save_checkpoint(tmp_path / "after.ckpt")
    made = fit(Automatic(), tmp_path, Fp8Watch(recipe="observe"), ckpt=tmp_path / "after.ckpt", max_epochs=2)
    assert made.global_step > 12
    assert kept.steps() == list(range(1, made.global_step + 1))
    assert len(kept.run_ids()) == 1


def test_what_raises_leaves_as_an_aborted_step_and_the_module_as_it_was(kept, tmp_path):
    class Breaks(Automatic):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 3:
                loss.backward()
                raise ZeroDivisionError
            return loss

    module = Breaks()
    with pytest.raises(ZeroDivisionError):
        fit(module, tmp_path, Fp8Watch(recipe="observe"))
    assert kept.steps() == [1, 2, 3, 4]
    assert int(kept[0].steps[-1][0]["status"]) == StepStatus.ABORTED
    assert kept[0].closed
    assert type(module) is Breaks
    assert type(module.net.up) is nn.Linear


def test_attach_alone_sees_the_loss_of_a_lightning_module_too(kept, tmp_path):
    module = Automatic()
    with fp8watch.attach(module, recipe="observe") as watch:
        fit(module, tmp_path)
    assert list(kept.losses().values()) == pytest.approx(module.seen, abs=1e-4)
    assert watch.guard.errors == {}


def test_copies_and_pickles_of_a_watched_module_are_plain(kept):
    module = Automatic()
    with fp8watch.attach(module, recipe="observe"):
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert type(other) is Automatic
            assert not [key for key in vars(other) if "fp8watch" in key]
    assert type(module) is Automatic
    assert not [key for key in vars(module) if "fp8watch" in key]


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_what_fabric_sets_up_has_the_names_of_its_model(kept, strategy, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(net := Net(), torch.optim.AdamW(net.parameters()))
    with fp8watch.attach(model, recipe="observe") as watch:
        for batch in batches(2):
            optimizer.zero_grad()
            fabric.backward((model(batch) - batch).square().mean())
            optimizer.step()
    assert watch.guard.errors == {}
    assert {site.module for site in kept[-1].sites} == {"up", "down"}
    assert kept.steps() == [0, 1]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
