// One run: loss, gradient norm and learning rate over steps, with incidents marked.
import { api, colour, draw, fail, incidentMarks, keepDrawn, layout, line, strip } from "./charts.js";
import { asked, followZoom, shownRange } from "./range.js";

const training = document.getElementById("training");
const POINTS = 1000;

const PANELS = [
  { field: "loss", name: "loss", title: "loss", stroke: "series-1", weight: 2.4, axis: {} },
  { field: "grad_norm", name: "gradient norm", title: "grad norm", stroke: "series-2", weight: 1.1, axis: { rangemode: "tozero" } },
  { field: "lr", name: "learning rate", title: "lr", stroke: "series-3", weight: 1, axis: { nticks: 3, exponentformat: "power", rangemode: "tozero" } },
];
const MARKS = 0.045, GAP = 0.045; // heights of the strip above a panel and of the space between panels
const logged = (series) => series.values.some((v) => v !== null) || (series.nonfinite ?? []).length > 0;

async function drawTraining() {
  const got = await api(`${location.pathname}/training.json`, { points: POINTS, ...asked() })
    .finally(() => import("./health.js")); // dearer to make, and lower on the page: asked for when this has come
  const { from, to } = asked();
  const marks = incidentMarks(got.incidents.filter((i) => (from === null || i.last_step >= from) && (to === null || i.first_step <= to)));
  // What was never logged has no panel: the page says below how to log it. The loss keeps its place for the incidents.
  const panels = PANELS.map((panel) => ({ ...panel, series: got.series[panel.field] })).filter((p) => p.field === "loss" || logged(p.series));
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
  const xaxis = { anchor: `y${suffix(panels.length - 1)}`, ...shownRange(got.series.loss.steps) };
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
