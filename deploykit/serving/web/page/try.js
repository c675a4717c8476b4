// The form that sends one request to a model and shows the answer.

import { number } from "./charts.js";
import { byId, el, meter, setText, show } from "./dom.js";
import { arrays, example, json, pad, photo, imageOf } from "./inputs.js";
import { sendFile, sendImage, sendJson, sendText } from "./task.js";
import { infer, inferJson, size } from "./tensors.js";

const SHOWN = 48; // values of a tensor that are written out
const TOP = 5;

/** Make the form for `model`; `headers()` gives what each request must carry. */
export function tryIt(model, headers) {
  const image = imageOf(model.inputs);
  const clear = () => { setText(byId("took"), ""); show(byId("answer")); };
  const ways = {};
  const takes = model.task?.takes;
  if (takes === "image") ways.Photo = () => sendImage(model, clear);
  if (takes === "text") ways.Sentence = () => sendText(model);
  if (takes === "json") ways.JSON = () => sendJson(model);
  if (takes === "bytes") ways.File = () => sendFile(model);
  const tensors = model.platform !== "deploykit_pipeline";
  if (image?.channels === 1 && image.height <= 64 && image.width <= 64) ways.Draw = () => pad(model.inputs[0], image, clear);
  if (image && !takes) ways.Image = () => photo(model.inputs[0], image, clear);
  if (tensors && !image) ways.Example = () => example(model.inputs);
  if (tensors && model.inputs.every((input) => input.datatype !== "FP16" && input.datatype !== "BF16")) ways.JSON = () => json(model.inputs);
  if (model.inputs.every((input) => input.datatype !== "BYTES" && input.datatype !== "BF16")) ways[".npy"] = () => arrays(model.inputs);

  let way = null;
  const made = {};
  const choose = (name) => {
    way = made[name] ??= ways[name]();
    byId("panel").replaceChildren(way.node);
    clear();
  };
  const radios = Object.keys(ways).map((name, i) => {
    const radio = el("input", { type: "radio", name: "kind", value: name, checked: i === 0 });
    radio.addEventListener("change", () => choose(name));
    return el("label", {}, radio, name);
  });
  byId("kinds").replaceChildren(...radios);
  setText(byId("try-title"), `Try ${model.name}`);
  if (!radios.length) {
    byId("panel").replaceChildren(el("p", { class: "empty" }, "This page cannot make this model's inputs."));
    byId("run").disabled = true;
    return;
  }
  byId("run").disabled = false;
  choose(Object.keys(ways)[0]);

  byId("try").onsubmit = async (event) => {
    event.preventDefault();
    byId("run").disabled = true;
    setText(byId("took"), "running");
    try {
      const { outputs, nodes, took } = way.ask
        ? await way.ask(headers())
        : way.text
          ? await inferJson(model.name, headers(), way.text())
          : await infer(model.name, headers(), await way.tensors());
      setText(byId("took"), `${number(took)} ms round trip`);
      show(byId("answer"), ...(nodes ?? outputs.map(outputNode)));
    } catch (problem) {
      setText(byId("took"), "");
      show(byId("answer"), el("p", { class: "bad", role: "alert" }, problem.message));
    }
    byId("run").disabled = false;
  };
}

function outputNode(output) {
  const title = el("p", {}, el("b", {}, output.name), " ",
    el("span", { class: "quiet" }, `${output.datatype} [${output.shape.join(", ")}]`));
  const width = output.shape.at(-1) ?? 1;
  const numeric = output.datatype !== "BYTES" && output.datatype !== "BOOL";
  const oneRow = numeric && width >= 2 && size(output.shape) === width && output.values.every(Number.isFinite);
  return el("div", { class: "output" }, title, oneRow ? topOf(output.values, output.datatype) : null, valuesOf(output, numeric));
}

/** The largest values with their indices; the softmax too, unless they are probabilities already. */
function topOf(values, datatype) {
  const total = values.reduce((a, b) => a + b, 0);
  const shares = values.every((value) => value >= 0) && Math.abs(total - 1) < 0.02;
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const spread = values.map((value) => Math.exp(value - most));
  const sum = spread.reduce((a, b) => a + b, 0);
  const share = shares ? values : datatype.startsWith("FP") || datatype === "BF16" ? spread.map((value) => value / sum) : null;
  const best = values.map((_, i) => i).sort((a, b) => values[b] - values[a]).slice(0, TOP);
  const rows = best.map((i) => el("li", {}, el("span", {}, String(i)), meter(share ? share[i] : values[i] / most),
    el("span", {}, plain(values[i], 4)), el("span", { class: "quiet" }, share ? `${(100 * share[i]).toFixed(1)} %` : "")));
  const what = shares || !share ? "Largest values, by index" : "Largest values, by index, and their softmax";
  return el("div", {}, el("p", { class: "hint" }, what), el("ol", { class: "top" }, ...rows));
}

function valuesOf(output, numeric) {
  const written = output.values.slice(0, SHOWN).map((value) => (numeric ? plain(value) : String(value)));
  const more = output.values.length > SHOWN ? ` … ${output.values.length} in total` : "";
  const summary = output.values.length > TOP ? el("summary", {}, "Values") : null;
  const text = el("p", { class: "values" }, written.join("  ") + more);
  return summary ? el("details", {}, summary, text) : text;
}

const plain = (value, digits = 5) => (Number.isInteger(value) ? String(value) : Number(value.toPrecision(digits)).toString());
