"""What of Transformer Engine has no sites is named where attach names what is left out."""

import torch
from torch import nn

import fp8watch
from fp8watch.integrations import te_modules


def model_of(te):
    model = nn.Module()
    model.attention = te.DotProductAttention(4, 32)
    model.proj = te.Linear(128, 128, params_dtype=torch.bfloat16)
    return model


def test_attention_is_named_and_its_parts_are_not(te, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    model = model_of(te)
    with fp8watch.attach(model):
        line = capsys.readouterr().err
    assert line.count("products of activations") == 1
    assert "attention (products of activations: not observed, in FP8 where its recipe says fp8_dpa or fp8_mha)" in line
    assert "communication" not in line


def test_communication_that_overlaps_with_gemms_is_named(te):
    model = model_of(te)
    flags = [name for name in vars(model.proj) if name.startswith("ub_overlap")]
    assert flags, "no such flags in this version"
    for flag in flags:
        setattr(model.proj, flag, True)
        assert ("proj communication", "overlapped with its GEMMs: what it sends is not observed") in (
            te_modules.without_sites(model.named_modules())
        )
        setattr(model.proj, flag, False)


def test_a_weight_gradient_that_is_computed_behind_the_backward_is_named(te):
    model = nn.ModuleDict(
        {name: te.Linear(128, 128, delay_wgrad_compute=name == "late") for name in ("late", "as_ever")}
    )
    assert te_modules.without_sites(model.named_modules()) == [
        ("late wgrad", "delayed behind the backward: its product is not observed")
    ]
