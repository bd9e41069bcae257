// The inbox: what is said of a cause goes to its incidents in all runs. e: acknowledge, or seen, of the row that is chosen.
import { change } from "./actions.js";

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-post]");
  if (button) change(button, button.dataset.post, { method: "POST" });
});
document.addEventListener("change", ({ target }) => {
  if (target.matches("[data-submit]")) target.form.requestSubmit();
});
document.addEventListener("submit", ({ target }) => {
  if (target.matches(".filters")) for (const field of target.elements) if (field.name && !field.value) field.disabled = true;
});
addEventListener("pageshow", () => {
  for (const field of document.querySelectorAll(".filters :disabled")) field.disabled = false;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "e" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  document.querySelector("tr.chosen [data-key=e]")?.click(); // no button of the row but this one: another may close the cause
});
