"""Grafana's alert rules, made out of Prometheus's: one list, two files. `python dashboards/make_alerts.py` writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RULES = HERE / "prometheus" / "fp8watch.rules.yml"
GRAFANA = HERE / "grafana" / "alerting" / "fp8watch.yml"
HEAD = (
    "# Made by dashboards/make_alerts.py out of dashboards/prometheus/fp8watch.rules.yml; do not edit.\n"
    "# Grafana reads it from its folder provisioning/alerting. FP8WATCH_PROMETHEUS_UID names the data source,\n"
    "# FP8WATCH_PUBLIC_URL the collector. No contact point is named: Grafana does not start with a rule whose contact\n"
    "# point is not there, and which are there depends on its version. Notification policies route by severity and run.\n"
)
_URL = re.compile(r"\{\{ with \$externalLabels\.fp8watch_url \}\}.*?\{\{ end \}\}")


def grafana(rules: dict[str, Any]) -> dict[str, Any]:
    """The provisioning file."""
    return {
        "apiVersion": 1,
        "groups": [
            {
                "orgId": 1,
                "name": g["name"],
                "folder": "fp8watch",
                "interval": "1m",
                "rules": [_rule(r) for r in g["rules"]],
            }
            for g in rules["groups"]
        ],
    }


def _rule(rule: dict[str, Any]) -> dict[str, Any]:
    # Grafana compares a number with a threshold: of whatever is found, one is counted for each set of labels.
    found = {"refId": "A", "expr": f"count without () ({rule['expr']})", "instant": True, "editorMode": "code"}
    above = {"evaluator": {"type": "gt", "params": [0]}, "query": {"params": ["A"]}, "type": "query"}
    threshold = {"refId": "B", "type": "threshold", "expression": "A", "conditions": [above]}
    return {
        "uid": re.sub(r"(?<!^)(?=[A-Z])", "-", rule["alert"]).lower(),
        "title": rule["alert"],
        "condition": "B",
        "data": [
            {
                "refId": "A",
                "relativeTimeRange": {"from": 600, "to": 0},
                "datasourceUid": "$FP8WATCH_PROMETHEUS_UID",
                "model": found,
            },
            {
                "refId": "B",
                "relativeTimeRange": {"from": 600, "to": 0},
                "datasourceUid": "__expr__",
                "model": threshold,
            },
        ],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": rule.get("for", "0s"),
        "labels": {name: _escaped(text) for name, text in rule["labels"].items()},
        "annotations": _annotations(rule["annotations"]),
    }


def _annotations(given: dict[str, str]) -> dict[str, str]:
    """Templates as Grafana has them: a dollar that is no variable of the environment is two.

    The value there is the count, so a summary that tells the value gives way to the description.
    """
    told = {**given, "summary": given["description"]} if "$value" in given["summary"] else given
    return {name: _escaped(_URL.sub("$FP8WATCH_PUBLIC_URL", t)) for name, t in told.items()}


def _escaped(text: str) -> str:
    return text.replace("{{ $labels", "{{ $$labels")


def text() -> str:
    """The file as it is committed."""
    made = grafana(yaml.safe_load(RULES.read_text()))
    return HEAD + yaml.safe_dump(made, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    GRAFANA.write_text(text())
