// The tile map: every tile of one site in one step, on a canvas, with its own hover, keys, and a state that lives in the URL.
import { api, colour } from "./charts.js";
import { loud, worstTile } from "./tile_flags.js";
import { LABELS, MARGIN, geometry, legend, paint } from "./tile_paint.js";
import { Steps } from "./tile_steps.js";
import { tileWords } from "./tile_words.js";

const MAX_KEPT = 40; // maps in memory: the slider goes back and forth

class TileMapView {
  constructor(panel) {
    this.panel = panel;
    const d = panel.dataset;
    this.rank = Number(d.rank);
    this.attempt = d.attempt; // whose map it is where several have the step: of an incident its own; undefined: of the newest
    this.tileShape = d.tileShape.split(",").map(Number);
    this.siteShape = d.siteShape.split(",").map(Number);
    this.chosen = d.tile ? d.tile.split(",").map(Number) : null;
    this.quantity = new URLSearchParams(location.search).get("show") ?? "amax";
    if (!(this.quantity in LABELS)) this.quantity = "amax";
    this.whole = location.pathname === decodeURI(d.page) || location.pathname === d.page; // the map's own page: its state lives in the URL
    this.box = panel.querySelector("[data-canvas-box]");
    this.canvas = this.box.querySelector("canvas");
    this.tooltip = panel.querySelector("[data-tooltip]");
    this.readout = panel.querySelector("[data-readout]");
    this.cache = new Map();
    this.listed = Number(d.step); // the step of the table under the map
    this.steps = new Steps(panel, (step) => this.load(step));
    this.listen();
    this.load(this.steps.now);
  }

  listen() {
    const { panel, canvas } = this;
    panel.querySelector("[data-next]").addEventListener("click", () => this.nextFlagged());
    panel.querySelector("[data-worst]").addEventListener("click", () => this.worst());
    panel.querySelector("[data-quantity]").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) { this.quantity = button.dataset.value; this.draw(); this.remember(); }
    });
    panel.querySelector("[data-rank-input]")?.addEventListener("change", (event) => {
      const url = new URL(panel.dataset.page, location.origin);
      url.searchParams.set("step", this.steps.now);
      url.searchParams.set("rank", event.target.value);
      if (this.attempt) url.searchParams.set("attempt", this.attempt);
      location.assign(url);
    });
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.tooltip.hidden = true; this.hovered = null; this.drawOverlay(); });
    canvas.addEventListener("click", (event) => { const t = this.tileAt(event); if (t) this.choose(t); });
    canvas.addEventListener("keydown", (event) => this.arrow(event));
    document.addEventListener("keydown", (event) => {
      if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      const act = { ",": () => this.steps.move(-1), ".": () => this.steps.move(1), p: () => this.steps.toggle(), n: () => this.nextFlagged(), w: () => this.worst() }[event.key];
      act?.();
    });
    document.addEventListener("click", (event) => {
      const link = event.target.closest("a[data-tile]");
      if (link && this.whole && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        this.choose(link.dataset.tile.split(",").map(Number));
        this.panel.scrollIntoView({ block: "nearest" });
      }
    });
    new ResizeObserver(() => this.draw()).observe(this.box);
    document.addEventListener("fp8watch:theme", () => { this.draw(); this.steps.drawBad(); });
    document.addEventListener("fp8watch:live", ({ detail }) => this.lookForSteps(detail));
  }

  // A large map comes in parts: `row0` is the first row of the one that is here. Tiles are named as in the whole map.
  get shape() { return (this.map.cut ?? this.map).shape; }
  indexOf([r, c]) { return (r - this.map.row0) * this.map.shape[1] + c; }
  tileOf(i) { return [this.map.row0 + Math.floor(i / this.map.shape[1]), i % this.map.shape[1]]; }
  isHere([r, c]) { const [rows, columns] = this.map.shape; return r >= this.map.row0 && r < this.map.row0 + rows && c < columns; }

  arrow(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by || !this.map) return;
    event.preventDefault();
    const [dr, dc] = this.at.turned ? [by[1], by[0]] : by;
    const [r, c] = this.chosen ?? [0, 0];
    const [rows, columns] = this.shape;
    this.choose([Math.min(rows - 1, Math.max(0, r + dr)), Math.min(columns - 1, Math.max(0, c + dc))]);
  }

  fetch(step, row) {
    const key = row === undefined ? step : `${step},${row}`;
    if (!this.cache.has(key)) {
      if (this.cache.size > MAX_KEPT) this.cache.delete(this.cache.keys().next().value);
      this.cache.set(key, api(this.panel.dataset.api, { step, rank: this.rank, row, attempt: this.attempt }).catch((e) => { this.cache.delete(key); throw e; }));
    }
    return this.cache.get(key);
  }

  // Of a map that comes in parts, the one of the tile that is chosen; without one that of its worst tile.
  async load(step) {
    this.steps.show(step);
    try {
      let map = await this.fetch(step);
      const lacks = (row) => map.cut && row < map.cut.shape[0] && (row < map.row0 || row >= map.row0 + map.shape[0]);
      while (this.steps.now === step && lacks(this.chosen?.[0])) map = await this.fetch(step, this.chosen[0]);
      if (this.steps.now !== step) return; // the slider went on meanwhile
      const special = (list) => new Map((list ?? []).map(([i, what]) => [Number(i), what]));
      this.map = { ...map, special: special(map.nonfinite), specialScale: special(map.nonfinite_scale_inv) };
      this.flagged = loud(map);
      this.sayCut(map);
      this.draw();
      this.list();
      this.remember();
      this.panel.dataset.loaded = String(step);
      for (const near of this.steps.neighbours()) this.fetch(near).catch(() => {});
    } catch (e) {
      this.say(`No map at step ${step} (${e.message}).`);
    }
  }

  // The page as it is now says which steps there are: the map itself, which may be large, is not asked for again.
  lookForSteps(fresh) {
    const told = fresh?.querySelector("[data-tile-map]")?.dataset;
    if (told === undefined || Number(told.rank) !== this.rank) return;
    const all = JSON.parse(told.steps);
    if (all.includes(this.steps.now) && String(all) !== String(this.steps.all)) this.steps.replace(all, this.whole);
  }

  async nextFlagged() {
    if (!this.map) await this.load(this.steps.now); // whoever is faster than the first map is not told that nothing stands out
    if (!this.flagged?.length) return this.say("No tile stands out in this step.");
    const at = this.chosen ? this.indexOf(this.chosen) : -1;
    this.choose(this.tileOf(this.flagged.find((i) => i > at) ?? this.flagged[0]));
  }

  // The worst tile of the worst step that was kept. A click before the first map has come waits for it.
  async worst() {
    this.steps.stop();
    await this.steps.known;
    const step = this.steps.worst();
    this.chosen = null;
    await this.load(step);
    if (!this.map || this.steps.now !== step) return; // not to be had, or the slider went on meanwhile
    this.choose(this.tileOf(worstTile(this.map)));
  }

  choose(tile) {
    this.chosen = tile;
    if (this.map?.cut && tile[0] < this.shape[0] && !this.isHere(tile)) return this.load(this.steps.now);
    this.drawOverlay();
    this.remember();
  }

  remember() {
    if (!this.whole) return;
    const url = new URL(location.href);
    url.searchParams.set("step", this.steps.now);
    if (this.chosen) url.searchParams.set("tile", this.chosen.join(","));
    if (this.quantity === "amax") url.searchParams.delete("show"); else url.searchParams.set("show", this.quantity);
    history.replaceState(null, "", url.href.replace("%2C", ","));
  }

  draw() {
    const width = this.box.clientWidth;
    if (!this.map || !width || !this.map.shape[0] || !this.map.shape[1]) return;
    this.at = geometry(this.map.shape, width);
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [this.at.width + MARGIN.left + MARGIN.right, this.at.height + MARGIN.top + MARGIN.bottom];
    const size = { width: Math.round(w * ratio), height: Math.round(h * ratio) };
    Object.assign(this.canvas, size);
    this.canvas.style.width = `${w}px`;
    this.canvas.style.height = `${h}px`;
    const painted = paint(this.map, this.quantity, this.at, size, ratio, this.flagged);
    this.base = painted.base;
    legend(this.panel, this.quantity, painted);
    for (const b of this.panel.querySelectorAll("[data-quantity] button")) b.setAttribute("aria-pressed", String(b.dataset.value === this.quantity));
    this.drawOverlay();
  }

  drawOverlay() {
    if (!this.base) return;
    const g = this.canvas.getContext("2d"), ratio = window.devicePixelRatio || 1, { cellX, cellY } = this.at;
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, this.canvas.width, this.canvas.height);
    g.drawImage(this.base, 0, 0);
    g.scale(ratio, ratio);
    const frame = (tile, stroke, width, out) => {
      if (!tile || !this.isHere(tile)) return;
      const [x, y] = this.at.place(this.indexOf(tile));
      g.strokeStyle = stroke;
      g.lineWidth = width;
      const w = Math.max(9, cellX), h = Math.max(9, cellY);
      g.strokeRect(x + cellX / 2 - w / 2 - out, y + cellY / 2 - h / 2 - out, w + 2 * out, h + 2 * out);
    };
    frame(this.hovered, colour("text"), 1.5, 0);
    frame(this.chosen, colour("panel"), 4, 3);
    frame(this.chosen, colour("text"), 2, 3);
    this.describe(this.hovered ?? this.chosen);
  }

  tileAt(event) {
    if (!this.map) return null;
    const box = this.canvas.getBoundingClientRect(), { cellX, cellY, turned } = this.at;
    const x = Math.floor((event.clientX - box.left - MARGIN.left) / cellX), y = Math.floor((event.clientY - box.top - MARGIN.top) / cellY);
    const [r, c] = turned ? [x, y] : [y, x];
    const [rows, columns] = this.map.shape;
    if (r < 0 || c < 0 || r >= rows || c >= columns) return null;
    const [row, column] = this.snap(r, c, x, y);
    return [this.map.row0 + row, column];
  }

  // Where tiles are smaller than a pointer can hit, the nearest one that stands out is meant.
  snap(r, c, x, y) {
    const { cellX, cellY, turned, columns } = this.at;
    if (cellX >= 7 && cellY >= 7) return [r, c];
    let best = null, distance = 5;
    for (const i of this.flagged) {
      const [tr, tc] = [Math.floor(i / columns), i % columns];
      const [tx, ty] = turned ? [tr, tc] : [tc, tr];
      const d = Math.hypot(Math.max(0, Math.abs(tx - x) - 0.5) * cellX, Math.max(0, Math.abs(ty - y) - 0.5) * cellY);
      if (d < distance) { best = [tr, tc]; distance = d; }
    }
    return best ?? [r, c];
  }

  hover(event) {
    const tile = this.tileAt(event);
    this.hovered = tile;
    this.tooltip.hidden = !tile;
    if (tile) {
      this.tooltip.replaceChildren(...this.words(tile, true));
      const box = this.box.getBoundingClientRect();
      const left = event.clientX - box.left + 14;
      this.tooltip.style.left = `${Math.max(0, Math.min(left, box.width - this.tooltip.offsetWidth - 4))}px`;
      this.tooltip.style.top = `${event.clientY - box.top + 16}px`;
    }
    this.drawOverlay();
  }

  words(tile, brief) {
    return tileWords(this.map, tile, this.tileShape, this.siteShape, brief);
  }

  describe(tile) {
    if (!tile) return this.say("Point at a tile, or choose one with a click or the arrow keys.");
    const [rows, columns] = this.shape;
    if (!this.isHere(tile)) return this.say(`Tile (${tile.join(", ")}) is outside this map of ${rows} × ${columns}.`);
    this.readout.replaceChildren(...this.words(tile, false));
  }

  say(what) {
    this.readout.replaceChildren(Object.assign(document.createElement("p"), { className: "muted", textContent: what }));
  }

  sayCut({ cut, row0, shape }) {
    const hint = document.querySelector("[data-map-cut]");
    if (!hint) return;
    hint.hidden = !cut;
    if (cut) hint.textContent = `Rows ${row0} to ${row0 + shape[0] - 1} of a map of ${cut.shape.join(" × ")} tiles are drawn; ${cut.num_broken} of the other tiles ${cut.num_broken === 1 ? "is" : "are"} non-finite, sentinel or off-scale.`;
  }

  // The table under the map follows the slider.
  list() {
    const table = document.querySelector("[data-map-flagged]"), step = this.steps.now;
    if (this.listed === step) return;
    this.listed = step;
    if (!table || !this.whole) return;
    const show = (...rows) => { if (step === this.steps.now) table.replaceChildren(...rows); };
    fetch(`${this.panel.dataset.page}?step=${step}&rank=${this.rank}${this.attempt ? `&attempt=${this.attempt}` : ""}`, { headers: { accept: "text/html" } }).then((a) => {
      if (!a.ok) throw new Error(String(a.status));
      return a.text();
    }).then((html) => {
      const fresh = new DOMParser().parseFromString(html, "text/html").querySelector("[data-map-flagged]");
      show(...[...fresh.children].map((row) => document.adoptNode(row)));
    }).catch((e) => {
      const row = document.createElement("tr"), cell = row.insertCell();
      Object.assign(cell, { colSpan: 7, className: "muted", textContent: `The tiles of step ${step} could not be listed (${e.message}).` });
      this.listed = undefined; // the next look at this step asks again
      show(row);
    });
  }
}

for (const panel of document.querySelectorAll("[data-tile-map]")) panel.tileMap = new TileMapView(panel);
