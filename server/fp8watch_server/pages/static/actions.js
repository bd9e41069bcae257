// What people may change on a page: what an incident is and whose, comments, silences; and the copy buttons.
import { refresh } from "./live.js";

const body = document.body;

const COPIED_MS = 1500;
const textOf = (button) => (button.dataset.copyText ?? button.parentElement.querySelector("code")?.innerText ?? "").trim();
let copied = null, copiedTimer = null; // the text that was copied last, while its buttons say so

function sayCopied() {
  for (const button of document.querySelectorAll("[data-copy]")) button.textContent = copied !== null && textOf(button) === copied ? "Copied" : "Copy";
}
document.addEventListener("fp8watch:live", sayCopied); // the button may be a new one

async function copy(button) {
  const text = textOf(button);
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no clipboard without HTTPS: the oldest way still works there
    const area = document.createElement("textarea");
    area.value = text;
    body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  copied = text;
  sayCopied();
  clearTimeout(copiedTimer);
  copiedTimer = setTimeout(() => { copied = null; sayCopied(); }, COPIED_MS);
}

// One change; what the collector answers when it refuses is shown beside the buttons.
export async function change(button, url, options, renew = true) {
  const says = document.getElementById("action-says");
  let done = false;
  button.disabled = true;
  says.hidden = true;
  try {
    const answer = await fetch(url, { headers: { accept: "application/json", "content-type": "application/json" }, ...options });
    if (!answer.ok) {
      const problem = await answer.json().catch(() => ({}));
      throw new Error([problem.detail, problem.remedy].filter(Boolean).join("; ") || `the collector answered ${answer.status}`);
    }
    done = true;
    document.activeElement?.blur();
    if (renew) await refresh().catch(() => {}); // it is done: the stream tells of it, and the page tries again
  } catch (e) {
    says.textContent = `Not done: ${e.message}`;
    says.hidden = false;
  }
  button.disabled = false;
  return done;
}

const escaped = (name) => name.replace(/[*?[]/g, "[$&]"); // silences take patterns; a module's name is none

function silence(form) {
  const { run, mode, module } = form.dataset;
  const what = { duration_s: Number(form.elements.duration.value), run_id: escaped(run), mode: escaped(mode), module: escaped(module), comment: "from the incident's page" };
  return change(form.querySelector("button"), "/api/v1/silences", { method: "POST", body: JSON.stringify(what) });
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy], [data-act], [data-end-silence]");
  if (button?.matches("[data-copy]")) copy(button);
  if (button?.matches("[data-act]")) change(button, `${body.dataset.incident}/${button.dataset.act}`, { method: "POST" });
  if (button?.matches("[data-end-silence]")) change(button, `/api/v1/silences/${encodeURIComponent(button.dataset.endSilence)}`, { method: "DELETE" });
});
document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.matches("[data-silence]")) {
    event.preventDefault();
    silence(form);
  }
  if (form.matches("[data-say]")) {
    event.preventDefault();
    const said = Object.fromEntries(new FormData(form));
    const done = await change(form.querySelector("button"), `${body.dataset.incident}/${form.dataset.say}`, { method: "POST", body: JSON.stringify(said) });
    if (done && form.dataset.say === "comment") form.reset();
  }
});
