// The tile map: every tile of one site in one step, on a canvas, with its own hover. Any size: a million tiles draw in ms.
// Tiles that stand out are drawn on top in device pixels, so that scaling never swallows one.
import { NAMES, api, colour, number } from "./charts.js";

const FLAG = { NAN: 1, INF: 2, SENTINEL: 4, ZERO: 8, EPS: 16, OFF_SCALE: 32, SATURATED: 64, UNDERFLOW: 128 };
const FLAG_NAMES = { NAN: "NaN", INF: "Inf", SENTINEL: "sentinel: scale forced to 1", ZERO: "zero tile", EPS: "clamped by eps", OFF_SCALE: "off-scale", SATURATED: "saturated", UNDERFLOW: "underflow" };
const LOUD = FLAG.NAN | FLAG.INF | FLAG.SENTINEL | FLAG.OFF_SCALE | FLAG.SATURATED;
const LABELS = { amax: "amax", scale_inv: "scale_inv", num_nonfinite: "non-finite elements", num_underflow: "underflow elements" };
const MARGIN = { left: 52, top: 26, right: 8, bottom: 8 };
const MAX_HEIGHT = 520, MAX_CELL = 76;

const rgb = (css) => {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = css;
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
};

function viridis() { // the ramp of the style sheet, as 256 colours
  const stops = [0, 1, 2, 3, 4, 5, 6].map((k) => rgb(colour(`map-${k}`)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(at)), f = at - k;
    return stops[k].map((c, channel) => Math.round(c + (stops[k + 1][channel] - c) * f));
  });
}

class TileMapView {
  constructor(panel) {
    this.panel = panel;
    const d = panel.dataset;
    this.steps = JSON.parse(d.steps);
    this.step = Number(d.step);
    this.rank = Number(d.rank);
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
    this.slider = panel.querySelector("[data-slider]");
    this.cache = new Map();
    this.listen();
    this.load(this.step);
  }

  listen() {
    const { panel, canvas } = this;
    this.slider.addEventListener("input", () => this.load(this.steps[Number(this.slider.value)]));
    panel.querySelector("[data-back]").addEventListener("click", () => this.move(-1));
    panel.querySelector("[data-on]").addEventListener("click", () => this.move(1));
    panel.querySelector("[data-worst]").addEventListener("click", () => this.nextFlagged());
    panel.querySelector("[data-quantity]").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) { this.quantity = button.dataset.value; this.draw(); this.remember(); }
    });
    panel.querySelector("[data-rank-input]")?.addEventListener("change", (event) => {
      const url = new URL(panel.dataset.page, location.origin);
      url.searchParams.set("step", this.step);
      url.searchParams.set("rank", event.target.value);
      location.assign(url);
    });
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.tooltip.hidden = true; this.hovered = null; this.drawOverlay(); });
    canvas.addEventListener("click", (event) => { const t = this.tileAt(event); if (t) this.choose(t); });
    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (by) {
        event.preventDefault();
        const [dr, dc] = this.turned ? [by[1], by[0]] : by;
        const [r, c] = this.chosen ?? [0, 0];
        const [rows, columns] = this.map.shape;
        this.choose([Math.min(rows - 1, Math.max(0, r + dr)), Math.min(columns - 1, Math.max(0, c + dc))]);
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.target.closest("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === ",") this.move(-1);
      if (event.key === ".") this.move(1);
      if (event.key === "w") this.nextFlagged();
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
    document.addEventListener("fp8watch:theme", () => this.draw());
    document.addEventListener("fp8watch:live", () => this.lookForSteps());
  }

  async fetch(step) {
    if (!this.cache.has(step)) {
      if (this.cache.size > 40) this.cache.delete(this.cache.keys().next().value);
      this.cache.set(step, api(this.panel.dataset.api, { step, rank: this.rank }).catch((e) => { this.cache.delete(step); throw e; }));
    }
    return this.cache.get(step);
  }

  async load(step) {
    this.step = step;
    this.slider.value = String(this.steps.indexOf(step));
    for (const out of document.querySelectorAll("[data-map-step]")) out.textContent = String(step);
    try {
      const map = await this.fetch(step);
      if (this.step !== step) return; // the slider went on meanwhile
      const special = new Map((map.nonfinite ?? []).map(([i, what]) => [Number(i), what]));
      this.map = { ...map, special, specialScale: new Map((map.nonfinite_scale_inv ?? []).map(([i, what]) => [Number(i), what])) };
      this.flagged = map.flags.map((bits, i) => [bits, i]).filter(([bits]) => bits & LOUD).map(([, i]) => i);
      this.draw();
      this.list();
      this.remember();
      this.panel.dataset.loaded = String(step);
      const index = this.steps.indexOf(step);
      for (const near of [this.steps[index + 1], this.steps[index - 1]]) if (near !== undefined) this.fetch(near).catch(() => {});
    } catch (e) {
      this.say(`No map at step ${step} (${e.message}).`);
    }
  }

  async lookForSteps() {
    const was = this.steps.at(-1), follows = this.step === was;
    this.cache.delete(this.step);
    const map = await this.fetch(this.step).catch(() => null);
    if (!map || map.steps_available.at(-1) === was) return;
    this.steps = map.steps_available;
    this.slider.max = String(this.steps.length - 1);
    this.slider.value = String(this.steps.indexOf(this.step));
    if (follows && this.whole) this.load(this.steps.at(-1));
  }

  move(by) {
    const to = this.steps[this.steps.indexOf(this.step) + by];
    if (to !== undefined) this.load(to);
  }

  nextFlagged() {
    if (!this.flagged?.length) return this.say("No tile stands out in this step.");
    const columns = this.map.shape[1];
    const at = this.chosen ? this.chosen[0] * columns + this.chosen[1] : -1;
    const next = this.flagged.find((i) => i > at) ?? this.flagged[0];
    this.choose([Math.floor(next / columns), next % columns]);
  }

  choose(tile) {
    this.chosen = tile;
    this.drawOverlay();
    this.remember();
  }

  remember() {
    if (!this.whole) return;
    const url = new URL(location.href);
    url.searchParams.set("step", this.step);
    if (this.chosen) url.searchParams.set("tile", this.chosen.join(","));
    if (this.quantity === "amax") url.searchParams.delete("show"); else url.searchParams.set("show", this.quantity);
    history.replaceState(null, "", url.href.replace("%2C", ","));
  }

  // A value as it is coloured: null has no colour of the ramp.
  level(i) {
    const v = this.map[this.quantity][i];
    if (v === null || this.map.special.has(i)) return null;
    if (this.quantity === "amax" || this.quantity === "scale_inv") return v > 0 ? Math.log2(v) : null;
    return v > 0 ? Math.log2(1 + v) : null;
  }

  draw() {
    if (!this.map) return;
    const [rows, columns] = this.map.shape;
    const width = this.box.clientWidth;
    if (!width || !rows || !columns) return;
    this.turned = rows > 2 * columns && rows > 24; // a tall map is laid on its side
    const across = this.turned ? rows : columns, down = this.turned ? columns : rows;
    const roomX = width - MARGIN.left - MARGIN.right, roomY = MAX_HEIGHT - MARGIN.top - MARGIN.bottom;
    this.cellX = Math.min(MAX_CELL, roomX / across);
    this.cellY = Math.min(MAX_CELL, roomY / down, Math.max(this.cellX, Math.min(46, 300 / down)));
    if (this.cellY < this.cellX && down * this.cellX > roomY) this.cellX = Math.min(this.cellX, Math.max(this.cellY, roomX / across));
    this.width = Math.round(this.cellX * across);
    this.height = Math.round(this.cellY * down);
    const ratio = window.devicePixelRatio || 1;
    const [w, h] = [this.width + MARGIN.left + MARGIN.right, this.height + MARGIN.top + MARGIN.bottom];
    this.canvas.width = Math.round(w * ratio);
    this.canvas.height = Math.round(h * ratio);
    this.canvas.style.width = `${w}px`;
    this.canvas.style.height = `${h}px`;
    this.base = this.paint(ratio, across, down);
    for (const b of this.panel.querySelectorAll("[data-quantity] button")) b.setAttribute("aria-pressed", String(b.dataset.value === this.quantity));
    this.drawOverlay();
  }

  paint(ratio, across, down) {
    const n = across * down;
    const levels = Array.from({ length: n }, (_, i) => this.level(i));
    let low = Infinity, high = -Infinity;
    for (const v of levels) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
    if (!(high > low)) { low = (Number.isFinite(low) ? low : 0) - 0.5; high = low + 1; }
    const ramp = viridis(), zero = rgb(colour("map-zero")), alarm = rgb(colour("critical"));
    const image = new ImageData(across, down);
    for (let i = 0; i < n; i += 1) {
      const [r, c] = [Math.floor(i / this.map.shape[1]), i % this.map.shape[1]];
      const at = 4 * (this.turned ? c * across + r : i);
      const bits = this.map.flags[i], v = levels[i];
      const pixel = bits & (FLAG.NAN | FLAG.INF | FLAG.SENTINEL) ? alarm : v === null ? zero : ramp[Math.round(((v - low) / (high - low)) * 255)];
      image.data.set([...pixel, 255], at);
    }
    const small = new OffscreenCanvas(across, down);
    small.getContext("2d").putImageData(image, 0, 0);
    const base = new OffscreenCanvas(this.canvas.width, this.canvas.height);
    const g = base.getContext("2d");
    g.scale(ratio, ratio);
    g.imageSmoothingEnabled = false;
    g.drawImage(small, MARGIN.left, MARGIN.top, this.width, this.height);
    if (this.cellX >= 5 && this.cellY >= 5) { // lines between tiles, where there is room
      g.strokeStyle = colour("panel");
      g.lineWidth = 1;
      g.beginPath();
      for (let k = 1; k < across; k += 1) { const x = MARGIN.left + k * this.cellX; g.moveTo(x, MARGIN.top); g.lineTo(x, MARGIN.top + this.height); }
      for (let k = 1; k < down; k += 1) { const y = MARGIN.top + k * this.cellY; g.moveTo(MARGIN.left, y); g.lineTo(MARGIN.left + this.width, y); }
      g.stroke();
    }
    this.axes(g, across, down);
    this.marks(g);
    this.legend(ramp, low, high);
    return base;
  }

  axes(g, across, down) {
    g.fillStyle = colour("muted");
    g.font = "11px system-ui, sans-serif";
    const ticks = (n, size) => { const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048].find((e) => e * size >= 44) ?? 4096; return Array.from({ length: Math.ceil(n / every) }, (_, k) => k * every); };
    g.textAlign = "center";
    for (const k of ticks(across, this.cellX)) g.fillText(String(k), MARGIN.left + (k + 0.5) * this.cellX, MARGIN.top - 6);
    g.textAlign = "right";
    for (const k of ticks(down, this.cellY * 2)) g.fillText(String(k), MARGIN.left - 6, MARGIN.top + (k + 0.5) * this.cellY + 4);
    g.textAlign = "left";
    g.fillText(this.turned ? "row →" : "col →", 2, MARGIN.top - 6);
    g.fillText(this.turned ? "col ↓" : "row ↓", 2, MARGIN.top + 11);
  }

  place(i) {
    const columns = this.map.shape[1], r = Math.floor(i / columns), c = i % columns;
    const [x, y] = this.turned ? [r, c] : [c, r];
    return [MARGIN.left + x * this.cellX, MARGIN.top + y * this.cellY];
  }

  // What stands out: never smaller than 7 pixels, whatever the scale.
  marks(g) {
    const alarm = colour("critical"), off = colour("warning"), ground = colour("panel");
    for (const i of this.flagged.slice(0, 5000)) {
      const bits = this.map.flags[i];
      const [x, y] = this.place(i);
      const w = Math.max(7, this.cellX), h = Math.max(7, this.cellY);
      const left = x + this.cellX / 2 - w / 2, top = y + this.cellY / 2 - h / 2;
      if (bits & (FLAG.NAN | FLAG.INF | FLAG.SENTINEL)) {
        g.fillStyle = alarm;
        g.fillRect(left, top, w, h);
        const s = Math.min(w, h, 14) / 2 - 1.5, cx = left + w / 2, cy = top + h / 2;
        g.strokeStyle = ground;
        g.lineWidth = 1.4;
        g.beginPath();
        if (bits & (FLAG.NAN | FLAG.INF)) { g.moveTo(cx - s, cy - s); g.lineTo(cx + s, cy + s); g.moveTo(cx + s, cy - s); g.lineTo(cx - s, cy + s); } else g.arc(cx, cy, s, 0, 7);
        g.stroke();
      } else {
        g.strokeStyle = off;
        g.lineWidth = 2;
        g.strokeRect(left + 1, top + 1, w - 2, h - 2);
      }
    }
  }

  drawOverlay() {
    if (!this.base) return;
    const g = this.canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.clearRect(0, 0, this.canvas.width, this.canvas.height);
    g.drawImage(this.base, 0, 0);
    g.scale(ratio, ratio);
    const frame = (tile, stroke, width, out) => {
      const [rows, columns] = this.map.shape;
      if (!tile || tile[0] >= rows || tile[1] >= columns) return;
      const [x, y] = this.place(tile[0] * columns + tile[1]);
      g.strokeStyle = stroke;
      g.lineWidth = width;
      const w = Math.max(9, this.cellX), h = Math.max(9, this.cellY);
      g.strokeRect(x + this.cellX / 2 - w / 2 - out, y + this.cellY / 2 - h / 2 - out, w + 2 * out, h + 2 * out);
    };
    frame(this.hovered, colour("text"), 1.5, 0);
    frame(this.chosen, colour("panel"), 4, 3);
    frame(this.chosen, colour("text"), 2, 3);
    this.describe(this.hovered ?? this.chosen);
  }

  legend(ramp, low, high) {
    const strip = this.panel.querySelector("canvas[data-legend]"), g = strip.getContext("2d");
    for (let x = 0; x < strip.width; x += 1) {
      g.fillStyle = `rgb(${ramp[Math.round((x / (strip.width - 1)) * 255)].join(" ")})`;
      g.fillRect(x, 0, 1, strip.height);
    }
    const octaves = this.quantity === "amax" || this.quantity === "scale_inv";
    const say = (v) => (octaves ? `2^${v.toFixed(1).replace(".0", "").replace("-", "−")}` : number(Math.max(0, Math.round(2 ** v - 1))));
    this.panel.querySelector("[data-legend-low]").textContent = `${LABELS[this.quantity]} ${say(low)}`;
    this.panel.querySelector("[data-legend-high]").textContent = say(high);
  }

  tileAt(event) {
    if (!this.map) return null;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left - MARGIN.left) / this.cellX), y = Math.floor((event.clientY - box.top - MARGIN.top) / this.cellY);
    const [r, c] = this.turned ? [x, y] : [y, x];
    const [rows, columns] = this.map.shape;
    if (r < 0 || c < 0 || r >= rows || c >= columns) return null;
    return this.snap(r, c, x, y);
  }

  // Where tiles are smaller than a pointer can hit, the nearest one that stands out is meant.
  snap(r, c, x, y) {
    if (this.cellX >= 7 && this.cellY >= 7) return [r, c];
    const columns = this.map.shape[1];
    let best = null, distance = 5;
    for (const i of this.flagged) {
      const [tr, tc] = [Math.floor(i / columns), i % columns];
      const [tx, ty] = this.turned ? [tr, tc] : [tc, tr];
      const d = Math.hypot(Math.max(0, Math.abs(tx - x) - 0.5) * this.cellX, Math.max(0, Math.abs(ty - y) - 0.5) * this.cellY);
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
      this.tooltip.style.left = `${Math.min(left, box.width - this.tooltip.offsetWidth - 4)}px`;
      this.tooltip.style.top = `${event.clientY - box.top + 16}px`;
    }
    this.drawOverlay();
  }

  words([r, c], brief) {
    const { map } = this, i = r * map.shape[1] + c, bits = map.flags[i];
    const el = (tag, textContent, className = "") => Object.assign(document.createElement(tag), { textContent, className });
    const span = (name, at, size, length) => { const a = at * size, b = Math.max(a, Math.min(a + size, length) - 1); return a === b ? `${name} ${a}` : `${name}s ${a}–${b}`; };
    const amax = map.special.has(i) ? NAMES[map.special.get(i)] ?? map.special.get(i) : map.amax[i];
    const octave = (v) => (v > 0 ? `2^${Math.log2(v).toFixed(1).replace(".0", "").replace("-", "−")}` : "");
    const flags = Object.keys(FLAG).filter((k) => bits & FLAG[k]);
    const facts = [["amax", typeof amax === "string" ? amax : number(amax), typeof amax === "string" ? "" : octave(amax)], ["scale_inv", number(map.specialScale.get(i) ?? map.scale_inv[i], 6), octave(map.scale_inv[i])], ["non-finite", number(map.num_nonfinite[i]), "elements"], ["underflow", number(map.num_underflow[i]), "elements"]];
    const list = document.createElement("dl");
    for (const [name, value, more] of facts) {
      const dd = el("dd", value, (name === "non-finite" && map.num_nonfinite[i]) || typeof amax === "string" && name === "amax" ? "nonfinite" : "");
      if (more) dd.append(" ", el("small", more));
      list.append(el("dt", name), dd);
    }
    const out = [el("strong", `Tile (${r}, ${c})`)];
    out.push(el("p", `${span("row", r, this.tileShape[0], this.siteShape[0])}, ${span("column", c, this.tileShape[1], this.siteShape[1])}`, "muted"));
    if (flags.length) {
      const p = el("p", "", "flags");
      for (const k of flags) p.append(el("span", FLAG_NAMES[k], `chip flag${FLAG[k] & LOUD ? " loud" : ""}`), " ");
      out.push(p);
    }
    out.push(list);
    if (!brief && bits & FLAG.INF) out.push(el("p", "An Inf made the scale 1: its neighbours in the tile were quantised unscaled, and the Inf itself was stored as the largest finite code.", "why"));
    return out;
  }

  describe(tile) {
    if (!tile) return this.say("Hover a tile, or choose one with the arrow keys.");
    const [rows, columns] = this.map.shape;
    if (tile[0] >= rows || tile[1] >= columns) return this.say(`Tile (${tile.join(", ")}) is outside this map of ${rows} × ${columns}.`);
    this.readout.replaceChildren(...this.words(tile, false));
  }

  say(what) {
    this.readout.replaceChildren(Object.assign(document.createElement("p"), { className: "muted", textContent: what }));
  }

  // The table under the map follows the slider.
  list() {
    const table = document.querySelector("[data-map-flagged]");
    if (!table || !this.whole || this.listed === undefined) { this.listed = this.step; return; }
    if (this.listed === this.step) return;
    this.listed = this.step;
    const step = this.step;
    fetch(`${this.panel.dataset.page}?step=${step}&rank=${this.rank}`, { headers: { accept: "text/html" } }).then((a) => a.text()).then((html) => {
      const fresh = new DOMParser().parseFromString(html, "text/html").querySelector("[data-map-flagged]");
      if (fresh && step === this.step) table.replaceChildren(...[...fresh.children].map((row) => document.adoptNode(row)));
    }).catch(() => {});
  }
}

for (const panel of document.querySelectorAll("[data-tile-map]")) panel.tileMap = new TileMapView(panel);
