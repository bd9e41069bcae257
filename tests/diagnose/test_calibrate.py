"""calibrate: the recipe follows from what was measured, and the file that it writes is read back by attach."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diagnose.small_models import Classifier, batch_of, trained
from torch import Tensor, nn

import fp8watch
from fp8watch.diagnose import calibrate
from fp8watch.layers.fp8_linear import WatchedLinear
from fp8watch.recipe import RECIPES, AmaxHistory, OperandRecipe, Recipe, resolve_recipe
from fp8watch.recipe.file import read_recipe_file, recipe_toml


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("FP8WATCH_COLLECTOR", "FP8WATCH_RECIPE", "FP8WATCH_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))


def batches(num: int, dim: int = 64, rows: int = 64) -> list[tuple[Tensor, Tensor]]:
    return [batch_of(seed, rows, dim) for seed in range(num)]


def uneven(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Half of the rows a million times smaller: one scale for the tensor flushes them, tiles of 128 rows do not."""
    return (torch.cat((args[0][:128], args[0][128:] * 1e-6)),)


def test_a_model_with_quiet_operands_gets_the_coarsest_recipe() -> None:
    model, _ = trained(6)
    before = [p.clone() for p in model.parameters()]
    got = calibrate(model, batches(3), steps=2)
    assert (got.recipe.name, got.steps, got.settled_at) == ("current", 2, None)
    assert got.reasons == {}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert {(s.operand, s.suggested) for s in got.sites} == {(o, "current") for o in ("input", "weight", "grad_output")}


def test_rows_of_other_sizes_in_every_layer_ask_for_tiles() -> None:
    model, _ = trained(6, dim=128)
    for layer in model.layers:
        for linear in (layer.gate, layer.up, layer.down):
            linear.register_forward_pre_hook(uneven)
    got = calibrate(model, batches(1, 128, 256))
    assert got.recipe.kind == "blockwise"
    site = next(s for s in got.sites if (s.module, s.operand) == ("layers.0.gate", "input"))
    assert site.suggested == "blockwise"
    assert site.tile_sqnr_p05_db["current"] < 28 < site.tile_sqnr_p05_db["blockwise"]


def test_a_single_bad_layer_stays_in_high_precision_and_attach_reads_that_back(tmp_path: Path, capfd: Any) -> None:
    """No recipe serves an operand whose tiles hold a gap of a million."""
    model, optimizer = trained(3, layers=8)

    def gap(_m: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[:, ::2] *= 1e-7
        return (x,)

    model.layers[4].down.register_forward_pre_hook(gap)
    got = calibrate(model, batches(2), optimizer=optimizer)
    assert list(got.reasons) == ["layers.4.down"]
    assert got.settled_at is not None
    path = tmp_path / "recipe.toml"
    path.write_text(got.toml())
    assert read_recipe_file(path) == got.recipe
    with fp8watch.attach(model, recipe=str(path)) as watch:
        converted = {n for n, m in model.named_modules() if isinstance(m, WatchedLinear)}
        assert len(converted) == 23
        assert "layers.4.down" not in converted
        assert watch.summary()["recipe"] == got.recipe.name
        said = capfd.readouterr().err
        assert "layers.4.down (the recipe leaves it in high precision)" in said, said
    with fp8watch.attach(model, recipe=fp8watch.observe(got.recipe)):
        assert sum(isinstance(m, WatchedLinear) for m in model.modules()) == 24  # to observe is not to convert


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused(bad: float) -> None:
    model, _ = trained(2)
    given = [*batches(2), (batches(1)[0][0] * bad, batches(1)[0][1]), *batches(1)]
    with pytest.raises(
        ValueError, match=r"the loss is nan in high precision: there is nothing to measure; give batches"
    ):
        calibrate(model, given)
    assert calibrate(model, given[:2]).steps == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_operand_that_is_not_finite_is_served_by_no_recipe(bad: float) -> None:
    model, _ = trained(2)

    def spoilt(_m: nn.Module, _args: Any, out: Tensor) -> None:
        out.register_hook(lambda grad: torch.full_like(grad, bad))

    model.layers[0].gate.register_forward_hook(spoilt)
    got = calibrate(model, batches(2))
    assert got.reasons == {"layers.0.gate": "grad_output is not finite in 2 of 2 steps"}
    assert got.recipe.high_precision_modules == ("layers.0.gate",)
    site = next(s for s in got.sites if (s.module, s.operand) == ("layers.0.gate", "grad_output"))
    assert site.suggested is None
    assert {s.suggested for s in got.sites if s is not site} == {"current"}


def test_what_was_not_measured_is_not_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8watch.diagnose.operand_costs.OperandCosts.tile_sqnr_db", None)
    got = calibrate(trained(2, layers=1)[0], batches(1))
    assert got.reasons["layers.0.gate"] == "input was not measured"
    assert {s.suggested for s in got.sites} == {None}


def test_an_operand_of_zeros_loses_nothing() -> None:
    model, _ = trained(2, layers=1)
    torch.nn.init.zeros_(model.lm_head.weight)  # no gradient comes to the layers
    got = calibrate(model, batches(1))
    assert got.reasons == {}
    assert {s.suggested for s in got.sites} == {"current"}


def test_the_first_steps_of_a_training_show_how_long_it_takes_to_settle() -> None:
    torch.manual_seed(0)
    model = Classifier(layers=1)
    for p in model.parameters():
        p.data.mul_(0.1)
    got = calibrate(model, batches(6), steps=6, optimizer=lambda p: torch.optim.AdamW(p, lr=0.05))
    assert got.settled_at is not None
    assert 1 <= got.settled_at <= 6
    assert got.recipe.warmup_steps == got.settled_at
    assert got.delayed_margin >= 1
    assert "warm_up_share" in got.toml()


def drawn_recipe(draw: random.Random) -> Recipe:
    def spec() -> OperandRecipe:
        fmt = draw.choice(["E4M3", "E5M2"])
        return draw.choice(
            [
                OperandRecipe((1, 128), fmt, draw.random() < 0.5, draw.choice([0.0, 1e-12])), OperandRecipe((1, -1), fmt, eps=1e-12),
                OperandRecipe(None, fmt, False), OperandRecipe((1, 32), fmt, scaling="mx"),
                OperandRecipe(None, fmt, False, scaling="delayed"),
            ]
        )  # fmt: skip

    made = [spec(), spec(), spec()]
    if draw.random() < 0.3:
        made[draw.randrange(3)] = None  # type: ignore[call-overload]
    delayed = any(s is not None and s.scaling == "delayed" for s in made)
    return Recipe(
        draw.choice(["", "mine", 'a "quoted"\\ näme\n']), *made, warmup_steps=draw.randrange(3),
        history=AmaxHistory(draw.randrange(1, 9), draw.choice(["max", "most_recent"]), draw.randrange(-3, 4)) if delayed else None,
        high_precision_modules=tuple(draw.sample(["layers.0.*", "*.down", "ø"], draw.randrange(3))),
    )  # fmt: skip


def test_every_recipe_comes_back_out_of_its_file_as_it_was(tmp_path: Path) -> None:
    draw = random.Random(0)
    for recipe in [*(r.build() for r in RECIPES.values()), *(drawn_recipe(draw) for _ in range(300))]:
        path = tmp_path / "r.toml"
        path.write_text(recipe_toml(recipe, "why\nso"))
        assert read_recipe_file(path) == recipe
        assert resolve_recipe(str(path)).facts() == recipe.facts()


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("version = 1", "version = 2", "must be 1"),
        ("warmup_steps = 0", "warm_up_steps = 3", "warm_up_steps, which is unknown; known are name, warmup_steps"),
        ("[recipe.weight]", "[recipe.wait]", "wait, which is unknown"),
        ("tile = [1, 128]", "tile = [1, 64]", r"tile=\(1, 64\)"),
        ("tile = [1, 128]", 'tile = "column"', "'row' or 'tensor'"),
        ('format = "E4M3"', 'format = "E3M4"', "E3M4"),
        ("high_precision_modules = []", 'high_precision_modules = "a"', "must be a list"),
        ("version = 1", "version = ", "recipe file"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(tmp_path: Path, old: str, new: str, word: str) -> None:
    path = tmp_path / "r.toml"
    text = recipe_toml(fp8watch.blockwise())
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=word) as caught:
        fp8watch.attach(nn.Linear(16, 16), recipe=path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp8watch calibrate -o"):
        resolve_recipe(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("change", "word"), [({"steps": 0}, "from 1"), ({"batches": []}, "empty"), ({"model": 3}, "torch.nn.Module")]
)
def test_what_cannot_be_calibrated_is_said(change: dict[str, Any], word: str) -> None:
    given: dict[str, Any] = {"model": Classifier(), "batches": batches(1)}
    with pytest.raises((TypeError, ValueError), match=word):
        calibrate(**{**given, **change})
