// How the flight recorder is painted: two panes of layers × steps side by side, fprop read down and backward read up.
// Each pane is painted once, a pixel a cell, and scaled; a frame of the film is a handful of copies of it.
import { colour, short } from "./basics.js";

const GAP = 16, TOP = 22, BOTTOM = 20, RIGHT = 6;
const MOST = 32, SHADES = 64; // times the band at which the colours end
const ROW = { most: 9, least: 2 };
const PANES = ["fprop", "backward"];
const NARROW = 170, MARK = 5, MARK_NARROW = 11; // a pane of a telephone; the least size of ✕ in pixels
const AHEAD = 0.22; // what the playhead has not reached yet, while it plays

const rgb = (css) => {
  const g = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  g.fillStyle = css;
  g.fillRect(0, 0, 1, 1);
  return [...g.getImageData(0, 0, 1, 1).data.slice(0, 3)];
};

function shades() {
  const stops = [0, 1, 2, 3, 4].map((k) => rgb(colour(`ramp-${k}`)));
  return Array.from({ length: SHADES }, (_, i) => {
    const at = (i / (SHADES - 1)) * 4, k = Math.min(3, Math.floor(at)), f = at - k;
    return stops[k].map((c, j) => Math.round(c + (stops[k + 1][j] - c) * f));
  });
}

const NAME_PX = 9;

// Inside the band all is calm; outside by octaves.
export const shareOf = (v) => (v <= 1 ? 0 : Math.min(1, 0.3 + 0.7 * (Math.log2(v) / Math.log2(MOST))));
export const shadeOf = (v) => Math.round(shareOf(v) * (SHADES - 1));

// Where everything lies, in pixels of the page. Rows of one module lie beside each other in both panes.
export function geometry(data, width, most) {
  const left = Math.round(Math.min(220, width * 0.26));
  const pane = Math.max(40, (width - left - GAP - RIGHT) / 2);
  const groups = new Map();
  data.rows.forEach((row, i) => {
    if (!groups.has(row.label)) groups.set(row.label, { label: row.label, modules: row.modules, fprop: [], backward: [] });
    groups.get(row.label)[row.pane].push(i);
  });
  const tall = (g) => Math.max(g.fprop.length, g.backward.length, 1);
  const all = [...groups.values()], subs = all.reduce((n, g) => n + tall(g), 0);
  const row = Math.max(ROW.least, Math.min(ROW.most, Math.floor((most - all.length) / Math.max(1, subs))));
  const between = row >= 4 ? 2 : 1;
  const rows = new Array(data.rows.length);
  let y = TOP;
  for (const g of all) {
    g.top = y;
    g.height = tall(g) * row;
    for (const name of PANES) g[name].forEach((i, k) => {
      const h = g.height / g[name].length;
      rows[i] = { top: y + k * h, height: h };
    });
    y += g.height + between;
  }
  const n = Math.max(1, data.steps.length);
  return { left, pane, row, groups: all, rows, cell: pane / n, columns: data.steps.length, top: TOP, bottom: y, width, height: y + BOTTOM, x: [left, left + pane + GAP] };
}

function pattern(g, size, draw) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = size;
  draw(tile.getContext("2d"), size);
  return g.createPattern(tile, "repeat");
}

const hatch = (g, ratio) => pattern(g, Math.round(5 * ratio), (t, n) => {
  t.strokeStyle = colour("faint");
  t.lineWidth = Math.max(1, ratio * 0.9);
  t.globalAlpha = 0.75;
  t.beginPath();
  for (const d of [-n, 0, n]) { t.moveTo(d, n); t.lineTo(d + n, 0); }
  t.stroke();
});

const dots = (g, ratio) => pattern(g, Math.round(4 * ratio), (t, n) => {
  t.fillStyle = colour("grid");
  t.fillRect(0, 0, n, n);
  t.fillStyle = colour("faint");
  t.fillRect(0, 0, Math.max(1, Math.round(ratio)), Math.max(1, Math.round(ratio)));
});

// Runs of cells in a row for which `is` holds: [first, length].
function runs(values, is) {
  const out = [];
  for (let j = 0; j < values.length; j += 1) {
    if (!is(values[j])) continue;
    const first = j;
    while (j + 1 < values.length && is(values[j + 1])) j += 1;
    out.push([first, j - first + 1]);
  }
  return out;
}

// Both panes with all their cells, on canvases of their own.
export function paintPanes(data, at, ratio) {
  const ramp = shades(), n = at.columns, alarm = colour("critical"), ground = colour("panel");
  return PANES.map((name) => {
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(at.pane * ratio));
    canvas.height = Math.max(1, Math.round((at.bottom - at.top) * ratio));
    const g = canvas.getContext("2d");
    const line = document.createElement("canvas");
    line.width = Math.max(1, n);
    line.height = 1;
    const pen = line.getContext("2d"), pixels = pen.createImageData(line.width, 1);
    const unlooked = hatch(g, ratio), unjudged = dots(g, ratio);
    g.imageSmoothingEnabled = false;
    data.rows.forEach((row, i) => {
      if (row.pane !== name) return;
      const top = (at.rows[i].top - at.top) * ratio, height = Math.max(1, at.rows[i].height * ratio - (at.row >= 4 ? ratio : 0));
      for (const [is, fill] of [[(v) => v === null, unlooked], [(v) => v === -1, unjudged]]) {
        g.fillStyle = fill;
        for (const [first, length] of runs(row.values, is)) g.fillRect(first * at.cell * ratio, top, length * at.cell * ratio, height);
      }
      row.values.forEach((v, j) => {
        const [r, gr, b] = v === null || v < 0 ? [0, 0, 0] : ramp[shadeOf(v)];
        pixels.data.set([r, gr, b, v === null || v < 0 ? 0 : 255], 4 * j);
      });
      pen.putImageData(pixels, 0, 0);
      g.drawImage(line, 0, 0, Math.max(1, n), 1, 0, top, canvas.width, height);
    });
    const least = at.pane < NARROW ? MARK_NARROW : MARK;
    for (const [i, j] of data.marks) {
      if (data.rows[i].pane !== name) continue;
      const { top, height } = at.rows[i], w = Math.max(least, at.cell) * ratio, h = Math.max(least, height - 1) * ratio;
      const inside = (v, size, whole) => Math.max(0, Math.min(whole - size, v - size / 2)); // none is cut at an edge of its pane
      const x = inside((j + 0.5) * at.cell * ratio, w, canvas.width), y = inside((top - at.top + height / 2) * ratio, h, canvas.height);
      g.fillStyle = alarm;
      g.fillRect(x, y, w, h);
      const s = Math.min(w, h) / 2 - 0.8 * ratio, cx = x + w / 2, cy = y + h / 2;
      g.strokeStyle = ground;
      g.lineWidth = ratio;
      g.beginPath();
      g.moveTo(cx - s, cy - s); g.lineTo(cx + s, cy + s); g.moveTo(cx + s, cy - s); g.lineTo(cx - s, cy + s);
      g.stroke();
    }
    return canvas;
  });
}

// The layers whose names are written, each with its place: names that would lie on each other are left out, and of those
// what stands out at the failure goes before what does in another step, and that before all others.
export function named(data, at) {
  const j = data.steps.indexOf(data.at), marked = new Set(data.marks.map(([i, k]) => `${i},${k}`)), out = (i, k) => data.rows[i].values[k] > 1 || marked.has(`${i},${k}`);
  const rank = (group) => Math.max(...[...group.fprop, ...group.backward].map((i) => (out(i, j) ? 2 : data.steps.some((_, k) => out(i, k)) ? 1 : 0)));
  const shown = [];
  for (const { group, rank: r } of at.groups.map((g) => ({ group: g, rank: rank(g) })).sort((a, b) => b.rank - a.rank)) {
    const y = group.top + group.height / 2, room = r ? NAME_PX : NAME_PX + 2;
    if (shown.every(([, other]) => Math.abs(other - y) >= room)) shown.push([group, y]);
  }
  return shown;
}

// What does not move: names of layers, heads of the panes, steps.
export function paintFrame(data, at, ratio) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(at.width * ratio);
  canvas.height = Math.round(at.height * ratio);
  const g = canvas.getContext("2d");
  g.scale(ratio, ratio);
  g.font = "10px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
  g.fillStyle = colour("text");
  g.textAlign = "right";
  g.textBaseline = "middle";
  const chars = Math.max(6, Math.floor((at.left - 8) / 6.1));
  for (const [group, y] of named(data, at)) {
    g.fillText(short(group.modules > 1 ? `${group.label} (${group.modules})` : group.label, chars), at.left - 6, y);
  }
  g.font = "600 12px system-ui, sans-serif";
  g.textAlign = "left";
  g.textBaseline = "alphabetic";
  const narrow = at.pane < NARROW;
  [narrow ? "fprop ↓" : "fprop, read down ↓", narrow ? "backward ↑" : "backward, read up ↑"].forEach((words, k) => g.fillText(words, at.x[k], 14));
  g.font = "11px system-ui, sans-serif";
  g.fillStyle = colour("muted");
  const { steps } = data, j = steps.indexOf(data.at);
  for (const x of at.x) {
    const say = (k, align) => { g.textAlign = align; g.fillText(String(steps[k]), x + (align === "left" ? 0 : align === "right" ? at.pane : (k + 0.5) * at.cell), at.bottom + 14); };
    if (!steps.length) continue;
    say(0, "left");
    if (steps.length > 1) say(steps.length - 1, "right");
    if (j >= 0 && (j + 0.5) * at.cell > 48 && at.pane - (j + 0.5) * at.cell > 48) say(j, "center");
    if (j < 0) continue;
    g.strokeStyle = colour("critical");
    g.setLineDash([2, 3]);
    g.beginPath();
    for (const edge of [j, j + 1]) { g.moveTo(x + edge * at.cell, at.top - 2); g.lineTo(x + edge * at.cell, at.bottom + 2); }
    g.stroke();
    g.setLineDash([]);
  }
  return canvas;
}

// One frame. `column` is the playhead; `part` of the step has been executed: its first half is fprop, downwards, its
// second half backward, upwards. While it plays, what lies ahead is faint.
export function paintFilm(g, painted, at, { column, part, playing, chosen, hovered }, ratio) {
  const { frame, panes, tints } = painted;
  g.setTransform(1, 0, 0, 1, 0, 0);
  g.clearRect(0, 0, g.canvas.width, g.canvas.height);
  g.drawImage(frame, 0, 0);
  const height = panes[0].height, top = Math.round(at.top * ratio);
  panes.forEach((pane, k) => {
    const x = Math.round(at.x[k] * ratio), from = Math.round(column * at.cell * ratio), wide = Math.max(1, Math.round(at.cell * ratio));
    if (!playing) { g.drawImage(pane, x, top); return; }
    g.globalAlpha = AHEAD;
    g.drawImage(pane, x, top);
    g.globalAlpha = 1;
    if (from > 0) g.drawImage(pane, 0, 0, from, height, x, top, from, height);
    const done = Math.max(0, Math.min(1, k ? 2 * part - 1 : 2 * part)), seen = Math.round(done * height);
    if (!seen) return;
    const y = k ? height - seen : 0;
    g.drawImage(pane, from, y, wide, seen, x + from, top + y, wide, seen);
    if (done < 1) {
      g.fillStyle = tints.accent;
      g.fillRect(x + from - 3 * ratio, top + (k ? y : seen) - ratio, wide + 6 * ratio, 2 * ratio);
    }
  });
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.strokeStyle = tints.accent;
  g.lineWidth = 1.5;
  for (const x of at.x) g.strokeRect(x + column * at.cell - 1, at.top - 4, at.cell + 2, at.bottom - at.top + 6);
  for (const [cell, width] of [[hovered, 1.2], [chosen, 2]]) {
    if (!cell) continue;
    const [i, j] = cell, box = at.rows[i], w = Math.max(7, at.cell), h = Math.max(7, box.height);
    g.strokeStyle = tints.text;
    g.lineWidth = width;
    g.strokeRect(at.x[painted.paneOf[i]] + (j + 0.5) * at.cell - w / 2, box.top + box.height / 2 - h / 2, w, h);
  }
}

// The row and column under a point of the page; null beside the panes. A mark is larger than its cell: it is met from
// some pixels around its middle, a finger's breadth where a finger points.
export function cellAt(data, at, px, py, finger = false) {
  const [across, along] = finger ? [20, 20] : [5, 6];
  let near = null;
  for (const [i, j] of data.marks) {
    const dx = Math.abs(at.x[PANES.indexOf(data.rows[i].pane)] + (j + 0.5) * at.cell - px), dy = Math.abs(at.rows[i].top + at.rows[i].height / 2 - py);
    if (dx <= across && dy <= along && dx + dy < (near?.apart ?? Infinity)) near = { apart: dx + dy, cell: [i, j] };
  }
  if (near) return near.cell;
  const k = px >= at.x[1] ? 1 : 0, j = Math.floor((px - at.x[k]) / at.cell);
  if (px < at.x[k] || j < 0 || j >= at.columns) return null;
  const group = at.groups.find((g) => py >= g.top && py < g.top + g.height + 2);
  const i = group?.[PANES[k]].find((r) => py < at.rows[r].top + at.rows[r].height + 2);
  return i === undefined ? null : [i, j];
}

export function legend(strip) {
  const g = strip.getContext("2d"), ramp = shades();
  for (let x = 0; x < strip.width; x += 1) {
    g.fillStyle = `rgb(${ramp[x < 18 ? 0 : shadeOf(MOST ** ((x - 18) / (strip.width - 19)) + 1e-6)].join(" ")})`;
    g.fillRect(x, 0, 1, strip.height);
  }
}
