// The health map of a run: layers × steps, the worst of each. Rows, columns and marks come ready from the server.
import { shareOf } from "./flight_paint.js";
import { behind } from "./chart_data.js";
import { api, colour, draw, fail, keepDrawn, layout, nothing, number, short, tabs, text } from "./charts.js";
import { asked, followZoom, shownRange } from "./range.js";

const health = document.getElementById("health");
const page = location.pathname;
const POINTS = 400, ROW_PX = 17;

const MAPS = new Map(JSON.parse(health.dataset.maps).map((of) => [of.field, of])); // the rows of pages/health_maps.py
const NOISELESS_DB = 99;
const map = tabs("map", () => redraw());
const operand = tabs("operand", () => redraw());

// A column is as wide as its step, or wide enough to be seen; plotly would widen it up to its neighbours, and steps that
// were not measured would look measured. So blank columns are put between. Returns places of columns, -1 for a blank.
function columns(steps, stride) {
  const between = steps.slice(1).map((s, j) => s - steps[j]);
  const usual = stride > 1 ? between.toSorted((a, b) => a - b)[between.length >> 1] : 1;
  const width = Math.max(usual, (steps.at(-1) - steps[0]) / 250);
  const x = [], from = [];
  const push = (at, j) => { x.push(at); from.push(j); };
  steps.forEach((s, j) => {
    push(s, j);
    if (between[j] > 2 * width) [s + width, steps[j + 1] - width].forEach((at) => push(at, -1));
    else if (between[j] === 2 * width) push(s + width, -1);
  });
  return { x, from };
}

// What the blank columns mean. Steps in which most rows were measured are full samples: those that follow a gap are
// multiples of the sampling stride; the last ones count, for the agent's overhead budget may have raised it.
function gaps({ steps, stride, rows }) {
  const full = steps.filter((_, j) => 2 * rows.filter((row) => row.values[j] !== null).length > rows.length);
  const after = full.filter((s, k) => k > 0 && s - full[k - 1] > 1);
  if (stride > 1 || !rows.length || !steps.some((s, j) => j > 0 && s - steps[j - 1] > 1)) return "";
  const every = after.slice(-3).reduce((a, b) => { while (b) [a, b] = [b, a % b]; return a; }, 0);
  return ` Blank: not measured (${every > 1 ? `full statistics every ${every} steps` : "statistics were not taken in every step"}).`;
}

async function drawHealth() {
  const field = map(), of = MAPS.get(field);
  const got = await api(`${page}/health.json`, { field, operand: operand(), points: POINTS, ...asked() });
  const { rows, steps, sites } = got;
  document.getElementById("health-gaps").textContent = gaps(got);
  if (!rows.length || !steps.length) return nothing(health, "No site was measured here.");
  const site = (id) => (sites[id] ? { label: text(short(sites[id][0], 90)), operand: `${text(sites[id][1])} / ${text(sites[id][2])}` } : { label: "", operand: "" });
  const label = (row) => (row.modules > 1 ? `${row.label} (${row.modules})` : row.label);
  const shown = (v) => (v === null ? null : of.log2 ? (v > 0 ? Math.log2(v) : null) : v * of.factor);
  const said = (v) => (field === "tile_sqnr_db" && v >= NOISELESS_DB ? "without loss" : `${number((v ?? 0) * of.factor)}${of.unit}`);
  const flat = rows.flatMap((row) => row.values.map(shown)).filter((v) => v !== null);
  const z = of.of_band ? (v) => (v === null ? null : shareOf(v)) : (v) => v; // one scale with the flight recorder
  const bandAt = [1.01, 2, 4, 8, 16, 32], band = of.of_band ? { tickmode: "array", tickvals: bandAt.map(shareOf), ticktext: bandAt.map((v) => `${Math.round(v)}${of.unit}`), ticksuffix: "" } : {};
  const low = of.of_band ? 0 : of.log2 ? Math.min(...flat) : of.low, high = of.of_band ? 1 : of.log2 ? Math.max(...flat) : flat.reduce((a, v) => (of.low_is_bad || !of.grows ? a : Math.max(a, v)), of.high);
  const ramp = [0, 1, 2, 3, 4].map((k) => colour(`ramp-${k}`)); // 0 lies near the background, 4 stands out most
  const { x, from } = columns(steps, got.stride);
  const placed = (list) => from.map((j) => (j < 0 ? null : list[j]));
  const y = rows.map((_, i) => i);
  const traces = [{
    type: "heatmap", x, y, z: rows.map((row) => placed(row.values.map((v) => z(shown(v))))), zmin: low, zmax: high, xgap: 0, ygap: 1.5, hoverongaps: false,
    colorscale: (of.low_is_bad ? ramp.toReversed() : ramp).map((c, k) => [k / 4, c]),
    customdata: rows.map((row) => placed(row.values.map((v, j) => { const s = site(row.sites[j]); return [s.label, s.operand, said(v), row.sites[j] ?? ""]; }))),
    hovertemplate: `<b>%{customdata[0]}</b><br>%{customdata[1]}<br>${of.label} %{customdata[2]} at step %{x}<extra></extra>`,
    colorbar: { thickness: 9, len: 0.96, outlinewidth: 0, ticksuffix: of.unit, tickprefix: of.log2 ? "2^" : "", tickfont: { size: 10.5, color: colour("muted") }, nticks: 5, x: 1.01, ...band },
  }];
  // Non-finite elements are marked on every map: whatever a colour says there, this is what to look at.
  traces.push({
    type: "scatter", mode: "markers", x: got.marks.map(([, j]) => steps[j]), y: got.marks.map(([i]) => i), cliponaxis: false,
    marker: { symbol: "x", size: 8, color: colour("critical"), line: { width: 1, color: colour("panel") } },
    customdata: got.marks.map(([, , id, what]) => [site(id).label, site(id).operand, what.startsWith("is ") ? `${of.label} ${what}` : what, id]),
    hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]} at step %{x}<extra></extra>",
  });
  health.style.height = `${Math.min(900, Math.max(220, rows.length * ROW_PX + 92))}px`;
  const every = Math.ceil((rows.length * 11) / 800); // names that would lie on each other are left out, not drawn
  const ticks = y.filter((i) => i % every === 0);
  const left = Math.min(210, Math.round(health.clientWidth * 0.4)); // in a narrow window the steps need the room more
  const chars = Math.max(10, Math.floor((left - 8) / 6));
  const figure = layout({
    margin: { l: left, r: 74, t: 8, b: 42 },
    hovermode: "closest",
    yaxis: { tickvals: ticks, ticktext: ticks.map((i) => text(short(label(rows[i]), Math.min(34, chars)))), range: [rows.length - 0.5, -0.5], fixedrange: true, showgrid: false, tickfont: { family: "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace", size: 10.5, color: colour("text") }, ticks: "" },
    xaxis: { showgrid: false, ...shownRange(steps) },
  });
  const first = await draw(health, traces, figure);
  const marked = new Map(got.marks.map(([i, j, , what]) => [`${i},${j}`, what]));
  behind(health, { rows: { columns: ["step", "layer", of.label, "operand", "marked"], rows: steps.flatMap((step, j) => rows.flatMap((row, i) => {
    const what = marked.get(`${i},${j}`), named = sites[row.sites[j]];
    return row.values[j] === null && !what ? [] : [[step, named?.[0] ?? row.label, row.values[j] ?? "", named ? `${named[1]} ${named[2]}` : "", what ?? ""]];
  })) } });
  if (first) {
    followZoom(health);
    health.on("plotly_click", ({ points }) => {
      const [, , , id] = points[0].customdata;
      if (id !== "") location.assign(`${page}/sites/${id}?step=${points[0].x}`);
    });
  }
}

const redraw = keepDrawn(() => drawHealth().catch((e) => fail(health, e)));
