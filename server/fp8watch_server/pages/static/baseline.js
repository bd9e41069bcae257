// The band of what was usual: the median of the 32 measurements before each one, ± 4σ, as the detectors see it (their σ is
// robust too: 1.4826 × the median distance from the median). A value outside of it is what to look at.

const WINDOW = 32, LEAST = 12, SIGMAS = 4, MAD_TO_SIGMA = 1.4826;
// Spread from step to step that is believed, by operand: octaves of amax and scale_inv.
const FLOOR_OCTAVES = { input: 0.12, weight: 0.01, grad_output: 0.5 };
const FLOOR = { dB: 0.25, ratio: 0.0005 };

const middle = (ordered) => (ordered.length % 2 ? ordered[ordered.length >> 1] : (ordered[ordered.length / 2 - 1] + ordered[ordered.length / 2]) / 2);
const ascending = (list) => list.slice().sort((a, b) => a - b);

// `y` as it is drawn (octaves, dB, percent); null where there was nothing. Returns [steps, low, high], null before enough
// was measured to say what is usual. What lies outside of the band does not feed it: a fault must not become usual.
// What walks, as amax of a weight does, is held against the value before it, and σ is that of its changes (store/deviation.py).
export function band(steps, y, floor, walks = false) {
  const x = [], low = [], high = [], past = [];
  let outside = 0, before = null;
  steps.forEach((step, i) => {
    if (past.length + walks >= LEAST) {
      const around = walks ? 0 : middle(ascending(past)), m = walks ? before : around;
      const spread = SIGMAS * Math.max(floor, MAD_TO_SIGMA * middle(ascending(past.map((v) => Math.abs(v - around)))));
      x.push(step);
      low.push(m - spread);
      high.push(m + spread);
      if (y[i] === null) return;
      outside = Math.abs(y[i] - m) > spread ? outside + 1 : 0;
      if (outside > WINDOW) { outside = 0; past.length = 0; before = null; } // so many in a row are a new normal: begin again
      if (outside > 0) return;
    }
    if (y[i] === null) return;
    if (!walks) past.push(y[i]);
    else if (before !== null) past.push(y[i] - before);
    before = y[i];
    if (past.length > WINDOW) past.shift();
  });
  return { x, low, high };
}

export const floorOf = (kind, operand) => (kind === "octaves" ? FLOOR_OCTAVES[operand] ?? 0.12 : kind === "percent" ? 100 * FLOOR.ratio : FLOOR[kind] ?? 0);

// Two traces: the lower edge, and the upper one filled down to it. They lie under the lines and are not hovered.
export function bandTraces(usual, fill, axis = "y") {
  if (!usual.x.length) return [];
  const edge = { x: usual.x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, yaxis: axis, meta: "band", zorder: -1 };
  return [{ ...edge, y: usual.low, name: "usual, low" }, { ...edge, y: usual.high, name: "usual", fill: "tonexty", fillcolor: fill }];
}
