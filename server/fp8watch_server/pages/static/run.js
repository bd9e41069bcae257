// One run: loss, gradient norm and learning rate with incidents marked; health of layers × steps.
import { NAMES, api, colour, draw, fail, incidentMarks, keepDrawn, layout, line, nothing, number, short, strip, tabs, text } from "./charts.js";

const base = document.body.dataset.api;
const training = document.getElementById("training");
const health = document.getElementById("health");
const POINTS = 1000;

const PANELS = [
  { field: "loss", name: "loss", title: "loss", stroke: "series-1", weight: 2.4, axis: {} },
  { field: "grad_norm", name: "gradient norm", title: "grad norm", stroke: "series-2", weight: 1.1, axis: { rangemode: "tozero" } },
  { field: "lr", name: "learning rate", title: "lr", stroke: "series-3", weight: 1, axis: { nticks: 3, exponentformat: "power", rangemode: "tozero" } },
];
const MARKS = 0.045, GAP = 0.045; // heights of the strip above a panel and of the space between panels
const logged = (series) => series.values.some((v) => v !== null) || (series.nonfinite ?? []).length > 0;

async function drawTraining() {
  const [incidents, ...series] = await Promise.all([
    api(`${base}/incidents`), ...PANELS.map(({ field }) => api(`${base}/series`, { field, points: POINTS })),
  ]);
  const marks = incidentMarks(incidents.items);
  // What was never logged has no panel: the page says below how to log it. The loss keeps its place for the incidents.
  const panels = PANELS.map((panel, i) => ({ ...panel, series: series[i] })).filter((p) => p.field === "loss" || logged(p.series));
  const suffix = (k) => (k ? k + 1 : "");
  const traces = [...panels.flatMap((p, k) => line(p.series, { name: p.name, colour: colour(p.stroke), axis: `y${suffix(k)}`, marks: `y${6 + k}` })), marks.trace];
  const room = 0.93 - panels.length * (MARKS + 0.01) - (panels.length - 1) * GAP;
  const axes = {};
  let top = 0.93;
  panels.forEach((p, k) => {
    const height = (room * p.weight) / panels.reduce((sum, q) => sum + q.weight, 0);
    axes[`yaxis${6 + k}`] = strip(top - MARKS, top);
    top -= MARKS + 0.01 + height;
    axes[`yaxis${suffix(k)}`] = { ...layout().yaxis, title: { text: p.title, standoff: 8, font: { size: 11.5 } }, ...p.axis, domain: [Math.max(0, top), Math.min(1, top + height)] };
    top -= GAP;
  });
  const figure = layout({ shapes: marks.shapes, margin: { l: 70, r: 18, t: 4, b: 42 }, ...axes, xaxis: { anchor: `y${suffix(panels.length - 1)}` }, yaxis9: strip(0.945, 1) });
  if (await draw(training, traces, figure)) {
    training.on("plotly_click", ({ points }) => {
      const hit = points.find((p) => p.data.meta === "incidents");
      if (hit) location.assign(`/incidents/${encodeURIComponent(hit.customdata[3])}`);
    });
  }
}

const MAPS = {
  tile_sqnr_db: { label: "tile SQNR", unit: " dB", worst: Math.min, low: 18, high: 32, flip: true },
  num_nonfinite: { label: "non-finite elements", unit: "", worst: Math.max, low: 0, high: 8, flip: false },
  underflow_ratio: { label: "underflow", unit: " %", factor: 100, worst: Math.max, low: 0, high: 20, flip: false },
  amax_max: { label: "largest amax", unit: "", worst: Math.max, log2: true, flip: false },
};
const map = tabs("map", () => redrawHealth());
const operand = tabs("operand", () => redrawHealth());

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

// What the blank columns mean. Steps in which most sites were measured are full samples: those that follow a gap are
// multiples of the sampling stride; the last ones count, for the agent's overhead budget may have raised it.
function gaps(answer) {
  const full = answer.steps.filter((_, j) => 2 * answer.values.filter((row) => row[j] !== null).length > answer.values.length);
  const after = full.filter((s, k) => k > 0 && s - full[k - 1] > 1);
  if (answer.stride > 1 || !answer.steps.some((s, j) => j > 0 && s - answer.steps[j - 1] > 1)) return "";
  const every = after.slice(-3).reduce((a, b) => { while (b) [a, b] = [b, a % b]; return a; }, 0);
  return ` Blank: not measured (${every > 1 ? `full statistics every ${every} steps` : "statistics were not taken in every step"}).`;
}

// One row a module: the worst of its sites, which the cell remembers by name.
function byModule(answer, of, want) {
  const special = new Map((answer.nonfinite ?? []).map(([i, j, what]) => [`${i},${j}`, what]));
  const rows = new Map();
  answer.sites.forEach((site, i) => {
    if (want && site.operand !== want) return;
    if (!rows.has(site.module)) rows.set(site.module, answer.steps.map(() => ({ value: null, what: null, site: null })));
    rows.get(site.module).forEach((cell, j) => {
      const what = special.get(`${i},${j}`) ?? null;
      const value = answer.values[i][j];
      if (what !== null && cell.what === null) Object.assign(cell, { what, site, value: null });
      else if (cell.what === null && value !== null && (cell.value === null || of.worst(cell.value, value) !== cell.value)) Object.assign(cell, { value, site });
    });
  });
  return rows;
}

async function drawHealth() {
  const field = map();
  const of = MAPS[field];
  const [answer, bad] = await Promise.all([field, "num_nonfinite"].map((f) => api(`${base}/heatmap`, { field: f, points: 400 })));
  const rows = byModule(answer, of, operand());
  if (!rows.size || !answer.steps.length) return nothing(health, "No site was measured yet.");
  const modules = [...rows.keys()];
  const cells = [...rows.values()];
  const shown = (v) => (v === null ? null : of.log2 ? (v > 0 ? Math.log2(v) : null) : v * (of.factor ?? 1));
  const z = cells.map((row) => row.map((c) => shown(c.value)));
  const flat = z.flat().filter((v) => v !== null);
  const low = of.log2 ? Math.min(...flat) : of.low, high = of.log2 ? Math.max(...flat) : Math.max(of.high, ...(of.flip ? [] : flat));
  const ramp = [0, 1, 2, 3, 4].map((k) => colour(`ramp-${k}`)); // 0 lies near the background, 4 stands out most
  const scale = (of.flip ? ramp.toReversed() : ramp).map((c, k) => [k / 4, c]);
  const name = (s) => (s ? `${text(s.operand)} / ${text(s.direction)}` : "");
  const y = modules.map((_, i) => i);
  const { x, from } = columns(answer.steps, answer.stride);
  const placed = (row) => from.map((j) => (j < 0 ? null : row[j]));
  document.getElementById("health-gaps").textContent = gaps(answer);
  const traces = [{
    type: "heatmap", x, y, z: z.map(placed), zmin: low, zmax: high, colorscale: scale, xgap: 0, ygap: 1.5, hoverongaps: false,
    customdata: cells.map((row, i) => placed(row).map((c) => c && [text(short(modules[i], 90)), name(c.site), `${number((c.value ?? 0) * (of.factor ?? 1))}${of.unit}`, c.site?.id ?? ""])),
    hovertemplate: `<b>%{customdata[0]}</b><br>%{customdata[1]}<br>${of.label} %{customdata[2]} at step %{x}<extra></extra>`,
    colorbar: { thickness: 9, len: 0.96, outlinewidth: 0, ticksuffix: of.unit, tickprefix: of.log2 ? "2^" : "", tickfont: { size: 10.5, color: colour("muted") }, nticks: 5, x: 1.01 },
  }];
  // Non-finite elements are marked on every map: whatever a colour says there, this is what to look at.
  const counts = [...byModule(bad, MAPS.num_nonfinite, operand())];
  const column = new Map(answer.steps.map((s, j) => [s, j]));
  const marks = counts.flatMap(([module, row]) => row.map((c, j) => [c, modules.indexOf(module), bad.steps[j]]).filter(([c, i, s]) => c.value > 0 && i >= 0 && column.has(s)).map(([c, i, s]) => [c, i, s, `${c.value} non-finite element${c.value === 1 ? "" : "s"}`]));
  cells.forEach((row, i) => row.forEach((c, j) => { if (c.what !== null) marks.push([c, i, answer.steps[j], `${of.label} is ${NAMES[c.what] ?? text(c.what)}`]); }));
  traces.push({
    type: "scatter", mode: "markers", x: marks.map(([, , s]) => s), y: marks.map(([, i]) => i), cliponaxis: false,
    marker: { symbol: "x", size: 8, color: colour("critical"), line: { width: 1, color: colour("panel") } },
    customdata: marks.map(([c, i, , what]) => [text(short(modules[i], 90)), name(c.site), what, c.site?.id ?? ""]),
    hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]} at step %{x}<extra></extra>",
  });
  const figure = layout({
    margin: { l: 210, r: 74, t: 8, b: 42 },
    hovermode: "closest",
    yaxis: { tickvals: y, ticktext: modules.map((m) => text(short(m))), range: [modules.length - 0.5, -0.5], showgrid: false, tickfont: { family: "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace", size: 10.5, color: colour("text") }, ticks: "" },
    xaxis: { showgrid: false },
  });
  if (await draw(health, traces, figure)) {
    health.on("plotly_click", ({ points }) => {
      const [, , , site] = points[0].customdata;
      if (site !== "") location.assign(`${location.pathname}/sites/${site}?step=${points[0].x}`);
    });
  }
}

keepDrawn(() => drawTraining().catch((e) => fail(training, e)));
const redrawHealth = keepDrawn(() => drawHealth().catch((e) => fail(health, e)));
