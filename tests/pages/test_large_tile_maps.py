"""A map of more tiles than one answer holds: it comes in parts, and what is said of it is said of the whole."""

from __future__ import annotations

import re

import httpx
import pytest
from pages.synthetic import FAULT_SITE, FAULT_STEP, FAULT_TILE, INCIDENT_ID

from fp8watch_server.pages.thumbnail import BROKEN
from fp8watch_server.store import tile_maps

SITE = f"/runs/demo-inf/sites/{FAULT_SITE}"
AT = f"{SITE}/tile-map?step={FAULT_STEP}"


@pytest.fixture(autouse=True)
def a_hundred_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256."""
    monkeypatch.setattr(tile_maps, "MAX_SHOWN_TILES", 600)


def test_of_a_map_that_is_too_large_the_rows_around_its_worst_tile_are_given(client: httpx.Client) -> None:
    got = client.get(f"/api/v1{AT}").json()
    assert (got["row0"], got["shape"]) == (FAULT_TILE[0] - 50, [100, 6])
    assert got["cut"] == {"shape": [256, 6], "num_broken": 0}
    assert all(len(got[name]) == 600 for name in ("amax", "scale_inv", "flags", "num_nonfinite", "num_underflow"))
    assert got["flags"][50 * 6 + FAULT_TILE[1]] & 2, "it is the tile that is broken"
    assert client.get(f"/api/v1{SITE}/tile-map?step=89").json()["row0"] == 0


@pytest.mark.parametrize(("row", "row0"), [(0, 0), (60, 10), (255, 156), (999, 156)])
def test_any_row_can_be_asked_for(client: httpx.Client, row: int, row0: int) -> None:
    got = client.get(f"/api/v1{AT}&row={row}").json()
    assert (got["row0"], got["shape"]) == (row0, [100, 6])
    broken = row0 <= FAULT_TILE[0] < row0 + 100
    assert got["cut"] == {"shape": [256, 6], "num_broken": 0 if broken else 1}


def test_the_parts_are_those_of_the_whole(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    part = client.get(f"/api/v1{AT}&row=200").json()
    monkeypatch.undo()
    whole = client.get(f"/api/v1{AT}").json()
    assert (whole["row0"], whole["shape"], whole["cut"]) == (0, [256, 6], None)
    for name in ("amax", "scale_inv", "flags", "num_nonfinite", "num_underflow"):
        assert part[name] == whole[name][150 * 6 : 250 * 6]


def test_picture_report_and_list_are_of_the_whole_map(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_maps, "MAX_SHOWN_TILES", 60)
    assert BROKEN in client.get(f"/incidents/{INCIDENT_ID}/tiles.svg").text
    assert ">(131, 3)</a>" in client.get(AT).text
    report = client.get(f"/incidents/{INCIDENT_ID}/report.html").text
    tiles = report[report.index('class="tilepicture"') :]
    assert "256 × 6 tiles" in tiles
    assert re.search(r"<td>\(131, 3\)</td>.*?\+Inf", tiles, re.S)
