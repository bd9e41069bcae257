"""FP8 that a trainer was asked for and that nothing in the model computes is said at attach, and on the run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from attach.stored_linear import StoredLinear
from torch import nn

from fp8watch.recipe import resolve_recipe
from fp8watch.recipe.declared import REMEDY, declared_fp8, not_active
from fp8watch.recipe.foreign import read_foreign
from fp8watch_server.detect.sessions import own_contradictions, sessions_of

ACCELERATOR = {
    "accelerate.state": SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state={"_mixed_precision": "fp8"}))
}


@pytest.mark.parametrize(
    ("argv", "environ", "modules", "said"),
    [
        (["--fp8-format", "hybrid"], {}, {}, ("--fp8-format hybrid", "Megatron")),
        ([], {"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, ("ACCELERATE_MIXED_PRECISION=fp8", "accelerate")),
        ([], {}, ACCELERATOR, ("Accelerator(mixed_precision='fp8')", "accelerate")),
        (
            [], {"ACCELERATE_FP8_BACKEND": "TE", "ACCELERATE_MIXED_PRECISION": "bf16"}, {},
            ("ACCELERATE_FP8_BACKEND=TE with ACCELERATE_MIXED_PRECISION=bf16", "accelerate"),
        ),
        (["--mixed_precision=fp8"], {}, {}, ("--mixed_precision fp8", "accelerate")),
        (["--model.converters=float8,x"], {}, {}, ("--model.converters float8,x", "torchtitan")),
        (["--model.converters", "quantize.linear.mx"], {}, {}, ("--model.converters quantize.linear.mx", "torchtitan")),
        (["--fp8"], {}, {}, ("--fp8", "the training script")),
        (["--fp8", "true"], {}, {}, ("--fp8", "the training script")),
    ],
)  # fmt: skip
def test_each_way_to_ask_is_read(argv, environ, modules, said) -> None:
    assert declared_fp8(argv, environ, modules) == (said,)
    assert said[1] in REMEDY


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        ([], {}),
        (["--fp8", "false", "--fp8=0", "--mixed_precision", "bf16", "--model.converters", "lora"], {}),
        (["--name", "fp8", "-k", "float8"], {"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ],
)
def test_what_asks_for_none_is_not_taken_for_it(argv, environ) -> None:
    assert declared_fp8(argv, environ, {}) == ()
    assert not_active((), converted=False) is None


@pytest.mark.parametrize(
    ("name", "text", "owner"),
    [
        ("train.yaml", "bf16: true\nfp8: true\n", "LLaMA-Factory"),
        ("llama3.toml", '[model]\nconverters = ["float8"]\n', "torchtitan"),
        ("args.json", '{"fp8": true}', "LLaMA-Factory"),
        ("other.yaml", "fp8: false\nnot_fp8: true\n", None),
        ("broken.toml", "\0converters", None),
    ],
)
def test_a_configuration_file_on_the_command_line_is_searched(tmp_path, name, text, owner) -> None:
    path = tmp_path / name
    path.write_text(text)
    for argv in ([str(path)], ["--job.config_file", str(path)], [f"--job.config_file={path}"]):
        found = declared_fp8(argv, {}, {})
        assert [o for _, o in found] == ([owner] if owner else [])
        assert all(name in what for what, _ in found)
    assert declared_fp8([str(tmp_path / "none.yaml"), str(tmp_path)], {}, {}) == ()


@pytest.mark.parametrize("recipe", [None, "observe"])
def test_attach_says_it_and_the_run_has_a_warning(attach, monkeypatch, capsys, recipe) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    watch = attach(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), recipe=recipe)
    ours = "" if recipe else ", but for what fp8watch converts"
    line = f"FP8 is asked for by ACCELERATE_MIXED_PRECISION=fp8 (accelerate), and no module of the model computes in FP8{ours}: "
    assert f"fp8watch: {line}" in capsys.readouterr().err
    session = watch._recorder.session
    (change,) = own_contradictions(sessions_of([session])[0])  # what recipe-mismatch is raised for
    assert change.fact == "configuration_warning"
    assert line in change.value


def test_a_model_that_computes_in_fp8_is_not_warned_of_and_has_its_own_flags(attach, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"])
    model = nn.Sequential(nn.Linear(64, 64), StoredLinear())
    attach(model)
    said = capsys.readouterr().err
    assert "FP8 is asked for" not in said
    assert "taken over here use" not in said
    assert resolve_recipe("observe", environ={}, argv=sys.argv).declared_not_effective != ()


def test_an_interval_is_declared_and_not_effective() -> None:
    class DelayedScaling:
        fp8_format, margin, amax_history_len, amax_compute_algo, interval = "HYBRID", 0, 16, "max", 8
        scaling_factor_compute_algo = None

    (said,) = [n for n in read_foreign(DelayedScaling(), {}).declared_not_effective if "interval" in n]
    assert said.startswith("DelayedScaling.interval=8 is declared; its quantisers do not read it")
