"""The alert rules that are shipped: they parse, they fire when they should, and they name metrics that are there."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from collector.kit import Agent, Recorder, make_site, served
from prometheus_client.parser import text_string_to_metric_families

from fp8watch_server.app import create_app
from fp8watch_server.pages import runbooks
from fp8watch_server.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards" / "prometheus"
RULES = [r for g in yaml.safe_load((FOLDER / "fp8watch.rules.yml").read_text())["groups"] for r in g["rules"]]
PAGE = (ROOT / "docs" / "alerts.md").read_text()
LATER = {"fp8watch_notifications_total": {"channel", "outcome"}, "fp8watch_incidents_open": {"run", "mode", "severity"}}
"""Metrics without a series as long as nothing has happened, with their labels."""


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        if os.environ.get("FP8WATCH_REQUIRE_PROMTOOL"):
            pytest.fail("promtool must be here: it is in Debian's package prometheus")
        pytest.skip("promtool is not here: apt-get install prometheus, or unpack promtool from that package")
    return found


@pytest.mark.parametrize(
    "what", [["check", "rules", "fp8watch.rules.yml"], ["test", "rules", "fp8watch.rules.test.yml"]]
)
def test_promtool_is_content(promtool: str, what: list[str]) -> None:
    done = subprocess.run([promtool, *what], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names that a real collector exposes after one batch, with their labels."""
    app = create_app(
        Settings(database_url=f"sqlite:///{tmp_path_factory.mktemp('rules') / 'x.db'}"),
        detection=Recorder().detection(),
        dispatcher=lambda e, s: None,
        pages=False,
    )
    with served(app) as url, httpx.Client(base_url=url) as client:
        site = make_site()
        health = {"dropped_ring_full": 3.0, "overhead_ratio": 0.004}
        Agent(client).register([site]).send([site], [1], health=health)
        app.state.worker.drain()
        text = client.get("/metrics").text
    app.state.ingest.stop()
    app.state.engine.dispose()
    found = {name: set(labels) for name, labels in LATER.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
        if family.name in {"fp8watch_notifications", "fp8watch_incidents_open"}:
            continue
    for name in LATER:
        assert f"# TYPE {name} " in text or f"# TYPE {name.removesuffix('_total')}" in text, name
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r["alert"])
def test_a_rule_names_metrics_and_labels_that_are_there(rule: dict[str, Any], exposed: dict[str, set[str]]) -> None:
    names = set(re.findall(r"\bfp8watch_\w+", rule["expr"]))
    assert names
    assert names <= set(exposed), names - set(exposed)
    labels = set.union(*(exposed[name] for name in names))
    asked = set(re.findall(r"[{,]\s*(\w+)\s*=", rule["expr"]))
    asked |= {w for by in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for w in re.split(r"[,\s]+", by) if w}
    asked |= set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert asked <= labels, asked - labels


def test_a_critical_alert_holds_back_the_warnings_of_its_module_alone() -> None:
    """For Alertmanager a label that both lack is equal: neither a run's other warnings nor the collector's go with it."""
    (inhibition,) = yaml.safe_load((FOLDER / "alertmanager.yml").read_text())["inhibit_rules"]
    assert set(inhibition["equal"]) == {"run", "module"}
    for side, severity in (("source_matchers", "critical"), ("target_matchers", "warning")):
        assert set(inhibition[side]) == {f'severity="{severity}"', 'module=~".+"'}
    of_layers = [r for r in RULES if "$labels.layer" in r["annotations"]["summary"]]
    assert {r["labels"]["severity"] for r in of_layers} == {"critical", "warning"}
    for rule in RULES:
        assert rule["labels"].get("module") == ("{{ $labels.layer }}" if rule in of_layers else None)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r["alert"])
def test_a_rule_leads_to_a_runbook(rule: dict[str, Any]) -> None:
    told = rule["annotations"]
    assert {"summary", "description"} <= set(told)
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    if "runbook_url" in told:
        slug = told["runbook_url"].rpartition("/runbooks/")[2]
        assert slug == "{{ $labels.mode }}" or slug in runbooks.slugs()
    else:
        assert told["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"
    assert re.search(rf"^#### {rule['alert']}$", PAGE, re.M) or "runbook_url" in told


def test_grafanas_rules_are_made_out_of_these() -> None:
    made = runpy.run_path(str(ROOT / "dashboards" / "make_alerts.py"))
    assert made["GRAFANA"].read_text() == made["text"](), "run python dashboards/make_alerts.py"
    rules = [r for g in yaml.safe_load(made["text"]())["groups"] for r in g["rules"]]
    assert [r["title"] for r in rules] == [r["alert"] for r in RULES]
    assert len({r["uid"] for r in rules}) == len(rules)
    assert max(len(r["uid"]) for r in rules) <= 40
    for rule, original in zip(rules, RULES, strict=True):
        assert original["expr"] in rule["data"][0]["model"]["expr"]
        for text in (*rule["annotations"].values(), *rule["labels"].values()):
            assert not re.search(r"(?<!\$)\$(?!\$|FP8WATCH_)", text), "Grafana would take this for a variable"
