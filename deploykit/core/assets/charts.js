// Numbers and charts as the report and the dashboard show them. Needs no DOM: SVG comes as text.
//
// A chart: {name, title, series, x_label, y_label, x_ticks, x_log, zero, flag}, in a panel also
// {alt, x_tight, y_top}: its text alternative, no rounded x axis, the least top of y. A series:
// {label, look, marks, upper}; a mark: {x, y, low, high, text}. Series differ in colour, dash and
// marker, so that none depends on its colour.

const SPACE = "\u202f"; // narrow and unbreakable: groups thousands
const MISSING = "–";
const FONT = 12, EM = 0.6; // EM: the mean width of a character, a little more than fonts need
const ROW = 18; // height of a row of labels above a plot
const LOG_FROM = 20; // an axis whose values span more than this is logarithmic, and says so
const DASHES = ["", "7 4", "2 4", "10 4 2 4", "4 2", "12 3", "1 3", "6 2 1 2"];
const SHAPES = [ // of markers; the baseline's, the first, is a circle
  null,
  [[-3.7, -3.7], [3.7, -3.7], [3.7, 3.7], [-3.7, 3.7]],
  [[0, -4.8], [4.6, 3.6], [-4.6, 3.6]],
  [[0, -5.2], [5.2, 0], [0, 5.2], [-5.2, 0]],
  [[0, 4.8], [4.6, -3.6], [-4.6, -3.6]],
  [[-4.8, 0], [3.6, -4.6], [3.6, 4.6]],
  [[4.8, 0], [-3.6, -4.6], [-3.6, 4.6]],
  [[-2.2, -4.4], [2.2, -4.4], [4.6, 0], [2.2, 4.4], [-2.2, 4.4], [-4.6, 0]],
];
const LOOKS = SHAPES.length;
export const FIGURE = { width: 760, height: 400, top: 28, bottom: 52, left: 64, panel: false };
export const PANEL = { width: 420, height: 160, top: 10, bottom: 22, left: 30, panel: true };

// -- numbers --------------------------------------------------------------------------------------

function grouped(value, digits) {
  const text = value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return text.replaceAll(",", SPACE).replace("-", "−");
}

/** Three significant digits, never an exponent: "12 300", "1.23", "0.0456". */
export function number(value) {
  if (!Number.isFinite(value ?? NaN)) return MISSING;
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3));
  return grouped(rounded, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded)))));
}

/** An integer in full: "12 345". */
export const count = (value) => (Number.isFinite(value ?? NaN) ? grouped(value, 0) : MISSING);

/** A round number on an axis: 0.3, 10, 12 500; with `digits` decimals if given. */
export function tick(value, digits = null) {
  if (digits === null && Math.abs(value) < 1000) return String(Number(value.toPrecision(6))).replace("-", "−");
  return grouped(value, digits ?? 0);
}

// -- axes -----------------------------------------------------------------------------------------

/** An axis over one or more finite values, with round ticks; `at` gives a value's pixel. */
export function axis(values, { log = null, zero = false, tight = false, ticks = [] } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log ?? (low > 0 && high / low > LOG_FROM)) if (low > 0) return logAxis(low, high, ticks);
  if (tight) return made(low, high, false, ticks);
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const step = roundStep((high - low) / 5);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  let digits = 0;
  while (digits < 20 && !isWhole(step * 10 ** digits)) digits++;
  const found = Array.from({ length: last - first + 1 }, (_, i) => [(first + i) * step, tick((first + i) * step, digits)]);
  return made(first * step, last * step, false, ticks.length ? ticks : found);
}

const isWhole = (value) => value > 0.5 && Math.abs(value - Math.round(value)) < 1e-9 * value;

function made(low, high, log, ticks) {
  const place = (value) => (log ? Math.log(Math.max(value, low)) : value);
  const at = (value, start, end) => start + ((place(value) - place(low)) / (place(high) - place(low))) * (end - start);
  return { low, high, log, ticks, at };
}

function logAxis(low, high, ticks) {
  [low, high] = low < high ? [low / 1.15, high * 1.15] : [low / 2, high * 2];
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  let found = [];
  for (const steps of [[1], [1, 3], [1, 2, 5]]) { // the fewest that give three ticks
    const decades = Array.from({ length: to - from + 1 }, (_, i) => 10 ** (from + i));
    const places = decades.flatMap((decade) => steps.map((step) => step * decade));
    found = places.filter((place) => low <= place && place <= high).map((place) => [place, tick(place)]);
    if (found.length >= 3) break;
  }
  return made(low, high, true, ticks.length ? ticks : found);
}

function roundStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((m) => m * power).find((step) => step >= raw * (1 - 1e-9));
}

// -- text and marks ---------------------------------------------------------------------------------

// eslint-disable-next-line no-control-regex
export const escape = (text) => String(text).replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "�")
  .replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
const px = (value) => String(Number(value.toFixed(1)));
const path = (places) => `M${places.map(([x, y]) => `${px(x)} ${px(y)}`).join("L")}`;
const short = (label, most = 26) => (label.length <= most ? label : `${label.slice(0, most - 1)}…`);

/** About how many pixels a text takes; rather too many than too few. */
export const textWidth = (text) => [...text].reduce((sum, c) => sum + (c.codePointAt(0) < 0x2e80 ? EM : 1), 0) * FONT;

/** Left, top, right, bottom of a text whose baseline is at `y`. */
export function textBox(x, y, text, anchor) {
  const width = textWidth(text), left = x - { start: 0, middle: width / 2, end: width }[anchor];
  return [left, y - FONT, left + width, y + 0.25 * FONT];
}

/** What is drawn so far, and which places are taken by text. */
class Canvas {
  parts = [];
  taken = [];

  add(text) { this.parts.push(text); }

  fits([left, top, right, bottom]) {
    return !this.taken.some(([x, t, r, b]) => left < r && right > x && top < b && bottom > t);
  }

  text(x, y, text, anchor = "start", kind = "") {
    this.taken.push(textBox(x, y, text, anchor));
    this.add(`<text x="${px(x)}" y="${px(y)}" text-anchor="${anchor}" class="${kind}">${escape(text)}</text>`);
  }

  /** Write `text` at the first of [x, y, anchor] where `gap` pixels on both sides are free; else nowhere. */
  textIfFree(places, text, kind = "small", gap = 0) {
    const free = places.find(([x, y, anchor]) => {
      const [left, top, right, bottom] = textBox(x, y, text, anchor);
      return this.fits([left - gap, top, right + gap, bottom]);
    });
    if (free) this.text(free[0], free[1], text, free[2], kind);
  }

  svg({ width, height }, alt) {
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" role="img" aria-label="${escape(alt)}">${this.parts.join("")}</svg>`;
  }
}

function marker(look, x, y) {
  if (!SHAPES[look]) return `<circle cx="${px(x)}" cy="${px(y)}" r="4"/>`;
  return `<path d="${path(SHAPES[look].map(([dx, dy]) => [x + dx, y + dy]))}Z"/>`;
}

const group = (look, ...parts) => `<g class="s s${look % LOOKS}">${parts.join("")}</g>`;

// -- lines ------------------------------------------------------------------------------------------

/** The chart as `<svg>`; a chart without any mark is an empty text. `chart.alt`: what it shows. */
export function draw(chart, frame = FIGURE) {
  const series = chart.series.filter((one) => one.marks.some((mark) => mark.y !== null));
  if (!series.length) return "";
  const marks = series.flatMap((one) => [...one.marks, ...(one.upper ?? [])]).filter((mark) => mark.y !== null);
  const values = marks.map((mark) => mark.y);
  const ends = marks.flatMap((mark) => [mark.y, mark.low, mark.high]).filter((end) => Number.isFinite(end));
  const log = !frame.panel && Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > LOG_FROM;
  const top = chart.y_top ? [...ends, chart.y_top] : ends;
  const yAxis = axis(log ? ends.filter((end) => end > 0) : top, { log, zero: chart.zero });
  const single = !frame.panel && series.every((one) => one.marks.length === 1); // named above, not at the end
  const names = frame.panel || single ? 0 : Math.max(...series.map((one) => textWidth(short(one.label)))) + 34;
  const place = {
    frame, yAxis,
    left: Math.max(frame.left, 14 + Math.max(...yAxis.ticks.map(([, text]) => textWidth(text)))),
    right: frame.width - (names || (frame.panel ? 8 : 34)),
    bottom: frame.height - frame.bottom,
    xAxis: axis([...marks.map((mark) => mark.x), ...(chart.x_ticks ?? []).map(([x]) => x)], { log: chart.x_log, tight: chart.x_tight, ticks: chart.x_ticks ?? [] }),
  };
  const above = single ? rowsAbove(series, place) : [];
  const legend = frame.panel && series.length > 1;
  place.top = frame.top + ROW * Math.max(legend ? 1 : 0, ...above.map(([, row]) => row));
  place.at = (x, y) => [place.xAxis.at(x, place.left, place.right), place.yAxis.at(y, place.bottom, place.top)];
  const canvas = new Canvas();
  drawAxes(canvas, chart, place);
  drawFlag(canvas, chart.flag, place);
  for (const one of series) (frame.panel ? drawTrend : drawSeries)(canvas, one, place, series.length === 1);
  if (legend) drawLegend(canvas, series, place);
  else if (single) drawNamesAbove(canvas, series, above, place);
  else if (!frame.panel) drawNames(canvas, series, place);
  for (const mark of frame.panel ? [] : series.flatMap((one) => one.marks).filter((mark) => mark.text)) {
    const [x, y] = place.at(mark.x, mark.y);
    canvas.textIfFree([[x + 8, y + 5, "start"], [x, y + 19, "middle"], [x, y - 9, "middle"]], mark.text);
  }
  return canvas.svg(frame, chart.alt ?? chart.title);
}

function drawAxes(canvas, chart, { frame, xAxis, yAxis, left, right, top, bottom }) {
  for (const [value, text] of yAxis.ticks) {
    const y = yAxis.at(value, bottom, top);
    canvas.add(`<path class="grid" d="M${px(left)} ${px(y)}H${px(right)}"/>`);
    canvas.textIfFree([[left - 8, y + 4, "end"]], text, "tick");
  }
  for (const [value, text] of xAxis.ticks) {
    const x = xAxis.at(value, left, right);
    const [from, , to] = textBox(x, 0, text, "middle");
    const anchor = frame.panel && to > right ? "end" : frame.panel && from < left ? "start" : "middle";
    if (!canvas.fits(textBox(x, bottom + 17, `${text} `, anchor))) continue;
    canvas.add(`<path class="axis" d="M${px(x)} ${px(bottom)}v5"/>`);
    canvas.text(x, bottom + (frame.panel ? 17 : 20), text, anchor, "tick");
  }
  canvas.add(`<path class="axis" d="M${px(left)} ${px(bottom)}H${px(right)}"/>`);
  if (frame.panel) return; // its heading names the axes
  canvas.text((left + right) / 2, frame.height - 12, chart.x_label + (xAxis.log ? ", log scale" : ""), "middle", "name");
  canvas.text(0, 13, chart.y_label + (yAxis.log ? ", log scale" : ""), "start", "name");
}

function drawFlag(canvas, flag, { frame, xAxis, left, right, bottom }) {
  if (!flag) return;
  const x = xAxis.at(flag[0], left, right);
  canvas.add(`<path class="flag" d="M${px(x)} ${frame.top - 4}V${px(bottom)}"/>`);
  const fits = x + 6 + textWidth(flag[1]) < right;
  canvas.text(fits ? x + 6 : x - 6, frame.top + 8, flag[1], fits ? "start" : "end", "small");
}

/** A line with its markers and intervals, and a thin one above it (p99 above p50). */
function drawSeries(canvas, series, place) {
  const look = series.look % LOOKS, dash = DASHES[look] ? ` stroke-dasharray="${DASHES[look]}"` : "";
  const low = series.marks.map((mark) => place.at(mark.x, mark.y));
  const upper = series.upper ?? [], high = upper.map((mark) => place.at(mark.x, mark.y));
  const parts = [];
  if (high.length > 1 && low.length > 1) {
    parts.push(`<path class="band" d="${path([...low, ...high.toReversed()])}Z"/>`, `<path class="line thin" d="${path(high)}"${dash}/>`);
  }
  if (low.length > 1) parts.push(`<path class="line" d="${path(low)}"${dash}/>`);
  for (const mark of [...series.marks, ...upper]) {
    if (!(mark.high > mark.low)) continue;
    const [[x, top], [, end]] = [place.at(mark.x, mark.high), place.at(mark.x, mark.low)];
    parts.push(`<path class="whisker" d="M${px(x)} ${px(top)}V${px(end)}M${px(x - 4)} ${px(top)}h8M${px(x - 4)} ${px(end)}h8"/>`);
  }
  parts.push(...low.map(([x, y]) => marker(look, x, y)));
  canvas.taken.push(...low.map(([x, y]) => [x - 5, y - 5, x + 5, y + 5]));
  if (high.length === 1 || low.length === 1) parts.push(...high.map(([x, y]) => `<g class="open">${marker(look, x, y)}</g>`));
  canvas.add(group(look, ...parts));
}

/** A line over time without markers; a mark whose y is null interrupts it. */
function drawTrend(canvas, series, place, alone) {
  const look = series.look % LOOKS, dash = alone || !DASHES[look - 1] ? "" : ` stroke-dasharray="${DASHES[look - 1]}"`;
  const runs = [[]];
  for (const mark of series.marks) {
    if (mark.y === null) runs.push([]);
    else runs.at(-1).push(place.at(mark.x, mark.y));
  }
  for (const run of runs.filter((points) => points.length)) {
    if (alone && run.length > 1) {
      const floor = [[run.at(-1)[0], place.bottom], [run[0][0], place.bottom]];
      canvas.add(group(look, `<path class="band" d="${path([...run, ...floor])}Z"/>`));
    }
    canvas.add(group(look, `<path class="line" d="${path(run)}${run.length > 1 ? "" : "h.1"}"${dash}/>`));
  }
}

function drawLegend(canvas, series, { frame, left }) {
  let x = left;
  for (const { look, label } of series) {
    const dash = DASHES[look - 1] ? ` stroke-dasharray="${DASHES[look - 1]}"` : "";
    canvas.add(group(look, `<path class="line" d="M${px(x)} ${frame.top - 1}h22"${dash}/>`));
    canvas.text(x + 28, frame.top + 3, label, "start", "tick");
    x += 44 + textWidth(label);
  }
}

/** Name each line at its right end, in the order of the ends, none over another. */
function drawNames(canvas, series, { at, top, bottom, right }) {
  const ends = series.map((one) => [...at(one.marks.at(-1).x, one.marks.at(-1).y), one]).sort((a, b) => a[1] - b[1]);
  const step = FONT * 1.5;
  let y = top - step;
  const wanted = ends.map(([x, end, one]) => ({ x, end, one, y: (y = Math.max(y + step, end)) }));
  let limit = y > bottom - 4 ? bottom - 4 : Infinity;
  for (const each of wanted.reverse()) {
    const label = Math.min(each.y, limit);
    if (limit < Infinity) limit = label - step;
    const leader = `<path class="leader" d="M${px(each.x + 7)} ${px(each.end)}L${px(right + 6)} ${px(label)}"/>`;
    canvas.add(group(each.one.look, leader, marker(each.one.look % LOOKS, right + 14, label)));
    canvas.taken.push([right + 8, label - 6, right + 20, label + 6]);
    canvas.text(right + 24, label + 4, short(each.one.label), "start", "label");
  }
}

/** Where the name of each single mark stands: its middle, and its row from the top, from 1. */
function rowsAbove(series, { xAxis, left, right }) {
  const taken = [];
  return series.map((one) => {
    const half = textWidth(short(one.label)) / 2;
    const x = Math.min(Math.max(xAxis.at(one.marks[0].x, left, right), left + half), right - half);
    const clash = new Set(taken.filter(([start, end]) => x - half - 8 < end && x + half + 8 > start).map(([, , row]) => row));
    let row = 1;
    while (clash.has(row)) row++;
    taken.push([x - half, x + half, row]);
    return [x, row];
  });
}

function drawNamesAbove(canvas, series, above, place) {
  series.forEach((one, i) => {
    const [xText, row] = above[i], mark = one.marks[0], yText = place.frame.top + ROW * row - 12;
    const [x, y] = place.at(mark.x, mark.high ?? mark.y);
    canvas.add(group(one.look, `<path class="leader" d="M${px(x)} ${px(yText + 5)}V${px(y - 4)}"/>`));
    canvas.text(xText, yText, short(one.label), "middle", "label");
  });
}

// -- bars -------------------------------------------------------------------------------------------

/** Bars side by side: `bars` is [{label, value, look}], their heights shares of the sum. */
export function drawBars({ bars, alt }, frame = PANEL) {
  const total = bars.reduce((sum, bar) => sum + bar.value, 0);
  if (!(total > 0)) return "";
  const canvas = new Canvas(), bottom = frame.height - frame.bottom, top = frame.top + ROW;
  const most = Math.max(...bars.map((bar) => bar.value)), step = frame.width / Math.max(bars.length, 4);
  canvas.add(`<path class="axis" d="M0 ${bottom}H${frame.width}"/>`);
  bars.forEach((bar, i) => {
    const height = bar.value > 0 ? Math.max(1, ((bottom - top) * bar.value) / most) : 0;
    const middle = (i + 0.5) * step, share = (100 * bar.value) / total;
    canvas.add(group(bar.look ?? 1, `<rect x="${px(i * step + step * 0.1)}" width="${px(step * 0.8)}" y="${px(bottom - height)}" height="${px(height)}"/>`));
    const named = bars.length <= 12 ? bar.value > 0 : bar.value === most; // else the shares would cover the bars
    if (named) canvas.textIfFree([[middle, bottom - height - 5, "middle"]], share < 1 ? "<1 %" : `${share.toFixed(0)} %`, "tick");
    const half = textWidth(bar.label) / 2;
    if (middle >= half && middle + half <= frame.width) canvas.textIfFree([[middle, bottom + 17, "middle"]], bar.label, "tick", FONT / 2);
  });
  return canvas.svg(frame, alt);
}

/** One bar of all `parts`, [{value, look}], end to end. */
export function drawStack({ parts, alt }, frame = { width: 1000, height: 26 }) {
  const total = parts.reduce((sum, part) => sum + part.value, 0), canvas = new Canvas();
  let x = 0;
  for (const { value, look } of parts) {
    const width = (frame.width * value) / total;
    canvas.add(`<g class="s s${look}"><rect x="${px(x)}" y="0" width="${px(Math.max(0, width - 1.5))}" height="${frame.height}"/></g>`);
    x += width;
  }
  return canvas.svg(frame, alt).replace("<svg ", '<svg preserveAspectRatio="none" class="stack" ');
}
