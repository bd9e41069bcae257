// Staying live without a reload: the collector tells of changes (server-sent events), the page is fetched and its
// [data-live] parts are replaced, and charts are told to draw anew. A page that nobody sees holds no connection.

const body = document.body;
const LEAST_MS = 1000, AGAIN_MS = 2000, PRESS_MS = 3000;
const badge = document.getElementById("live");
let seen = body.dataset.version ?? null, source = null, timer = null, readyAt = 0, due = null;
let stale = false; // a change was told of, and could not be fetched yet

function say(state, text) {
  badge.hidden = !text;
  badge.className = `live ${state}`;
  badge.textContent = text;
}

const status = () => document.querySelector("[data-status]")?.dataset.status ?? "running";
const well = () => say(status() === "running" ? "on" : "ended", status() === "running" ? "live" : status());

// A press ends on what it began on, or it is no click: nothing is replaced between the two, for as long as a press takes.
let pressed = false;
addEventListener("pointerdown", () => { pressed = true; }, true);
for (const end of ["pointerup", "pointercancel", "dragend"]) {
  addEventListener(end, () => setTimeout(() => { pressed = false; }), true); // the click comes behind it
}
const released = async () => {
  for (const late = performance.now() + PRESS_MS; pressed && performance.now() < late; ) await new Promise((resolve) => setTimeout(resolve, 20));
};

// What is shown is gone with a 404: then the collector's own page says so.
export async function refresh() {
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (answer.status === 404) return location.reload();
  if (!answer.ok) throw new Error(`${location.pathname}: ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html"); // scripts in it do not run
  await released();
  for (const part of document.querySelectorAll("[data-live][id]")) {
    const next = fresh.getElementById(part.id);
    // What somebody is using stays until they are done with it: a list that is open, a field that has the focus.
    if (!next || next.outerHTML === part.outerHTML || part.contains(document.activeElement?.closest("select, input") ?? null)) continue;
    for (const open of part.querySelectorAll("details[open][id]")) next.querySelector(`#${CSS.escape(open.id)}`)?.setAttribute("open", "");
    for (const list of part.querySelectorAll("select[aria-label]")) { // what was chosen stays chosen
      const same = next.querySelector(`select[aria-label="${CSS.escape(list.getAttribute("aria-label"))}"]`);
      if (same && !list.selectedOptions[0]?.defaultSelected) same.value = list.value;
    }
    const { scrollLeft } = part; // a table wider than the window stays where it was scrolled to
    const focused = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    part.replaceWith(document.adoptNode(next));
    next.scrollLeft = scrollLeft;
    if (focused) next.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true }); // keys go on from there
  }
  Object.assign(body.dataset, fresh.body.dataset); // what scripts are told: steps of an incident, maps that there are
  document.dispatchEvent(new CustomEvent("fp8watch:live", { detail: fresh }));
}

// Many changes are one; and a page that takes long to fetch is fetched less often.
function changed() {
  if (due !== null) return;
  due = setTimeout(async () => {
    due = null;
    if ("watchReload" in body.dataset) return location.reload();
    const began = performance.now();
    stale = await refresh().then(() => false, () => true);
    readyAt = performance.now() + Math.max(stale ? AGAIN_MS : LEAST_MS, 3 * (performance.now() - began));
    if (!stale) return well();
    if (source?.readyState !== EventSource.OPEN) return; // when it is there again, so is its first event
    say("off", "could not be renewed, trying again");
    changed();
  }, Math.max(0, readyAt - performance.now()));
}

function connect() {
  clearTimeout(timer);
  if (source !== null || document.hidden) return;
  source = new EventSource(body.dataset.watch);
  source.addEventListener("change", ({ data }) => {
    if (stale || (seen !== null && data !== seen)) changed();
    seen = data;
    if (!stale) well();
  });
  source.addEventListener("error", () => {
    say("off", "collector not reachable, trying again");
    if (source?.readyState !== EventSource.CLOSED) return; // the browser tries by itself
    source = null;
    timer = setTimeout(connect, AGAIN_MS);
  });
}

function disconnect() {
  clearTimeout(timer);
  source?.close();
  source = null;
}

// "3 min ago" is true for a minute.
function age() {
  const now = Date.now() / 1000;
  for (const time of document.querySelectorAll("time[data-at]")) {
    const s = Math.max(0, now - Number(time.dataset.at));
    const [n, unit] = s >= 86400 ? [s / 86400, "d"] : s >= 3600 ? [s / 3600, "h"] : s >= 60 ? [s / 60, "min"] : [s, "s"];
    time.textContent = s < 2 ? "just now" : `${Math.floor(n)} ${unit} ago`;
  }
}
setInterval(age, 5000);

if (body.dataset.watch) {
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  addEventListener("pagehide", disconnect); // a page in the back/forward cache must not hold one either
  addEventListener("pageshow", connect);
  connect();
}
