// Charts as inline SVG: lines over the last two minutes, bars, and one stacked bar.

import { el, svg } from "./dom.js";
import { short, tick, time } from "./figures.js";

const WIDTH = 420, HEIGHT = 130, LEFT = 40, BOTTOM = 18, TOP = 8;

/** The smallest of 1, 2, 5 times a power of ten that is not below `value`. */
function roundUp(value) {
  const decade = 10 ** Math.floor(Math.log10(value));
  return decade * [1, 2, 5, 10].find((step) => step * decade >= value * 0.9999);
}

/** Lines: `series` is [{name, look, values}], a value a second, oldest first, null for no value. */
export function lines(title, series, seconds, smallest = 1) {
  const values = series.flatMap((one) => one.values.filter((value) => value !== null));
  const top = roundUp(Math.max(smallest, ...values));
  const x = (i, count) => LEFT + ((WIDTH - LEFT) * (seconds - count + i)) / (seconds - 1);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const parts = [0, 0.5, 1].flatMap((share) => [
    svg("line", { class: "grid", x1: LEFT, x2: WIDTH, y1: y(top * share), y2: y(top * share) }),
    svg("text", { x: LEFT - 6, y: y(top * share) + 4, "text-anchor": "end" }, tick(top * share)),
  ]);
  parts.push(svg("text", { x: LEFT, y: HEIGHT - 2 }, `${seconds} s ago`),
    svg("text", { x: WIDTH, y: HEIGHT - 2, "text-anchor": "end" }, "now"));
  const said = [];
  series.forEach((one, index) => {
    const runs = [[]];
    one.values.forEach((value, i) => {
      if (value === null) runs.push([]);
      else runs.at(-1).push([x(i, one.values.length), y(value)]);
    });
    for (const run of runs.filter((points) => points.length > 0)) {
      const path = run.map(([a, b], i) => `${i ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
      if (series.length === 1 && run.length > 1) {
        const floor = y(0).toFixed(1);
        parts.push(svg("path", { class: `area fill k${one.look}`, d: `${path}L${run.at(-1)[0].toFixed(1)} ${floor}L${run[0][0].toFixed(1)} ${floor}Z` }));
      }
      parts.push(svg("path", { class: `line stroke k${one.look}${index ? " second" : ""}`, d: run.length > 1 ? path : `${path}h.1` }));
    }
    said.push(`${one.name} ${short(one.values.at(-1) ?? null)}`);
  });
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, now: ${said.join(", ")}` }, ...parts);
  if (series.length === 1) return [chart];
  const keys = series.map((one, index) =>
    el("span", {}, el("i", { class: `dash k${one.look}${index ? " second" : ""}` }), one.name));
  return [chart, el("p", { class: "keys quiet", "aria-hidden": "true" }, ...keys)];
}

/** Bars: `pairs` is [[rows, count]]; neighbouring sizes share a bar when there are many. */
export function bars(title, pairs) {
  if (!pairs.length) return [el("p", { class: "empty" }, "No batch has run yet.")];
  const groups = grouped([...pairs].sort((a, b) => a[0] - b[0]));
  const total = groups.reduce((sum, [, count]) => sum + count, 0);
  const most = Math.max(...groups.map(([, count]) => count));
  const step = WIDTH / Math.max(groups.length, 4);
  const parts = groups.flatMap(([name, count], i) => {
    const height = Math.max(1, (HEIGHT - TOP - BOTTOM - 12) * (count / most));
    const left = i * step + step * 0.12;
    const share = (100 * count) / total;
    const middle = i * step + step / 2;
    return [
      svg("rect", { class: "fill k1", x: left, width: step * 0.76, y: HEIGHT - BOTTOM - height, height, rx: 2 }),
      svg("text", { x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, name),
      svg("text", { x: middle, y: HEIGHT - BOTTOM - height - 4, "text-anchor": "middle" }, share < 1 ? "<1%" : `${share.toFixed(0)}%`),
    ];
  });
  const said = groups.map(([name, count]) => `${name} rows ${((100 * count) / total).toFixed(0)} percent`).join(", ");
  return [svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${said}` }, ...parts)];
}

function grouped(pairs) {
  if (pairs.length <= 10) return pairs.map(([rows, count]) => [String(rows), count]);
  const found = new Map(); // to powers of two, as 3–4, 5–8
  for (const [rows, count] of pairs) {
    const high = 2 ** Math.ceil(Math.log2(Math.max(1, rows)));
    found.set(high, (found.get(high) ?? 0) + count);
  }
  return [...found].map(([high, count]) => [high > 2 ? `${high / 2 + 1}–${high}` : String(high), count]);
}

/** One bar of all stages with its legend: `stages` is [{name, text, look, us}]. */
export function stacked(title, stages) {
  const total = stages.reduce((sum, stage) => sum + stage.us, 0);
  if (!(total > 0)) return [el("p", { class: "empty" }, "No request has been answered yet.")];
  let at = 0;
  const parts = stages.filter((stage) => stage.us > 0).map((stage) => {
    const width = (1000 * stage.us) / total;
    const part = svg("rect", { class: `fill k${stage.look}`, x: at, y: 0, width: Math.max(0, width - 1.5), height: 26 });
    at += width;
    return part;
  });
  const rows = stages.map((stage) => el("li", { class: `k${stage.look}` },
    el("i", { class: "swatch" }), el("b", {}, stage.text), el("span", {}, time(stage.us)),
    el("span", {}, `${((100 * stage.us) / total).toFixed(0)} %`)));
  const said = `${title}: ${time(total)} a request`;
  return [
    svg("svg", { viewBox: "0 0 1000 26", preserveAspectRatio: "none", class: "stack", role: "img", "aria-label": said }, ...parts),
    el("ul", { class: "legend" }, ...rows),
  ];
}
