"""JSON schemas of Grafana's panels, made out of the types that Grafana publishes for npm (`@grafana/schema`).

One schema for each panel type, in a cache outside of the tree, so that nothing of Grafana's lies in the repository. What is
required is not taken over: Grafana fills in what a dashboard leaves out. What stays are names, types and choices.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

GRAFANA, GENERATOR = "13.2.3", "2.9.0"
FOLDERS = {"status-history": "statushistory"}
"""Names of panel types that differ from their folder's."""
_TYPES = "./node_modules/@grafana/schema/dist/types/raw"


class NoNpm(RuntimeError):
    """npm, or its registry, is not there."""


def cache() -> Path:
    """Where the package and the schemas lie."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fp8watch" / f"grafana-schema-{GRAFANA}-{GENERATOR}"


def _npm(*args: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("npm") is None:
        raise NoNpm("npm is not here")
    return subprocess.run(["npm", *args], cwd=cache(), capture_output=True, text=True, timeout=300)


def _installed() -> None:
    folder = cache()
    if not (folder / "node_modules" / "@grafana" / "schema").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        packages = [f"@grafana/schema@{GRAFANA}", f"ts-json-schema-generator@{GENERATOR}"]
        done = _npm("install", "--no-audit", "--no-fund", *packages)
        if done.returncode:
            raise NoNpm(f"npm install: {done.stderr.strip()[-500:]}")


def _schema(name: str, source: str) -> dict[str, Any]:
    """The schema of every type that a source exports; made once.

    Raises:
        NoNpm: it is not there yet and cannot be made.
    """
    path = cache() / f"{name}.schema.json"
    if not path.is_file():
        _installed()
        (cache() / f"{name}.ts").write_text(source)
        made = _npm("exec", "--", "ts-json-schema-generator", "--path", f"{name}.ts", "--type", "*", "--no-type-check")
        assert made.returncode == 0, made.stderr
        path.write_text(made.stdout)
    loaded: dict[str, Any] = _looser(json.loads(path.read_text()))
    return loaded


def _looser(thing: Any) -> Any:
    """Without what is required, and without what the generator says of deprecation, which is no JSON schema."""
    if isinstance(thing, dict):
        drop = {k for k, v in thing.items() if (k == "required" and isinstance(v, list)) or (k == "deprecated" and v)}
        return {k: _looser(v) for k, v in thing.items() if k not in drop}
    return [_looser(v) for v in thing] if isinstance(thing, list) else thing


def panel(kind: str) -> dict[str, Any]:
    """Definitions `PanelOptions` and, where there are options of fields, `PanelFieldConfig` of a panel type."""
    folder = FOLDERS.get(kind, kind)
    source = f"import * as panel from '{_TYPES}/composable/{folder}/panelcfg/x/types.gen';\n"
    source += "export type PanelOptions = panel.Options;\n"
    _installed()
    if "FieldConfig " in (cache() / f"{_TYPES}/composable/{folder}/panelcfg/x/types.gen.d.ts").read_text():
        source += "export type PanelFieldConfig = panel.FieldConfig;\n"
    return _schema(f"panel-{folder}", source)


def dashboard() -> dict[str, Any]:
    """Definition `Whole` of a dashboard."""
    source = f"import * as raw from '{_TYPES}/dashboard/x/types.gen';\nexport type Whole = raw.Dashboard;\n"
    return _schema("dashboard", source)


def of(schema: dict[str, Any], definition: str) -> dict[str, Any]:
    """One definition as a schema of its own."""
    return {"$ref": f"#/definitions/{definition}", "definitions": schema["definitions"]}
