// One tile in words: its place, its flags, amax, scale_inv and counts. For the hover and for the panel beside the map.
import { NAMES, number } from "./charts.js";
import { FLAG, FLAG_NAMES, LOUD } from "./tile_flags.js";
import { octave } from "./tile_paint.js";

const el = (tag, textContent, className = "") => Object.assign(document.createElement(tag), { textContent, className });
const span = (name, at, size, length) => { const a = at * size, b = Math.max(a, Math.min(a + size, length) - 1); return a === b ? `${name} ${a}` : `${name}s ${a}–${b}`; };

export function tileWords(map, [r, c], tileShape, siteShape, brief) {
  const i = (r - map.row0) * map.shape[1] + c, bits = map.flags[i];
  const amax = map.special.has(i) ? NAMES[map.special.get(i)] ?? map.special.get(i) : map.amax[i];
  const scaleInv = map.specialScale.get(i) ?? map.scale_inv[i];
  const power = (v) => (typeof v === "number" && v > 0 ? octave(v) : "");
  const facts = [
    ["amax", typeof amax === "string" ? amax : number(amax), power(amax), typeof amax === "string"],
    ["scale_inv", number(scaleInv, 6), power(scaleInv), false],
    ["non-finite", number(map.num_nonfinite[i]), "elements", map.num_nonfinite[i] > 0],
    ["underflow", number(map.num_underflow[i]), "elements", false],
  ];
  const list = document.createElement("dl");
  for (const [name, value, more, alarming] of facts) {
    const dd = el("dd", value, alarming ? "nonfinite" : "");
    if (more) dd.append(" ", el("small", more));
    list.append(el("dt", name), dd);
  }
  const what = tileShape[0] > 1 && tileShape[1] > 1 ? "Block" : "Tile";
  const out = [el("strong", `${what} (${r}, ${c})`)];
  out.push(el("p", `${span("row", r, tileShape[0], siteShape[0])}, ${span("column", c, tileShape[1], siteShape[1])}`, "muted"));
  const flags = Object.keys(FLAG).filter((k) => bits & FLAG[k]);
  if (flags.length) {
    const p = el("p", "", "flags");
    for (const k of flags) p.append(el("span", FLAG_NAMES[k], `chip flag${FLAG[k] & LOUD ? " loud" : ""}`), " ");
    out.push(p);
  }
  out.push(list);
  if (!brief && bits & FLAG.INF) out.push(el("p", "An Inf made the scale 1: its neighbours in the tile were quantised unscaled, and the Inf itself was stored as the largest finite code.", "why"));
  if (!brief && bits & FLAG.OFF_SCALE) out.push(el("p", "The scale does not fit the amax beside it: the tile was scaled by a number that was made for other values.", "why"));
  return out;
}
