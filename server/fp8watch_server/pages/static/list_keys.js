// Keys of a list: / searches, j and k go from row to row, Enter opens, x ticks.

const rows = () => [...document.querySelectorAll("[data-rows] tbody tr")];
let at = null; // address of the row that is chosen: the list may be sorted anew while it is looked at

const address = (row) => row.querySelector("a.rowlink")?.getAttribute("href") ?? null;

function show() {
  for (const row of rows()) row.classList.toggle("chosen", at !== null && address(row) === at);
}

function move(by) {
  const all = rows();
  if (!all.length) return;
  const now = all.findIndex((row) => address(row) === at);
  const next = all[Math.min(all.length - 1, Math.max(0, now < 0 ? (by > 0 ? 0 : all.length - 1) : now + by))];
  at = address(next);
  show();
  next.querySelector("a.rowlink").focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input:not([type=checkbox]), textarea, select, dialog")) return;
  const search = document.querySelector("[data-search]");
  if (event.key === "/" && search) {
    event.preventDefault();
    search.focus();
    search.select();
  }
  if (!document.querySelector("[data-rows]")) return;
  if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
  if (event.key === "x") rows().find((row) => address(row) === at)?.querySelector("[data-tick]")?.click();
});
document.addEventListener("fp8watch:live", show);
