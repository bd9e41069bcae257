// Runs, on their list and on the page of one: tick, archive, delete after a question, tags and a note; keys of the list.
import { change } from "./actions.js";

const ticked = new Set();
const boxes = () => [...document.querySelectorAll("[data-tick]")];
const url = (id) => `/api/v1/runs/${encodeURIComponent(id)}`;

function showTicked() {
  const there = new Set(boxes().map((box) => box.value));
  for (const id of ticked) if (!there.has(id)) ticked.delete(id);
  for (const box of boxes()) box.checked = ticked.has(box.value);
  const bar = document.querySelector("[data-ticked]");
  if (bar === null) return;
  bar.hidden = ticked.size === 0;
  bar.querySelector("[data-ticked-count]").textContent = `${ticked.size} chosen`;
  const compared = bar.querySelector("[data-compare]");
  compared.disabled = ticked.size !== 2;
  compared.textContent = ticked.size === 2 ? "Compare" : "Compare: choose two";
}

// A question in the page's own words; resolves to whether it was answered with yes.
function ask(text, verb) {
  const dialog = document.createElement("dialog");
  const words = Object.assign(document.createElement("p"), { textContent: text });
  const yes = Object.assign(document.createElement("button"), { type: "submit", value: "yes", textContent: verb, className: "danger" });
  const no = Object.assign(document.createElement("button"), { type: "submit", value: "no", textContent: "Cancel", autofocus: true });
  const form = Object.assign(document.createElement("form"), { method: "dialog", className: "buttons" });
  form.append(no, yes);
  dialog.append(words, form);
  dialog.setAttribute("aria-label", `${verb}?`);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(dialog.returnValue === "yes");
  }));
}

async function act(button) {
  const ids = button.dataset.run !== undefined ? [button.dataset.run] : [...ticked];
  const what = ids.length === 1 ? `run ${ids[0]}` : `${ids.length} runs`;
  const back = "back" in button.dataset || document.querySelector("[data-rows][data-archived]") !== null;
  if (button.dataset.runsDo === "delete") {
    if (!(await ask(`Delete ${what}, with all of its steps, incidents and comments? This cannot be undone.`, "Delete"))) return;
    for (const id of ids) if (!(await change(button, url(id), { method: "DELETE" }, false))) return;
  } else {
    if (!back && !(await ask(`Archive ${what}? It leaves the list, keeps its data, and comes back when it goes on.`, "Archive"))) return;
    for (const id of ids) if (!(await change(button, url(id), { method: "PATCH", body: JSON.stringify({ archived: !back }) }, false))) return;
  }
  ticked.clear();
  if (button.dataset.run !== undefined && button.dataset.runsDo === "delete") location.assign("/");
  else location.reload();
}

document.addEventListener("change", ({ target }) => {
  if (target.matches("[data-tick]")) {
    if (target.checked) ticked.add(target.value);
    else ticked.delete(target.value);
    showTicked();
    target.blur(); // the list stays live
  }
  if (target.matches("[data-submit]")) target.form.requestSubmit();
});
// Two runs side by side, in the order in which they were chosen.
function compare() {
  const [a, b] = [...ticked];
  if (ticked.size === 2) location.assign(`/compare?${new URLSearchParams({ a, b })}`);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-runs-do]");
  if (button) act(button);
  if (event.target.closest("[data-compare]")) compare();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "c" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("input:not([type=checkbox]), textarea, select, dialog")) compare();
});
document.addEventListener("submit", async (event) => {
  if (event.target.matches(".filters")) { // what was not chosen is not in the address
    for (const field of event.target.elements) if (field.name && !field.value) field.disabled = true;
    return;
  }
  if (!event.target.matches("[data-edit-run]")) return;
  event.preventDefault();
  const { tags, note } = event.target.elements;
  const body = { tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note: note.value };
  const done = await change(event.submitter ?? event.target.querySelector("button"), event.target.dataset.runUrl, { method: "PATCH", body: JSON.stringify(body) });
  if (done) event.target.closest("details").open = false;
});
document.addEventListener("fp8watch:live", showTicked);
addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll(".filters :disabled")) field.disabled = false;
  showTicked();
});
