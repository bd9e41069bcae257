// What all charts share: plotly when it is there, colours of the theme, axes, non-finite values along the top edge.
import { NAMES, api, colour, number, short, text } from "./basics.js";
import { revision } from "./range.js";

export { NAMES, api, colour, number, short, text };

// plotly.js is large, and to compile it takes longer than to paint the page: it is asked for when that has been done.
// A tab in the background paints nothing, and does not wait for it.
const painted = new Promise((resolve) => {
  requestAnimationFrame(() => requestAnimationFrame(resolve));
  setTimeout(resolve, 250);
});
export const plotly = painted.then(() => new Promise((resolve, reject) => {
  const script = document.createElement("script");
  script.src = document.querySelector("script[data-plotly]").dataset.plotly;
  script.addEventListener("load", () => resolve(window.Plotly));
  script.addEventListener("error", () => reject(new Error("plotly.js did not load")));
  document.head.append(script);
}));
plotly.catch(() => {}); // each chart says so by itself

const SYMBOLS = { nan: "x", inf: "triangle-up", "-inf": "triangle-down" };

export function layout(extra = {}) {
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, tickcolor: colour("line"), automargin: false, fixedrange: false };
  const { xaxis, yaxis, ...rest } = extra;
  return {
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 11.5, color: colour("muted") },
    margin: { l: 64, r: 16, t: 14, b: 40 },
    showlegend: false,
    hovermode: "x",
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 }, align: "left", namelength: -1 },
    uirevision: revision(), // zoom survives live updates
    dragmode: "zoom",
    ...rest,
    xaxis: { ...axis, title: { text: "step", standoff: 4 }, tickformat: "d", hoverformat: "d", ...xaxis },
    yaxis: { ...axis, ...yaxis },
  };
}
export const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], displayModeBar: false, showTips: false };

// Marks that have no value have a place all the same: a strip above the plot, and the foot of the plot for zeros.
export const strip = (low = 0.93, high = 1) => ({ range: [0, 1], visible: false, fixedrange: true, domain: [low, high] });
export const foot = () => ({ overlaying: "y", range: [0, 1], visible: false, fixedrange: true });
export const single = { domain: [0, 0.91] }; // of a plot with one strip above it

const LOG2 = (v) => Math.log2(v);

// The points of a line: a line joins neighbours only. What lies further apart than the series' usual stride was not
// measured in between, and a line there would be read as values. `breaks`: what was measured, but is no point of a line
// (NaN; 0 on an axis of octaves). Few points, or points without a neighbour, have a dot each.
const FEW = 30, SPARSE = 120;
export function joined(series, y, breaks = () => false) {
  const { steps } = series;
  const at = y.map((_, i) => i).filter((i) => y[i] !== null || breaks(i));
  const middle = (list) => list.sort((a, b) => a - b)[(list.length - 1) >> 1];
  const apart = (n) => at.slice(n).map((i, k) => steps[i] - steps[at[k]]);
  const thinned = (series.stride ?? 1) > 1; // of each bucket a few points are left, at uneven distances
  const usual = at.length > 3 ? middle(apart(1)) : 1;
  const reach = thinned ? Math.max(2 * series.stride, 3 * (middle(apart(2)) ?? 1)) : 1.5 * usual;
  const points = { x: [], y: [], index: [] };
  const push = (x, value, i) => { points.x.push(x); points.y.push(value); points.index.push(i); };
  let before = -1, num_gaps = 0;
  steps.forEach((step, i) => {
    if (y[i] === null && !breaks(i)) {
      if (before < 0) push(step, null, i);
      return;
    }
    if (before >= 0 && step - steps[before] > reach) { num_gaps += 1; push((step + steps[before]) / 2, null, -1); }
    push(step, y[i], i);
    before = i;
  });
  const all = at.length < FEW || (at.length < SPARSE && (num_gaps > 0 || (!thinned && usual > 1)));
  const lone = points.y.map((v, k) => v !== null && (points.y[k - 1] ?? null) === null && (points.y[k + 1] ?? null) === null);
  return { ...points, size: all ? points.y.map(() => 5) : lone.map((l) => (l ? 5 : 0)), marked: all || lone.includes(true) };
}

// Which steps a point stands for, where that is more than its own: records of many ranks are merged over steps.
export function standsFor({ steps, from_steps: from, at_steps: at }, i) {
  if (!from || from[i] === steps[i]) return "";
  return at ? ` at step ${at[i]}, of steps ${from[i]} to ${steps[i]}` : ` of steps ${from[i]} to ${steps[i]}`;
}

// One series as a line, plus marks for what a line cannot show. `at` is the height of the marks on the edge axis.
// Counts are `stems`: one event in one step is one mark, and a line between two of them would be an invention.
export function line(series, { name, colour: stroke, unit = "", scale = null, axis = "y", marks: row = "y9", at = 0.5, dash = "solid", percent = false, stems = false }) {
  const special = new Map((series.nonfinite ?? []).map(([i, what]) => [Number(i), what]));
  const y = series.values.map((v, i) => (v === null || special.has(i) || (scale === "log2" && !(v > 0)) ? null : scale === "log2" ? LOG2(v) : percent ? 100 * v : v));
  const label = (v) => (percent ? `${number(100 * v, 3)} %` : `${number(v, 5)}${unit ? ` ${unit}` : ""}`);
  const points = joined(series, y, (i) => special.has(i) || series.values[i] !== null);
  const of = (i) => label(series.values[i]) + standsFor(series, i);
  const traces = [{
    x: points.x, y: points.y, name, type: "scatter", mode: stems ? "markers" : points.marked ? "lines+markers" : "lines", yaxis: axis, connectgaps: false,
    line: { color: stroke, width: 1.6, dash }, marker: { color: stroke, size: stems ? 5 : points.size, line: { width: 0 }, opacity: 1 },
    customdata: points.index.map((i) => (i < 0 ? "" : of(i))), hovertemplate: `${text(name)} %{customdata}<extra></extra>`,
  }];
  if (stems) {
    const tall = points.y.map((v, k) => [points.x[k], v]).filter(([, v]) => v);
    traces.push({
      x: tall.flatMap(([x]) => [x, x, null]), y: tall.flatMap(([, v]) => [0, v, null]), yaxis: axis, type: "scatter", mode: "lines", name: `${name} stems`,
      line: { color: stroke, width: 2 }, hoverinfo: "skip", showlegend: false,
    });
  }
  if (special.size) {
    const marks = [...special].sort(([a], [b]) => a - b);
    const lossless = (w) => unit === "dB" && w === "inf"; // of an SQNR the best that there is
    traces.push({
      x: marks.map(([i]) => series.steps[i]), y: marks.map(() => at), yaxis: row, type: "scatter", mode: "markers", name: `${name} non-finite`, meta: "mark", showlegend: false,
      marker: { symbol: marks.map(([, w]) => SYMBOLS[w] ?? "x"), color: marks.map(([, w]) => (lossless(w) ? stroke : colour("critical"))), size: 8, line: { width: 0 } }, cliponaxis: false,
      customdata: marks.map(([, w]) => (lossless(w) ? "+Inf: nothing was lost" : NAMES[w] ?? w)), hovertemplate: `${text(name)} is %{customdata} at step %{x}<extra></extra>`,
    });
  }
  const zeros = scale === "log2" ? series.steps.filter((_, i) => series.values[i] === 0 && !special.has(i)) : [];
  if (zeros.length) {
    traces.push({
      x: zeros, y: zeros.map(() => 0.02), yaxis: "y8", type: "scatter", mode: "markers", name: `${name} zero`, meta: "mark", showlegend: false, cliponaxis: false,
      marker: { symbol: "circle-open", color: stroke, size: 5 }, hovertemplate: `${text(name)} is 0 at step %{x}<extra></extra>`,
    });
  }
  return traces;
}

// Ticks of an axis that holds log2 of a positive quantity.
export function log2Axis(traces) {
  const values = traces.flatMap((t) => (t.meta === "mark" ? [] : t.y)).filter((v) => v !== null && Number.isFinite(v));
  const low = Math.floor(Math.min(...values, Infinity)), high = Math.ceil(Math.max(...values, -Infinity));
  if (!Number.isFinite(low) || !Number.isFinite(high)) return { range: [-1, 1], tickvals: [0], ticktext: ["2^0"] };
  const every = Math.max(1, Math.ceil((high - low) / 6));
  const tickvals = [];
  for (let k = Math.floor(low / every) * every; k <= high + every; k += every) tickvals.push(k);
  return { tickvals, ticktext: tickvals.map((k) => `2<sup>${String(k).replace("-", "−")}</sup>`), range: [low - 0.6, high + 0.9] };
}

// Incidents over steps: a line each, a mark that can be hovered and clicked, and the first few by name.
export function incidentMarks(incidents) {
  const rank = (i) => ({ critical: 2, warning: 1 })[i.severity] ?? 0; // what is drawn last lies on top, where several began in one step
  const shown = incidents.slice(0, 40).sort((a, b) => rank(a) - rank(b));
  const of = (i) => colour(i.severity === "info" ? "info" : i.severity === "warning" ? "warning" : "critical");
  // Above: where a line of the grid stands at the same step, it would hide one that lies below.
  const shapes = shown.map((i) => ({ type: "line", xref: "x", yref: "paper", x0: i.first_step, x1: i.first_step, y0: 0, y1: 1, line: { color: of(i), width: 1.2, dash: "dot" }, layer: "above" }));
  shapes.push(...shown.filter((i) => i.last_step > i.first_step).map((i) => ({ type: "rect", xref: "x", yref: "paper", x0: i.first_step, x1: i.last_step, y0: 0, y1: 1, fillcolor: of(i), opacity: 0.08, line: { width: 0 }, layer: "below" })));
  const trace = {
    x: shown.map((i) => i.first_step), y: shown.map(() => 0.5), yaxis: "y9", type: "scatter", mode: "markers", name: "incidents", cliponaxis: false,
    marker: { symbol: shown.map((i) => ({ critical: "triangle-down", warning: "diamond" })[i.severity] ?? "circle"), size: 10, color: shown.map(of) },
    customdata: shown.map((i) => [text(short(i.mode, 60)), i.severity, text(i.title.slice(0, 120)), i.id]),
    hovertemplate: "<b>%{customdata[0]}</b> · %{customdata[1]}<br>%{customdata[2]}<br>since step %{x}, click to open<extra></extra>",
    meta: "incidents",
  };
  return { shapes, trace };
}

export async function draw(element, traces, figureLayout) {
  const Plotly = await plotly;
  const first = !element.classList.contains("js-plotly-plot");
  element.querySelector(":scope > .nothing")?.remove();
  const byServer = element.querySelector(":scope > svg.first"); // lies below until the same is drawn on top of it
  await Plotly.react(element, traces, figureLayout, CONFIG);
  if (byServer?.contains(document.activeElement)) element.focus();
  byServer?.remove();
  element.dataset.shows = chosen();
  element.dataset.drawn = String(Number(element.dataset.drawn ?? 0) + 1);
  if (first) element.classList.add("ready");
  return first;
}

// What a person has chosen to be drawn, in the address: under another choice a picture of before would be read as of now.
const CHOICES = ["from", "to", "map", "operand", "x", "panel"];
const chosen = () => JSON.stringify(CHOICES.map((name) => new URLSearchParams(location.search).getAll(name)));
const opened = chosen(); // the server drew its charts for this

export function fail(element, problem) {
  const drawn = element.matches(".js-plotly-plot, :has(> svg.first)");
  if (drawn && (element.dataset.shows ?? opened) === chosen()) return; // what was drawn stays; the next update tries again
  nothing(element, `No data for this chart (${problem.message}).`);
}

// A sentence in place of a chart, and of all that was drawn before.
export function nothing(element, what) {
  if (element.classList.contains("js-plotly-plot")) {
    window.Plotly.purge(element);
    element.classList.remove("js-plotly-plot", "ready");
    element.dispatchEvent(new CustomEvent("fp8watch:emptied"));
  }
  element.replaceChildren(Object.assign(document.createElement("p"), { className: "nothing", textContent: what }));
}

// Draw now, after each live update, and in the colours of a new theme. Overlapping updates are merged into one.
export function keepDrawn(update) {
  let busy = false, again = false;
  const run = async () => {
    if (busy) { again = true; return; }
    busy = true;
    try { await update(); } finally {
      busy = false;
      if (again) { again = false; run(); }
    }
  };
  document.addEventListener("fp8watch:live", run);
  document.addEventListener("fp8watch:theme", run);
  document.addEventListener("fp8watch:range", run);
  document.addEventListener("fp8watch:shown", run);
  run();
  return run;
}

// A group of buttons of which one is pressed; its choice lives in the URL.
export function tabs(name, changed) {
  const group = document.querySelector(`[data-tabs="${name}"]`);
  const choose = (value) => {
    for (const b of group.querySelectorAll("button")) b.setAttribute("aria-pressed", String(b.dataset.value === value));
  };
  const asked = new URLSearchParams(location.search).get(name);
  const values = [...group.querySelectorAll("button")].map((b) => b.dataset.value);
  const usual = group.querySelector("[aria-pressed=true]")?.dataset.value ?? values[0]; // what the server opens the page on
  let value = values.includes(asked) ? asked : usual;
  choose(value);
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    value = button.dataset.value;
    choose(value);
    const url = new URL(location.href);
    if (value === usual) url.searchParams.delete(name); else url.searchParams.set(name, value);
    history.replaceState(null, "", url);
    changed();
  });
  return () => value;
}
