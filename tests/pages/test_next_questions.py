"""An incident's page says what to ask next, and shows what a bisection that was sent to it said."""

from __future__ import annotations

import html as htmllib
import re

import pytest
from pages import synthetic
from pages.collector import make_app, serving
from pages.synthetic import FAULT_MODULE, HOSTILE, INCIDENT_ID

from fp8watch.diagnose.bisect_command import main as bisect_command
from fp8watch.diagnose.bisection import Bisection, TrialResult


def test_a_bisection_that_is_sent_to_the_address_of_the_page_is_on_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    found = Bisection(
        "fp8", (f"{FAULT_MODULE}.input", HOSTILE), ("a", "b"),
        (TrialResult((), True, "loss 11 is nan", 2.0), TrialResult(("a", "b"), False, "20 losses", 3.0)),
    )  # fmt: skip
    app = make_app(tmp_path_factory.mktemp("asked"))
    with serving(app) as client:
        synthetic.faulty_run(client, app.state.engine, num_steps=20)
        page = f"/incidents/{INCIDENT_ID}"
        before, of_run = client.get(page).text, client.get("/runs/demo-inf").text
        address = str(client.base_url).rstrip("/") + page
        found.send(address)
        after = client.get(page).text

    commands = [htmllib.unescape(c) for c in re.findall(r'data-copy-text="(fp8watch[^"]*)"', before)]
    assert f"fp8watch diagnose bisect MODULE:FUNCTION --suspect {FAULT_MODULE} --incident {address}" in commands
    assert any(c.startswith("fp8watch diagnose what-if --run demo-inf --collector http://") for c in commands)
    for asked in ("diagnose loss-impact", "diagnose moments", "diagnose collectives", "calibrate", "check-checkpoint"):
        assert any(c.startswith(f"fp8watch {asked} ") for c in commands), asked
    for part in ("costs", "checkpoints", "coverage"):
        assert f'href="/runs/demo-inf#{part}"' in before, part
        assert f'id="{part}"' in of_run, part
    assert 'href="/compare?a=demo-inf"' in before  # none began earlier
    assert '<section class="panel" id="bisection" data-live hidden>' in before
    panel = after[after.index('id="bisection"') : after.index('id="touched"')]
    assert f"With {FAULT_MODULE}.input and " in panel
    assert HOSTILE not in panel
    assert f"fix?for=megatron&amp;module={FAULT_MODULE}.input&amp;module=" in panel
    assert "2 trials, 2 modules in FP8" in panel


def test_an_incident_that_cannot_be_told_stops_the_command_before_its_trials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FP8WATCH_COLLECTOR", raising=False)
    assert bisect_command(["nowhere:nothing", "--incident", "i1"]) == 2
    assert "no collector: give the address of the incident's page" in capsys.readouterr().err
