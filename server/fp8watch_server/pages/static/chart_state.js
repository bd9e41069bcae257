// How charts are shown (smoothing, log y, band, further panels) stands in the address, and is set by the tools above them.
const query = () => new URLSearchParams(location.search);

export const state = (name) => query().get(name) ?? "";
export const panels = () => [...new Set(query().getAll("panel"))].slice(0, 6);

function put(change) {
  const url = new URL(location.href);
  change(url.searchParams);
  history.replaceState(null, "", url);
  show();
  document.dispatchEvent(new CustomEvent("fp8watch:shown"));
}

// Buttons and lists say what the address says.
function show() {
  for (const tool of document.querySelectorAll("[data-state]")) {
    const value = state(tool.dataset.state);
    if (tool.matches("select")) tool.value = [...tool.options].some((o) => o.value === value) ? value : "";
    else tool.setAttribute("aria-pressed", String(value === "1"));
  }
  const shown = panels();
  for (const button of document.querySelectorAll("[data-panel]")) button.setAttribute("aria-pressed", String(shown.includes(button.dataset.panel)));
}

document.addEventListener("change", ({ target }) => {
  const { state: name } = target.dataset ?? {};
  if (name !== undefined && target.matches("select")) put((q) => (target.value ? q.set(name, target.value) : q.delete(name)));
});
document.addEventListener("click", ({ target }) => {
  const toggle = target.closest("button[data-state]"), panel = target.closest("button[data-panel]");
  if (toggle) put((q) => (state(toggle.dataset.state) === "1" ? q.delete(toggle.dataset.state) : q.set(toggle.dataset.state, "1")));
  if (!panel) return;
  const name = panel.dataset.panel, shown = panels();
  put((q) => {
    q.delete("panel");
    for (const other of shown) if (other !== name) q.append("panel", other);
    if (!shown.includes(name)) q.append("panel", name);
  });
  if (!shown.includes(name)) document.getElementById("training")?.scrollIntoView({ block: "nearest" });
});
document.addEventListener("fp8watch:live", show);
show();
