"""The dashboards are of Grafana's own types: no name that it does not know, no value of another type."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema_rs
import pytest

from dashboards import boards, schemas

pytestmark = pytest.mark.long
BOARDS = boards.load()
KINDS = sorted({p["type"] for b in BOARDS.values() for p in b["panels"]})


def schema_of(kind: str | None) -> dict[str, Any]:
    try:
        return schemas.dashboard() if kind is None else schemas.panel(kind)
    except schemas.NoNpm as e:
        pytest.skip(f"no schemas of Grafana: {e}")


def problems(schema: dict[str, Any], thing: Any) -> list[str]:
    found = jsonschema_rs.Draft7Validator(schema).iter_errors(thing)
    return [f"{'/'.join(map(str, e.instance_path))}: {e.message[:300]}" for e in found]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_dashboard_is_of_grafanas_type(board: dict[str, Any]) -> None:
    schema = schemas.of(schema_of(None), "Whole")
    board = copy.deepcopy(board)
    for a in board["annotations"]["list"]:
        del a["target"]  # of the data source: the type describes only annotations that Grafana keeps itself
    assert problems(schema, board) == []
    broken = copy.deepcopy(board)
    broken["panels"][0]["gridPos"]["w"] = "wide"
    broken["templating"]["list"][0]["colour"] = "red"
    assert len(problems(schema, broken)) >= 2, "the schema sees nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_panels_of_a_type_have_its_options(kind: str) -> None:
    whole = schema_of(kind)
    options = schemas.of(whole, "PanelOptions")
    has_fields = "PanelFieldConfig" in whole["definitions"]
    custom = schemas.of(whole, "PanelFieldConfig") if has_fields else {"additionalProperties": False}
    found = [p for b in BOARDS.values() for p in b["panels"] if p["type"] == kind]
    for p in found:
        config = p["fieldConfig"]
        wrong = problems(options, p["options"]) + problems(custom, config["defaults"].get("custom") or {})
        for o in config["overrides"]:
            given = {
                q["id"].removeprefix("custom."): q["value"] for q in o["properties"] if q["id"].startswith("custom.")
            }
            wrong += problems(custom, given)
        assert wrong == [], p["title"]
    broken = copy.deepcopy(found[0]["options"])
    broken["nosuch"] = 1
    assert problems(options, broken), "the schema sees nothing"
    assert problems(custom, {"nosuch": 1}), "the schema sees nothing"
