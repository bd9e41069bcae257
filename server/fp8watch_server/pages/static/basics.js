// What scripts with and without charts share: data of the collector, colours of the theme, numbers and names as text.

export const api = async (url, parameters = {}) => {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, v]) => v !== null && v !== undefined && v !== ""));
  const answer = await fetch(query.size ? `${url}?${query}` : url, { headers: { accept: "application/json" }, cache: "no-store" });
  if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
  return answer.json();
};

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const NAMES = { nan: "NaN", inf: "+Inf", "-inf": "−Inf" };

// Text that plotly shows: it reads a little HTML, and names come from outside.
export const text = (value) => String(value).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
export const short = (value, length = 34) => (value.length > length ? `…${value.slice(1 - length)}` : value);

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return NAMES[value] ?? value;
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}
