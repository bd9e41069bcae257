// What people may change on a page: what an incident is and whose, comments, silences; and the copy buttons.
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
    if (renew) await refresh();
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
