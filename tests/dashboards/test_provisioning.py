"""What is mounted into Prometheus and Grafana: valid by their own tools, complete, and where docker-compose looks for it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards.real_run import binary

from dashboards import boards
from dashboards.boards import ROOT

GRAFANA, PROMETHEUS = ROOT / "dashboards" / "grafana", ROOT / "dashboards" / "prometheus"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
SHIPPED = sorted(p for folder in (GRAFANA, PROMETHEUS) for p in folder.rglob("*.yml"))
SECRET = re.compile(r"(?i)(password|token|secret)\w*:\s*(?!\$|/run/secrets/)\S")


def loaded(name: str) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((GRAFANA / name).read_text())
    return made


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_parses_and_holds_no_secret(path: Path) -> None:
    assert yaml.safe_load(path.read_text())
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in lines if SECRET.search(line)]


def test_prometheus_takes_its_configuration() -> None:
    command = [binary("promtool"), "check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alertmanager_takes_the_example() -> None:
    command = [binary("amtool"), "check-config", PROMETHEUS / "alertmanager.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    test = ["config", "routes", "test", f"--config.file={PROMETHEUS / 'alertmanager.yml'}"]
    for severity, receiver in (("critical", "oncall"), ("warning", "team")):
        command = [binary("amtool"), *test, f"severity={severity}", "run=r", "alertname=inf-laundering"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == receiver, done.stdout + done.stderr


def test_the_provider_has_a_folder_of_its_own_that_nobody_edits() -> None:
    (provider,) = loaded("providers/fp8watch.yml")["providers"]
    assert (provider["folder"], provider["type"]) == ("fp8watch", "file")
    assert provider["allowUiUpdates"] is False
    assert provider["options"]["path"] == "$FP8WATCH_DASHBOARDS"


def test_the_rules_of_grafana_ask_the_source_that_is_provisioned() -> None:
    uids = {d["uid"] for d in loaded("datasources/fp8watch.yml")["datasources"]}
    given = COMPOSE["grafana"]["environment"]
    assert given["FP8WATCH_PROMETHEUS_UID"] in uids
    rules = [r for g in loaded("alerting/fp8watch.yml")["groups"] for r in g["rules"]]
    assert {r["data"][0]["datasourceUid"] for r in rules} == {"$FP8WATCH_PROMETHEUS_UID"}
    assert {g["folder"] for g in loaded("alerting/fp8watch.yml")["groups"]} == {"fp8watch"}
    assert "policies" not in loaded("alerting/fp8watch.yml"), "they would replace the whole tree"


def receivers(thing: Any) -> set[str]:
    """Contact points that a provisioning file names, at any depth."""
    if isinstance(thing, list):
        return set().union(*map(receivers, thing))
    if not isinstance(thing, dict):
        return set()
    named = {thing["receiver"]} if isinstance(thing.get("receiver"), str) else set()
    return named.union(*map(receivers, thing.values()))


@pytest.mark.parametrize("folder", ["alerting", "examples"])
def test_every_contact_point_that_is_named_is_made(folder: str) -> None:
    """A fresh Grafana does not start otherwise: which contact points it has of itself depends on its version."""
    files = [loaded(str(path.relative_to(GRAFANA))) for path in (GRAFANA / folder).glob("*.yml")]
    made = {point["name"] for file in files for point in file.get("contactPoints", [])}
    assert receivers(files) <= made


def mounts(service: str) -> dict[str, Path]:
    """Path inside a container -> what lies there."""
    pairs = [v.split(":") for v in COMPOSE[service]["volumes"] if v.startswith("./")]
    return {inside: ROOT / outside for outside, inside, _ in pairs}


def test_grafana_finds_everything_where_it_looks() -> None:
    found = mounts("grafana")
    for folder, name in (("datasources", "datasources"), ("dashboards", "providers"), ("alerting", "alerting")):
        assert found[f"/etc/grafana/provisioning/{folder}"] == GRAFANA / name
        assert list(found[f"/etc/grafana/provisioning/{folder}"].glob("*.yml"))
    place = COMPOSE["grafana"]["environment"]["FP8WATCH_DASHBOARDS"]
    assert {p.stem for p in found[place].glob("*.json")} == set(boards.load())
    read = re.findall(r"\$__file\{([^}]+)\}", (GRAFANA / "datasources" / "fp8watch.yml").read_text())
    assert {p.removeprefix("/run/secrets/") for p in read} <= set(COMPOSE["grafana"]["secrets"])
    assert not [p for p in found.values() if "examples" in p.parts], "the example of policies is mounted nowhere"


def test_prometheus_finds_everything_where_it_looks() -> None:
    found = mounts("prometheus")
    config = yaml.safe_load(found["/etc/prometheus/prometheus.yml"].read_text())
    assert "--config.file=/etc/prometheus/prometheus.yml" in COMPOSE["prometheus"]["command"]
    for name in config["rule_files"]:
        assert found[name].is_file()
    (job,) = config["scrape_configs"]
    secret = job["authorization"]["credentials_file"].removeprefix("/run/secrets/")
    assert secret in COMPOSE["prometheus"]["secrets"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in COMPOSE
    assert any(p.endswith(f":{port}") for p in COMPOSE[host]["ports"])


def test_addresses_between_containers_are_of_containers() -> None:
    given = COMPOSE["grafana"]["environment"]
    for address in (given["FP8WATCH_POSTGRES"], given["FP8WATCH_PROMETHEUS"].removeprefix("http://")):
        assert address.split(":")[0] in COMPOSE, address
    assert given["FP8WATCH_POSTGRES_DATABASE"] == COMPOSE["postgres"]["environment"]["POSTGRES_DB"]
    for name in ("prometheus", "grafana"):
        assert COMPOSE[name]["profiles"] == ["grafana"], "a collector alone needs neither them nor their secrets"
        assert re.search(r":v?\d+\.\d+\.\d+$", COMPOSE[name]["image"]), "a version, not what is newest today"
