// Every page: theme button, copy buttons, acknowledge and resolve, and staying live without a reload.
// Live: the API is asked every 2 s; when its answer changes, the page is fetched and its [data-live] parts are replaced.

const root = document.documentElement;
const body = document.body;
const RUNNING_MS = 2000;
const IDLE_MS = 10000;

function setTheme(theme) {
  root.dataset.theme = theme;
  try {
    sessionStorage.removeItem("fp8watch-theme");
    localStorage.setItem("fp8watch-theme", theme);
  } catch { /* storage is off: this page only */ }
  nameTheme();
  document.dispatchEvent(new CustomEvent("fp8watch:theme"));
}

function nameTheme() {
  const other = root.dataset.theme === "dark" ? "light" : "dark";
  const button = document.getElementById("theme-toggle");
  button.textContent = other === "light" ? "☀ Light" : "☾ Dark";
  button.setAttribute("aria-label", `Switch to the ${other} theme`);
  button.onclick = () => setTheme(other);
}
nameTheme();

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

async function act(button) {
  button.disabled = true;
  const answer = await fetch(`${body.dataset.incident}/${button.dataset.act}`, { method: "POST", headers: { accept: "application/json" } });
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    button.disabled = false;
    button.title = [problem.detail, problem.remedy].filter(Boolean).join(". ") || `The collector answered ${answer.status}`;
    button.classList.add("failed");
    return;
  }
  await refresh();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy], [data-act]");
  if (button?.matches("[data-copy]")) copy(button);
  if (button?.matches("[data-act]")) act(button);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("input, textarea, select")) {
    document.getElementById("theme-toggle").click();
  }
});

async function refresh() {
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html"); // scripts in it do not run
  for (const part of document.querySelectorAll("[data-live][id]")) {
    const next = fresh.getElementById(part.id);
    if (next && next.outerHTML !== part.outerHTML) part.replaceWith(document.adoptNode(next));
  }
  document.dispatchEvent(new CustomEvent("fp8watch:live"));
}

const badge = document.getElementById("live");
function say(state, text) {
  badge.hidden = !text;
  badge.className = `live ${state}`;
  badge.textContent = text;
}

const status = () => document.querySelector("[data-status]")?.dataset.status ?? "running";
let last = null;

async function poll() {
  if (!document.hidden) {
    try {
      const answers = await Promise.all(body.dataset.poll.split(" ").map((url) => fetch(url, { headers: { accept: "application/json" }, cache: "no-store" })));
      const text = (await Promise.all(answers.map((a) => a.text()))).join("\n");
      const answer = answers.find((a) => !a.ok) ?? answers[0];
      if (answer.ok) {
        if (last !== null && text !== last) {
          if ("pollReload" in body.dataset) location.reload();
          else await refresh();
        }
        last = text;
        say(status() === "running" ? "on" : "ended", status() === "running" ? "live" : status());
      } else {
        say("off", `collector answered ${answer.status}`);
      }
    } catch {
      say("off", "collector not reachable, trying again");
    }
  }
  setTimeout(poll, status() === "running" ? RUNNING_MS : IDLE_MS);
}
if (body.dataset.poll) poll();
