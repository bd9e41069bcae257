"""Each failure of the demo is named as it was injected, and a healthy run raises nothing."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import urllib3
from support.counts import in_turn
from support.ranks import run_ranks

from fp8watch.demo import command
from fp8watch.demo.collector import detected_step, incidents, running_collector

TOKEN = "a-token-of-the-team-of-32-letters"

FAILURES = ["inf", "outlier", "zero-tile", "stale-weight-scale", "lr", "bit-flip"]


def demo(tmp_path, *args):
    command = [sys.executable, "-m", "fp8watch", "demo", "--exit", "--port", "0", "--dir", str(tmp_path), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=580)


DEMO = """
import sys
from fp8watch.demo import command
command.STEPS_AFTER_FAULT = 1
sys.exit(command.main(sys.argv[1:]))
"""


def test_an_inf_is_named(tmp_path):
    """Early, cut short, and where torch is imported already; the long tests run the command as it is."""
    options = ["--exit", "--port", "0", "--dir", str(tmp_path), "--fault", "inf", "--fault-step", "12"]
    (out,) = run_ranks(tmp_path, DEMO, *options, world=1)
    assert "named as injected" in out
    assert "layers.1.mlp.down_proj" in out


@pytest.mark.heavy(20, "fp8watch/demo", "server/fp8watch_server/detect")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault_and_seed", in_turn([f"{fault} {seed}" for fault in FAILURES for seed in (1, 2, 3)]))
def test_every_failure_is_named_whatever_the_seed(tmp_path, fault_and_seed):
    fault, seed = fault_and_seed.split()
    out = demo(tmp_path, "--fault", fault, "--seed", seed)
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.heavy(13, "fp8watch/demo", "server/fp8watch_server/detect")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", in_turn(["1", "2", "3"]))
def test_a_healthy_run_raises_nothing_in_600_steps_whatever_the_seed(tmp_path, seed):
    out = demo(tmp_path, "--fault", "none", "--steps", "600", "--seed", seed)
    assert out.returncode == 0, out.stdout + out.stderr


def test_the_demo_runs_at_the_defaults_of_attach(monkeypatch):
    """What the demo shows is what everybody gets: nothing of it depends on a setting that costs more."""
    from fp8watch.demo.faults import FAULTS

    class Asked(Exception):
        pass

    def asked(_model, **kwargs):
        raise Asked(kwargs)

    monkeypatch.setattr(command, "attach", asked)
    monkeypatch.setattr(command, "DistributedDataParallel", lambda model: model)
    for name, fault in FAULTS.items():
        with pytest.raises(Asked) as e:
            command._train(command._parse(["--fault", name]), fault, "http://127.0.0.1:1")
        assert set(e.value.args[0]) == {"run", "recipe", "optimizer", "collector"}


def test_the_exit_status_can_say_no():
    from fp8watch.demo.command import _is_named
    from fp8watch.demo.faults import FAULTS

    place = {"module": "layers.1.mlp.down_proj", "operand": "input", "tile": [37, 2]}
    right = {"mode": "inf-laundering", "verdict": "fp8", "place": place}
    assert _is_named(FAULTS["inf"], right)
    for wrong in (
        {**right, "mode": "nan-in-loss"},
        {**right, "verdict": "shared"},
        {**right, "place": {**place, "module": "layers.0.mlp.down_proj"}},
        {**right, "place": {**place, "tile": None}},
    ):
        assert not _is_named(FAULTS["inf"], wrong)


def test_settings_of_a_teams_collector_are_not_those_of_the_demos(monkeypatch, tmp_path):
    for name, value in (
        ("TOKEN", TOKEN), ("PG", "1"), ("TLS_CERT", "/nowhere"), ("SLACK_WEBHOOK_URL", "http://127.0.0.1:9/x")
    ):  # fmt: skip
        monkeypatch.setenv(f"FP8WATCH_{name}", value)
    with running_collector(tmp_path, 0) as url:
        assert urllib3.request("GET", f"{url}/api/v1/runs").status == 200, "nobody is asked for a token"
        assert incidents(f"{url}/", "r") == []


def test_a_collector_that_has_tokens_is_asked_with_the_agents(monkeypatch, tmp_path):
    with running_collector(tmp_path, 0, FP8WATCH_TOKEN=TOKEN) as url:
        monkeypatch.setenv("FP8WATCH_TOKEN", TOKEN)
        assert incidents(f"{url}/", "r") == []
        assert detected_step(url, "r") == -1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9"])
def test_no_training_is_begun_for_a_collector_that_is_not_there(url, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert command.main(["--exit", "--collector", url, "--dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "127.0.0.1:9" in out
    assert "parameters" not in out
