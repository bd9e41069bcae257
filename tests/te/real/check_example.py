"""The example for Transformer Engine trains over this version, and all of its operands are observed."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "transformer_engine_layers.py"


def test_the_example_trains_and_is_observed(te, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("FP8WATCH_SPOOL_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", [EXAMPLE.name])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    told = capfd.readouterr()
    assert "10 sites observed" in told.out
    assert "2 Transformer Engine modules observed" in told.err
    losses = [float(line.split()[-1]) for line in told.out.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
