// Chooses dark or light before the first paint. A classic script on purpose: modules run too late for that.
// ?theme= holds for this tab, the button's choice for this browser, else the system decides.
(() => {
  const read = (store) => { try { return store().getItem("fp8watch-theme"); } catch { return null; } };
  const asked = new URLSearchParams(location.search).get("theme");
  if (asked === "dark" || asked === "light") {
    try { sessionStorage.setItem("fp8watch-theme", asked); } catch { /* storage is off: this page only */ }
  }
  const chosen = [asked, read(() => sessionStorage), read(() => localStorage)].find((t) => t === "dark" || t === "light");
  const system = matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark";
  document.documentElement.dataset.theme = chosen ?? system;
})();
