// Numbers and the small charts of the dashboard. Needs no DOM: SVG comes as text.
//
// A chart: {series, alt, x_ticks, x_tight, y_top, zero}: its text alternative, no rounded x axis, the
// least top of y. A series: {label, look, marks}; a mark: {x, y}, whose y null interrupts the line.
// Series differ in colour and dash, so that none depends on its colour.

const SPACE = "\u202f"; // narrow and unbreakable: groups thousands
const MISSING = "–";
const FONT = 12, EM = 0.6; // EM: the mean width of a character, a little more than fonts need
const ROW = 18; // height of a row of labels above a plot
const DASHES = ["", "7 4", "2 4", "10 4 2 4", "4 2", "12 3", "1 3", "6 2 1 2"];
export const PANEL = { width: 420, height: 160, top: 10, bottom: 22, left: 30 };

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

/** A linear axis over one or more finite values, with round ticks; `at` gives a value's pixel. */
export function axis(values, { zero = false, tight = false, ticks = [] } = {}) {
  let low = Math.min(...values), high = Math.max(...values);
  if (tight) return made(low, high, ticks);
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 1), high + (Math.abs(high) * 0.1 || 1)];
  const step = roundStep((high - low) / 5);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  let digits = 0;
  while (digits < 20 && !isWhole(step * 10 ** digits)) digits++;
  const found = Array.from({ length: last - first + 1 }, (_, i) => [(first + i) * step, tick((first + i) * step, digits)]);
  return made(first * step, last * step, ticks.length ? ticks : found);
}

const isWhole = (value) => value > 0.5 && Math.abs(value - Math.round(value)) < 1e-9 * value;

function made(low, high, ticks) {
  return { low, high, ticks, at: (value, start, end) => start + ((value - low) / (high - low)) * (end - start) };
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

const group = (look, ...parts) => `<g class="s s${look}">${parts.join("")}</g>`;

// -- lines ------------------------------------------------------------------------------------------

/** The chart as `<svg>`; a chart without any mark is an empty text. */
export function draw(chart, frame = PANEL) {
  const series = chart.series.filter((one) => one.marks.some((mark) => mark.y !== null));
  if (!series.length) return "";
  const marks = series.flatMap((one) => one.marks).filter((mark) => mark.y !== null);
  const values = marks.map((mark) => mark.y), ticks = chart.x_ticks ?? [];
  const yAxis = axis(chart.y_top ? [...values, chart.y_top] : values, { zero: chart.zero });
  const legend = series.length > 1;
  const place = {
    frame, yAxis,
    left: Math.max(frame.left, 14 + Math.max(...yAxis.ticks.map(([, text]) => textWidth(text)))),
    right: frame.width - 8,
    top: frame.top + (legend ? ROW : 0),
    bottom: frame.height - frame.bottom,
    xAxis: axis([...marks.map((mark) => mark.x), ...ticks.map(([x]) => x)], { tight: chart.x_tight, ticks }),
  };
  place.at = (x, y) => [place.xAxis.at(x, place.left, place.right), place.yAxis.at(y, place.bottom, place.top)];
  const canvas = new Canvas();
  drawAxes(canvas, place);
  for (const one of series) drawTrend(canvas, one, place, series.length === 1);
  if (legend) drawLegend(canvas, series, place);
  return canvas.svg(frame, chart.alt);
}

function drawAxes(canvas, { xAxis, yAxis, left, right, top, bottom }) {
  for (const [value, text] of yAxis.ticks) {
    const y = yAxis.at(value, bottom, top);
    canvas.add(`<path class="grid" d="M${px(left)} ${px(y)}H${px(right)}"/>`);
    canvas.textIfFree([[left - 8, y + 4, "end"]], text, "tick");
  }
  for (const [value, text] of xAxis.ticks) {
    const x = xAxis.at(value, left, right);
    const [from, , to] = textBox(x, 0, text, "middle");
    const anchor = to > right ? "end" : from < left ? "start" : "middle";
    if (!canvas.fits(textBox(x, bottom + 17, `${text} `, anchor))) continue;
    canvas.add(`<path class="axis" d="M${px(x)} ${px(bottom)}v5"/>`);
    canvas.text(x, bottom + 17, text, anchor, "tick");
  }
  canvas.add(`<path class="axis" d="M${px(left)} ${px(bottom)}H${px(right)}"/>`);
}

/** A line over time without markers; a mark whose y is null interrupts it. */
function drawTrend(canvas, series, place, alone) {
  const look = series.look, dash = alone || !DASHES[look - 1] ? "" : ` stroke-dasharray="${DASHES[look - 1]}"`;
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
