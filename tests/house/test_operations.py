"""What operators read is what the collector does: settings, limits, commands, image and compose file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8watch_agent.bounded_decompress import MAX_INFLATED_BYTES
from fp8watch_agent.settings import VARIABLES as OF_THE_AGENT
from fp8watch_agent.wire import MAX_WIRE_BYTES
from fp8watch_server.auth.tokens import LOOPBACK_NAMES, RELOAD_AFTER_S, SCOPES
from fp8watch_server.cli import DRAIN_S
from fp8watch_server.ingest.routes import MAX_INFLIGHT_BYTES
from fp8watch_server.settings import SETTINGS, Setting, Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
WRITE = "run python tests/house/test_operations.py to write it"


def settings_table() -> str:
    """The rows between the marks of docs/operations.md."""

    def default(s: Setting) -> str:
        return f"`{s.default}`" if s.default not in ("", (), False) else "off" if s.default is False else "none"

    rows = []
    for s in SETTINGS:
        flag = "" if s.secret else f"`--{s.name.replace('_', '-')}`"
        rows.append(f"| {flag} | {', '.join(f'`{v}`' for v in s.variables)} | {default(s)} | {s.help} |")
    return "\n".join(["| setting | variable | default | meaning |", "|---|---|---|---|", *rows])


def test_the_table_of_settings_is_that_of_the_code() -> None:
    written = PAGE.split("<!-- settings -->\n")[1].split("\n<!-- /settings -->")[0]
    assert written == settings_table(), WRITE


def test_limits_and_times_are_those_of_the_code() -> None:
    assert f"{MAX_WIRE_BYTES >> 20} MiB, or inflating above {MAX_INFLATED_BYTES >> 20} MiB" in PAGE
    assert f"{MAX_INFLIGHT_BYTES >> 20} MiB of bodies in flight" in PAGE
    assert f"within {RELOAD_AFTER_S:.0f} seconds" in PAGE
    assert f"SIGTERM ends it in {DRAIN_S} seconds" in PAGE
    for word in (*SCOPES, *LOOPBACK_NAMES):
        assert word in PAGE


def test_every_command_that_is_named_exists() -> None:
    table = (ROOT / "pyproject.toml").read_text().split('entry-points."fp8watch.commands"]')[1].split("\n[")[0]
    known = set(re.findall(r"^(\w+) =", table, re.M))
    text = PAGE + (ROOT / "docker-compose.yml").read_text() + (ROOT / "Dockerfile").read_text()
    named = set(re.findall(r"fp8watch ([a-z]+)\b(?= |`|$)", text)) & {
        "serve",
        "load",
        "token",
        "notify",
        "sync",
        "check",
    }
    assert named <= known


def test_metrics_that_are_named_exist() -> None:
    code = "".join(p.read_text() for p in (ROOT / "server").rglob("*metrics.py"))
    for name in re.findall(r"`(fp8watch_[a-z_]+)`", PAGE):
        assert name.removesuffix("_total") in code, name


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_every_container_is_a_user_on_a_read_only_system_with_a_health_check(compose: dict[str, Any]) -> None:
    assert set(compose) <= {"name", "services", "networks", "volumes", "secrets", "configs"}
    for name, service in compose["services"].items():
        assert service["read_only"] is True, name
        assert str(service["user"]) not in ("root", "0"), name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        check = service["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL"), name
        assert {"interval", "timeout", "retries"} <= set(check), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name}: {port} would be open to everyone"


def _asked_by_mounted_files(service: dict[str, Any]) -> set[str]:
    """Variables in the files that a container gets to read."""
    mounts = [ROOT / v.split(":")[0] for v in service.get("volumes", []) if v.startswith("./")]
    files = [f for m in mounts for f in ([m] if m.is_file() else sorted(m.rglob("*.yml")))]
    lines = [line for f in files for line in f.read_text().splitlines() if not line.lstrip().startswith("#")]
    return set(re.findall(r"\$\{?(FP8WATCH_[A-Z_]+)", "\n".join(lines)))


def test_what_the_compose_file_refers_to_is_there(compose: dict[str, Any]) -> None:
    variables = {v for s in SETTINGS for v in s.variables} | {v.name for v in OF_THE_AGENT}
    for name, service in compose["services"].items():
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}, name
            assert "healthcheck" in compose["services"][other]
        for secret in service.get("secrets", []):
            assert secret in compose["secrets"], name
        assert ("networks" in service) != (service.get("network_mode") == "host"), name
        for network in service.get("networks", []):
            assert network in compose["networks"], name
        for volume in service.get("volumes", []):
            source, *_, mode = volume.split(":")
            if source.startswith("./"):  # of this repository: a mistyped one docker would make as an empty folder
                assert (ROOT / source).exists(), volume
                assert mode == "ro", volume
            else:
                assert source in compose["volumes"], name
        asked = variables if service.get("image") == "fp8watch" else _asked_by_mounted_files(service)
        for variable, value in service.get("environment", {}).items():
            assert not re.search("(?i)password=|fp8w_", str(value)), f"{name}: a secret in the open"
            if variable.startswith("FP8WATCH_"):
                assert variable in asked
            if variable.endswith("_FILE"):
                assert value.removeprefix("/run/secrets/") in service["secrets"]
        for config in service.get("configs", []):
            assert config["source"] in compose["configs"], name
        if service.get("image") != "fp8watch":
            assert asked <= set(service.get("environment", {})), f"{name}: {asked}"
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    grace_s = int(compose["services"]["collector"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > DRAIN_S


def test_the_image_runs_as_a_user_and_is_checked() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    last_stage = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    text = "\n".join(last_stage)
    assert re.search(r"^USER [1-9]\d+$", text, re.M)
    assert "HEALTHCHECK" in text
    assert "/healthz" in text
    variables = {v for s in SETTINGS for v in s.variables}
    assert set(re.findall(r"\b(FP8WATCH_[A-Z_]+)=", text)) <= variables
    copied = {w for line in lines if line.startswith("COPY ") and "--from" not in line for w in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name.removeprefix('./')}" for name in copied} <= set(ignored)


def _of_the_image() -> dict[str, str]:
    """What every container of the image finds in its environment."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ENV (.*)$", text[text.rindex("\nFROM ") :], re.M)
    return dict(pair.split("=", 1) for line in lines for pair in line.split())


def _containers(compose: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The environment that compose and Kubernetes give to each container that reads the collector's settings."""
    found = {
        f"compose {name}": {k: re.sub(r"\$\{\w+:-(.*)\}", r"\1", str(v)) for k, v in service["environment"].items()}
        for name, service in compose["services"].items()
        if service.get("image") == "fp8watch" and service.get("command", ["serve"])[0] in ("serve", "worker")
    }
    for name in ("collector", "worker"):
        (pod,) = (
            d["spec"]["template"]["spec"]
            for d in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / f"{name}.yaml").read_text())
            if d and "template" in d.get("spec", {})
        )
        (container,) = pod["containers"]
        found[f"kubernetes {name}"] = {
            v["name"]: v.get("value", "a-secret").replace("$(QUEUE_PASSWORD)", "nfeedbeef") for v in container["env"]
        }
    return found


def test_the_settings_of_every_container_are_taken_in_the_image(compose: dict[str, Any], tmp_path: Path) -> None:
    """A variable that the image sets and a file that a container is given must not be two of one setting."""
    secrets = {"database_url": "postgresql+psycopg://u:p@h/d", "token": "fp8w_" + "a" * 40}
    for name, value in secrets.items():
        (tmp_path / name).write_text(value)
    containers = _containers(compose)
    assert {"compose collector", "compose worker", "kubernetes collector", "kubernetes worker"} <= set(containers)
    for name, given in containers.items():
        env = _of_the_image() | given
        files = {k: str(tmp_path / Path(v).name) for k, v in env.items() if k.endswith("_FILE")}
        assert "FP8WATCH_DATABASE_URL_FILE" in files, name
        settings = Settings.from_environ(env | files)
        assert settings.database_url == secrets["database_url"], name
        assert settings.log_format == "json", name
    alone = Settings.from_environ(_of_the_image())
    assert alone.database_url == "sqlite:////data/fp8watch/fp8watch.db"  # on the volume


def test_collectors_and_workers_of_compose_are_given_the_same_databases(compose: dict[str, Any]) -> None:
    given = _containers(compose)
    shared = ["FP8WATCH_DATABASE_URL_FILE", "FP8WATCH_SHARDS", "FP8WATCH_QUEUE_REPLICAS"]
    assert [given["compose collector"][k] for k in shared] == [given["compose worker"][k] for k in shared]


if __name__ == "__main__":
    head, rest = PAGE.split("<!-- settings -->\n")
    tail = rest.split("<!-- /settings -->")[1]
    page = f"{head}<!-- settings -->\n{settings_table()}\n<!-- /settings -->{tail}"
    (ROOT / "docs" / "operations.md").write_text(page)
