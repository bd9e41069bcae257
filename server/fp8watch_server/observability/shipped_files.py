"""Files for other programs that come with an installation: compose file, rules, examples, provisioning, dashboards.

Shapes:     a folder -> the same files in the layout of the repository
Thread:     main
"""

from __future__ import annotations

import shutil
from pathlib import Path

COMPOSE = "docker-compose.yml"
FOLDERS = (
    "dashboards/prometheus",
    "dashboards/grafana/alerting",
    "dashboards/grafana/dashboards",
    "dashboards/grafana/datasources",
    "dashboards/grafana/examples",
    "dashboards/grafana/providers",
)
_HERE = Path(__file__).parent
_INSTALLED = {name: _HERE / "shipped" / name for name in (COMPOSE, *FOLDERS)}
_INSTALLED["dashboards/grafana/dashboards"] = _HERE / "dashboards"
_CHECKOUT = Path(__file__).parents[3]


class Taken(Exception):
    """A file that is there already is not overwritten."""


def source_of(name: str) -> Path:
    """Where a file or folder lies: in the installed package, else in the checkout."""
    installed = _INSTALLED[name]
    return installed if installed.exists() else _CHECKOUT / name


def write(folder: Path) -> list[Path]:
    """Copy all of them into a folder.

    Returns:
        What was written.

    Raises:
        Taken: a file of that name is there; nothing was written.
        OSError: the folder cannot be written.
    """
    copies = [(source_of(COMPOSE), folder / COMPOSE)]
    for name in FOLDERS:
        copies += [(p, folder / name / p.name) for p in sorted(source_of(name).iterdir()) if p.is_file()]
    there = [str(target) for _, target in copies if target.exists()]
    if there:
        raise Taken(f"{there[0]} is there already; choose an empty folder")
    for source, target in copies:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    return [target for _, target in copies]
