// The ways to make a model's inputs: drawing, an image, an example, JSON, .npy files. Each is {node, tensors()}.

import { el } from "./dom.js";
import { pack, readNpy, size, zeros } from "./tensors.js";

const FREE = 224; // the side of an image where the model takes any

/** What a model's only input takes as an image: {height, width, channels, last}; else null. */
export function imageOf(inputs) {
  if (inputs.length !== 1 || !["FP32", "FP16", "UINT8"].includes(inputs[0].datatype)) return null;
  const shape = inputs[0].shape;
  const side = (axis) => (axis === -1 ? FREE : axis);
  const made = (channels, height, width, last) =>
    side(height) > 1 && side(width) > 1 ? { channels, height: side(height), width: side(width), last } : null;
  const colours = (axis) => axis === 1 || axis === 3;
  const [a, b, c, d] = shape;
  const one = a === -1 || a === 1;
  if (shape.length === 4 && one) return colours(b) ? made(b, c, d, false) : colours(d) ? made(d, b, c, true) : null;
  if (shape.length !== 3) return null;
  if (one && b > 4 && c > 4) return made(1, b, c, null);
  return colours(a) ? made(a, b, c, false) : colours(c) ? made(c, a, b, true) : null;
}

const SCALES = {
  "0 to 1": (v) => v / 255,
  "-1 to 1": (v) => v / 127.5 - 1,
  "0 to 255": (v) => v,
  "ImageNet mean and deviation": (v, c) => (v / 255 - [0.485, 0.456, 0.406][c]) / [0.229, 0.224, 0.225][c],
};

function scaleChoice(input) {
  if (input.datatype === "UINT8") return null;
  const names = Object.keys(SCALES);
  return el("label", {}, "Values", el("select", {}, ...names.map((name) => el("option", {}, name))));
}

/** A tensor from grey or RGB pixels: `at(y, x, channel)` gives 0 to 255. */
function tensorOf(input, image, choice, at) {
  const { channels, height, width, last } = image;
  const scale = choice ? SCALES[choice.querySelector("select").value] : SCALES["0 to 255"];
  const values = new Float32Array(channels * height * width);
  for (let c = 0; c < channels; c++) {
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const place = last ? (y * width + x) * channels + c : (c * height + y) * width + x;
        values[place] = scale(at(y, x, c), c);
      }
    }
  }
  const inner = last === null ? [height, width] : last ? [height, width, channels] : [channels, height, width];
  const shape = inner.length < input.shape.length ? [1, ...inner] : inner;
  return { name: input.name, datatype: input.datatype, shape, bytes: pack(values, input.datatype) };
}

/** A pad of the model's own pixels, to draw on with the pointer or the arrow keys. */
export function pad(input, image, changed) {
  const { height, width } = image;
  const ink = new Float32Array(height * width); // 0 to 1
  const cursor = { x: Math.floor(width / 2), y: Math.floor(height / 2) };
  let focused = false, pen = null;
  const canvas = el("canvas", {
    class: "pad", width: width * 8, height: height * 8, tabindex: "0", role: "application",
    "aria-label": `Drawing pad of ${height} by ${width} pixels`, "aria-describedby": "pad-help",
  });
  const place = el("span", { class: "hidden", "aria-live": "polite" });

  function paint() {
    const context = canvas.getContext("2d");
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        const grey = Math.round(255 * ink[y * width + x]);
        context.fillStyle = `rgb(${grey},${grey},${grey})`;
        context.fillRect(x * 8, y * 8, 8, 8);
      }
    }
    if (focused) {
      context.strokeStyle = "#ff9a5c";
      context.lineWidth = 2;
      context.strokeRect(cursor.x * 8 + 1, cursor.y * 8 + 1, 6, 6);
    }
  }
  function dab(x, y) { // a round brush a little over two pixels wide
    for (let v = Math.floor(y - 2); v <= y + 2; v++) {
      for (let u = Math.floor(x - 2); u <= x + 2; u++) {
        if (u < 0 || v < 0 || u >= width || v >= height) continue;
        const near = 1.75 - Math.hypot(u + 0.5 - x, v + 0.5 - y);
        ink[v * width + u] = Math.max(ink[v * width + u], Math.min(1, Math.max(0, near)));
      }
    }
  }
  function stroke(from, to) {
    const steps = Math.max(1, Math.ceil(Math.hypot(to.x - from.x, to.y - from.y) * 3));
    for (let i = 0; i <= steps; i++) dab(from.x + ((to.x - from.x) * i) / steps, from.y + ((to.y - from.y) * i) / steps);
    paint();
  }
  const where = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: ((event.clientX - box.left) / box.width) * width, y: ((event.clientY - box.top) / box.height) * height };
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pen = where(event);
    stroke(pen, pen);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (pen === null) return;
    const next = where(event);
    stroke(pen, next);
    pen = next;
  });
  const lift = () => { if (pen !== null) { pen = null; changed(); } };
  canvas.addEventListener("pointerup", lift);
  canvas.addEventListener("pointercancel", lift);
  canvas.addEventListener("focus", () => { focused = canvas.matches(":focus-visible"); paint(); });
  canvas.addEventListener("blur", () => { focused = false; paint(); });
  const MOVES = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
  canvas.addEventListener("keydown", (event) => {
    const middle = () => ({ x: cursor.x + 0.5, y: cursor.y + 0.5 });
    const move = MOVES[event.key];
    if (move) {
      const before = middle();
      cursor.x = Math.min(width - 1, Math.max(0, cursor.x + move[0]));
      cursor.y = Math.min(height - 1, Math.max(0, cursor.y + move[1]));
      if (event.shiftKey) stroke(before, middle());
    } else if (event.key === " ") {
      stroke(middle(), middle());
    } else if (event.key === "Delete" || event.key === "Backspace") {
      ink[cursor.y * width + cursor.x] = 0;
    } else {
      return;
    }
    event.preventDefault();
    focused = true;
    place.textContent = `row ${cursor.y + 1}, column ${cursor.x + 1}, ${ink[cursor.y * width + cursor.x] > 0.5 ? "drawn" : "empty"}`;
    paint();
  });

  const clear = el("button", { type: "button" }, "Clear");
  clear.addEventListener("click", () => { ink.fill(0); paint(); });
  const example = el("button", { type: "button" }, "Example");
  example.addEventListener("click", () => { // a seven
    ink.fill(0);
    const point = ([x, y]) => ({ x: x * width, y: y * height });
    const path = [[0.27, 0.25], [0.72, 0.25], [0.56, 0.52], [0.45, 0.8]].map(point);
    for (let i = 1; i < path.length; i++) stroke(path[i - 1], path[i]);
    changed();
  });
  const choice = scaleChoice(input);
  paint();
  const help = el("p", { class: "hint", id: "pad-help" },
    "Draw with the pointer. With the keyboard: arrows move, Shift and arrows draw, Space draws a dot, Delete erases.");
  const node = el("div", {}, canvas, place, help, el("div", { class: "row" }, clear, example), choice);
  return { node, tensors: async () => [tensorOf(input, image, choice, (y, x) => 255 * ink[y * width + x])] };
}

/** Where an image is dropped or chosen; `take` gets the file. */
export function dropArea(canvas, notice, accept, take) {
  const file = el("input", { type: "file", accept });
  const drop = el("div", { class: "drop" }, canvas, el("label", {}, "Drop an image here, or choose one", file), notice);
  file.addEventListener("change", () => { if (file.files[0]) take(file.files[0]); });
  drop.addEventListener("dragover", (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });
  return drop;
}

/** An image, dropped or chosen, scaled and cropped about its centre to the model's size. */
export function photo(input, image, changed) {
  const { height, width, channels } = image;
  let pixels = null;
  const canvas = el("canvas", { width, height, hidden: true, role: "img" });
  const notice = el("p", { class: "hint", role: "status" }, `It is scaled and cropped to ${width} × ${height}.`);
  const choice = scaleChoice(input);

  async function take(chosen) {
    let image;
    try { image = await createImageBitmap(chosen); } catch { notice.textContent = `${chosen.name} is not an image that this browser can read.`; return; }
    const scale = Math.max(width / image.width, height / image.height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.imageSmoothingQuality = "high";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    context.drawImage(image, (width - image.width * scale) / 2, (height - image.height * scale) / 2, image.width * scale, image.height * scale);
    pixels = context.getImageData(0, 0, width, height).data;
    canvas.hidden = false;
    canvas.setAttribute("aria-label", `${chosen.name}, scaled`);
    notice.textContent = `${chosen.name}: ${image.width} × ${image.height}, sent as ${width} × ${height}.`;
    changed();
  }
  const at = (y, x, c) => {
    const i = 4 * (y * width + x);
    return channels === 3 ? pixels[i + c] : 0.299 * pixels[i] + 0.587 * pixels[i + 1] + 0.114 * pixels[i + 2];
  };
  const node = el("div", {}, dropArea(canvas, notice, "image/*", take), choice);
  return {
    node,
    tensors: async () => {
      if (pixels === null) throw new Error("choose an image first");
      return [tensorOf(input, image, choice, at)];
    },
  };
}

const typed = (input) => `${input.name}: ${input.datatype} [${input.shape.map((axis) => (axis === -1 ? "any" : axis)).join(", ")}]`;

/** One .npy file for each input. */
export function arrays(inputs) {
  const files = inputs.map(() => el("input", { type: "file", accept: ".npy" }));
  const labels = inputs.map((input, i) => el("label", {}, typed(input), files[i]));
  return {
    node: el("div", {}, ...labels, el("p", { class: "hint" }, "As numpy.save writes it. The batch axis may be left out.")),
    tensors: () => Promise.all(inputs.map((input, i) => {
      if (!files[i].files[0]) throw new Error(`choose a file for ${input.name} first`);
      return readNpy(files[i].files[0], input);
    })),
  };
}

const MOST = 4096; // values that are written out

/** One tensor of zeros for each input (empty strings for BYTES), a row of the smallest size. */
export function example(inputs) {
  const made = inputs.map(({ name, datatype, shape }) => zeros(name, datatype, shape.map((axis) => (axis === -1 ? 1 : axis))));
  const list = made.map((tensor) => el("li", {}, el("code", {}, typed(tensor))));
  return { node: el("div", {}, el("p", {}, "Sends zeros:"), el("ul", { class: "plain" }, ...list)), tensors: async () => made };
}

/** The request's JSON itself, to be edited; it begins with zeros. */
export function json(inputs) {
  const begun = inputs.map((input) => {
    const shape = input.shape.map((axis) => (axis === -1 ? 1 : axis));
    const empty = input.datatype === "BYTES" ? "text" : input.datatype === "BOOL" ? false : 0;
    return { name: input.name, datatype: input.datatype, shape, data: Array(Math.min(MOST, size(shape))).fill(empty) };
  });
  const lines = begun.map((one) => `    ${JSON.stringify(one)}`).join(",\n");
  const text = el("textarea", { spellcheck: "false", autocomplete: "off" });
  text.value = `{\n  "inputs": [\n${lines}\n  ]\n}`;
  return { node: el("label", {}, "The body of the request", text), text: () => text.value };
}
