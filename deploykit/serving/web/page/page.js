// The dashboard: asks for /status once a second while it is looked at, and shows what changed.

import { bars, lines, stacked } from "./charts.js";
import { byId, el, meter, setText, show } from "./dom.js";
import { between, bytes, errorsOf, ms, short, span, time } from "./figures.js";
import { tryIt } from "./try.js";

const EVERY_MS = 1000;
const KEPT = 121; // looks, so two minutes
const WINDOW = 10; // looks that p50, p99 and the tiles are taken over
const STAGES = {
  decode: ["Decode", 7], queue: ["Queue", 2], join: ["Join", 5], copy_in: ["Copy in", 6], compute: ["Compute", 1],
  copy_out: ["Copy out", 4], split: ["Split", 3], encode: ["Encode", 8], rest: ["Hand-over", 0],
};

let history = []; // the last looks, oldest first
let chosen = null; // a model's name
let token = null;
let timer = null;

const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});
const named = (look, name) => look?.models.find((model) => model.name === name) ?? null;

async function look() {
  let response;
  try {
    response = await fetch("/status", { headers: headers(), cache: "no-store" });
  } catch {
    state("bad", "unreachable");
    return;
  }
  byId("token").hidden = response.status !== 401;
  if (!response.ok) {
    state("bad", response.status === 401 ? "locked" : `error ${response.status}`);
    return;
  }
  take(await response.json());
}

function take(now) {
  const last = history.at(-1);
  const restarted = last && now.models.some((model) => model.runs < (named(last, model.name)?.runs ?? 0));
  if (restarted) history = [];
  history.push(now);
  if (history.length > KEPT) history.shift();
  if (!named(now, chosen)) {
    chosen = now.models[0].name;
    tryIt(named(now, chosen), headers);
  }
  byId("main").hidden = false;
  server(now);
  models(now);
  model(now);
}

const seconds = (now, then) => (now.at_us - then.at_us) / 1e6;

/** What a model did in the last `looks` looks before position `at`; null while there is but one. */
function recent(name, looks, at = history.length - 1) {
  const now = history[at];
  const then = history[Math.max(0, at - looks)];
  if (now === then || !named(then, name)) return null;
  return between(named(now, name), named(then, name), now.buckets_us, seconds(now, then));
}

function state(kind, text) {
  byId("state").className = `pill ${kind}`;
  setText(byId("state"), text);
}

function server(now) {
  setText(byId("version"), now.version);
  if (now.not_ready) state("bad", `not ready: ${now.not_ready}`);
  else state("good", "ready");
  const process = now.process;
  setText(byId("uptime"), process ? `up ${span(now.at_s - process.started_s)}` : "");
  const before = history.at(-3)?.process ? history.at(-3) : null;
  const cpu = process && before ? (process.cpu_s - before.process.cpu_s) / seconds(now, before) : null;
  show(byId("process"), ...(process ? pairs({
    Memory: bytes(process.resident_bytes),
    Processor: cpu === null ? "–" : `${(100 * cpu).toFixed(0)} % of a core`,
    "Open files": `${process.open_fds} of ${short(process.max_fds)}`,
    Threads: String(process.threads),
  }) : [el("dt", {}, "not known yet")]));
  show(byId("gpus"), ...(now.gpus.length ? now.gpus.map(gpu) : [el("p", { class: "empty" }, "No GPU reports here.")]));
}

const pairs = (values) => Object.entries(values).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);

function gpu(found) {
  const rows = [];
  const row = (name, text, share) => {
    rows.push(...pairs({ [name]: text }));
    if (share !== undefined) rows.push(meter(share));
  };
  if (found.utilization !== null) row("Busy", `${(100 * found.utilization).toFixed(0)} %`, found.utilization);
  if (found.memory_used_bytes !== null) {
    row("Memory", `${bytes(found.memory_used_bytes)} of ${bytes(found.memory_total_bytes)}`, found.memory_used_bytes / found.memory_total_bytes);
  }
  if (found.power_w !== null) row("Power", `${found.power_w.toFixed(1)} W${found.power_limit_w ? ` of ${found.power_limit_w.toFixed(0)} W` : ""}`);
  if (found.clock_hz !== null) row("Clock", `${Math.round(found.clock_hz / 1e6)} MHz`);
  if (found.temperature_c !== null) row("Temperature", `${found.temperature_c.toFixed(0)} °C`);
  if (found.throttled?.length) rows.push(el("dt", {}, "Throttled"), el("dd", { class: "bad" }, found.throttled.join(", ").replaceAll("_", " ")));
  return el("div", { class: "gpu" }, el("p", {}, found.name), el("dl", { class: "pairs" }, ...rows));
}

function models(now) {
  byId("models").hidden = now.models.length < 2;
  if (now.models.length < 2) return;
  const rows = byId("models-rows");
  const names = now.models.map((each) => each.name).join("\n");
  if (rows.dataset.names !== names) { // the rows stay, so that the focus does
    rows.dataset.names = names;
    rows.replaceChildren(...now.models.map((each) => {
      const button = el("button", { type: "button" }, each.name);
      button.addEventListener("click", () => choose(each.name));
      return el("tr", {}, el("td", {}, button), ...Array.from({ length: 6 }, (_, i) => el("td", i ? { class: "n" } : {})));
    }));
  }
  now.models.forEach((each, i) => {
    const seen = recent(each.name, WINDOW);
    const [first, ...cells] = rows.children[i].children;
    first.firstChild.setAttribute("aria-pressed", String(each.name === chosen));
    const texts = [each.not_ready ?? (each.notes.length ? "see notes" : "ready"), short(seen?.perSecond), ms(seen?.p50), ms(seen?.p99),
      String(each.waiting), short(seen?.errorsPerSecond)];
    texts.forEach((text, j) => setText(cells[j], text));
  });
}

function choose(name) {
  chosen = name;
  const now = history.at(-1);
  tryIt(named(now, name), headers);
  models(now);
  model(now);
}

function tile(name, value, unit, kind = "") {
  return el("div", {}, el("dt", {}, name), el("dd", { class: kind }, value, el("small", {}, unit ? ` ${unit}` : "")));
}

function about(found) {
  const engines = found.engines > 1 ? `${found.engines} engines, ` : "";
  const now = found.batch_limit < found.max_batch ? ` (now ${found.batch_limit})` : "";
  const delay = found.delay_us > 0 ? `, waiting at most ${time(found.delay_us)} for them` : "";
  const rows = found.max_batch ? `up to ${found.max_batch} rows a batch${now}${delay}` : "one request at a time";
  return `${found.platform} on ${found.device}, ${engines}${rows}`;
}

function model(now) {
  const found = named(now, chosen);
  const seen = recent(chosen, WINDOW);
  const whole = between(found, null, now.buckets_us, 0);
  setText(byId("model-name"), found.name);
  setText(byId("model-about"), about(found));
  const notes = [...(found.not_ready ? [`Not ready: ${found.not_ready}`] : []), ...found.notes];
  byId("notes").hidden = notes.length === 0;
  show(byId("notes"), ...notes.map((note) => el("li", {}, note)));
  show(byId("tiles"),
    tile("Requests", short(seen?.perSecond), "/s"), tile("p50", ms(seen?.p50), "ms"), tile("p99", ms(seen?.p99), "ms"),
    tile("Waiting", String(found.waiting), `of ${short(found.queue)}`), tile("Rows a batch", short(seen?.rowsPerRun), ""),
    tile("Errors", short(seen?.errorsPerSecond), `/s, ${short(errorsOf(found))} in all`, seen?.errorsPerSecond > 0 ? "bad" : ""));

  const places = history.map((_, i) => i).filter((i) => i > 0);
  const each = places.map((i) => recent(chosen, 1, i));
  const windows = places.map((i) => recent(chosen, WINDOW / 2, i));
  const span_s = KEPT - 1;
  show(byId("throughput"), ...lines("Requests a second", [{ name: "requests", look: 1, values: each.map((one) => one?.perSecond ?? null) }], span_s));
  const inMs = (us) => (us === null || us === undefined ? null : us / 1000);
  show(byId("latency"), ...lines("Latency in ms", [
    { name: "p99", look: 2, values: windows.map((one) => inMs(one?.p99)) },
    { name: "p50", look: 1, values: windows.map((one) => inMs(one?.p50)) },
  ], span_s, 0.1));
  show(byId("queue"), ...lines("Requests waiting", [{ name: "waiting", look: 2, values: history.map((one) => named(one, chosen)?.waiting ?? null) }], span_s, 10));

  const live = seen?.success > 0 && seen.answered > 0 ? seen : whole;
  const period = live === whole ? "since the start" : `last ${Math.round(seconds(now, history.at(-1 - Math.min(WINDOW, history.length - 1))))} s`;
  const stages = live.stages.map(({ name, us }) => ({ us, text: STAGES[name][0], look: STAGES[name][1] }));
  const rest = Math.max(0, (live.mean ?? 0) - stages.reduce((sum, stage) => sum + stage.us, 0));
  stages.push({ us: rest, text: STAGES.rest[0], look: STAGES.rest[1] });
  const waited = live.waited ? `; an engine stood idle for ${time(live.waited)} of it` : "";
  setText(byId("time-span"), live.mean ? `${time(live.mean)} a request, ${period}${waited}` : "");
  show(byId("time"), ...stacked("Where the time goes", live.mean ? stages.filter((stage) => stage.us > 0) : []),
    live.mean ? el("p", { class: "hint" }, "Hand-over: between an engine's thread and the one that answers.") : null);
  show(byId("batches"), ...bars("Rows in a batch", seen?.batches.length ? seen.batches : whole.batches));
}

function run() {
  clearTimeout(timer);
  if (document.hidden) return;
  look().finally(() => {
    clearTimeout(timer); // of a look that was under way when this one began
    timer = setTimeout(run, EVERY_MS);
  });
}

byId("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token-text").value;
  run();
});
document.addEventListener("visibilitychange", run);
run();
