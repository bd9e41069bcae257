"""Grafana's dashboards. `python dashboards/make_dashboards.py [FOLDER]` writes them; it needs grafana-foundation-sdk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from boards import collector, fleet, incidents, layers, run

FOLDER = Path(__file__).parent / "grafana" / "dashboards"


def write(folder: Path) -> None:
    """One file a dashboard, named by its uid."""
    folder.mkdir(parents=True, exist_ok=True)
    for module in (run, layers, incidents, fleet, collector):
        text = json.dumps(module.dashboard(), indent=1, sort_keys=True, ensure_ascii=False)
        (folder / f"{module.UID}.json").write_text(text + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
