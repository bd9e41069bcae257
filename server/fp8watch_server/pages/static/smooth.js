// An exponential moving average over what was measured, without its start being pulled to 0. What is no number is no part
// of it, and stays a gap.
export function smoothed(y, weight) {
  let sum = 0, norm = 0;
  return y.map((v) => {
    if (v === null || !Number.isFinite(v)) return null;
    sum = weight * sum + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}
