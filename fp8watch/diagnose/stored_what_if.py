"""What other formats would do to the sites of a run that a collector holds: from its stored sketches, without its model.

Shapes:     per site depth_hist [32] and amax_hist [64], summed over steps -> shares and dB by format
Thread:     the caller's
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import urllib3

from fp8watch.diagnose.impact_tables import columns, number
from fp8watch.diagnose.verdict import as_plain
from fp8watch_agent.depth_what_if import FORMATS, SketchCost, sketch_costs
from fp8watch_agent.settings import ADDRESS, read_token_file


@dataclass(frozen=True)
class StoredSite:
    """One site: its steps, and what each format would do."""

    module: str
    operand: str
    direction: str
    tile: tuple[int, ...]
    steps: tuple[int, int]  # first and last whose sketches count
    costs: tuple[SketchCost, ...]


@dataclass(frozen=True)
class StoredWhatIf:
    """Result of `stored_what_if`."""

    run: str
    sites: tuple[StoredSite, ...]
    unmeasured: tuple[str, ...]  # sites without a depth histogram

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        plain: dict[str, Any] = as_plain(asdict(self))
        return plain

    def __str__(self) -> str:
        lines = []
        for f in FORMATS:
            rows = [[f.name, "steps", "becomes zero", "between", "tile SQNR"]]
            for site in self.sites:
                cost = next((c for c in site.costs if c.format == f.name), None)
                if cost is None:
                    continue
                most = "" if cost.underflow_max is None else f"{cost.underflow_max:.3%}"
                least = "" if cost.underflow_min is None else f"{cost.underflow_min:.3%}"
                between = f"{least}–{most}" if least and most else f"≥ {least}" if least else f"≤ {most}"
                name = f"{site.module}.{site.operand}.{site.direction}"
                steps = f"{site.steps[0]}–{site.steps[1]}"
                rows.append([f"  {name}", steps, number(cost.underflow, ".3%"), between, number(cost.tile_sqnr_db)])
            lines += [columns(rows), ""]
        lines.append(
            "becomes zero: share of non-zero elements, estimated from octaves; – is what a sketch does not tell"
        )
        if self.unmeasured:
            lines.append(f"no depth histogram yet: {', '.join(self.unmeasured[:20])}")
        return "\n".join(lines)


def stored_what_if(
    run: str,
    collector: str | None = None,
    token: str | None = None,
    *,
    only: list[str] | None = None,
    from_step: int | None = None,
    to_step: int | None = None,
) -> StoredWhatIf:
    """Ask a collector for the histograms of a run's sites.

    Args:
        run: id of the run.
        collector: URL; None: FP8WATCH_COLLECTOR.
        token: with scope read; None: FP8WATCH_TOKEN, or what is in FP8WATCH_TOKEN_FILE.
        only: shell patterns of module names.
        from_step: the first step that counts; None: all that are kept.
        to_step: the last.

    Raises:
        ValueError: no collector is named, or it has no such run.
        OSError: it cannot be reached, or refuses.
    """
    url = collector or os.environ.get("FP8WATCH_COLLECTOR")
    if not url:
        raise ValueError("no collector: give --collector http://…:8420, or set FP8WATCH_COLLECTOR")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"collector={url!r}: must be an http:// or https:// URL with a host; {ADDRESS}")
    file = os.environ.get("FP8WATCH_TOKEN_FILE")
    secret = token or os.environ.get("FP8WATCH_TOKEN") or (read_token_file(Path(file)) if file else None)
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    base = f"{url.rstrip('/')}/api/v1/runs/{quote(run, safe='')}"
    window = "".join(f"&{k}={v}" for k, v in (("from", from_step), ("to", to_step)) if v is not None)
    found: list[StoredSite] = []
    unmeasured: list[str] = []
    for site in _all_sites(base, headers):
        if only and not any(fnmatchcase(site["module"], p) for p in only):
            continue
        got = {
            f: _get(f"{base}/sites/{site['id']}/histogram?field={f}{window}", headers)
            for f in ("depth_hist", "amax_hist")
        }
        depth, amax = (np.array(got[f]["counts"]) for f in ("depth_hist", "amax_hist"))
        name = f"{site['module']}.{site['operand']}.{site['direction']}"
        costs = sketch_costs(depth.sum(0), amax.sum(0) if len(amax) else None) if len(depth) else ()
        if not costs:
            unmeasured.append(name)
            continue
        steps = got["depth_hist"]["steps"]
        found.append(
            StoredSite(
                site["module"], site["operand"], site["direction"], tuple(site["tile"]), (steps[0], steps[-1]), costs
            )
        )
    return StoredWhatIf(run, tuple(found), tuple(unmeasured))


def _all_sites(base: str, headers: dict[str, str]) -> list[dict[str, Any]]:
    sites: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = _get(f"{base}/sites?limit=1000{cursor}", headers)
        sites += page["items"]
        if page.get("next") is None:
            return sites
        cursor = f"&cursor={quote(str(page['next']), safe='')}"


def _get(url: str, headers: dict[str, str]) -> dict[str, Any]:
    try:
        answer = urllib3.request("GET", url, headers=headers, timeout=30, retries=False)
    except urllib3.exceptions.HTTPError as e:
        raise OSError(f"{url} was not reached: {e}") from e
    if answer.status == 404:
        raise ValueError(f"{url}: {answer.data[:300].decode('utf-8', 'replace')}")
    if answer.status != 200:
        raise OSError(f"{url} answered {answer.status}: {answer.data[:300].decode('utf-8', 'replace')}")
    data: dict[str, Any] = json.loads(answer.data)
    return data
