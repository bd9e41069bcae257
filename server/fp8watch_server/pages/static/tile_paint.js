// How a tile map is painted: a pixel a tile, scaled up, with axes; tiles that stand out are drawn on top in device pixels,
// so that scaling never swallows one. Any size: a million tiles draw in milliseconds.
import { colour, number } from "./charts.js";
import { BROKEN, FLAG, NONFINITE } from "./tile_flags.js";

export const MARGIN = { left: 52, top: 26, right: 8, bottom: 8 };
export const LABELS = { amax: "amax", scale_inv: "scale_inv", num_nonfinite: "non-finite elements", num_underflow: "underflow elements" };
const MAX_HEIGHT = 520, MAX_CELL = 76, MAX_CELL_WIDE = 168;
const WORDS = { width: 46, height: 22 }; // a tile of this size holds its value as text: so do the blocks of most weights
const MAX_MARKS = 5000;

const octaves = (quantity) => quantity === "amax" || quantity === "scale_inv";
export const octave = (v) => `2^${Math.log2(v).toFixed(1).replace(".0", "").replace("-", "−")}`;

const rgb = (css) => {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = css;
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
};

function viridis() { // the ramp of the style sheet, as 256 colours; told apart by brightness alone
  const stops = [0, 1, 2, 3, 4, 5, 6].map((k) => rgb(colour(`map-${k}`)));
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(at)), f = at - k;
    return stops[k].map((c, channel) => Math.round(c + (stops[k + 1][channel] - c) * f));
  });
}

// Where tiles lie: a tall map is laid on its side.
export function geometry([rows, columns], width) {
  const turned = rows > 2 * columns && rows > 24;
  const across = turned ? rows : columns, down = turned ? columns : rows;
  const roomX = width - MARGIN.left - MARGIN.right, roomY = MAX_HEIGHT - MARGIN.top - MARGIN.bottom;
  let cellX = Math.min(across <= 8 ? MAX_CELL_WIDE : MAX_CELL, roomX / across);
  const cellY = Math.min(MAX_CELL, roomY / down, Math.max(cellX, Math.min(46, 300 / down)));
  if (cellY < cellX && across > 8 && down * cellX > roomY) cellX = Math.min(cellX, Math.max(cellY, roomX / across));
  const place = (i) => {
    const r = Math.floor(i / columns), c = i % columns;
    const [x, y] = turned ? [r, c] : [c, r];
    return [MARGIN.left + x * cellX, MARGIN.top + y * cellY];
  };
  return { turned, across, down, cellX, cellY, columns, place, width: Math.round(cellX * across), height: Math.round(cellY * down) };
}

// A value as it is coloured: null has no colour of the ramp.
function levelsOf(map, quantity, n) {
  const values = map[quantity];
  return Array.from({ length: n }, (_, i) => {
    const v = values[i];
    if (v === null || map.special.has(i)) return null;
    return v > 0 ? Math.log2(octaves(quantity) ? v : 1 + v) : null;
  });
}

function extremes(levels) {
  let low = Infinity, high = -Infinity;
  for (const v of levels) if (v !== null) { if (v < low) low = v; if (v > high) high = v; }
  if (!(high > low)) { low = (Number.isFinite(low) ? low : 0) - 0.5; high = low + 1; }
  return [low, high];
}

// The whole map, on a canvas of its own that overlays are drawn over. Returns it with what its legend says.
export function paint(map, quantity, at, size, ratio, flagged) {
  const { across, down, turned } = at, n = across * down;
  const levels = levelsOf(map, quantity, n);
  const [low, high] = extremes(levels);
  const ramp = viridis(), zero = rgb(colour("map-zero")), alarm = rgb(colour("critical"));
  const image = new ImageData(across, down);
  const shade = (v) => ramp[Math.round(((v - low) / (high - low)) * 255)];
  for (let i = 0; i < n; i += 1) {
    const r = Math.floor(i / map.shape[1]), c = i % map.shape[1];
    const pixel = map.flags[i] & BROKEN ? alarm : levels[i] === null ? zero : shade(levels[i]);
    image.data.set([...pixel, 255], 4 * (turned ? c * across + r : i));
  }
  const small = new OffscreenCanvas(across, down);
  small.getContext("2d").putImageData(image, 0, 0);
  const base = new OffscreenCanvas(size.width, size.height);
  const g = base.getContext("2d");
  g.scale(ratio, ratio);
  g.imageSmoothingEnabled = false;
  g.drawImage(small, MARGIN.left, MARGIN.top, at.width, at.height);
  lines(g, at);
  axes(g, at, map.row0);
  marks(g, at, map, flagged);
  words(g, at, map, quantity, levels, shade);
  return { base, ramp, low, high };
}

function lines(g, { across, down, cellX, cellY, width, height }) { // between tiles, where there is room
  if (cellX < 5 || cellY < 5) return;
  g.strokeStyle = colour("panel");
  g.lineWidth = 1;
  g.beginPath();
  for (let k = 1; k < across; k += 1) { const x = MARGIN.left + k * cellX; g.moveTo(x, MARGIN.top); g.lineTo(x, MARGIN.top + height); }
  for (let k = 1; k < down; k += 1) { const y = MARGIN.top + k * cellY; g.moveTo(MARGIN.left, y); g.lineTo(MARGIN.left + width, y); }
  g.stroke();
}

function axes(g, { across, down, cellX, cellY, turned }, row0) {
  g.fillStyle = colour("muted");
  g.font = "11px system-ui, sans-serif";
  const ticks = (n, size) => { const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048].find((e) => e * size >= 44) ?? 4096; return Array.from({ length: Math.ceil(n / every) }, (_, k) => k * every); };
  g.textAlign = "center";
  for (const k of ticks(across, cellX)) g.fillText(String(turned ? row0 + k : k), MARGIN.left + (k + 0.5) * cellX, MARGIN.top - 6);
  g.textAlign = "right";
  for (const k of ticks(down, cellY * 2)) g.fillText(String(turned ? k : row0 + k), MARGIN.left - 6, MARGIN.top + (k + 0.5) * cellY + 4);
  g.textAlign = "left";
  g.fillText(turned ? "row →" : "col →", 2, MARGIN.top - 6);
  g.fillText(turned ? "col ↓" : "row ↓", 2, MARGIN.top + 11);
}

// What stands out: never smaller than 7 pixels, whatever the scale. Each kind has a form of its own, and the frame of
// what is off-scale is light within dark, so that it is seen on every colour of the ramp and by every eye.
function marks(g, { cellX, cellY, place }, map, flagged) {
  const alarm = colour("critical"), ground = colour("panel");
  for (const i of flagged.slice(0, MAX_MARKS)) {
    const bits = map.flags[i];
    const [x, y] = place(i);
    const w = Math.max(7, cellX), h = Math.max(7, cellY);
    const left = x + cellX / 2 - w / 2, top = y + cellY / 2 - h / 2;
    if (bits & BROKEN) {
      g.fillStyle = alarm;
      g.fillRect(left, top, w, h);
      const s = Math.min(w, h, 14) / 2 - 1.5, cx = left + w / 2, cy = top + h / 2;
      g.strokeStyle = ground;
      g.lineWidth = 1.4;
      g.beginPath();
      if (bits & NONFINITE) { g.moveTo(cx - s, cy - s); g.lineTo(cx + s, cy + s); g.moveTo(cx + s, cy - s); g.lineTo(cx - s, cy + s); } else g.arc(cx, cy, s, 0, 7);
      g.stroke();
    } else {
      const thick = Math.min(4, w / 4, h / 4);
      g.lineWidth = thick;
      g.strokeStyle = "#0d1116";
      g.strokeRect(left + thick / 2, top + thick / 2, w - thick, h - thick);
      g.lineWidth = thick / 2;
      g.strokeStyle = "#ffffff";
      g.strokeRect(left + thick, top + thick, w - 2 * thick, h - 2 * thick);
      const ear = Math.min(12, w / 2, h / 2);
      g.fillStyle = alarm;
      g.beginPath();
      g.moveTo(left + w - ear, top); g.lineTo(left + w, top); g.lineTo(left + w, top + ear);
      g.fill();
    }
  }
}

function words(g, { cellX, cellY, place, across, down }, map, quantity, levels, shade) {
  if (cellX < WORDS.width || cellY < WORDS.height) return;
  g.font = "11px system-ui, sans-serif";
  g.textAlign = "center";
  for (let i = 0; i < across * down; i += 1) {
    const [x, y] = place(i);
    if (map.flags[i] & BROKEN || levels[i] === null) continue;
    const [r, gr, b] = shade(levels[i]);
    g.fillStyle = 0.299 * r + 0.587 * gr + 0.114 * b > 140 ? "#10161c" : "#ffffff";
    g.fillText(octaves(quantity) ? octave(map[quantity][i]) : number(map[quantity][i]), x + cellX / 2, y + cellY / 2 + 4);
  }
}

export function legend(panel, quantity, { ramp, low, high }) {
  const strip = panel.querySelector("canvas[data-legend]"), g = strip.getContext("2d");
  for (let x = 0; x < strip.width; x += 1) {
    g.fillStyle = `rgb(${ramp[Math.round((x / (strip.width - 1)) * 255)].join(" ")})`;
    g.fillRect(x, 0, 1, strip.height);
  }
  const say = (v) => (octaves(quantity) ? octave(2 ** v) : number(Math.max(0, Math.round(2 ** v - 1))));
  panel.querySelector("[data-legend-low]").textContent = `${LABELS[quantity]} ${say(low)}`;
  panel.querySelector("[data-legend-high]").textContent = say(high);
}
