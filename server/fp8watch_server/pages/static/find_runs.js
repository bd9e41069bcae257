// Runs to choose from for a comparison: what is typed narrows both lists; a run that is chosen stays in its list.
const PAUSE_MS = 200;
const field = document.querySelector("[data-find]"), says = document.getElementById("offered");
const lists = [...field.form.querySelectorAll("select")];
let timer = null, asked = 0;

function offer(list, found) {
  const chosen = list.selectedOptions[0];
  const kept = chosen === undefined || chosen.value === "" ? null : chosen;
  list.replaceChildren(...[...found.options].filter((o) => o.value !== kept?.value).map((o) => new Option(o.text, o.value)));
  if (kept) list.options[0].after(kept);
  list.value = kept?.value ?? "";
}

async function find() {
  const turn = ++asked;
  try {
    const answer = await fetch(`/compare?${new URLSearchParams({ q: field.value })}`, { headers: { accept: "text/html" } });
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (turn !== asked) return; // more was typed since
    for (const list of lists) offer(list, found.querySelector(`select[name="${list.name}"]`));
    says.textContent = found.getElementById("offered").textContent;
  } catch (e) {
    if (turn === asked) says.textContent = `The search got no answer (${e.message}); press Enter to ask again`;
  }
}

field.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(find, PAUSE_MS);
});
