// What a chart is drawn over: steps, the clock of training, or tokens. Between the knots that the server gives, a step lies
// in proportion; before the first and after the last, at the pace of the nearest two.
const identity = (v) => v;
export const STEPS = { kind: "step", to: identity, from: (v) => Number(v), axis: {} };

function between(knots, a, b, v) {
  let low = 0, high = knots.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (knots[middle][a] <= v) low = middle; else high = middle;
  }
  const [p, q] = [knots[low], knots[high]], wide = q[a] - p[a];
  return wide > 0 ? p[b] + ((v - p[a]) / wide) * (q[b] - p[b]) : p[b];
}

// `knots`: [[step, seconds or tokens], …]. Too few of them: steps.
export function over(kind, knots) {
  if (kind === "step" || knots.length < 2) return STEPS;
  const time = kind === "time", scale = time ? 1000 : 1;
  const parsed = (v) => (typeof v === "string" && /\D/.test(v.replace(/^-|\.|e/g, "")) ? Date.parse(`${v.replace(" ", "T")}Z`) : Number(v));
  return {
    kind,
    to: (step) => (step === null ? null : between(knots, 0, 1, step) * scale),
    from: (v) => between(knots, 1, 0, parsed(v) / scale),
    axis: time ? { type: "date", title: { text: "time (UTC)", standoff: 4 }, tickformat: "", hoverformat: "%Y-%m-%d %H:%M:%S" } : { title: { text: "tokens", standoff: 4 }, tickformat: "~s", hoverformat: "~s" },
  };
}

// Traces, shapes and ranges that were made over steps.
export function moved(figure, traces, { kind, to }) {
  if (kind === "step") return;
  for (const trace of traces) {
    trace.text = trace.x.map((s) => (s === null ? "" : String(s)));
    trace.hovertemplate = trace.hovertemplate?.replaceAll("%{x}", "%{text}");
    trace.x = trace.x.map(to);
  }
  for (const shape of figure.shapes ?? []) if (shape.xref === "x") Object.assign(shape, { x0: to(shape.x0), x1: to(shape.x1) });
  if (figure.xaxis.range) figure.xaxis.range = figure.xaxis.range.map(to);
}
