// One run: its panels over steps, time or tokens, with incidents marked; further panels for whatever was logged.
import { over as axisOver, STEPS, moved } from "./axis_x.js";
import { band, bandTraces } from "./baseline.js";
import { behind } from "./chart_data.js";
import { panels as further, state } from "./chart_state.js";
import { api, colour, draw, fail, incidentMarks, keepDrawn, layout, line, short, strip, tabs, text } from "./charts.js";
import { asked, followZoom, shownRange, zoomsOf } from "./range.js";
import { smoothed } from "./smooth.js";

const training = document.getElementById("training");
const POINTS = 1000;

const PANELS = JSON.parse(training.dataset.panels); // the rows of pages/panels.py
const HEIGHT = training.clientHeight, MORE = 120; // of a panel that was added
const MARKS = 0.045, GAP = 0.045; // heights of the strip above a panel and of the space between panels
const MARKS_FROM = 20; // number of the first strip's axis, behind those of the panels, the foot (8) and the incidents (9)
const FREE = [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]; // axes of plotly that nothing else uses
const logged = (series) => series.values.some((v) => v !== null) || (series.nonfinite ?? []).length > 0;
const x = tabs("x", () => redraw());
let axis = STEPS;

// A logged scalar as a panel: it takes the colours of the others in turn.
const added = (name, series, k) => ({ field: name, label: text(short(name, 60)), title: text(short(name, 16)), stroke: PANELS[k % PANELS.length].stroke, weight: 1, to_zero: false, log: series.values.every((v) => v === null || v > 0), axis: { nticks: 4 }, series, added: true });

function tracesOf(panel, name, marks) {
  const stroke = colour(panel.stroke), traces = line(panel.series, { name: panel.label, colour: stroke, axis: name, marks });
  const [raw] = traces, weight = Number(state("smooth")), more = [];
  if (state("band") === "1") {
    const usual = band(raw.x, raw.y, 0), least = Math.min(...raw.y.filter((v) => v !== null && v > 0));
    if (state("logy") === "1" && panel.log) usual.low = usual.low.map((v) => Math.max(v, least / 2));
    more.push(...bandTraces(usual, colour("usual"), name));
  }
  if (weight > 0 && weight < 1) {
    more.push({ ...raw, y: smoothed(raw.y, weight), mode: "lines", line: { ...raw.line, width: 2 }, hoverinfo: "skip", hovertemplate: undefined, meta: "smooth", name: `${panel.label}, smoothed` });
    Object.assign(raw, { opacity: 0.35 });
  }
  return [...traces, ...more];
}

// What the axes cannot show is said.
function note(panels) {
  const notes = [];
  const low = panels.filter((p) => p.log && state("logy") === "1").reduce((n, p) => n + p.series.values.filter((v) => v !== null && v <= 0).length, 0);
  if (low) notes.push(`${low} value${low === 1 ? "" : "s"} of 0 or less ha${low === 1 ? "s" : "ve"} no place on a logarithmic axis.`);
  if (state("smooth")) notes.push(`Smoothed: moving average, weight ${state("smooth")} on what was before; the faint line is what was measured.`);
  if (state("band") === "1") notes.push("Band: the median of the 32 points before, ± 4σ.");
  if (x() !== axis.kind) notes.push(x() === "tokens" ? "The logged count of tokens does not rise from step to step: drawn over steps." : "The time of these steps is not known: drawn over steps.");
  document.getElementById("training-note").textContent = notes.join(" ");
}

async function drawTraining() {
  const names = further();
  const got = await api(`${location.pathname}/training.json`, { points: POINTS, ...asked(), x: x() === "step" ? "" : x(), panels: names.length ? JSON.stringify(names) : "" })
    .finally(() => import("./health.js")); // dearer to make, and lower on the page: asked for when this has come
  axis = axisOver(x(), got.knots);
  const { from, to } = asked();
  const marks = incidentMarks(got.incidents.filter((i) => (from === null || i.last_step >= from) && (to === null || i.first_step <= to)));
  // What was never logged has no panel: the page says below how to log it. One that keeps its place has the incidents.
  const panels = PANELS.map((panel) => ({ ...panel, series: got.series[panel.field] })).filter((p) => p.keeps_its_place || logged(p.series));
  panels.push(...names.filter((name) => name in got.further).map((name, k) => added(name, got.further[name], k)));
  const axes = {}, ids = panels.map((_, k) => (k ? FREE[k - 1] : ""));
  const traces = [...panels.flatMap((p, k) => tracesOf(p, `y${ids[k]}`, `y${MARKS_FROM + k}`)), marks.trace];
  const room = 0.93 - panels.length * (MARKS + 0.01) - (panels.length - 1) * GAP;
  let top = 0.93;
  panels.forEach((p, k) => {
    const height = (room * p.weight) / panels.reduce((sum, q) => sum + q.weight, 0), log = p.log && state("logy") === "1";
    axes[`yaxis${MARKS_FROM + k}`] = strip(top - MARKS, top);
    top -= MARKS + 0.01 + height;
    axes[`yaxis${ids[k]}`] = { ...layout().yaxis, title: { text: p.title, standoff: 8, font: { size: 11.5 } }, ...(log ? { type: "log", nticks: 4 } : p.to_zero ? { rangemode: "tozero" } : {}), ...p.axis, domain: [Math.max(0, top), Math.min(1, top + height)] };
    top -= GAP;
  });
  const steps = got.series[PANELS[0].field].steps;
  const xaxis = { anchor: `y${ids.at(-1)}`, ...axis.axis, ...shownRange(steps) };
  const figure = layout({ shapes: marks.shapes, margin: { l: 70, r: 18, t: 4, b: 42 }, ...axes, xaxis, yaxis9: strip(0.945, 1) });
  figure.uirevision += `${axis.kind} ${state("logy")} ${names}`;
  moved(figure, traces, axis);
  training.style.height = `${HEIGHT + MORE * panels.filter((p) => p.added).length}px`;
  note(panels);
  const first = await draw(training, traces, figure);
  behind(training, { curves: panels.map((p) => ({ name: p.added ? p.field : p.label, series: p.series, stroke: colour(p.stroke) })), over: axis });
  zoomsOf(() => {
    const { from: low, to: high } = asked(), all = panels.flatMap((p) => [p.series.steps[0], p.series.steps.at(-1)]).filter((s) => s !== undefined);
    return all.length ? [low ?? Math.min(...all), high ?? Math.max(...all)] : null;
  });
  if (first) {
    followZoom(training, (v) => axis.from(v));
    training.on("plotly_click", ({ points }) => {
      const hit = points.find((p) => p.data.meta === "incidents");
      if (hit) location.assign(`/incidents/${encodeURIComponent(hit.customdata[3])}`);
    });
  }
}

const redraw = keepDrawn(() => drawTraining().catch((e) => fail(training, e)));
