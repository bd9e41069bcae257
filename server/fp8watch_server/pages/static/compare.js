// Two runs side by side: their losses, the difference on a log axis with its noise band, and the ratio of amax by module.
import { colour, draw, fail, keepDrawn, layout, line, nothing, short, strip, text } from "./charts.js";
import { followZoom, shownRange } from "./range.js";

const difference = document.getElementById("difference"), ratio = document.getElementById("ratio");
const { loss, map, parting } = JSON.parse(difference.dataset.drawnFrom);
const OCTAVES = 1; // at least so much of a ratio has the full colour, so that rounding stays pale

const upright = (x, dash) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: colour("warning"), width: 1.2, dash } });
const marked = () => [...(parting.step === null ? [] : [upright(parting.seen_at ?? parting.step, "solid")]), ...(parting.loss_step === null || parting.loss_step === parting.step ? [] : [upright(parting.loss_step, "dot")])];

async function drawLoss() {
  const { steps, stride } = loss;
  if (!steps.length) return nothing(difference, "No loss was logged on both sides in a common step.");
  const of = (name) => ({ steps, stride, ...loss[name] });
  const known = loss.band.values.filter((v) => v > 0), least = Math.min(...known, ...loss.difference.values.filter((v) => v > 0), 1);
  const floor = 10 ** Math.floor(Math.log10(least)); // equal losses have no place on a log axis: they lie at its foot
  const apart = of("difference");
  const equal = apart.values.map((v) => v === 0);
  const drawn = line({ ...apart, values: apart.values.map((v) => (v === null ? null : Math.max(v, floor))) }, { name: "difference", colour: colour("text"), axis: "y2", marks: "y9" });
  drawn[0].customdata = drawn[0].x.map((x) => { const i = steps.indexOf(x); return i < 0 ? "" : equal[i] ? "0: equal" : String(Number(apart.values[i]?.toPrecision(3))); });
  const band = { x: steps, y: loss.band.values.map((v) => (v === null ? null : Math.max(v, floor))), yaxis: "y2", type: "scatter", mode: "lines", name: "noise band", line: { width: 0 }, fill: "tozeroy", fillcolor: colour("usual"), hovertemplate: "band %{y:.3g}<extra></extra>" };
  const traces = [band, ...line(of("a"), { name: "first", colour: colour("series-1"), marks: "y8" }), ...line(of("b"), { name: "second", colour: colour("series-2"), marks: "y8", dash: "dot" }), ...drawn];
  const figure = layout({
    shapes: marked(), margin: { l: 70, r: 18, t: 20, b: 42 }, showlegend: true,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, bgcolor: "transparent" },
    yaxis: { domain: [0.6, 0.94], title: { text: "loss", font: { size: 11.5 } } }, yaxis8: strip(0.95, 1),
    yaxis2: { gridcolor: colour("grid"), domain: [0, 0.5], type: "log", exponentformat: "power", title: { text: "|difference|", font: { size: 11.5 } } }, yaxis9: strip(0.52, 0.57),
    xaxis: { anchor: "y2", ...shownRange(steps) },
  });
  if (await draw(difference, traces, figure)) followZoom(difference);
}

async function drawRatio() {
  const { rows, steps, sites, marks } = map;
  if (!rows.length || !steps.length) return nothing(ratio, "No common site was measured on both sides in a common step.");
  const largest = rows.reduce((a, row) => row.values.reduce((b, v) => Math.max(b, Math.abs(v ?? 0)), a), OCTAVES);
  const end = Math.min(largest, 4);
  const said = (v) => (v === null ? "" : `${v > 0 ? "+" : ""}${String(Number(v.toPrecision(3))).replace("-", "−")} octaves`);
  const name = (i) => (i === null ? ["", ""] : [text(short(sites[i][0], 90)), `${text(sites[i][1])} / ${text(sites[i][2])}`]);
  const y = rows.map((_, i) => i);
  const traces = [{
    type: "heatmap", x: steps, y, z: rows.map((row) => row.values), zmin: -end, zmax: end, ygap: 1.5, hoverongaps: false,
    colorscale: [[0, colour("series-2")], [0.5, colour("panel")], [1, colour("series-1")]],
    customdata: rows.map((row) => row.values.map((v, j) => [...name(row.sites[j]), said(v)])),
    hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>first / second %{customdata[2]} at step %{x}<extra></extra>",
    colorbar: { thickness: 9, len: 0.96, outlinewidth: 0, tickfont: { size: 10.5, color: colour("muted") }, nticks: 5, x: 1.01, title: { text: "log2", font: { size: 10.5 } } },
  }, {
    type: "scatter", mode: "markers", x: marks.map(([, j]) => steps[j]), y: marks.map(([i]) => i), cliponaxis: false,
    marker: { symbol: "x", size: 8, color: colour("critical"), line: { width: 1, color: colour("panel") } },
    customdata: marks.map(([, , i, what]) => [...name(i), what]), hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]} at step %{x}<extra></extra>",
  }];
  const left = Math.min(210, Math.round(ratio.clientWidth * 0.4)), chars = Math.max(10, Math.floor((left - 8) / 6));
  const every = Math.ceil((rows.length * 11) / 800), ticks = y.filter((i) => i % every === 0);
  const figure = layout({
    shapes: marked(), margin: { l: left, r: 74, t: 8, b: 42 }, hovermode: "closest",
    yaxis: { tickvals: ticks, ticktext: ticks.map((i) => text(short(rows[i].label, Math.min(34, chars)))), range: [rows.length - 0.5, -0.5], fixedrange: true, showgrid: false, tickfont: { family: "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace", size: 10.5, color: colour("text") }, ticks: "" },
    xaxis: { showgrid: false, ...shownRange(steps) },
  });
  if (await draw(ratio, traces, figure)) followZoom(ratio);
}

keepDrawn(() => Promise.all([drawLoss().catch((e) => fail(difference, e)), drawRatio().catch((e) => fail(ratio, e))]));
