// A model with a task, or a pipeline: it takes an image, a sentence, JSON or a file as it is, and its answer is drawn.
// Each is {node, ask(headers)}.

import { el, meter } from "./dom.js";
import { dropArea } from "./inputs.js";

const SIDE = 960; // pixels of the canvas at most; larger images are shown smaller
const LEAST = 480; // of its longer side: labels over a small image would cover it
const READ = { willReadFrequently: true };
const SHOWN = 20; // boxes and segments that are listed
const VALUES = 16; // of an embedding
const WRITTEN = 20000; // characters of an answer as JSON
const COLOURS = ["#ff7f0e", "#1f9bff", "#2ec27e", "#e0435c", "#b37feb", "#f5c211", "#00b3a4", "#ff69b4"];

const colour = (index) => COLOURS[index % COLOURS.length];
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

async function post(model, headers, type, body) {
  const began = performance.now();
  const response = await fetch(`v2/models/${encodeURIComponent(model)}/predict`, { method: "POST", headers: { ...headers, "Content-Type": type }, body });
  const took = performance.now() - began;
  if (response.ok && !response.headers.get("Content-Type").startsWith("application/json")) return { answer: await response.blob(), took };
  let answer;
  try { answer = await response.json(); } catch { throw new Error(`the server answered ${response.status}`); }
  if (!response.ok) throw new Error(answer.error ?? `the server answered ${response.status}`);
  return { answer, took };
}

/** A file as it is, shown with what the model found in it. */
export function sendImage(model, changed) {
  let file = null, bitmap = null;
  const canvas = el("canvas", { hidden: true, role: "img", class: "found" });
  const notice = el("p", { class: "hint", role: "status" }, "It is sent as it is: JPEG, PNG or WebP.");

  function draw() {
    const long = Math.max(bitmap.width, bitmap.height);
    const scale = Math.min(Math.max(1, LEAST / long), SIDE / long);
    canvas.width = Math.max(1, Math.round(bitmap.width * scale));
    canvas.height = Math.max(1, Math.round(bitmap.height * scale));
    canvas.getContext("2d", READ).drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    canvas.hidden = false;
  }
  async function take(chosen) {
    try { bitmap = await createImageBitmap(chosen); } catch { notice.textContent = `${chosen.name} is not an image that this browser can read.`; return; }
    file = chosen;
    draw();
    canvas.setAttribute("aria-label", chosen.name);
    notice.textContent = `${chosen.name}: ${bitmap.width} × ${bitmap.height}.`;
    changed();
  }
  return {
    node: dropArea(canvas, notice, "image/jpeg,image/png,image/webp", take),
    ask: async (headers) => {
      if (file === null) throw new Error("choose an image first");
      const { answer, took } = await post(model.name, headers, "application/octet-stream", file);
      draw();
      const boxes = isTask(model) ? answer.boxes : boxesIn(answer);
      if (boxes) drawBoxes(canvas, { boxes, width: answer.width ?? bitmap.width, height: answer.height ?? bitmap.height });
      if (isTask(model) && answer.segments) drawSegments(canvas, answer);
      return { nodes: await nodesOf(model, answer), took };
    },
  };
}

/** What is typed. */
function sendTyped(model, title, type) {
  const text = el("textarea", { rows: "4" });
  return {
    node: el("label", {}, title, text),
    ask: async (headers) => {
      const { answer, took } = await post(model.name, headers, type, text.value);
      return { nodes: await nodesOf(model, answer), took };
    },
  };
}
export const sendText = (model) => sendTyped(model, "A sentence", "text/plain");
export const sendJson = (model) => sendTyped(model, "JSON", "application/json");

/** Any file as it is. */
export function sendFile(model) {
  const file = el("input", { type: "file" });
  return {
    node: el("label", {}, "A file", file),
    ask: async (headers) => {
      if (!file.files[0]) throw new Error("choose a file first");
      const { answer, took } = await post(model.name, headers, "application/octet-stream", file.files[0]);
      return { nodes: await nodesOf(model, answer), took };
    },
  };
}

const isTask = (model) => Boolean(model.task.task);

/** What a pipeline answers as [{box: [left, top, right, bottom], label?, score?}], or null: pixels of the image. */
function boxesIn(answer) {
  const found = Array.isArray(answer) ? answer : answer?.boxes ?? null;
  const isBox = (box) => Array.isArray(box) && box.length === 4 && box.every(Number.isFinite);
  if (!Array.isArray(found) || !found.every((one) => isBox(one?.box))) return null;
  return found.map((one, i) => ({ label: String(one.label ?? i + 1), score: one.score, index: one.index ?? i, box: one.box }));
}

function drawBoxes(canvas, answer) {
  const context = canvas.getContext("2d", READ);
  const across = canvas.width / answer.width, down = canvas.height / answer.height;
  const unit = Math.max(1, canvas.width / 320); // lines and letters of one size on every screen
  context.lineWidth = 2 * unit;
  context.font = `600 ${12 * unit}px system-ui, sans-serif`;
  context.textBaseline = "top";
  for (const { label, index, score, box: [left, top, right, bottom] } of [...answer.boxes].reverse()) { // the surest on top
    const text = Number.isFinite(score) ? `${label} ${percent(score)}` : label;
    const [x, y] = [left * across, top * down];
    context.strokeStyle = context.fillStyle = colour(index);
    context.strokeRect(x, y, (right - left) * across, (bottom - top) * down);
    const width = context.measureText(text).width + 8 * unit;
    const [at, above] = [Math.max(0, Math.min(x, canvas.width - width)), Math.max(0, y - 17 * unit)];
    context.fillRect(at, above, width, 17 * unit);
    context.fillStyle = "#000";
    context.fillText(text, at + 4 * unit, above + 3 * unit);
  }
}

/** Colours over the pixels of each label: the run lengths go down the columns. */
function drawSegments(canvas, answer) {
  const labels = new Int32Array(answer.width * answer.height).fill(-1);
  for (const { index, rle: { counts } } of answer.segments) {
    let at = 0;
    counts.forEach((count, i) => {
      if (i % 2) labels.fill(index, at, at + count);
      at += count;
    });
  }
  const context = canvas.getContext("2d", READ);
  const image = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let y = 0; y < canvas.height; y++) {
    const row = Math.floor(((y + 0.5) / canvas.height) * answer.height);
    for (let x = 0; x < canvas.width; x++) {
      const column = Math.floor(((x + 0.5) / canvas.width) * answer.width);
      const index = labels[column * answer.height + row];
      if (index < 0) continue;
      const [i, rgb] = [4 * (y * canvas.width + x), parseInt(colour(index).slice(1), 16)];
      [rgb >> 16, (rgb >> 8) & 255, rgb & 255].forEach((value, c) => { image.data[i + c] = (image.data[i + c] + value) / 2; });
    }
  }
  context.putImageData(image, 0, 0);
}

async function nodesOf(model, answer) {
  if (answer instanceof Blob) return [await fileOf(answer)];
  if (!isTask(model)) {
    const text = JSON.stringify(answer, null, 1);
    return [el("pre", { class: "values", tabindex: "0" }, text.length > WRITTEN ? `${text.slice(0, WRITTEN)} …` : text)];
  }
  if (answer.top) return [listOf(answer.top.map(({ label, score }) => [label, score]))];
  if (answer.embedding) {
    const shown = answer.embedding.slice(0, VALUES).map((value) => Number(value.toPrecision(4))).join("  ");
    return [el("p", { class: "values" }, `${shown}${answer.embedding.length > VALUES ? " …" : ""} (${answer.embedding.length} numbers)`)];
  }
  if (answer.boxes) {
    if (!answer.boxes.length) return [el("p", { class: "empty" }, "Nothing was found.")];
    return [listOf(answer.boxes.slice(0, SHOWN).map(({ label, score, index }) => [label, score, colour(index)])), more(answer.boxes)];
  }
  const pixels = answer.width * answer.height;
  const parts = [...answer.segments].sort((a, b) => b.pixels - a.pixels);
  return [listOf(parts.slice(0, SHOWN).map((one) => [one.label, one.pixels / pixels, colour(one.index)])), more(parts)];
}

/** An answer of bytes: drawn if it is an image. */
async function fileOf(blob) {
  try {
    const bitmap = await createImageBitmap(blob);
    const canvas = el("canvas", { role: "img", class: "found", "aria-label": "The answer", width: bitmap.width, height: bitmap.height });
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    return canvas;
  } catch {
    return el("p", {}, `${blob.size} bytes`);
  }
}

const more = (all) => (all.length > SHOWN ? el("p", { class: "hint" }, `and ${all.length - SHOWN} more`) : null);

/** Rows of a label, a bar and a share; with a square of `tint` where the image has that colour. */
function listOf(rows) {
  return el("ol", { class: "top found" }, ...rows.map(([label, share, tint]) => {
    const name = el("span", {}, label);
    if (tint) name.style.borderLeft = `.6rem solid ${tint}`;
    return el("li", {}, name, meter(share), el("span", {}, percent(share)));
  }));
}
