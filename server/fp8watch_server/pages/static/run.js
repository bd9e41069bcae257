// One run: its panels over steps, with incidents marked.
import { api, colour, draw, fail, incidentMarks, keepDrawn, layout, line, strip } from "./charts.js";
import { asked, followZoom, shownRange } from "./range.js";

const training = document.getElementById("training");
const POINTS = 1000;

const PANELS = JSON.parse(training.dataset.panels); // the rows of pages/panels.py
const MARKS = 0.045, GAP = 0.045; // heights of the strip above a panel and of the space between panels
const MARKS_FROM = 20; // number of the first strip's axis, behind those of the panels, the foot (8) and the incidents (9)
const logged = (series) => series.values.some((v) => v !== null) || (series.nonfinite ?? []).length > 0;

async function drawTraining() {
  const got = await api(`${location.pathname}/training.json`, { points: POINTS, ...asked() })
    .finally(() => import("./health.js")); // dearer to make, and lower on the page: asked for when this has come
  const { from, to } = asked();
  const marks = incidentMarks(got.incidents.filter((i) => (from === null || i.last_step >= from) && (to === null || i.first_step <= to)));
  // What was never logged has no panel: the page says below how to log it. One that keeps its place has the incidents.
  const panels = PANELS.map((panel) => ({ ...panel, series: got.series[panel.field] })).filter((p) => p.keeps_its_place || logged(p.series));
  const suffix = (k) => (k ? k + 1 : "");
  const traces = [...panels.flatMap((p, k) => line(p.series, { name: p.label, colour: colour(p.stroke), axis: `y${suffix(k)}`, marks: `y${MARKS_FROM + k}` })), marks.trace];
  const room = 0.93 - panels.length * (MARKS + 0.01) - (panels.length - 1) * GAP;
  const axes = {};
  let top = 0.93;
  panels.forEach((p, k) => {
    const height = (room * p.weight) / panels.reduce((sum, q) => sum + q.weight, 0);
    axes[`yaxis${MARKS_FROM + k}`] = strip(top - MARKS, top);
    top -= MARKS + 0.01 + height;
    axes[`yaxis${suffix(k)}`] = { ...layout().yaxis, title: { text: p.title, standoff: 8, font: { size: 11.5 } }, ...(p.to_zero ? { rangemode: "tozero" } : {}), ...p.axis, domain: [Math.max(0, top), Math.min(1, top + height)] };
    top -= GAP;
  });
  const xaxis = { anchor: `y${suffix(panels.length - 1)}`, ...shownRange(got.series[PANELS[0].field].steps) };
  const figure = layout({ shapes: marks.shapes, margin: { l: 70, r: 18, t: 4, b: 42 }, ...axes, xaxis, yaxis9: strip(0.945, 1) });
  if (await draw(training, traces, figure)) {
    followZoom(training);
    training.on("plotly_click", ({ points }) => {
      const hit = points.find((p) => p.data.meta === "incidents");
      if (hit) location.assign(`/incidents/${encodeURIComponent(hit.customdata[3])}`);
    });
  }
}

keepDrawn(() => drawTraining().catch((e) => fail(training, e)));
