// One site over steps: amax, scale_inv, SQNR, underflow, clip depth with what was usual as a band; beside it the other
// direction of the same operand, on the same scale. The histogram of the tiles' amax is in histogram.js.
import { behind } from "./chart_data.js";
import { band, bandTraces, floorOf } from "./baseline.js";
import { api, colour, draw, fail, foot, keepDrawn, layout, line, log2Axis, nothing, number, single, strip } from "./charts.js";
import { drawHistogram } from "./histogram.js";
import { asked, followZoom, shownRange, zoomsOf } from "./range.js";

const { run: runUrl, operand, step } = document.body.dataset;
const told = (name) => JSON.parse(document.body.dataset[name]); // anew each time: it changes while the page is open
const SITES = told("sites"); // one, or both directions: [{id, maps: the steps of which one was kept}]
const POINTS = 800;
const CHARTS = told("charts"); // the rows of pages/site_charts.py

// The step that was asked for in the address, and the incidents of this site.
const upright = (x, stroke, dash) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: stroke, width: 1.2, dash } });
const marked = () => [
  ...told("marks").map(([at, severity]) => upright(at, colour(severity === "info" || severity === "warning" ? severity : "critical"), "dot")),
  ...(step === undefined || told("marks").some(([at]) => at === Number(step)) ? [] : [upright(Number(step), colour("muted"), "solid")]),
];

export function goToMap(element, { id }) {
  element.on("plotly_click", ({ points }) => {
    const kept = told("sites").find((site) => site.id === id)?.maps ?? [], at = points[0].x;
    const nearest = kept.reduce((best, step) => (best === null || Math.abs(step - at) < Math.abs(best - at) ? step : best), null);
    if (nearest !== null) location.assign(`${runUrl}/sites/${id}/tile-map?step=${nearest}`);
  });
}

// All series of a site come in one answer, which its charts share.
const askFor = (site) => api(`${runUrl}/sites/${site.id}/charts.json`, { points: POINTS, ...asked() });

async function tracesOf({ curves, kind }, asking) {
  const got = await asking;
  const series = curves.map(({ field }) => got[field]);
  const measured = series.some((s) => s.values.some((v) => v !== null) || (s.nonfinite ?? []).length);
  const scale = kind === "octaves" ? "log2" : null;
  const lines = series.flatMap((s, i) => line(s, { name: curves[i].label, colour: colour(curves[i].stroke), scale, unit: kind === "dB" ? "dB" : "", percent: kind === "percent", dash: i ? "dot" : "solid", at: 0.75 - 0.5 * i }));
  const drawn = lines[0] ? bandTraces(band(lines[0].x, lines[0].y, floorOf(kind, operand), kind === "octaves" && operand === "weight"), colour("usual")) : [];
  const say = kind === "percent" ? (v) => `${number(100 * v, 3)} %` : kind === "dB" ? (v) => `${number(v)} dB` : (v) => number(v);
  return { traces: [...lines, ...drawn], steps: series[0].steps, measured, curves: series.map((s, i) => ({ name: curves[i].label, series: s, stroke: colour(curves[i].stroke), say })) };
}

function axis({ kind, floor, limit }, traces) {
  const values = traces.flatMap((t) => (t.meta === "mark" ? [] : t.y)).filter((v) => v !== null && Number.isFinite(v));
  if (kind === "octaves") return log2Axis(limit === null ? traces : [...traces, { y: [limit - 1, limit + 1] }]);
  if (kind === "percent") return { ticksuffix: " %", range: [Math.min(...values, 0) * 1.15, Math.max(0.5, Math.max(...values, 0) * 1.15)] };
  const room = Math.max(...values, 0) - Math.min(...values, 0);
  return { ticksuffix: " dB", range: [Math.min(floor ?? 28, ...values) - 3, Math.max(...values, 32) + Math.max(2, room * 0.08)] };
}

// Both directions at once, so that they are drawn on one scale.
async function drawChart(chart, asking) {
  const elements = SITES.map((_, k) => document.getElementById(k ? `${chart.id}-other` : chart.id));
  try {
    const found = await Promise.all(asking.map((of) => tracesOf(chart, of)));
    const yaxis = axis(chart, found.filter((f) => f.measured).flatMap((f) => f.traces));
    const shapes = marked();
    const region = { type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, fillcolor: colour("damage"), line: { width: 0 }, layer: "below" };
    if (chart.floor) shapes.push({ ...region, y0: -100, y1: chart.floor });
    if (chart.limit !== null) shapes.push({ ...region, y0: chart.limit, y1: chart.limit + 200 });
    await Promise.all(found.map(async ({ traces, steps, measured, curves }, k) => {
      if (!measured) return nothing(elements[k], "Not measured at this site.");
      const figure = layout({
        shapes, xaxis: shownRange(steps), yaxis: { ...yaxis, ...single }, yaxis8: foot(), yaxis9: strip(), margin: { l: 58, r: 14, t: 18, b: 40 },
        showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, bgcolor: "transparent" },
      });
      const first = await draw(elements[k], traces, figure);
      behind(elements[k], { curves: curves.map((c) => ({ ...c, name: [c.name === chart.title ? c.name : `${chart.title} ${c.name}`, ...(SITES.length > 1 ? [SITES[k].direction] : [])].join(", ") })) });
      if (first) { followZoom(elements[k]); goToMap(elements[k], SITES[k]); }
    }));
    const all = found.flatMap((f) => [f.steps[0], f.steps.at(-1)]).filter((s) => s !== undefined), { from, to } = asked();
    if (all.length) zoomsOf(() => [from ?? Math.min(...all), to ?? Math.max(...all)]);
  } catch (e) { elements.forEach((element) => fail(element, e)); }
}

keepDrawn(() => {
  const asking = SITES.map(askFor);
  return Promise.all([...CHARTS.map((chart) => drawChart(chart, asking)), ...SITES.map((site, k) => drawHistogram(document.getElementById(k ? "histogram-other" : "histogram"), site, marked, goToMap))]);
});
