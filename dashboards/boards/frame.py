"""A dashboard around its panels: variables, links between dashboards, incidents as annotations, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from .kit import POSTGRES, PROMETHEUS, RED, RUN, Sql

SCHEMA_VERSION = 42
TAG = "fp8watch"
WINDOWS = {
    "500 steps": "500",
    "2000 steps": "2000",
    "10000 steps": "10000",
    "100000 steps": "100000",
    "all steps": "1000000000",
}


def query_variable(
    name: str, label: str, query: str, *, source: Any = POSTGRES, many: bool = False, shown: bool = True
) -> dashboard.QueryVariable:
    """Values out of a data source; `many`: several or all of them."""
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(source)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    made.query(" ".join(query.split()) if source is POSTGRES else {"query": query, "refId": "A"})
    made.hide(model.VariableHide.DONT_HIDE if shown else model.VariableHide.HIDE_VARIABLE)
    if many:
        everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
        made.multi(True).include_all(True).current(everything)
    return made


def run_variable() -> dashboard.QueryVariable:
    """One run, the newest first."""
    text = "coalesce(nullif(name, ''), run_id) || ' · ' || left(run_id, 8)"
    query = f"SELECT {text} AS __text, run_id AS __value FROM grafana.run ORDER BY last_seen_at DESC LIMIT 500"
    return query_variable("run", "Run", query)


def choice(name: str, label: str, options: dict[str, str], default: str, *, many: bool = False) -> Any:
    """A list that is written down here: text -> value."""
    made = dashboard.CustomVariable(name).label(label)
    made.values(", ".join(f"{text} : {value}" for text, value in options.items()))
    made.options(
        [model.VariableOption(selected=text == default, text=text, value=value) for text, value in options.items()]
    )
    if many:
        everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
        return made.multi(True).include_all(True).current(everything)
    return made.current(model.VariableOption(selected=True, text=default, value=options[default]))


def span_variables(default: str = "2000 steps") -> list[Any]:
    """Which steps: how many, and up to which."""
    until = dashboard.TextBoxVariable("until").label("Up to step").default_value("")
    until.description("Empty: the newest step.")
    return [choice("steps", "Steps", WINDOWS, default), until]


def collector_variable() -> dashboard.QueryVariable:
    """Address of the collector's own pages: it says so in the database."""
    return query_variable("collector", "Collector", "SELECT public_url FROM grafana.collector", shown=False)


def _incidents(where: str) -> dashboard.AnnotationQuery:
    sql = f"""SELECT time, title || ' (step ' || first_step || ')' AS text, severity || ',' || mode AS tags
              FROM grafana.incident_detail WHERE {where} AND $__timeFilter(time) ORDER BY time"""
    made = dashboard.AnnotationQuery().name("Incidents").datasource(POSTGRES).enable(True).icon_color(RED)
    made._internal.target = Sql(sql, ref="Incidents").build()  # type: ignore[assignment]
    return made


def board(
    uid: str,
    title: str,
    says: str,
    variables: Sequence[Any],
    panels: Sequence[Any],
    *,
    since: str = "now-6h",
    annotated: str | None = f"run_id = {RUN}",
    refresh: str = "30s",
) -> dict[str, Any]:
    """The dashboard as JSON; `annotated` says whose incidents are marked on panels over time."""
    made = dashboard.Dashboard(title).uid(uid).description(says).tags([TAG]).readonly()
    made.time(since, "now").timezone("browser").refresh(refresh).tooltip(model.DashboardCursorSync.CROSSHAIR)
    for v in (*variables, collector_variable()):
        made.with_variable(v)
    if annotated:
        made.annotation(_incidents(annotated))
    others = dashboard.DashboardLink(TAG).type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    made.link(others.as_dropdown(False).include_vars(False).keep_time(True).icon("external link"))
    pages = dashboard.DashboardLink("fp8watch pages").type(model.DashboardLinkType.LINK).url("${collector:raw}/")
    made.link(pages.target_blank(True).icon("external link"))
    for panel in panels:
        made.with_panel(panel)
    return _clean(json.loads(json.dumps(made.build(), cls=JSONEncoder)))


def _clean(made: dict[str, Any]) -> dict[str, Any]:
    """What the SDK leaves open, or says too much of."""
    made["schemaVersion"] = SCHEMA_VERSION
    made["version"] = 1
    made["annotations"].setdefault("list", [])
    for i, panel in enumerate(made["panels"], 1):
        panel["id"] = i
        if panel["type"] == "table":
            del panel["options"]["footer"]  # of fields by now, and shown nowhere here
    for v in made["templating"]["list"]:
        if v["type"] != "interval":
            for name in [n for n in v if n.startswith("auto")]:
                del v[name]
    return made


__all__ = ["PROMETHEUS", "board", "choice", "query_variable", "run_variable", "span_variables"]
