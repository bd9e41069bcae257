// One incident: the charts that prove it, around the step where it began.
import { behind } from "./chart_data.js";
import { api, colour, draw, fail, foot, keepDrawn, layout, line, log2Axis, nothing, number, single, strip } from "./charts.js";

const { api: base, severity } = document.body.dataset;
const BEFORE = 64, AFTER = 64;
const OCTAVES = new Set(["amax_max", "amax_min_nonzero", "scale_inv_max", "scale_inv_min"]);
const PERCENT = new Set(["underflow_ratio", "saturated_ratio"]);

async function drawEvidence(element) {
  const { evidence: field, evidenceSite: site } = element.dataset;
  const { first, last } = document.body.dataset; // an incident may go on while its page is open
  try {
    const got = await api(`${base}/series`, { field, site, from: Math.max(0, Number(first) - BEFORE), to: Number(last) + AFTER, points: 400 });
    if (got.values.every((v) => v === null) && !(got.nonfinite ?? []).length) return nothing(element, "Not measured here.");
    const scale = OCTAVES.has(field) ? "log2" : null;
    const traces = line(got, { name: field.replaceAll("_", " "), colour: colour("series-1"), scale, unit: field.endsWith("_db") ? "dB" : "", percent: PERCENT.has(field), stems: field.startsWith("num_") });
    const mark = colour(severity === "info" ? "info" : severity === "warning" ? "warning" : "critical");
    const shapes = [
      { type: "rect", xref: "x", yref: "paper", x0: Number(first) - 0.5, x1: Math.max(Number(last), Number(first)) + 0.5, y0: 0, y1: 1, fillcolor: mark, opacity: 0.14, line: { width: 0 }, layer: "below" },
      { type: "line", xref: "x", yref: "paper", x0: Number(first), x1: Number(first), y0: 0, y1: 1, line: { color: mark, width: 1.2, dash: "dot" } },
    ];
    // The event itself is a point, so that a single step is seen at any width.
    const at = traces[0].x.map((s, i) => [s, traces[0].y[i]]).filter(([s, v]) => v !== null && s >= Number(first) && s <= Number(last));
    if (at.length) traces.push({ x: at.map(([s]) => s), y: at.map(([, v]) => v), type: "scatter", mode: "markers", marker: { color: mark, size: 7 }, hoverinfo: "skip" });
    const annotations = [{ x: Number(first), y: 1, xref: "x", yref: "paper", yanchor: "bottom", text: `step ${first}`, showarrow: false, font: { size: 11, color: mark } }];
    const yaxis = scale === "log2" ? log2Axis(traces) : PERCENT.has(field) ? { ticksuffix: " %", rangemode: "tozero" } : { rangemode: field.startsWith("num_") ? "tozero" : "normal" };
    const words = element.closest(".panel").querySelector("h2").textContent;
    await draw(element, traces, layout({ shapes, annotations, yaxis: { ...yaxis, ...single }, yaxis8: foot(), yaxis9: strip(), margin: { l: 46, r: 12, t: 20, b: 38 } }));
    behind(element, { curves: [{ name: words, series: got, stroke: colour("series-1"), say: PERCENT.has(field) ? (v) => `${number(100 * v, 3)} %` : undefined }] });
  } catch (e) { fail(element, e); }
}

// The map of a fault arrives after the incident: the page gets its panel while it is open, and the script with it.
document.addEventListener("fp8watch:live", () => { if (document.querySelector("#tiles [data-tile-map]")) import("./tile_map.js").catch(() => {}); });

keepDrawn(() => Promise.all([...document.querySelectorAll("[data-evidence]")].map(drawEvidence)));
