// The flight recorder as an animated GIF, made in the browser: for a message, a report of a bug, a slide.
import { colour } from "./basics.js";
import { gif } from "./gif.js";
import { geometry, paintFilm, paintFrame, paintPanes } from "./flight_paint.js";

const WIDTH = 960, HEAD = 26, LINE = 17, LEGEND = "The more a cell stands out, the farther its site is outside of its own band. ✕: NaN, Inf or a sentinel tile.";
const PARTS = [0.25, 0.5, 0.75, 1]; // of a step around the failure
const LAST_MS = 2500;

function lines(g, words, width) {
  const out = [""];
  for (const word of words.split(/\s+/)) {
    const longer = `${out.at(-1)} ${word}`.trim();
    if (out.at(-1) && g.measureText(longer).width > width) out.push(word);
    else out[out.length - 1] = longer;
  }
  return out;
}

// data: of the API, as the panel shows it. slow(apart): how many times longer a step is shown, apart steps from the failure.
export function film(data, { title, most, step_ms, slow }) {
  const at = geometry(data, WIDTH, most), page = document.createElement("canvas"), pen = page.getContext("2d", { willReadFrequently: true });
  const picture = Object.assign(document.createElement("canvas"), { width: WIDTH, height: Math.round(at.height) });
  const painted = {
    panes: paintPanes(data, at, 1), frame: paintFrame(data, at, 1), paneOf: data.rows.map((row) => (row.pane === "fprop" ? 0 : 1)),
    tints: { accent: colour("accent"), text: colour("text") },
  };
  pen.font = "12.5px system-ui, sans-serif";
  const below = [...lines(pen, data.said.join(" "), WIDTH - 20), LEGEND];
  Object.assign(page, { width: WIDTH, height: HEAD + picture.height + LINE * below.length + 10 });
  const shots = [];
  const shoot = ({ column, part, playing }) => {
    paintFilm(picture.getContext("2d"), painted, at, { column, part, playing }, 1);
    pen.fillStyle = colour("panel");
    pen.fillRect(0, 0, page.width, page.height);
    pen.drawImage(picture, 0, HEAD);
    pen.fillStyle = colour("text");
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillText(title, 10, 18, WIDTH - 130);
    pen.textAlign = "right";
    pen.fillText(`step ${data.steps[column]}`, WIDTH - 10, 18);
    pen.textAlign = "left";
    pen.font = "12.5px system-ui, sans-serif";
    below.forEach((words, k) => {
      if (k === below.length - 1) pen.fillStyle = colour("muted");
      pen.fillText(words, 10, HEAD + picture.height + LINE * (k + 1) - 2);
    });
    return pen.getImageData(0, 0, page.width, page.height);
  };
  data.steps.forEach((step, j) => {
    const times = slow(step - data.at);
    for (const part of times > 1 ? PARTS : [1]) shots.push({ column: j, part, playing: true, ms: times > 1 ? (step_ms * times) / PARTS.length : step_ms });
  });
  const failed = data.steps.indexOf(data.at);
  shots.push({ column: failed < 0 ? data.steps.length - 1 : failed, part: 1, playing: false, ms: LAST_MS });
  return gif((n) => shoot(shots[n]), shots.map(({ ms }) => ms));
}
