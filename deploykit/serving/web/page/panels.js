// The panels of one model: its figures over time, where the time goes, its latencies and batches.

import { PANEL, drawBars, drawStack, draw, number, tick } from "./charts.js";
import { el, empty, graphic } from "./dom.js";
import { between, time, timeTick } from "./figures.js";

const SHORT_S = 120, LONG_S = 600; // the least and the most that a chart spans
const STAGES = {
  decode: ["Decode", 7], queue: ["Queue", 2], join: ["Join", 5], copy_in: ["Copy in", 6], compute: ["Compute", 1],
  "copy_out": ["Copy out", 4], split: ["Split", 3], encode: ["Encode", 8], other: ["Hand-over", 0],
};

/** A line for each of `series`, [{label, look, values}]; `ages` are the values' ages in seconds. */
export function trend(title, unit, ages, series, smallest = 1) {
  const spanned = Math.min(LONG_S, Math.max(SHORT_S, ...ages));
  const minutes = Math.round(spanned / 6) / 10;
  const ticks = [[-spanned, `${tick(minutes)} min ago`], [-spanned / 2, `${tick(minutes / 2)} min ago`], [0, "now"]];
  const now = series.map(({ label, values }) => `${label} ${number(values.at(-1) ?? null)} ${unit}`).join(", ");
  const chart = draw({
    title, alt: `${title}, now: ${now}`, zero: true, y_top: smallest, x_log: false, x_tight: true, x_ticks: ticks,
    series: series.map(({ label, look, values }) => ({ label, look, marks: values.map((y, i) => ({ x: -Math.min(ages[i], spanned), y })) })),
  }, PANEL);
  return chart ? graphic(chart) : empty("No request has been answered in this time.");
}

/** Bars of the answered requests by their latency. */
export function latencies(title, counts, bounds) {
  const used = counts.map((_, i) => i).filter((i) => counts[i] > 0);
  if (!used.length) return empty("No request has been answered yet.");
  const first = Math.max(0, used[0] - 1), last = Math.min(counts.length - 1, used.at(-1) + 1);
  const bars = counts.slice(first, last + 1).map((value, i) => {
    const bound = bounds[first + i];
    return { value, label: bound === undefined ? "more" : timeTick(bound) };
  });
  const most = bars.reduce((a, b) => (b.value > a.value ? b : a));
  return graphic(drawBars({ bars, alt: `${title}: most often up to ${most.label}` }));
}

/** Bars of the batches by their size; neighbouring sizes share a bar when there are many. */
export function batchSizes(title, pairs) {
  if (!pairs.length) return empty("No batch has run yet.");
  const sizes = [...pairs].sort((a, b) => a[0] - b[0]);
  const bars = (sizes.length <= 10 ? sizes.map(([rows, value]) => ({ label: String(rows), value })) : byPowers(sizes));
  const total = bars.reduce((sum, bar) => sum + bar.value, 0);
  const shares = bars.map(({ label, value }) => `${label} rows ${((100 * value) / total).toFixed(0)} percent`).join(", ");
  return graphic(drawBars({ bars, alt: `${title}: ${shares}` }));
}

function byPowers(sizes) {
  const found = new Map(); // to powers of two, as 3–4, 5–8
  for (const [rows, value] of sizes) {
    const high = 2 ** Math.ceil(Math.log2(Math.max(1, rows)));
    found.set(high, (found.get(high) ?? 0) + value);
  }
  return [...found].map(([high, value]) => ({ label: high > 2 ? `${high / 2 + 1}–${high}` : String(high), value }));
}

/** One bar of the stages of a request, with its legend, from `between`'s figures. */
export function stages({ stages: found, mean }) {
  if (!mean) return [empty("No request has been answered yet.")];
  const parts = found.map(({ name, us }, i) => ({ value: us, label: STAGES[name]?.[0] ?? name, look: STAGES[name]?.[1] ?? (i % 8) + 1 }));
  const rest = Math.max(0, mean - parts.reduce((sum, part) => sum + part.value, 0));
  parts.push({ value: rest, label: STAGES.other[0], look: STAGES.other[1] });
  const used = parts.filter((part) => part.value > 0);
  const total = used.reduce((sum, part) => sum + part.value, 0);
  const rows = used.map(({ value, label, look }) => el("li", { class: `s${look}` },
    el("i", { class: "swatch" }), el("b", {}, label), el("span", {}, time(value)),
    el("span", {}, `${((100 * value) / total).toFixed(0)} %`)));
  return [
    graphic(drawStack({ parts: used, alt: `Where the time goes: ${time(total)} per request` })),
    el("ul", { class: "legend" }, ...rows),
    el("p", { class: "hint" }, "Hand-over: from an engine's thread to the one that answers."),
  ];
}

/** What a model did in each of `places` of the samples, over the `back` samples before it. */
export function overTime(samples, name, bounds, places, back) {
  const found = (i) => samples[i]?.models.find((model) => model.name === name) ?? null;
  return places.map((i) => {
    const then = Math.max(0, i - back);
    if (then === i || !found(i) || !found(then)) return null;
    return between(found(i), found(then), bounds, (samples[i].at_us - samples[then].at_us) / 1e6);
  });
}
