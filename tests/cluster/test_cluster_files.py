"""Manifests for Kubernetes and the compose profile `cluster`: valid by the tools that read them, and one with the settings."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("nats", reason="pip install 'fp8watch[nats]'")

from cluster.nats_servers import server_binary

from fp8watch_agent.relay import PORT as RELAY_PORT
from fp8watch_agent.settings import VARIABLES
from fp8watch_server.cli import DRAIN_S
from fp8watch_server.db.migrations import PATIENCE_S
from fp8watch_server.queue.jetstream import MIN_PAYLOAD_BYTES
from fp8watch_server.settings import SETTINGS, Settings

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
OLDEST = "1.30"
"""Of Kubernetes: the first that sleeps before it stops a container, without being told to."""
KNOWN = {v for s in SETTINGS for v in s.variables} | {v.name for v in VARIABLES}


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d]


def resources() -> list[dict[str, Any]]:
    """Of kustomization.yaml and of the examples."""
    named = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())["resources"]
    paths = [MANIFESTS / name for name in named] + sorted((MANIFESTS / "examples").glob("*.yaml"))
    return [d for path in paths for d in documents(path)]


def pods() -> dict[str, dict[str, Any]]:
    return {
        r["metadata"]["name"]: r["spec"]["template"]["spec"] for r in resources() if "template" in r.get("spec", {})
    }


def ours() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every container that runs our image: name, pod, container."""
    found = [
        (c["name"], pod, c) for pod in pods().values() for c in [*pod["containers"], *pod.get("initContainers", [])]
    ]
    return [(name, pod, c) for name, pod, c in found if c["image"] == "fp8watch"]


def test_every_manifest_has_the_schema_of_its_kind() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    found = resources()
    assert {r["kind"] for r in found} == {
        "Service", "Deployment", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy", "Job"
    }  # fmt: skip
    for version in (OLDEST, kubernetes_validate.latest_version()):
        for resource in found:
            kubernetes_validate.validate(resource, version, strict=True)
    found[0]["spec"]["selectr"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="selectr"):
        kubernetes_validate.validate(found[0], OLDEST, strict=True)


def test_kustomize_builds_them() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which has kustomize in it")
    done = subprocess.run(["kubectl", "kustomize", str(MANIFESTS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    built = [d for d in yaml.safe_load_all(done.stdout) if d]
    assert {d["metadata"]["namespace"] for d in built} == {"fp8watch"}
    pods = [d["spec"]["template"]["spec"] for d in built if "template" in d.get("spec", {})]
    images = {container["image"] for pod in pods for container in pod["containers"]}
    assert images == {"fp8watch:0.1.0"}


def test_every_file_is_built_or_an_example() -> None:
    kustomization = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    named = {*kustomization["resources"], "kustomization.yaml"}
    named |= {name for made in kustomization["configMapGenerator"] for name in made["files"]}
    assert {p.name for p in MANIFESTS.iterdir() if p.is_file()} == named


def test_containers_are_users_on_a_read_only_system_with_probes_and_known_variables() -> None:
    assert {name for name, _, _ in ours()} == {"collector", "worker", "nats", "relay"}
    for name, pod, container in ours():
        assert pod["enableServiceLinks"] is False, f"{name}: a Service would set variables"
        security = {**pod.get("securityContext", {}), **container["securityContext"]}
        assert security["runAsNonRoot"] is True, name
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        assert {"livenessProbe", "startupProbe"} & set(container), name
        assert pod["terminationGracePeriodSeconds"] > 2 * DRAIN_S, name
        volumes = {v["name"] for v in pod["volumes"]} | ({"data"} if name == "nats" else set())
        assert {m["name"] for m in container["volumeMounts"]} <= volumes, name
        for variable in container["env"]:
            if variable["name"].startswith("FP8WATCH_"):
                assert variable["name"] in KNOWN, variable
            assert not re.search(r"fp8w_|://[^$]*:[^$]*@", variable.get("value", "")), f"{name}: a secret in the open"
    services = [r["metadata"]["name"] for r in resources() if r["kind"] == "Service"]
    assert not [name for name in services if name.startswith("fp8watch")]


def test_a_collector_or_worker_that_migrates_is_not_ended_before_it_is_done() -> None:
    for name, _, container in ours():
        if name in ("collector", "worker"):
            probe = container.get("startupProbe") or container["livenessProbe"]
            patience_s = probe["periodSeconds"] * probe.get("failureThreshold", 3)
            assert patience_s > 4 * PATIENCE_S, name


def test_training_behind_the_relay_needs_no_token_that_deletes_runs() -> None:
    """Clients of a relay show its own token, and that of a collector has all scopes."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    (relay,), collector = services["relay"]["secrets"], services["collector"]
    assert relay not in collector["secrets"]
    assert services["relay"]["environment"]["FP8WATCH_TOKEN_FILE"] == f"/run/secrets/{relay}"


def test_links_of_collectors_lead_to_no_pod() -> None:
    """Each would take the name of its own machine, which nobody can open and which ends with it."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["collector"]["environment"]
    (manifest,) = [{e["name"]: e.get("value") for e in c["env"]} for name, _, c in ours() if name == "collector"]
    for given in (manifest, compose):
        assert given["FP8WATCH_PUBLIC_URL"]


def test_settings_in_the_manifests_are_taken() -> None:
    """The queue that collector and worker are given has every server of the StatefulSet, and the settings accept it."""
    (nats,) = (r for r in resources() if r["kind"] == "StatefulSet")
    servers = {f"nats-{i}.{nats['spec']['serviceName']}" for i in range(nats["spec"]["replicas"])}
    conf = (MANIFESTS / "nats.conf").read_text()
    assert set(re.findall(r'"nats://([\w.-]+):6222"', conf)) == servers
    for name in ("collector", "worker"):
        (container,) = pods()[name]["containers"]
        env = {v["name"]: v["value"] for v in container["env"] if "value" in v}
        env = {k: v.replace("$(QUEUE_PASSWORD)", "nfeedbeef") for k, v in env.items() if not k.endswith("_FILE")}
        settings = Settings.from_environ({**env, "FP8WATCH_DATABASE_URL": "postgresql+psycopg://u@h/d"})
        assert {url.rpartition("@")[2].removesuffix(":4222") for url in settings.queue.split(",")} == servers
        assert settings.queue_replicas == len(servers)
        assert "nfeedbeef" in settings.secrets
    relay = next(c for name, _, c in ours() if name == "relay")
    assert f"FP8WATCH_PORT={RELAY_PORT}" in relay["startupProbe"]["exec"]["command"]


@pytest.mark.parametrize("where", ["kubernetes", "compose"])
def test_the_queue_servers_take_their_configuration(where: str, tmp_path: Path) -> None:
    """By the server's own check; room for the largest batch, and for all that the queue may hold."""
    if where == "kubernetes":
        text = (MANIFESTS / "nats.conf").read_text()
    else:
        compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
        text = compose["configs"]["nats"]["content"].replace("$$", "$")
        names = {name for name in compose["services"] if name.startswith("nats-")}
        assert set(re.findall(r'"nats://([\w-]+):6222"', text)) == names
        assert {compose["services"][name]["environment"]["NODE"] for name in names} == names
        assert len({compose["services"][name]["volumes"][0] for name in names}) == len(names) == 3
        queue = compose["services"]["worker"]["environment"]["FP8WATCH_QUEUE"]
        assert set(re.findall(r"nats://([\w-]+):4222", queue)) == names
    conf = tmp_path / "nats.conf"
    conf.write_text(text)
    env = {"POD_NAME": "nats-0", "NODE": "nats-1", "QUEUE_PASSWORD": "n0123"}
    done = subprocess.run([server_binary(), "-t", "-c", str(conf)], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    size = {name: int(n) * {"MB": 1 << 20, "GB": 1 << 30}[unit]
            for name, n, unit in re.findall(r"(max_payload|max_file_store): (\d+)([MG]B)", text)}  # fmt: skip
    assert size["max_payload"] >= MIN_PAYLOAD_BYTES
    assert size["max_file_store"] >= Settings(database_url="sqlite:///a.db").queue_bytes
