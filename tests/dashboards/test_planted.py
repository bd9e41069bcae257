"""Mistakes planted into the dashboards and into /metrics, each with the test that has to see it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dashboards.bugs import BUGS
from support.planted import Bug, all_fit, seen_to_fail

from dashboards import boards, test_boards

BOARDS = boards.load()
Board = dict[str, Any]


def panel(board: Board, title: str) -> dict[str, Any]:
    return next(p for p in board["panels"] if p["title"] == title)


def whole(board: Board) -> None:
    test_boards.test_a_dashboard_is_whole(board)


def panels(board: Board) -> None:
    for p in board["panels"]:
        test_boards.test_a_panel_is_whole(board, p)


def links(board: Board) -> None:
    app = test_boards.FastAPI()
    for url in set(test_boards._urls(board)):
        test_boards.test_a_link_leads_to_a_page(app, board["uid"], url)


def columns(board: Board) -> None:
    for query in boards.queries({board["uid"]: board}, boards.POSTGRES):
        if query.panel is not None:
            test_boards.test_what_a_panel_refers_to_is_a_column(query)


def in_sql(title: str, old: str, new: str) -> Callable[[Board], None]:
    def change(board: Board) -> None:
        target = panel(board, title)["targets"][0]
        assert old in target["rawSql"]
        target["rawSql"] = target["rawSql"].replace(old, new)

    return change


def in_promql(title: str, old: str, new: str) -> Callable[[Board], None]:
    def change(board: Board) -> None:
        target = panel(board, title)["targets"][0]
        assert old in target["expr"]
        target["expr"] = target["expr"].replace(old, new)

    return change


def in_links(old: str, new: str) -> Callable[[Board], None]:
    def change(thing: Any) -> None:
        for value in thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else []:
            change(value)
        if isinstance(thing, dict) and isinstance(thing.get("url"), str):
            thing["url"] = thing["url"].replace(old, new)

    return change


def put(title: str, **values: Any) -> Callable[[Board], None]:
    return lambda board: panel(board, title).update(values)


PLANTED: list[tuple[str, str, Callable[[Board], None], Callable[[Board], None]]] = [
    ("two panels of one id", "run", put("Status", id=2), whole),
    ("a variable that is not declared", "layers", lambda b: b["templating"]["list"].pop(0), whole),
    (
        "an automatic interval where there is none",
        "run",
        lambda b: b["templating"]["list"][0].update(auto=False),
        whole,
    ),
    ("a dashboard that anybody edits", "run", lambda b: b.update(editable=True), whole),
    ("a panel that nobody explains", "fleet", put("Loss", description=""), panels),
    ("a panel over another", "run", put("Sites", gridPos={"h": 4, "w": 4, "x": 0, "y": 0}), panels),
    ("text of a person in SQL", "run", in_sql("Status", "${run:sqlstring}", "'${run}'"), panels),
    ("a table in place of a view", "run", in_sql("Sites", "FROM grafana.run_now", "FROM run"), panels),
    ("a chart over time of all times", "fleet", in_sql("Incidents that began", "$__timeFilter(time)", "true"), panels),
    ("a rate over a fixed time", "collector", in_promql("Bodies per second", "$__rate_interval", "5m"), panels),
    ("a counter as it is", "collector", in_promql("Bytes per second", "rate(", "abs("), panels),
    ("a dead link", "run", in_links("/tile-map", "/tiles"), links),
    ("another dead link", "incidents", in_links("/incidents/", "/incident/"), links),
    ("a name that is not encoded", "fleet", in_links(":percentencode", ""), links),
    ("a link to a dashboard that forgets its run", "fleet", in_links("var-run=", "var-runs="), links),
    ("a colour for a column that is not there", "run", in_links("fields.site:", "fields.sites:"), columns),
]


@pytest.mark.parametrize(("name", "uid", "plant", "see"), PLANTED, ids=[p[0] for p in PLANTED])
def test_a_planted_mistake_is_seen(
    name: str, uid: str, plant: Callable[[Board], None], see: Callable[[Board], None]
) -> None:
    board = copy.deepcopy(BOARDS[f"fp8watch-{uid}"])
    see(board)
    plant(board)
    with pytest.raises((AssertionError, KeyError)):
        see(board)


def test_what_is_broken_on_purpose_still_fits_the_code() -> None:
    all_fit(BUGS)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_seen(tree: Path, bug: Bug) -> None:
    if "test_promtool" in bug.test and shutil.which("promtool") is None:
        pytest.skip("promtool is not here")
    seen_to_fail(tree, bug)
