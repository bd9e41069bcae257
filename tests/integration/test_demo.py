"""Each failure of the demo is named as it was injected, and a healthy run raises nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.counts import in_turn
from support.ranks import run_ranks

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
    from fp8watch.demo import command
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
