// One site over steps: amax, scale_inv, SQNR, underflow, and the histogram of the tiles' amax.
import { api, colour, draw, fail, foot, keepDrawn, layout, line, log2Axis, nothing, single, strip, text } from "./charts.js";

const { api: base, site, siteUrl, hasMaps, siteFormat, step } = document.body.dataset;
const POINTS = 800;
const FLOOR_DB = { E4M3: 28, E5M2: 22 };

const CHARTS = [
  { id: "amax", scale: "log2", fields: [["amax_max", "largest", "series-1"], ["amax_min_nonzero", "smallest above 0", "series-2"]] },
  { id: "scale_inv", scale: "log2", fields: [["scale_inv_max", "largest", "series-1"], ["scale_inv_min", "smallest", "series-2"]] },
  { id: "sqnr", unit: "dB", fields: [["tile_sqnr_db", "tiles", "series-1"], ["sqnr_db", "tensor", "series-2"]], floor: FLOOR_DB[siteFormat] },
  { id: "underflow", percent: true, fields: [["underflow_ratio", "underflow", "series-1"], ["saturated_ratio", "saturated", "series-2"]] },
];

// The step that was asked for in the address, and the incidents of this site.
const upright = (x, stroke, dash) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: stroke, width: 1.2, dash } });
const incidents = JSON.parse(document.body.dataset.marks);
const marked = () => [
  ...incidents.map(([at, severity]) => upright(at, colour(severity === "info" || severity === "warning" ? severity : "critical"), "dot")),
  ...(step === undefined || incidents.some(([at]) => at === Number(step)) ? [] : [upright(Number(step), colour("muted"), "solid")]),
];

function goToMap(element) {
  if (hasMaps) element.on("plotly_click", ({ points }) => location.assign(`${siteUrl}/tile-map?step=${Math.round(points[0].x)}`));
}

async function drawChart({ id, fields, scale, unit, percent, floor }) {
  const element = document.getElementById(id);
  try {
    const series = await Promise.all(fields.map(([field]) => api(`${base}/series`, { site, field, points: POINTS })));
    if (series.every((s) => s.values.every((v) => v === null) && !(s.nonfinite ?? []).length)) return nothing(element, "Not measured at this site.");
    const traces = series.flatMap((s, i) => line(s, { name: fields[i][1], colour: colour(fields[i][2]), scale, unit, percent, dash: i ? "dot" : "solid", at: 0.75 - 0.5 * i }));
    const shapes = marked().map((s) => ({ ...s, layer: "below" }));
    if (floor) shapes.push({ type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: -100, y1: floor, fillcolor: colour("damage"), line: { width: 0 }, layer: "below" });
    const values = traces.flatMap((t) => (t.meta === "mark" ? [] : t.y)).filter((v) => v !== null);
    const room = Math.max(...values, 0) - Math.min(...values, 0);
    const yaxis = scale === "log2" ? log2Axis(traces)
      : percent ? { ticksuffix: " %", range: [0, Math.max(0.5, Math.max(...values, 0) * 1.15)] }
      : { ticksuffix: " dB", range: [Math.min(floor ?? 28, ...values) - 3, Math.max(...values, 32) + Math.max(2, room * 0.08)] };
    const figure = layout({
      shapes, yaxis: { ...yaxis, ...single }, yaxis8: foot(), yaxis9: strip(), margin: { l: 58, r: 14, t: 18, b: 40 },
      showlegend: true, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, bgcolor: "transparent" },
    });
    if (await draw(element, traces, figure)) goToMap(element);
  } catch (e) { fail(element, e); }
}

async function drawHistogram() {
  const element = document.getElementById("histogram");
  try {
    const got = await api(`${base}/sites/${site}/histogram`, { points: 300 });
    const used = got.buckets.map((_, k) => got.counts.some((row) => row && row[k] > 0));
    const first = Math.max(0, used.indexOf(true) - 1), last = Math.min(used.length - 1, used.lastIndexOf(true) + 1);
    if (!used.includes(true)) return nothing(element, "No histogram was measured at this site.");
    const buckets = got.buckets.slice(first, last + 1);
    const counts = buckets.map((_, k) => got.counts.map((row) => (row ? row[first + k] : null)));
    const ramp = [0, 1, 2, 3, 4].map((k) => [k / 4, colour(`ramp-${k}`)]);
    const every = Math.max(1, Math.ceil(buckets.length / 12));
    const traces = [{
      type: "heatmap", x: got.steps, y: buckets.map((_, k) => k), z: counts.map((row) => row.map((c) => (c ? Math.log2(1 + c) : null))), colorscale: ramp, hoverongaps: false, ygap: 1,
      customdata: counts.map((row, k) => row.map((c) => [text(buckets[k]), c === null ? "–" : Math.round(c)])),
      hovertemplate: "%{customdata[1]} tiles with amax from 1.75·%{customdata[0]}<br>at step %{x}<extra></extra>",
      colorbar: { thickness: 9, len: 0.96, outlinewidth: 0, x: 1.01, tickvals: [0, 2, 4, 6, 8, 10, 12, 14, 16], ticktext: ["0", "3", "15", "63", "255", "1k", "4k", "16k", "64k"], tickfont: { size: 10.5, color: colour("muted") } },
    }];
    const ticks = buckets.map((_, k) => k).filter((k) => k % every === 0);
    const figure = layout({
      shapes: marked(), hovermode: "closest", margin: { l: 70, r: 74, t: 8, b: 42 }, xaxis: { showgrid: false },
      yaxis: { tickvals: ticks, ticktext: ticks.map((k) => text(buckets[k])), showgrid: false, title: { text: "tile amax ÷ 1.75", standoff: 8 } },
    });
    if (await draw(element, traces, figure)) goToMap(element);
  } catch (e) { fail(element, e); }
}

keepDrawn(() => Promise.all([...CHARTS.map(drawChart), drawHistogram()]));
