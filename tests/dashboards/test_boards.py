"""The committed dashboards: made by the generator, whole, and every link leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards.columns import COLUMNS
from fastapi import FastAPI
from starlette.routing import Match

from dashboards import boards
from dashboards.boards import BUILT_IN, POSTGRES, PROMETHEUS, ROOT, Query
from fp8watch_server.pages import runbooks
from fp8watch_server.pages.routes import router

BOARDS = boards.load()
TYPES = {"stat", "table", "trend", "timeseries", "status-history", "heatmap", "barchart"}
WITHOUT_RATE = {"Records that agents gave up"}
"""Counters shown as they are: their series begin with the first loss, which a rate would not see."""
panels = [pytest.param(b, p, id=f"{uid}: {p['title']}") for uid, b in BOARDS.items() for p in b["panels"]]


def test_the_files_are_what_the_generator_makes(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("grafana-foundation-sdk needs Python 3.11")
    subprocess.run([sys.executable, ROOT / "dashboards" / "make_dashboards.py", tmp_path], check=True)
    made = {p.name: p.read_text() for p in tmp_path.iterdir()}
    there = {p.name: p.read_text() for p in boards.FOLDER.iterdir()}
    assert made.keys() == there.keys()
    for name, text in made.items():
        assert text == there[name], f"{name}: run python dashboards/make_dashboards.py"


def test_the_five_dashboards_are_there() -> None:
    assert set(BOARDS) == {f"fp8watch-{name}" for name in ("run", "layers", "incidents", "fleet", "collector")}
    assert {b["uid"] for b in BOARDS.values()} == set(BOARDS)
    assert len({b["title"] for b in BOARDS.values()}) == len(BOARDS)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_whole(board: dict[str, Any]) -> None:
    assert board["schemaVersion"] in (41, 42)
    assert board["editable"] is False
    assert board["description"]
    assert "id" not in board
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [p["title"] for p in board["panels"]]
    assert len(set(titles)) == len(titles)
    variables = board["templating"]["list"]
    asked = {name for q in _queries_of(board) for name in boards.names_of_variables(q)}
    asked |= {name for url in _urls(board) for name in boards.names_of_variables(url)}
    declared = {v["name"] for v in variables}
    assert asked - BUILT_IN == declared, "every variable is declared, and none for nothing"
    for v in variables:
        assert v.get("label"), v["name"]
        assert not [name for name in v if name.startswith("auto")], "of an interval only"
        if v["type"] == "query":
            assert v["refresh"] == 2, "asked again when the time range changes"


def _queries_of(board: dict[str, Any]) -> list[str]:
    return [q.text for source in (POSTGRES, PROMETHEUS) for q in boards.queries({board["uid"]: board}, source)]


@pytest.mark.parametrize(("board", "panel"), panels)
def test_a_panel_is_whole(board: dict[str, Any], panel: dict[str, Any]) -> None:
    assert panel["type"] in TYPES
    assert panel["title"]
    assert panel["description"], "what it shows, for who does not know"
    assert panel["fieldConfig"]["defaults"]["unit"], "a unit, if only none"
    assert panel["targets"]
    position = panel["gridPos"]
    assert 0 <= position["x"] <= 24 - position["w"]
    for other in board["panels"]:
        if other is not panel:
            assert not _overlap(position, other["gridPos"]), f"lies over {other['title']!r}"
    source = panel["datasource"]["uid"]
    assert source in (POSTGRES, PROMETHEUS)
    assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]
        if source == PROMETHEUS:
            _lint_promql(panel["title"], target["expr"])
        else:
            _lint_sql(panel["type"], target)


def _overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    return (
        a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"] and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]
    )


def _lint_promql(title: str, expr: str) -> None:
    """As dashboard-linter: a rate goes over $__rate_interval, a counter goes through a rate."""
    for interval in re.findall(r"(?:rate|irate|deriv)\([^)]*\[([^]]+)\]", expr):
        assert interval == "$__rate_interval"
    for counter in re.findall(r"\bfp8watch_\w+_total\b", expr):
        assert re.search(rf"(?:rate|increase)\({counter}", expr) or title in WITHOUT_RATE, f"{counter} without a rate"
    assert expr.count("(") == expr.count(")")


def _lint_sql(kind: str, target: dict[str, Any]) -> None:
    """Of the fixed views only; what people type goes in as a quoted string; over time means in the time range."""
    text = target["rawSql"]
    assert set(re.findall(r"\b(?:FROM|JOIN)\s+(?!LATERAL)([\w.]+)", text)) - {"unnest"}
    for relation in re.findall(r"\b(?:FROM|JOIN)\s+([\w.]+)", text):
        assert relation.startswith("grafana."), relation
    for found in re.finditer(r"\$\{?(\w+)(?::(\w+))?\}?", text):
        assert found[1].startswith("__") or found[2] == "sqlstring", f"{found[0]} is not quoted"
    assert ";" not in text
    assert target["rawQuery"] is True
    if kind == "timeseries":
        assert target["format"] == "time_series"
        assert "$__timeFilter(" in text


def _urls(thing: Any) -> Iterator[str]:
    if isinstance(thing, dict):
        if isinstance(thing.get("url"), str):
            yield thing["url"]
        for value in thing.values():
            yield from _urls(value)
    elif isinstance(thing, list):
        for value in thing:
            yield from _urls(value)


LINKS = sorted({(uid, url) for uid, board in BOARDS.items() for url in _urls(board)})
EXAMPLES = {
    "run": "r/1",
    "run_id": "r/1",
    "site": "7",
    "id": "abc",
    "mode": "inf-laundering",
    "first_step": "3",
    "rank": "0",
}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    made = FastAPI()
    made.include_router(router)
    return made


def leads_to(app: FastAPI, path: str) -> str | None:
    """Name of the page that answers, or None."""
    scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
    for route in router.routes:
        match, child = route.matches(scope)
        if match is Match.FULL:
            return str(child["endpoint"].__name__)
    return None


PAGES = {
    "/": "runs_page",
    "/runs/${}": "run_page",
    "/runs/${}/sites/${}": "site_page",
    "/runs/${}/sites/${}/tile-map": "tile_map_page",
    "/incidents/${}": "incident_page",
    "/runbooks/${}": "runbook_page",
}


@pytest.mark.parametrize(("uid", "url"), LINKS)
def test_a_link_leads_to_a_page(app: FastAPI, uid: str, url: str) -> None:
    for found in re.finditer(r"\$\{(\w+)(?:\.fields\.\w+)?(?::(\w+))?\}", url):
        assert found[2] == ("raw" if found[1] == "collector" else "percentencode"), f"{found[0]} is not encoded"
    if url.startswith("/d/"):
        target, _, query = url.removeprefix("/d/").partition("?")
        names = {v["name"] for v in BOARDS[target]["templating"]["list"]}
        assert {part.split("=")[0].removeprefix("var-") for part in query.split("&")} <= names
        return
    base = "${collector:raw}"
    assert url.startswith(base), "into the collector's own pages"
    path, _, query = url.removeprefix(base).partition("?")
    pattern = re.sub(r"\$\{[^}]*\}", "${}", path)
    assert pattern in PAGES, f"no such page: {pattern}"
    filled = re.sub(r"\$\{(?:__data\.fields\.)?(\w+)[^}]*\}", lambda m: EXAMPLES[m[1]], path)
    assert leads_to(app, filled) == PAGES[pattern]
    assert {part.split("=")[0] for part in query.split("&") if part} <= {"step", "rank", "tile"}


@pytest.mark.parametrize("query", [q for q in boards.queries(BOARDS, POSTGRES) if q.panel is not None], ids=str)
def test_what_a_panel_refers_to_is_a_column(query: Query) -> None:
    assert query.panel is not None
    wanted = set(re.findall(r"__data\.fields\.(\w+)", str(query.panel["fieldConfig"])))
    for o in query.panel["fieldConfig"]["overrides"]:
        if o["matcher"]["id"] == "byName":
            wanted.add(o["matcher"]["options"])
    if x := query.panel["options"].get("xField"):
        wanted.add(x)
    assert wanted <= set(COLUMNS[str(query)]), wanted - set(COLUMNS[str(query)])


def test_the_modes_that_link_to_runbooks_have_them() -> None:
    assert "inf-laundering" in runbooks.slugs()


def test_the_sources_are_those_that_are_provisioned() -> None:
    text = (ROOT / "dashboards" / "grafana" / "datasources" / "fp8watch.yml").read_text()
    given = {d["uid"]: d["type"] for d in yaml.safe_load(text)["datasources"]}
    used = {(p["datasource"]["uid"], p["datasource"]["type"]) for b in BOARDS.values() for p in b["panels"]}
    assert used == set(given.items())
