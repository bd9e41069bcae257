"""A watch in a notebook, the spool that a read-only home leaves, and a spool shown without a collector that runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8watch
from fp8watch_server.open import command as open_command


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def train(of: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        of(torch.randn(8, 64)).pow(2).mean().backward()
        optimizer.step()


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "spool"))
    return tmp_path / "spool"


def test_a_cell_that_is_run_again_attaches_anew_and_the_run_goes_on(
    spool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    net = model()
    first = fp8watch.attach(net, overhead_budget=None)
    train(net, 3)
    second = fp8watch.attach(net, overhead_budget=None)
    train(net, 2)
    try:
        assert "attached anew: the watch of this model is detached, and step 3 comes next" in capsys.readouterr().err
        assert second.identity.run_id == first.identity.run_id
        assert second.last_step == 4
        assert second.summary()["num_sites"] == 10
        run = first.identity.run_id
        assert repr(first) == f"<fp8watch.Watch run {run}: detached, 10 sites, blockwise>"
        assert repr(second) == f"<fp8watch.Watch run {run}: step 4, 10 sites, blockwise>"
        card = second._repr_html_()
        assert run in card
        assert "not known (no collector)" in card
        assert f"spool {spool}" in card
        assert not re.search("<script|<img|http", card)
    finally:
        second.detach()


def test_a_card_shows_open_incidents_loss_and_the_link_and_a_name_is_text() -> None:
    from fp8watch.session import card

    summary = {
        "run_id": "<b>r",
        "last_step": 7,
        "num_sites": 3,
        "recipe": "blockwise",
        "url": "http://c:1/runs/r",
        "spool": None,
    }
    loss = {"steps": [0, 1, 2, 3], "values": [4.0, None, 3.0, 2.0], "nonfinite": [[1, "nan"]]}
    shown = card.card(summary, card.Said([{"title": "<i>Inf"}], loss), detached=False)
    assert "1: &lt;i&gt;Inf" in shown
    assert "&lt;b&gt;r" in shown
    assert "loss 4 at step 0 to 2 at step 3, 1 not finite" in shown
    assert '<a href="http://c:1/runs/r"' in shown
    unreached = card.ask("http://127.0.0.1:9", "r")
    assert unreached.incidents is None
    assert "not known (http://127.0.0.1:9 was not reached" in card.card(summary, unreached, detached=False)


def test_the_spool_that_is_named_is_the_one_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder can be made below a file, whoever asks")
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path / "file" / "spool"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    net = model()
    with fp8watch.attach(net, overhead_budget=None) as watch:
        train(net, 1)
        used = watch.summary()["spool"]
    assert Path(used).parent == tmp_path
    assert list(Path(used).iterdir())
    assert f"spool {used}, send it with `fp8watch sync --spool-dir {used}`" in capsys.readouterr().err


def test_a_spool_is_shown_as_a_copy_and_a_report_is_told_from_other_pages(
    spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    with fp8watch.attach(net, run="from a spool", overhead_budget=None):
        train(net, 3)
    before = {p.name: p.read_bytes() for p in spool.iterdir()}
    env = {k: v for k, v in os.environ.items() if not k.startswith("FP8WATCH_")}
    command = [sys.executable, "-m", "fp8watch", "open", str(spool), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        assert "sent" in lines[0]
        url = re.search(r"http://127\.0\.0\.1:\d+", lines[1])
        assert url is not None, lines
        with urllib.request.urlopen(f"{url[0]}/", timeout=20) as answer:
            assert "from a spool" in answer.read().decode()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        process.stdout.close()  # type: ignore[union-attr]
    assert {p.name: p.read_bytes() for p in spool.iterdir()} == before

    report = tmp_path / "report.html"
    report.write_text('<!doctype html><head><meta name="generator" content="fp8watch 0.1.0"><title>Inf</title>')
    assert open_command.main([str(report), "--no-browser"]) == 0
    assert f"Inf\nopen it in a browser: {report.as_uri()}" in capsys.readouterr().out
    report.write_text("<p>another page")
    assert open_command.main([str(report)]) == 2
    assert open_command.main([str(tmp_path)]) == 2
    assert "must be a report (.html), or a spool" in capsys.readouterr().err
