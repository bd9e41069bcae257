"""Checkpoints that are sound and checkpoints that are not are told apart, whatever wrote them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import shutil
import sys

import pytest
import torch
from diagnose import made_checkpoints as made
from torch.distributed.checkpoint import format_utils

import fp8watch
from fp8watch.diagnose import check_checkpoint
from fp8watch.diagnose.check_checkpoint import main
from fp8watch.diagnose.checkpoint_files import Unreadable, _OnlyTorch, open_checkpoint

HOW = ("safetensors", "dcp", "torch.save")
NUM = 20


@pytest.fixture(scope="module")
def base():
    """Weights and moments of a training, and the weights in FP8."""
    random.seed(1)
    model, optimizer = made.trained()
    return made.flat(model, optimizer), made.as_fp8(model)


def bits(x):
    return x.reshape(-1).view(torch.uint8)


def one(base, number, folder, *, poisoned):
    """The checkpoint of a number: its kind, its format and its fault follow from it."""
    draw = random.Random(number)
    in_fp8 = number % 2
    tensors = {k: v.clone() for k, v in base[in_fp8].items()}
    fault = None
    if poisoned:
        faults = made.OF_FP8 if in_fp8 else made.OF_TRAINING
        fault = faults[number // 2 % len(faults)]
        fault(tensors, draw)
    folder.mkdir()
    return made.save(tensors, folder, HOW[number % 3]), fault


def test_poisoned_and_clean_are_told_apart_20_of_20(base, tmp_path):
    pytest.importorskip("safetensors")
    told = []
    for number in range(NUM):
        poisoned = number % 4 != 3  # one in four is clean
        path, fault = one(base, number, tmp_path / str(number), poisoned=poisoned)
        report = check_checkpoint(path)
        told.append(report.clean is not poisoned)
        assert report.clean is not poisoned, (number, fault, str(report))
        assert report.num_tensors > 10
        shutil.rmtree(tmp_path / str(number))
    assert sum(told) == NUM


@pytest.mark.parametrize("fault", made.OF_TRAINING + made.OF_FP8)
def test_each_fault_is_named_with_its_tensor(base, tmp_path, fault):
    tensors = {k: v.clone() for k, v in base[fault in made.OF_FP8].items()}
    before = {k: v.clone() for k, v in tensors.items()}
    fault(tensors, random.Random(5))
    touched = {k for k in before if k not in tensors or before[k].shape != tensors[k].shape}
    touched |= {k for k in tensors if k not in touched and bits(before[k]).ne(bits(tensors[k])).any()}
    report = check_checkpoint(made.save(tensors, tmp_path, "torch.save"))
    failed = [f.tensor.removeprefix("state.") for f in report.findings if f.status == "FAIL"]
    roots = {k.removesuffix("_scale_inv").removesuffix("_sq") for k in touched}
    assert failed
    assert {f.removesuffix("_scale_inv").removesuffix("_sq") for f in failed} == roots


def squares_alone(base, keep):
    """The training's checkpoint without the first moments, but those to keep."""
    return {k: v.clone() for k, v in base[0].items() if not k.endswith("exp_avg") or keep(k)}


def test_second_moments_without_first_ones_are_looked_at(base, tmp_path):
    alone = squares_alone(base, lambda name: False)
    assert check_checkpoint(made.save(alone, tmp_path, "torch.save")).findings == []  # as Adafactor keeps them
    squares = sorted(name for name in alone if name.endswith("exp_avg_sq"))
    alone[squares[0]].view(-1)[2] = float("nan")
    alone[squares[1]].view(-1)[1] = -1e-8
    alone[squares[2]] = alone[squares[2]].half()
    report = check_checkpoint(made.save(alone, tmp_path, "torch.save"))
    found = [(f.status, f.tensor.removeprefix("state."), f.check) for f in report.findings]
    assert sorted(found[:2]) == [("FAIL", squares[0], "finite"), ("FAIL", squares[1], "moments")]
    assert found[2:] == [("WARN", squares[2], "moment dtype")] * 2  # by itself, and beside the others
    assert report.num_moments == 0


def test_a_first_moment_that_is_lost_is_a_warning(base, tmp_path):
    lost = "optimizer.state.2.0.weight.exp_avg"
    report = check_checkpoint(made.save(squares_alone(base, lambda name: name != lost), tmp_path, "torch.save"))
    assert [(f.status, f.tensor, f.check) for f in report.findings] == [("WARN", f"state.{lost}_sq", "moments")]
    assert "no exp_avg" in report.findings[0].said


def test_one_element_that_is_most_of_a_weight_is_named(tmp_path):
    weights = {
        name: torch.randn(64, 64, generator=torch.Generator().manual_seed(3)) / 8 for name in ("sound", "flipped")
    }
    weights["flipped"][3, 5] = 100.0
    report = check_checkpoint(made.save(weights, tmp_path, "torch.save"))
    assert [(f.status, f.tensor, f.check) for f in report.findings] == [("FAIL", "state.flipped", "distribution")]


def test_a_sound_checkpoint_of_each_format_has_no_finding_at_all(base, tmp_path):
    for i, how in enumerate(HOW):
        if how == "safetensors":
            pytest.importorskip("safetensors")
        for in_fp8 in (0, 1):
            folder = tmp_path / f"{i}{in_fp8}"
            folder.mkdir()
            report = check_checkpoint(made.save(dict(base[in_fp8]), folder, how))
            assert report.findings == [], (how, in_fp8)
            assert report.num_fp8 == (made.LAYERS if in_fp8 else 0)
            assert report.num_moments == (0 if in_fp8 else 4 * made.LAYERS)


def test_scales_may_lie_in_another_file_and_what_the_index_lists_must_be_there(base, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    weights = {k: v for k, v in base[1].items() if not k.endswith("_scale_inv")}
    scales = {k: v for k, v in base[1].items() if k.endswith("_scale_inv")}
    save_file(weights, tmp_path / "model-1.safetensors")
    save_file(scales, tmp_path / "model-2.safetensors")
    index = dict.fromkeys(base[1], "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert check_checkpoint(tmp_path).findings == []
    index["lost.weight"] = "model-3.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert [f.tensor for f in check_checkpoint(tmp_path).findings] == ["lost.weight"]


def test_weights_that_moved_since_an_earlier_checkpoint_are_named(base, tmp_path):
    now = {k: v.clone() for k, v in base[0].items()}
    now["model.2.0.weight"] *= 8
    for name, tensors in (("before", base[0]), ("now", now)):
        torch.save(tensors, tmp_path / f"{name}.pt")
    assert check_checkpoint(tmp_path / "now.pt").clean
    found = check_checkpoint(tmp_path / "now.pt", against=tmp_path / "before.pt").findings
    assert [(f.tensor, f.status) for f in found] == [("model.2.0.weight", "FAIL")]


def test_the_bits_that_a_watch_saw_are_held_against_those_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))
    with fp8watch.attach(model) as watch:
        state = {"model": model.state_dict(), "fp8watch": watch.state_dict()}
    torch.save(state, tmp_path / "good.pt")
    assert check_checkpoint(tmp_path / "good.pt").num_verified == 4
    state["model"]["1.weight"].view(torch.int32)[5, 7] ^= 1  # the lowest bit of one element
    torch.save(state, tmp_path / "bad.pt")
    report = check_checkpoint(tmp_path / "bad.pt")
    assert [(f.tensor, f.check) for f in report.findings] == [("model.1.weight", "bits")]
    assert report.num_verified == 3


def test_the_command_says_it_as_a_table_and_as_json_and_by_its_status(base, tmp_path, capsys):
    bad = dict(base[1])
    del bad["0.0.weight_scale_inv"]
    torch.save(bad, tmp_path / "bad.pt")
    torch.save(base[1], tmp_path / "good.pt")
    assert main([str(tmp_path / "good.pt")]) == 0
    assert "nothing fails: 0 FAIL" in capsys.readouterr().out
    assert main([str(tmp_path / "bad.pt")]) == 1
    out = capsys.readouterr().out
    assert "FAIL  0.0.weight  scale present  FP8 codes without 0.0.weight_scale_inv" in out
    assert main([str(tmp_path / "bad.pt"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["clean"] is False
    assert found["findings"][0]["tensor"] == "0.0.weight"
    assert main([str(tmp_path / "nothing.pt")]) == 2
    assert "no such file" in capsys.readouterr().err


class Payload:
    """What runs where a pickle is trusted."""

    def __init__(self, *args, call=os.mkdir):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def test_nothing_in_a_checkpoint_is_executed(base, tmp_path):
    ran = str(tmp_path / "ran")
    torch.save({"w": base[0]["model.0.0.weight"], "x": Payload(ran)}, tmp_path / "bad.pt")
    where = made.save({"w": torch.ones(4, 4)}, tmp_path, "dcp")
    (where / ".metadata").write_bytes(pickle.dumps(Payload(ran)))
    for path in (tmp_path / "bad.pt", where):
        with pytest.raises(Unreadable):
            open_checkpoint(path)
    assert not os.path.exists(ran)


def test_no_function_of_torchs_checkpoints_is_called_for_its_metadata(tmp_path):
    """One of them reads the pickle that it is given the path of."""
    ran, other = str(tmp_path / "ran"), str(tmp_path / "other.pt")
    torch.save({"x": Payload(ran)}, other)
    where = made.save({"w": torch.ones(4, 4)}, tmp_path, "dcp")
    payload = Payload(other, str(tmp_path / "out"), call=format_utils.torch_save_to_dcp)
    (where / ".metadata").write_bytes(pickle.dumps(payload))
    with pytest.raises(Unreadable, match="does not belong into the metadata"):
        open_checkpoint(where)
    assert not os.path.exists(ran)
    room = "torch.distributed.checkpoint"
    inside = [(at, name) for at, m in list(sys.modules.items()) if at.startswith(room) for name in vars(m)]
    assert ("torch.distributed.checkpoint.filesystem", "os") in inside
    taken = set()
    for at, name in inside:
        with contextlib.suppress(pickle.UnpicklingError):
            taken.add(_OnlyTorch(io.BytesIO()).find_class(at, name))
    assert taken
    assert all(isinstance(one, type) for one in taken)


def test_a_file_that_was_cut_off_is_a_finding_or_a_reason(base, tmp_path):
    where = made.save(dict(base[0]), tmp_path, "dcp")
    data = next(where.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    report = check_checkpoint(where)
    assert not report.clean
    assert {f.check for f in report.findings} == {"readable"}
    torch.save(base[0], tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unreadable, match=r"x\.pt: cannot be read"):
        check_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_without_a_byte_is_a_reason(tmp_path, capsys, name):
    (tmp_path / name).touch()
    for path in (tmp_path / name, tmp_path):
        assert main([str(path)]) == 2
        assert f"{name}: cannot be read" in capsys.readouterr().err


def test_a_folder_that_may_not_be_listed_is_a_reason(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(tmp_path), "iterdir", refuse)
    with pytest.raises(Unreadable, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_names_of_tensors_do_not_reach_the_terminal_as_commands(tmp_path, capsys):
    hostile = "a\x1b]0;gone\x07\x9b2J"
    torch.save({hostile: torch.full((4, 4), torch.nan)}, tmp_path / "x.pt")
    assert main([str(tmp_path / "x.pt")]) == 1
    out = capsys.readouterr().out
    assert "]0;gone" in out
    assert all(c.isprintable() or c == "\n" for c in out)
