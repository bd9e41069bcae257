// The steps of which a map was kept: slider, back and on, play, the steps with something wrong in them, the worst of all.
import { api, colour } from "./charts.js";

const FRAME_MS = 500;
// A step is as bad as its worst count: what is non-finite weighs most.
const TELLS = [["num_nonfinite", 1e9], ["num_sentinel_tiles", 1e6], ["num_off_scale_tiles", 1e3], ["num_saturated", 1]];

export class Steps {
  // `go(step)` shows a step and resolves when it is on the screen.
  constructor(panel, go) {
    this.panel = panel;
    this.go = go;
    this.all = JSON.parse(panel.dataset.steps);
    this.now = Number(panel.dataset.step);
    this.slider = panel.querySelector("[data-slider]");
    this.play = panel.querySelector("[data-play]");
    this.bad = new Map();
    this.timer = null;
    this.slider.addEventListener("input", () => { this.stop(); go(this.all[Number(this.slider.value)]); });
    panel.querySelector("[data-back]").addEventListener("click", () => this.move(-1));
    panel.querySelector("[data-on]").addEventListener("click", () => this.move(1));
    this.play.addEventListener("click", () => this.toggle());
    this.known = this.lookForBad(); // resolves when it is known which steps have something wrong in them
  }

  show(step) {
    this.now = step;
    this.slider.value = String(this.all.indexOf(step));
    for (const out of document.querySelectorAll("[data-map-step]")) out.textContent = String(step);
  }

  move(by) {
    this.stop();
    const to = this.all[this.all.indexOf(this.now) + by];
    if (to !== undefined) this.go(to);
  }

  neighbours() {
    const i = this.all.indexOf(this.now);
    return [this.all[i + 1], this.all[i - 1]].filter((step) => step !== undefined);
  }

  // New maps have come: whoever looked at the newest goes on with it.
  replace(all, follow) {
    const newest = this.now === this.all.at(-1);
    this.all = all;
    this.slider.max = String(all.length - 1);
    this.slider.value = String(all.indexOf(this.now));
    this.known = this.lookForBad();
    if (newest && follow && this.timer === null) this.go(all.at(-1));
  }

  toggle() {
    if (this.timer !== null) return this.stop();
    this.play.textContent = "❚❚";
    this.play.setAttribute("aria-label", "Pause");
    this.play.setAttribute("aria-pressed", "true");
    if (this.now === this.all.at(-1)) this.go(this.all[0]);
    this.frame();
  }

  frame() {
    this.timer = setTimeout(async () => {
      const to = this.all[this.all.indexOf(this.now) + 1];
      if (to === undefined) return this.stop();
      await this.go(to);
      if (this.timer !== null) this.frame();
    }, FRAME_MS);
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.play.textContent = "▶";
    this.play.setAttribute("aria-label", "Play");
    this.play.setAttribute("aria-pressed", "false");
  }

  async lookForBad() {
    const { series, site } = this.panel.dataset;
    const window_ = { from: this.all[0], to: this.all.at(-1) };
    const found = await Promise.all(TELLS.map(([field]) => api(series, { field, site, points: 2000, ...window_ }).catch(() => null)));
    const kept = new Set(this.all), bad = new Map();
    found.forEach((got, k) => got?.steps.forEach((step, i) => {
      if (kept.has(step) && got.values[i] > 0) bad.set(step, (bad.get(step) ?? 0) + TELLS[k][1] * got.values[i]);
    }));
    this.bad = bad;
    this.panel.dataset.badSteps = String(bad.size);
    this.drawBad();
  }

  // A line above the slider for each kept step with something wrong in it.
  drawBad() {
    const strip = this.panel.querySelector("[data-bad-steps-strip]"), g = strip.getContext("2d");
    strip.width = strip.clientWidth * (window.devicePixelRatio || 1);
    g.clearRect(0, 0, strip.width, strip.height);
    g.fillStyle = colour("critical");
    const last = Math.max(1, this.all.length - 1), thumb = (8 * strip.width) / Math.max(1, strip.clientWidth);
    this.all.forEach((step, i) => { if (this.bad.has(step)) g.fillRect(thumb + (i / last) * (strip.width - 2 * thumb) - 1, 0, Math.max(2, thumb / 4), strip.height); });
  }

  // The kept step with the most wrong in it; the one that is shown where nothing is wrong in any.
  worst() {
    const mine = this.bad.get(this.now) ?? 0;
    return [...this.bad].reduce((best, [step, n]) => (n > best[1] ? [step, n] : best), [this.now, mine])[0];
  }
}
