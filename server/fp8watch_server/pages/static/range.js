// The steps that all charts of a page show: dragged in any of them, kept in the address, and read again from the server,
// which thins out what it sends. A double click, or the key 0, shows all steps again.

const whole = (name) => {
  const value = new URLSearchParams(location.search).get(name);
  return value !== null && /^\d{1,15}$/.test(value) ? Number(value) : null;
};

// What is asked of the server: {from, to}, each null where open.
export const asked = () => {
  const [from, to] = [whole("from"), whole("to")];
  return from !== null && to !== null && from > to ? { from: to, to: from } : { from, to };
};

// For an x axis. Without a range the data decides; `uirevision` makes plotly forget a zoom that has gone out of date.
export const shownRange = (steps = []) => {
  const { from, to } = asked();
  if (from === null && to === null) return { autorange: true };
  const [low, high] = [from ?? steps[0] ?? 0, to ?? steps.at(-1) ?? from];
  return { range: [low - 0.5, high + 0.5], autorange: false };
};

export const revision = () => `${whole("from")}-${whole("to")}`;

export function set(from, to) {
  const url = new URL(location.href);
  for (const [name, value] of [["from", from], ["to", to]]) {
    if (value === null) url.searchParams.delete(name); else url.searchParams.set(name, String(value));
  }
  if (url.href === location.href) return;
  history.replaceState(null, "", url);
  show();
  document.dispatchEvent(new CustomEvent("fp8watch:range"));
}

// A chart that was dragged moves all of them. `stepOf` makes steps of what it is drawn over.
export function followZoom(element, stepOf = Number) {
  element.on("plotly_relayout", (change) => {
    const axis = ["xaxis", "xaxis2"].find((name) => `${name}.range[0]` in change || `${name}.autorange` in change || `${name}.range` in change);
    if (!axis) return;
    if (change[`${axis}.autorange`]) return set(null, null);
    const [low, high] = change[`${axis}.range`] ?? [change[`${axis}.range[0]`], change[`${axis}.range[1]`]];
    set(Math.max(0, Math.ceil(stepOf(low))), Math.max(0, Math.floor(stepOf(high))));
  });
  element.on("plotly_doubleclick", () => set(null, null));
}

// The button that says which steps are shown, and leads back to all of them.
function show() {
  const button = document.getElementById("range");
  if (!button) return;
  const { from, to } = asked();
  button.hidden = from === null && to === null;
  button.textContent = `Steps ${from ?? 0}–${to ?? "now"} ✕`;
  button.onclick = () => set(null, null);
}

// Twice as near, or half: around the middle of what is shown. `shown` gives the first and the last step of a chart.
let shown = () => null;
export const zoomsOf = (ends) => { shown = ends; };
export function zoom(times) {
  if (!times) return set(null, null);
  const ends = shown();
  if (!ends) return;
  const middle = (ends[0] + ends[1]) / 2, half = Math.max(1, (ends[1] - ends[0]) / times / 2);
  set(Math.max(0, Math.round(middle - half)), Math.round(middle + half));
}
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-zoom]");
  if (button) zoom(Number(button.dataset.zoom));
});

document.addEventListener("keydown", (event) => {
  const near = { "+": 2, "-": 0.5 }[event.key];
  if (near && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("input, textarea, select")) zoom(near);
  if (event.key === "0" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("input, textarea, select")) set(null, null);
});
show();
