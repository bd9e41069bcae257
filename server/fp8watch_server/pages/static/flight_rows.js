// Where there is room for one row a module only, its sites share one: the worst of each step, with its name.

// Rows that do not fit into `most` pixels, of `least` each, become one for each module and pane. A mark outweighs any distance.
export function fitted(data, most, least) {
  const tall = new Map();
  for (const { label, pane } of data.rows) {
    const of = tall.get(label) ?? { fprop: 0, backward: 0 };
    of[pane] += 1;
    tall.set(label, of);
  }
  const subs = [...tall.values()].reduce((n, of) => n + Math.max(of.fprop, of.backward), 0);
  if (subs * least <= most || subs === tall.size) return data;
  const groups = new Map(), sites = { ...data.sites }, marked = new Map(data.marks.map((mark) => [`${mark[0]},${mark[1]}`, mark]));
  const bySqnr = new Set(data.sqnr.map(([i, j]) => `${i},${j}`));
  data.rows.forEach((row, i) => {
    const key = `${row.pane} ${row.label}`;
    if (!groups.has(key)) groups.set(key, { row: { ...row, operand: null, direction: null, site: null }, of: [] });
    groups.get(key).of.push(i);
    if (row.site !== null) sites[String(row.site)] ??= [row.label, row.operand, row.direction];
  });
  const marks = [], sqnr = [];
  const rows = [...groups.values()].map(({ row, of }, r) => {
    const rank = (i, j) => (marked.has(`${i},${j}`) ? Infinity : data.rows[i].values[j] ?? -2);
    const best = data.steps.map((_, j) => of.reduce((a, i) => (rank(i, j) > rank(a, j) ? i : a)));
    best.forEach((i, j) => {
      const mark = marked.get(`${i},${j}`);
      if (mark) marks.push([r, j, mark[2], mark[3]]);
      if (bySqnr.has(`${i},${j}`)) sqnr.push([r, j]);
    });
    return { ...row, values: best.map((i, j) => data.rows[i].values[j]), sites: best.map((i, j) => data.rows[i].site ?? data.rows[i].sites[j]) };
  });
  return { ...data, rows, marks, sqnr, sites };
}
