// What lies behind a chart, and is had from the menu beside its heading: a picture, a file, a table to be read aloud. And the
// readout: what all curves of the page say at the step under the pointer.
import { NAMES, colour, number } from "./basics.js";
import { plotly, standsFor } from "./charts.js";

const MAX_ROWS = 300;
const known = new Map(); // figure -> {curves: [{name, series, stroke, say}], over, rows}

// A chart was drawn. `curves` are series of the collector; `rows` stands for them where a chart is no curves:
// {columns, rows}. `over`: what it is drawn over (axis_x.js).
export function behind(figure, { curves = [], over = null, rows = null }) {
  const first = !known.has(figure);
  known.set(figure, { curves, over, rows });
  if (!first) return;
  figure.setAttribute("role", "img");
  figure.setAttribute("aria-description", "The menu beside the heading has it as a table.");
  const box = menu(figure);
  figure.addEventListener("fp8watch:emptied", () => {
    known.delete(figure);
    figure.removeAttribute("role");
    figure.removeAttribute("aria-description");
    box?.remove();
    tableOf(figure)?.remove();
  }, { once: true });
  figure.on("plotly_hover", ({ xvals, points }) => {
    const x = xvals?.[0] ?? points[0].x, { over: axis } = known.get(figure);
    point(axis ? axis.from(x) : Number(x));
  });
  figure.on("plotly_unhover", () => point(null));
}

function menu(figure) {
  const head = figure.closest(".panel")?.querySelector(".head");
  if (!head) return null;
  const name = nameOf(figure);
  const box = Object.assign(document.createElement("details"), { className: "chartmenu" });
  const summary = Object.assign(document.createElement("summary"), { textContent: "⋯", title: "Picture, file, table" });
  summary.setAttribute("aria-label", `Picture, file or table: ${name}`);
  const list = Object.assign(document.createElement("div"), { className: "menu" });
  for (const [words, act] of [["PNG", picture], ["CSV", file], ["Table", table]]) {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: words });
    button.addEventListener("click", () => { box.open = false; act(figure, name); summary.focus(); });
    list.append(button);
  }
  box.append(summary, list);
  box.addEventListener("keydown", (event) => { if (event.key === "Escape") { box.open = false; summary.focus(); } });
  document.addEventListener("click", ({ target }) => { if (!box.contains(target)) box.open = false; });
  head.append(box);
  return box;
}

const nameOf = (figure) => figure.getAttribute("aria-label") ?? figure.id;
const tableOf = (figure) => figure.parentElement.querySelector(`[data-table-of="${CSS.escape(figure.id || nameOf(figure))}"]`);

const fileName = (name) => `${document.title.replace(/ · fp8watch$/, "")} ${name}`.replace(/[^\p{L}\p{N}.-]+/gu, "-").slice(0, 120);

async function picture(figure, name) {
  const Plotly = await plotly, { width, height } = figure.getBoundingClientRect();
  const layout = { ...figure.layout, paper_bgcolor: colour("panel"), plot_bgcolor: colour("panel") };
  await Plotly.downloadImage({ data: figure.data, layout }, { format: "png", width, height, scale: 2, filename: fileName(name) });
}

// One row a step; a value that is no number under its name; what was not measured is empty.
export function rowsOf({ curves, rows }) {
  if (rows) return rows;
  const steps = new Map();
  curves.forEach(({ series }, k) => {
    const special = new Map(series.nonfinite ?? []);
    series.steps.forEach((step, i) => {
      if (!steps.has(step)) steps.set(step, new Array(curves.length).fill(""));
      steps.get(step)[k] = special.get(i) ?? series.values[i] ?? "";
    });
  });
  return { columns: ["step", ...curves.map((c) => c.name)], rows: [...steps].sort(([a], [b]) => a - b).map(([step, values]) => [step, ...values]) };
}

// A name that a spreadsheet would take for a formula gets an apostrophe.
const cell = (v) => {
  const text = typeof v === "string" && /^[=+\-@\t\r]/.test(v) && !(v in NAMES) ? `'${v}` : String(v);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
};
export const csv = ({ columns, rows }) => [columns, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";

function file(figure, name) {
  const url = URL.createObjectURL(new Blob([csv(rowsOf(known.get(figure)))], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: `${fileName(name)}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

function table(figure, name) {
  const there = tableOf(figure);
  if (there) return there.remove();
  const { columns, rows } = rowsOf(known.get(figure));
  const box = Object.assign(document.createElement("div"), { className: "tablebox", tabIndex: 0 });
  box.dataset.tableOf = figure.id || name;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", `${name}, as a table`);
  const made = Object.assign(document.createElement("table"), { className: "data tight" });
  const add = (parent, tag, words, properties = {}) => parent.appendChild(Object.assign(document.createElement(tag), { textContent: words, ...properties }));
  add(made, "caption", rows.length > MAX_ROWS ? `${name}: the last ${MAX_ROWS} of ${rows.length} rows; the file has all` : name);
  const head = made.createTHead().insertRow();
  for (const column of columns) add(head, "th", column, { scope: "col", className: "n" });
  const body = made.createTBody();
  for (const row of rows.slice(-MAX_ROWS)) {
    const line = body.insertRow();
    row.forEach((v) => add(line, "td", v === "" ? "–" : typeof v === "number" ? number(v, 6) : NAMES[v] ?? v, { className: "n" }));
  }
  box.append(made);
  figure.after(box);
  box.focus();
}

// The pointer is at a step of some chart: a line there in all of them, and what their curves say.
function point(step) {
  const bar = document.getElementById("readout") ?? document.body.appendChild(Object.assign(document.createElement("div"), { id: "readout", hidden: true }));
  bar.hidden = step === null;
  const words = [];
  for (const [figure, { curves, over }] of known) {
    if (!figure.isConnected) continue;
    let line = figure.querySelector(":scope > .cursorline");
    line ??= figure.appendChild(Object.assign(document.createElement("div"), { className: "cursorline" }));
    const axis = figure._fullLayout?.xaxis;
    const at = step === null || !axis ? NaN : axis._offset + axis.d2p(over ? over.to(step) : step);
    line.hidden = !(at >= axis?._offset && at <= axis._offset + axis._length);
    line.style.left = `${at}px`;
    if (step !== null) for (const curve of curves) words.push([curve, nearest(curve.series, step)]);
  }
  if (step === null) return;
  const now = Math.round(step);
  const parts = words.filter(([, found]) => found).map(([{ name, stroke, say, series }, [at, value, i]]) => {
    const part = Object.assign(document.createElement("span"), { textContent: `${name} ${typeof value === "string" ? NAMES[value] ?? value : say ? say(value) : number(value, 5)}${at === now ? "" : ` @${at}`}${standsFor(series, i)}` });
    part.style.setProperty("--c", stroke);
    return part;
  });
  bar.replaceChildren(Object.assign(document.createElement("strong"), { textContent: `step ${now}` }), ...parts);
}

// The measured value next to a step, its step, and its place.
export function nearest(series, step) {
  const special = new Map(series.nonfinite ?? []);
  let best = null;
  series.steps.forEach((s, i) => {
    const value = special.get(i) ?? series.values[i];
    if (value !== null && (best === null || Math.abs(s - step) < Math.abs(best[0] - step))) best = [s, value, i];
  });
  return best;
}
