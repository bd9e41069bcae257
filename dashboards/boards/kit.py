"""What all dashboards are put together from: queries, panels, variables, links.

The classes of the foundation SDK do the rest. It has none for SQL: `Sql` is that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    barchart,
    common,
    dashboard,
    heatmap,
    stat,
    statushistory,
    table,
    timeseries,
    trend,
)
from grafana_foundation_sdk.builders import prometheus as prometheus_query
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model

POSTGRES = common_model.DataSourceRef(type_val="grafana-postgresql-datasource", uid="fp8watch-postgres")
PROMETHEUS = common_model.DataSourceRef(type_val="prometheus", uid="fp8watch-prometheus")

RUN = "${run:sqlstring}"
SPAN = f"{RUN}, nullif(${{until:sqlstring}}, '')::bigint, ${{steps:sqlstring}}::bigint"
"""Arguments of the functions that take a span of steps."""

GREEN, ORANGE, RED, BLUE, GREY = "green", "orange", "red", "blue", "text"
HIDDEN = {"id": "custom.hideFrom", "value": {"viz": True, "legend": False, "tooltip": False}}


class Sql:
    """A query in SQL, as the data source for PostgreSQL takes it."""

    def __init__(self, text: str, *, ref: str = "A", over_time: bool = False) -> None:
        self.text, self.ref, self.format = text, ref, "time_series" if over_time else "table"

    def build(self) -> _SqlQuery:
        """The query."""
        return _SqlQuery(self)


class _SqlQuery(Dataquery):
    def __init__(self, given: Sql) -> None:
        self._given = given

    def to_json(self) -> dict[str, Any]:
        """As a panel holds it."""
        given = self._given
        how = {"format": given.format, "rawQuery": True, "editorMode": "code"}
        return {"refId": given.ref, "datasource": POSTGRES, **how, "rawSql": " ".join(given.text.split())}


def promql(expr: str, legend: str = "__auto", ref: str = "A", *, instant: bool = False) -> prometheus_query.Dataquery:
    """A query to Prometheus."""
    made = prometheus_query.Dataquery().datasource(PROMETHEUS).expr(expr).legend_format(legend).ref_id(ref)
    return made.instant() if instant else made.range()


def override(name: str, **properties: Any) -> tuple[str, list[model.DynamicConfigValue]]:
    """Of one field: `unit`, `links`, …; `custom_x` stands for `custom.x`."""
    values = [(k.replace("custom_", "custom.").replace("__", "."), v) for k, v in properties.items()]
    return name, [model.DynamicConfigValue(id_val=k, value=v) for k, v in values]


def hidden(name: str) -> tuple[str, list[model.DynamicConfigValue]]:
    """A column that only links read."""
    return name, [model.DynamicConfigValue(id_val=HIDDEN["id"], value=HIDDEN["value"])]


def link(title: str, path: str) -> dict[str, Any]:
    """A link from a value into the collector's own pages."""
    return {"title": title, "url": "${collector:raw}" + path, "targetBlank": True}


def inner(title: str, uid: str, variables: str) -> dict[str, Any]:
    """A link from a value to another of these dashboards."""
    return {"title": title, "url": f"/d/{uid}?{variables}", "targetBlank": False}


def field(name: str) -> str:
    """A value of the same row, inside an address."""
    return f"${{__data.fields.{name}:percentencode}}"


def variable(name: str) -> str:
    """A variable, inside an address."""
    return f"${{{name}:percentencode}}"


def thresholds(*steps: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Colours from values on."""
    made = [model.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(made)


def colored(*steps: tuple[float | None, str]) -> dict[str, Any]:
    """Properties of a cell whose background says how bad it is."""
    values = [{"value": value, "color": color} for value, color in steps]
    return {
        "thresholds": {"mode": "absolute", "steps": values},
        "custom_cellOptions": {"type": "color-background", "mode": "basic"},
    }


def words(**colors: str) -> list[dict[str, Any]]:
    """Value mappings: each word in its colour."""
    options = {word: {"text": word, "color": color, "index": i} for i, (word, color) in enumerate(colors.items())}
    return [{"type": "value", "options": options}]


STATUS = words(running=GREEN, stalled=RED, ended=GREY)
SEVERITY = words(critical=RED, warning=ORANGE, info=BLUE)


def _filled(panel: Any, title: str, says: str, unit: str, queries: Sequence[Any], width: int, height: int) -> Any:
    source = POSTGRES if isinstance(queries[0], Sql) else PROMETHEUS
    panel.title(title).description(says).datasource(source).unit(unit).targets(list(queries))
    if hasattr(panel, "legend"):
        below = common_model.LegendDisplayMode.LIST, common_model.LegendPlacement.BOTTOM
        panel.legend(common.VizLegendOptions().show_legend(True).display_mode(below[0]).placement(below[1]))
        every = common_model.TooltipDisplayMode.MULTI, common_model.SortOrder.DESCENDING
        panel.tooltip(common.VizTooltipOptions().mode(every[0]).sort(every[1]))
    return panel.span(width).height(height)


def number(
    title: str,
    says: str,
    query: Any,
    *,
    unit: str = "none",
    text: bool = False,
    bad: float | None = None,
    width: int = 4,
) -> stat.Panel:
    """One value, large; red from `bad` on."""
    made: stat.Panel = _filled(stat.Panel(), title, says, unit, [query], width, 4)
    made.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("/.*/" if text else ""))
    made.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)).no_value("none")
    if text:
        made.mappings([model.ValueMap.from_json(m) for m in STATUS])
    return made.thresholds(thresholds((None, GREEN), *([(bad, RED)] if bad is not None else [])))


def rows(
    title: str, says: str, query: Sql, overrides: Sequence[tuple[str, Any]], *, width: int = 24, height: int = 9
) -> table.Panel:
    """A table; `overrides` say how columns look and where they lead."""
    made: table.Panel = _filled(table.Panel(), title, says, "none", [query], width, height)
    for name, properties in overrides:
        made.override_by_name(name, properties)
    return made.filterable(True)


def over_steps(
    title: str,
    says: str,
    query: Sql,
    *,
    unit: str = "none",
    log: int | None = None,
    marks: Sequence[str] = (),
    width: int = 12,
    height: int = 8,
) -> trend.Panel:
    """Lines over optimizer steps; the fields of `marks` are red bars on the right axis."""
    made: trend.Panel = _filled(trend.Panel(), title, says, unit, [query], width, height)
    made.x_field("step").line_width(1).span_nulls(False).show_points(common_model.VisibilityMode.AUTO)
    made.override_by_name("step", override("step", unit="none", decimals=0)[1])
    if log:
        made.scale_distribution(common.ScaleDistributionConfig().type(common_model.ScaleDistribution.LOG).log(log))
    for mark in marks:
        bars = {"custom_drawStyle": "bars", "custom_axisPlacement": "right", "custom_fillOpacity": 100}
        red = {"mode": "fixed", "fixedColor": RED}
        more = {"custom_scaleDistribution": {"type": "linear"}, "decimals": 0, "unit": "none"}
        made.override_by_name(mark, override(mark, color=red, **bars, **more)[1])
    return made


def over_time(
    title: str, says: str, queries: Sequence[Any], *, unit: str = "none", bars: bool = False, log: int | None = None,
    width: int = 12, height: int = 8,
) -> timeseries.Panel:  # fmt: skip
    """Lines over time, or stacked bars."""
    made: timeseries.Panel = _filled(timeseries.Panel(), title, says, unit, queries, width, height)
    if bars:
        made.draw_style(common_model.GraphDrawStyle.BARS).fill_opacity(60)
        made.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL))
    if log:
        made.scale_distribution(common.ScaleDistributionConfig().type(common_model.ScaleDistribution.LOG).log(log))
    return made.line_width(1)


def cells(title: str, says: str, query: Sql, *, unit: str, steps: Sequence[tuple[float | None, str]], height: int = 14):  # type: ignore[no-untyped-def]
    """A row of coloured cells over time for each site."""
    made: statushistory.Panel = _filled(statushistory.Panel(), title, says, unit, [query], 24, height)
    made.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)).thresholds(thresholds(*steps))
    return made.show_value(common_model.VisibilityMode.NEVER)


def histogram_over_steps(title: str, says: str, query: Sql, *, height: int = 12) -> heatmap.Panel:
    """Buckets over steps, out of a frame that is counted already."""
    made: heatmap.Panel = _filled(heatmap.Panel(), title, says, "none", [query], 24, height)
    color = heatmap_model.HeatmapColorMode.SCHEME
    scale = heatmap_model.HeatmapColorScale.EXPONENTIAL
    made.calculate(False).color(
        heatmap.HeatmapColorOptions()
        .mode(color)
        .scheme("Viridis")
        .fill("dark-orange")
        .scale(scale)
        .exponent(0.5)
        .steps(64)
        .reverse(False)
    )
    return made


def bars_by(title: str, says: str, query: Sql, *, name: str, width: int = 12, height: int = 8) -> barchart.Panel:
    """A bar for each row."""
    made: barchart.Panel = _filled(barchart.Panel(), title, says, "none", [query], width, height)
    return made.x_field(name).orientation(common_model.VizOrientation.HORIZONTAL)
