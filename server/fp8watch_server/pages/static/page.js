// Every page: theme button, keys, and what the other scripts do for all of them.
import "./live.js";
import "./actions.js";
import "./list_keys.js";

const root = document.documentElement;

function setTheme(theme) {
  root.dataset.theme = theme;
  try {
    sessionStorage.removeItem("fp8watch-theme");
    localStorage.setItem("fp8watch-theme", theme);
  } catch { /* storage is off: this page only */ }
  const url = new URL(location.href);
  if (url.searchParams.has("theme")) { // an address that names a theme names this one now
    url.searchParams.set("theme", theme);
    history.replaceState(null, "", url);
  }
  nameTheme();
  document.dispatchEvent(new CustomEvent("fp8watch:theme"));
}

function nameTheme() {
  const other = root.dataset.theme === "dark" ? "light" : "dark";
  const button = document.getElementById("theme-toggle");
  const word = Object.assign(document.createElement("span"), { className: "word", textContent: other === "light" ? "Light" : "Dark" });
  button.replaceChildren(other === "light" ? "☀" : "☾", word);
  button.setAttribute("aria-label", `Switch to the ${other} theme`);
  button.onclick = () => setTheme(other);
}
nameTheme();

const up = () => [...document.querySelectorAll(".crumbs a")].at(-1) ?? (location.pathname === "/" ? null : document.querySelector(".rooms a"));

// What is not here is not done on this page: the list shows the keys of the page that is open.
const help = document.getElementById("keys");
const showKeys = () => {
  const has = { flight: document.querySelector("[data-flight]"), map: document.querySelector("[data-tile-map]"), charts: document.getElementById("range"), up: up(), inbox: document.getElementById("inbox"), tick: document.querySelector("[data-tick]"), list: document.querySelector("[data-rows]"), search: document.querySelector("[data-search]") };
  for (const row of help.querySelectorAll("[data-for]")) row.hidden = !has[row.dataset.for];
  help.showModal();
};
document.getElementById("keys-button").addEventListener("click", showKeys);
help.addEventListener("click", (event) => { if (event.target === help) help.close(); });

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
  if (event.key === "t") document.getElementById("theme-toggle").click();
  if (event.key === "u") up()?.click();
  if (event.key === "?") (help.open ? help.close() : showKeys());
});
