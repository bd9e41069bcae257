// The flight recorder: layers × steps around a failure, with a playhead that runs through each step in the order of execution.
import { api, colour, number } from "./basics.js";
import { film } from "./flight_gif.js";
import { fitted } from "./flight_rows.js";
import { cellAt, geometry, legend, paintFilm, paintFrame, paintPanes } from "./flight_paint.js";

const MOST_PX = { alone: 620, beside: 280 };
const STEP_MS = 150, SLOW = 4, SLOW_AROUND = [-1, 3]; // around the failure the film runs slower

const MOST_PLACES = 5;

const slow = (apart) => (apart >= SLOW_AROUND[0] && apart <= SLOW_AROUND[1] ? SLOW : 1);

// Beside module and operand in the header of an incident: where it went.
function spreadTo(spread) {
  const fact = document.getElementById("spread");
  if (!fact) return;
  fact.hidden = !spread?.places.length;
  if (fact.hidden) return;
  const { places, first_step: first, last_step: last } = spread, more = places.length - MOST_PLACES;
  fact.lastElementChild.textContent = `${places.slice(0, MOST_PLACES).join(", ")}${more > 0 ? ` and ${more} more` : ""}, ${last > first ? `steps ${first}–${last}` : `step ${first}`}`;
}

class Flight {
  constructor(panel) {
    this.panel = panel;
    const d = panel.dataset, asked = new URLSearchParams(location.search).get("whole" in d ? "step" : "flight");
    this.whole = "whole" in d; // the picture's own page
    this.at = Number(d.at);
    this.step = asked !== null && /^\d{1,15}$/.test(asked) ? Number(asked) : this.at;
    this.touched = asked !== null;
    this.find = (name) => panel.querySelector(`[data-flight-${name}]`);
    this.box = this.find("box");
    this.canvas = this.box.querySelector("canvas");
    this.g = this.canvas.getContext("2d");
    this.tooltip = this.find("tooltip");
    this.slider = this.find("slider");
    this.part = 1;
    this.playing = false;
    this.listen();
    this.load();
  }

  listen() {
    const { canvas } = this;
    this.find("play").addEventListener("click", () => this.toggle());
    this.find("back").addEventListener("click", () => this.move(-1));
    this.find("on").addEventListener("click", () => this.move(1));
    this.find("gif").addEventListener("click", () => this.gif());
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.hovered = null; this.tooltip.hidden = true; this.paint(); });
    canvas.addEventListener("click", (event) => { const cell = this.cell(event); if (cell) this.open(cell); });
    document.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.box);
    document.addEventListener("fp8watch:theme", () => this.draw());
    document.addEventListener("fp8watch:live", () => this.load());
  }

  // On the picture's own page its keys work everywhere, on others while it has the focus: Space scrolls a page.
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.data) return;
    const here = event.target === this.canvas;
    if (!here && (!this.whole || event.target.closest("input, textarea, select, button, a, summary, dialog"))) return;
    const act = {
      " ": () => this.toggle(), ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1),
      ArrowUp: () => this.climb(-1), ArrowDown: () => this.climb(1), Enter: () => this.chosen && this.open(this.chosen),
      Home: () => this.go(0), End: () => this.go(this.data.steps.length - 1),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  async load() {
    try {
      this.most = this.whole ? MOST_PX.alone : MOST_PX.beside;
      const data = fitted(await api(this.panel.dataset.url, { at: this.at, span: this.panel.dataset.span }), this.most, this.whole ? 1 : 4);
      this.data = data;
      this.sqnr = new Set(data.sqnr.map(([i, j]) => `${i},${j}`));
      this.marks = new Map(data.marks.map(([i, j, site, words]) => [`${i},${j}`, { site, words }]));
      this.slider.max = String(Math.max(0, data.steps.length - 1));
      this.find("says").textContent = data.said.join(" ");
      spreadTo(data.spread);
      this.canvas.hidden = !data.rows.length || !data.steps.length;
      this.draw();
      this.panel.dataset.loaded = String(this.at);
    } catch (e) {
      this.find("says").textContent = `The flight recorder could not be read (${e.message}).`;
    }
  }

  get column() {
    const { steps } = this.data;
    return Math.max(0, Math.min(steps.length - 1, this.step - steps[0]));
  }

  draw() {
    const width = this.box.clientWidth;
    if (!this.data?.rows.length || !this.data.steps.length || !width) return;
    const ratio = this.ratio = window.devicePixelRatio || 1;
    this.geometry = geometry(this.data, width, this.most);
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(this.geometry.height * ratio) });
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.geometry.height}px`;
    this.painted = {
      panes: paintPanes(this.data, this.geometry, ratio),
      frame: paintFrame(this.data, this.geometry, ratio),
      paneOf: this.data.rows.map((row) => (row.pane === "fprop" ? 0 : 1)),
      tints: { accent: colour("accent"), text: colour("text") },
    };
    legend(this.find("legend"));
    this.show();
  }

  paint() {
    if (!this.painted) return;
    paintFilm(this.g, this.painted, this.geometry, { column: this.column, part: this.part, playing: this.playing, chosen: this.chosen, hovered: this.hovered }, this.ratio);
  }

  // The playhead has moved: what it says.
  show() {
    const j = this.column, { steps, outside, looked } = this.data, step = steps[j];
    this.step = step;
    this.slider.value = String(j);
    this.slider.setAttribute("aria-valuetext", `step ${step}`);
    this.find("step").textContent = String(step);
    this.panel.dataset.step = String(step);
    const worst = this.farthest(j);
    this.find("now").textContent = !this.touched ? "" : looked[j]
      ? `Step ${step}: ${outside[j]} of ${looked[j]} sites measured stand out${worst ? `, farthest ${this.name(worst)}: ${this.says(worst)}` : ""}`
      : `Step ${step}: no site was looked at`;
    this.paint();
  }

  farthest(j) {
    const mark = this.data.marks.find(([, c]) => c === j);
    if (mark) return [mark[0], j];
    let best = null, most = 1;
    this.data.rows.forEach((row, i) => { if (row.values[j] > most) { most = row.values[j]; best = [i, j]; } });
    return best;
  }

  siteOf([i, j]) {
    const row = this.data.rows[i];
    return this.marks.get(`${i},${j}`)?.site ?? row.site ?? row.sites?.[j];
  }

  name(cell) {
    const row = this.data.rows[cell[0]], told = this.data.sites[String(this.siteOf(cell))];
    return told ? `${told[0]} ${told[1]}, ${told[2]}` : row.operand ? `${row.label} ${row.operand}, ${row.direction}` : row.label;
  }

  says(cell) {
    const [i, j] = cell, v = this.data.rows[i].values[j], mark = this.marks.get(`${i},${j}`);
    const of = this.sqnr.has(`${i},${j}`) ? "tile SQNR" : "amax";
    const far = v === null ? (mark ? "" : "not looked at") : v < 0 ? (mark ? "" : "looked at, no band yet") : v > 1 ? `${of} at ${number(v, 2)} × its band` : "inside its band";
    return [mark?.words, far].filter(Boolean).join(", ");
  }

  hasMap(cell) {
    return this.data.maps[String(this.siteOf(cell))]?.includes(this.data.steps[cell[1]]) ?? false;
  }

  open(cell) {
    const site = this.siteOf(cell), step = this.data.steps[cell[1]];
    if (site === undefined) return;
    location.assign(`${this.panel.dataset.runPage}/sites/${site}${this.hasMap(cell) ? "/tile-map" : ""}?step=${step}`);
  }

  cell(event) {
    if (!this.geometry || !this.data) return null;
    const box = this.canvas.getBoundingClientRect();
    return cellAt(this.data, this.geometry, event.clientX - box.left, event.clientY - box.top, event.pointerType === "touch");
  }

  hover(event) {
    const cell = this.cell(event);
    this.hovered = cell;
    this.tooltip.hidden = !cell;
    this.canvas.style.cursor = cell ? "pointer" : "default";
    if (cell) {
      const line = (tag, words) => Object.assign(document.createElement(tag), { textContent: words });
      this.tooltip.replaceChildren(line("strong", `Step ${this.data.steps[cell[1]]}`), line("div", this.name(cell)), line("div", this.says(cell)), line("small", this.hasMap(cell) ? "click: its tiles" : "click: the site; no tile map of this step was kept"));
      const box = this.box.getBoundingClientRect(), x = event.clientX - box.left, wide = this.tooltip.offsetWidth;
      this.tooltip.style.left = `${Math.max(0, x + 14 + wide > box.width ? x - wide - 10 : x + 14)}px`;
      this.tooltip.style.top = `${event.clientY - box.top + 16}px`;
    }
    this.paint();
  }

  // Up and down among the rows of a pane; from its end into the other one.
  climb(by) {
    const { rows } = this.data, { rows: boxes } = this.geometry;
    const order = rows.map((_, i) => i).sort((a, b) => (this.painted.paneOf[a] - this.painted.paneOf[b]) || boxes[a].top - boxes[b].top);
    const now = this.chosen ? order.indexOf(this.chosen[0]) : -1;
    const start = this.farthest(this.column)?.[0];
    const next = now < 0 ? start ?? order[0] : order[Math.max(0, Math.min(order.length - 1, now + by))];
    this.stop();
    this.chosen = [next, this.column];
    this.find("now").textContent = `Step ${this.step}: ${this.name(this.chosen)}: ${this.says(this.chosen)}`;
    this.paint();
  }

  go(column) {
    this.stop();
    this.step = this.data.steps[Math.max(0, Math.min(this.data.steps.length - 1, column))];
    this.touched = true;
    this.chosen = this.chosen ? [this.chosen[0], this.column] : null;
    this.show();
    this.remember();
  }

  move(by) {
    if (this.data) this.go(this.column + by);
  }

  remember() {
    const url = new URL(location.href);
    url.searchParams.set(this.whole ? "step" : "flight", String(this.step));
    history.replaceState(null, "", url);
    const own = this.find("own");
    if (own) own.href = `${this.panel.dataset.own}?step=${this.step}`;
  }

  toggle() {
    if (!this.data?.steps.length) return;
    if (this.playing) { this.stop(); this.remember(); return; }
    if (!this.touched || this.column === this.data.steps.length - 1) this.step = this.data.steps[0];
    this.touched = true;
    this.playing = true;
    this.part = 0;
    this.chosen = null;
    this.button("❚❚", "Pause the flight recorder", true);
    let before = null;
    const frame = (now) => {
      if (!this.playing) return;
      this.advance(before === null ? 0 : Math.min(100, now - before));
      before = now;
      requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
    this.show();
  }

  // So many milliseconds of film further.
  advance(ms) {
    this.part += ms / (STEP_MS * slow(this.step - this.at));
    if (this.part < 1) return this.paint();
    if (this.column === this.data.steps.length - 1) { this.stop(); this.remember(); return this.paint(); }
    this.part -= 1;
    this.step += 1;
    this.show();
  }

  stop() {
    this.playing = false;
    this.part = 1;
    this.button("▶", "Play the flight recorder", false);
    this.paint();
  }

  // The film as a file, for a message: it takes a second or two, in which the button says so.
  async gif() {
    const button = this.find("gif"), { title } = this.panel.dataset;
    if (!this.data?.rows.length || !this.data.steps.length) return;
    Object.assign(button, { disabled: true, textContent: "Making …" });
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
    const bytes = film(this.data, { title, most: this.most, step_ms: STEP_MS, slow });
    const url = URL.createObjectURL(new Blob([bytes], { type: "image/gif" }));
    Object.assign(document.createElement("a"), { href: url, download: `flight-step-${this.at}.gif` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
    Object.assign(button, { disabled: false, textContent: "GIF" });
  }

  button(glyph, words, pressed) {
    const play = this.find("play");
    play.textContent = glyph;
    play.setAttribute("aria-label", words);
    play.setAttribute("aria-pressed", String(pressed));
  }
}

for (const panel of document.querySelectorAll("[data-flight]")) panel.flight = new Flight(panel);
