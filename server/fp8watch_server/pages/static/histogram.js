// The tiles' amax by octave, over steps: with power-of-two scales this is the distribution of the scales.
import { behind } from "./chart_data.js";
import { api, colour, draw, fail, layout, nothing, text } from "./charts.js";
import { asked, followZoom, shownRange } from "./range.js";

const base = document.body.dataset.api;

export async function drawHistogram(element, site, marked, goToMap) {
  try {
    const got = await api(`${base}/sites/${site.id}/histogram`, { points: 300, ...asked() });
    const used = got.buckets.map((_, k) => got.counts.some((row) => row && row[k] > 0));
    const first = Math.max(0, used.indexOf(true) - 1), last = Math.min(used.length - 1, used.lastIndexOf(true) + 1);
    if (!used.includes(true)) return nothing(element, "No histogram was measured at this site.");
    const buckets = got.buckets.slice(first, last + 1);
    const counts = buckets.map((_, k) => got.counts.map((row) => (row ? row[first + k] : null)));
    const ramp = [0, 1, 2, 3, 4].map((k) => [k / 4, colour(`ramp-${k}`)]);
    const every = Math.max(1, Math.ceil(buckets.length / 12));
    const traces = [{
      type: "heatmap", x: got.steps, y: buckets.map((_, k) => k), z: counts.map((row) => row.map((c) => (c ? Math.log2(1 + c) : null))), colorscale: ramp, hoverongaps: false, ygap: 1,
      customdata: counts.map((row, k) => row.map((c) => [text(buckets[k]), c === null ? "–" : Math.round(c)])),
      hovertemplate: "%{customdata[1]} tiles with amax from 1.75·%{customdata[0]}<br>at step %{x}<extra></extra>",
      colorbar: { title: { text: "tiles", side: "top", font: { size: 10.5, color: colour("muted") } }, thickness: 9, len: 0.96, outlinewidth: 0, x: 1.01, tickvals: [0, 2, 4, 6, 8, 10, 12, 14, 16], ticktext: ["0", "3", "15", "63", "255", "1k", "4k", "16k", "64k"], tickfont: { size: 10.5, color: colour("muted") } },
    }];
    const ticks = buckets.map((_, k) => k).filter((k) => k % every === 0);
    const figure = layout({
      shapes: marked(), hovermode: "closest", margin: { l: 70, r: 60, t: 8, b: 42 }, xaxis: { showgrid: false, ...shownRange(got.steps) },
      yaxis: { tickvals: ticks, ticktext: ticks.map((k) => text(buckets[k]).replace(/\^(.*)$/, "<sup>$1</sup>")), showgrid: false, title: { text: "amax of a tile ÷ 1.75", standoff: 8 } },
    });
    const isNew = await draw(element, traces, figure);
    behind(element, { rows: { columns: ["step", ...got.buckets], rows: got.steps.map((step, j) => [step, ...got.buckets.map((_, k) => got.counts[j]?.[k] ?? "")]) } });
    if (isNew) { followZoom(element); goToMap(element, site); }
  } catch (e) { fail(element, e); }
}
