// What people may change on a page: acknowledge, resolve, silence for a while, end a silence; and the copy buttons.
import { refresh } from "./live.js";

const body = document.body;

async function copy(button) {
  const text = button.dataset.copyText ?? button.parentElement.querySelector("code")?.innerText ?? "";
  try {
    await navigator.clipboard.writeText(text.trim());
  } catch { // no clipboard without HTTPS: the oldest way still works there
    const area = document.createElement("textarea");
    area.value = text.trim();
    body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// One change; what the collector answers when it refuses is shown beside the buttons.
async function change(button, url, options) {
  const says = document.getElementById("action-says");
  button.disabled = true;
  says.hidden = true;
  try {
    const answer = await fetch(url, { headers: { accept: "application/json", "content-type": "application/json" }, ...options });
    if (!answer.ok) {
      const problem = await answer.json().catch(() => ({}));
      throw new Error([problem.detail, problem.remedy].filter(Boolean).join("; ") || `the collector answered ${answer.status}`);
    }
    document.activeElement?.blur();
    await refresh();
  } catch (e) {
    says.textContent = `Not done: ${e.message}`;
    says.hidden = false;
  }
  button.disabled = false;
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
document.addEventListener("submit", (event) => {
  if (!event.target.matches("[data-silence]")) return;
  event.preventDefault();
  silence(event.target);
});
