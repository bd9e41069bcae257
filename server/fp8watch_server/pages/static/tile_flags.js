// What a tile may be said to be: the bits that the agent sends, their names, and which tile is the worst of a map.

export const FLAG = { NAN: 1, INF: 2, SENTINEL: 4, ZERO: 8, EPS: 16, OFF_SCALE: 32, SATURATED: 64, UNDERFLOW: 128 };
export const FLAG_NAMES = { NAN: "NaN", INF: "Inf", SENTINEL: "sentinel: scale forced to 1", ZERO: "zero tile", EPS: "clamped by eps", OFF_SCALE: "off-scale", SATURATED: "saturated", UNDERFLOW: "underflow" };
export const NONFINITE = FLAG.NAN | FLAG.INF;
export const BROKEN = NONFINITE | FLAG.SENTINEL;
export const LOUD = BROKEN | FLAG.OFF_SCALE | FLAG.SATURATED; // the others are everyday
const WORST_FIRST = [FLAG.NAN, FLAG.INF, FLAG.SENTINEL, FLAG.OFF_SCALE, FLAG.SATURATED];

export const loud = (map) => map.flags.map((bits, i) => [bits, i]).filter(([bits]) => bits & LOUD).map(([, i]) => i);

// Index of the worst tile: by flag, then by how many elements are non-finite; of a map without any flag the tile that
// lost most elements, and where none was lost the one with the largest amax.
export function worstTile(map) {
  const rank = (i) => WORST_FIRST.findIndex((flag) => map.flags[i] & flag);
  const flagged = loud(map);
  if (flagged.length) return flagged.reduce((a, b) => (rank(b) < rank(a) || (rank(b) === rank(a) && (map.num_nonfinite[b] ?? 0) > (map.num_nonfinite[a] ?? 0)) ? b : a));
  const most = (list) => list.reduce((best, v, i) => ((v ?? -1) > (list[best] ?? -1) ? i : best), 0);
  return (map.num_underflow[most(map.num_underflow)] ?? 0) > 0 ? most(map.num_underflow) : most(map.amax);
}
