// The dashboard: requests /status once a second while it is visible, and shows what changed.

import { count, number } from "./charts.js";
import { byId, el, meter, setText, show } from "./dom.js";
import { between, bytes, losses, ms, span, time } from "./figures.js";
import { batchSizes, latencies, overTime, stages, trend } from "./panels.js";
import { tryIt } from "./try.js";

const EVERY_MS = 1000;
const WINDOW_US = 10e6; // what the tiles are taken over
const SAMPLE_US = 2e6; // between two samples
const KEPT = 300; // samples: ten minutes
const SMOOTH = 3; // samples that a point of the latency chart is taken over

let samples = []; // answers of the last minutes, oldest first
let now = null; // the newest answer of the server
let processor = { at_s: null, cpu_s: null, share: null }; // between the two latest looks at the process
let chosen = null; // a model's name
let token = null;
let timer = null;

const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});
const named = (sample, name) => sample?.models.find((model) => model.name === name) ?? null;
const seconds = (late, early) => (late.at_us - early.at_us) / 1e6;

async function look() {
  let response;
  try {
    response = await fetch("status", { headers: headers(), cache: "no-store" });
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

function take(next) {
  const restarted = now && (next.at_us < now.at_us || next.models.some((model) => model.runs < (named(now, model.name)?.runs ?? 0)));
  if (restarted) [samples, now, processor] = [[], null, { at_s: null }];
  now = next;
  if (!samples.length || now.at_us - samples.at(-1).at_us >= SAMPLE_US) samples = [...samples, now].slice(-KEPT);
  if (!named(now, chosen)) {
    chosen = now.models[0].name;
    tryIt(named(now, chosen), headers);
  }
  byId("main").hidden = false;
  server();
  models();
  model();
}

/** What a model did in the last ten seconds; null where there is no earlier sample. */
function recent(name) {
  const then = samples.findLast((sample) => now.at_us - sample.at_us >= WINDOW_US) ?? samples[0];
  return named(then, name) ? between(named(now, name), named(then, name), now.buckets_us, seconds(now, then)) : null;
}

function state(kind, text) {
  byId("state").className = `pill ${kind}`;
  setText(byId("state"), text);
}

const pairs = (values) => Object.entries(values).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);

function server() {
  setText(byId("version"), now.version);
  if (now.not_ready) state("bad", `not ready: ${now.not_ready}`);
  else state("good", "ready");
  const process = now.process;
  setText(byId("uptime"), process ? `up ${span(now.at_s - process.started_s)}` : "");
  if (process && process.at_s !== processor.at_s) {
    const share = processor.at_s === null ? null : Math.max(0, process.cpu_s - processor.cpu_s) / (process.at_s - processor.at_s); // a worker may have ended
    processor = { at_s: process.at_s, cpu_s: process.cpu_s, share };
  }
  const cpu = process ? processor.share : null;
  show(byId("process"), ...(process ? pairs({
    Memory: bytes(process.resident_bytes),
    Processor: cpu === null ? "–" : `${(100 * cpu).toFixed(0)} % of a core`,
    "Open files": `${count(process.open_fds)} of ${count(process.max_fds)}`,
    Threads: count(process.threads),
    ...(now.workers ? { Workers: `${now.workers.serving} of ${now.workers.wanted}, ${now.workers.restarts} replaced` } : {}),
    ...(now.gpus.length ? {} : { GPU: "none" }),
  }) : [el("dt", {}, "not known yet")]));
  byId("gpu-card").hidden = now.gpus.length === 0;
  show(byId("gpus"), ...now.gpus.map(gpu));
}

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
  for (const [name, watts] of Object.entries(found.rails)) row(name, `${watts.toFixed(1)} W`);
  if (found.power_mode !== null) row("Power mode", found.power_mode);
  else if (found.source.includes("sysfs")) row("Power mode", "not known");
  if (found.clock_hz !== null) row("Clock", `${Math.round(found.clock_hz / 1e6)}${found.clock_max_hz ? ` of ${Math.round(found.clock_max_hz / 1e6)}` : ""} MHz`);
  if (found.temperature_c !== null) row("Temperature", `${found.temperature_c.toFixed(0)} °C`);
  const zones = Object.entries(found.zones).sort((a, b) => b[1] - a[1]);
  if (zones.length) row("Hottest zone", `${zones[0][0]}, ${zones[0][1].toFixed(0)} °C`);
  if (found.throttled?.length) rows.push(el("dt", {}, "Throttled"), el("dd", { class: "bad" }, found.throttled.join(", ").replaceAll("_", " ")));
  return el("div", { class: "gpu" }, el("p", {}, found.name), el("dl", { class: "pairs" }, ...rows));
}

function models() {
  byId("models").hidden = now.models.length < 2;
  if (now.models.length < 2) return;
  const rows = byId("models-rows");
  const names = now.models.map((each) => each.name).join("\n");
  if (rows.dataset.names !== names) { // the rows stay, so that the focus does
    rows.dataset.names = names;
    rows.replaceChildren(...now.models.map((each) => {
      const button = el("button", { type: "button" }, each.name);
      button.addEventListener("click", () => choose(each.name));
      return el("tr", {}, el("td", {}, button), ...Array.from({ length: 8 }, (_, i) => el("td", i ? { class: "n" } : {})));
    }));
  }
  now.models.forEach((each, i) => {
    const seen = recent(each.name), lost = seen?.lostPerSecond;
    const [first, ...cells] = rows.children[i].children;
    first.firstChild.setAttribute("aria-pressed", String(each.name === chosen));
    const values = [each.not_ready ?? (each.notes.length ? "see notes" : "ready"), number(seen?.perSecond), ms(seen?.p50), ms(seen?.p99),
      count(each.waiting), number(lost?.refused), number(lost?.expired), number(lost?.failed)];
    values.forEach((text, j) => setText(cells[j], text));
  });
}

function choose(name) {
  chosen = name;
  tryIt(named(now, name), headers);
  models();
  model();
}

function tile(name, value, unit, more = "", kind = "") {
  return el("div", {}, el("dt", {}, name), el("dd", { class: kind }, value, el("small", {}, unit ? ` ${unit}` : "")),
    more ? el("dd", { class: "more" }, more) : null);
}

function about(found) {
  if (found.task?.stages) return `pipeline: ${found.task.stages.replaceAll(", ", " → ")}`;
  const engines = found.engines > 1 ? `${found.engines} engines, ` : "";
  const limit = found.batch_limit < found.max_batch ? ` (now ${found.batch_limit})` : "";
  const delay = found.delay_us > 0 ? `, waiting at most ${time(found.delay_us)} for more` : "";
  const rows = found.max_batch ? `batches of up to ${found.max_batch} rows${limit}${delay}` : "one request at a time";
  return `${found.runtime} on ${found.device}, ${engines}${rows}`;
}

function file(found, generation, loaded_s) {
  byId("file-card").hidden = found === null;
  if (found === null) return;
  const nodes = Object.entries(found.precision).sort((a, b) => b[1] - a[1]).map(([type, each]) => `${count(each)} ${type}`);
  show(byId("file"), ...pairs({
    Name: found.name,
    Size: bytes(found.bytes),
    Written: `${span(now.at_s - found.written_s).replace(/ \d+ s$/, "")} ago`,
    Loaded: `${span(now.at_s - loaded_s).replace(/ \d+ s$/, "")} ago, generation ${generation}`,
    Precision: nodes.length ? `${nodes.join(", ")} nodes` : "not recorded",
    "SHA-256": el("code", {}, found.sha256),
  }));
}

function model() {
  const found = named(now, chosen), seen = recent(chosen);
  const whole = between(found, null, now.buckets_us, 0);
  setText(byId("model-name"), found.name);
  setText(byId("model-about"), about(found));
  const notes = [...(found.not_ready ? [`Not ready: ${found.not_ready}`] : []), ...found.notes];
  byId("notes").hidden = notes.length === 0;
  show(byId("notes"), ...notes.map((note) => el("li", {}, note)));
  const total = losses(found);
  const lost = (name, kind) => {
    const rate = seen?.lostPerSecond[kind];
    return tile(name, number(rate), "/s", `${count(total[kind])} in total`, rate > 0 ? "bad" : "");
  };
  show(byId("tiles"),
    tile("Requests", number(seen?.perSecond), "/s"), tile("p50", ms(seen?.p50), "ms"), tile("p99", ms(seen?.p99), "ms"),
    tile("Waiting", count(found.waiting), "requests", `of ${count(found.queue)} at most`), tile("Batch size", number(seen?.rowsPerRun), "rows"),
    lost("Refused (503)", "refused"), lost("Timed out (504)", "expired"), lost("Other errors", "failed"));
  file(found.file, found.generation, found.loaded_s);
  charts(found);

  const live = seen?.success > 0 && seen.answered > 0 ? seen : whole;
  const period = live === whole ? "since the start" : "last 10 s";
  const waited = live.waited ? `; an engine waited ${time(live.waited)} of it for a fuller batch` : "";
  setText(byId("time-span"), live.mean ? `${time(live.mean)} per request, ${period}${waited}` : "");
  show(byId("time"), ...stages(live));
}

/** The charts over all samples: the last ten minutes, or since the page was opened. */
function charts(found) {
  const bounds = now.buckets_us;
  const places = samples.map((_, i) => i).filter((i) => i > 0);
  const ages = places.map((i) => seconds(now, samples[i]));
  const each = overTime(samples, chosen, bounds, places, 1), smooth = overTime(samples, chosen, bounds, places, SMOOTH);
  const inMs = (us) => (us === null || us === undefined ? null : us / 1000);
  const losing = (kind) => each.map((one) => one?.lostPerSecond[kind] ?? null);
  show(byId("throughput"), trend("Throughput", "requests/s", ages, [{ label: "answered", look: 1, values: each.map((one) => one?.perSecond ?? null) }]));
  show(byId("latency"), trend("Latency", "ms", ages, [
    { label: "p99", look: 2, values: smooth.map((one) => inMs(one?.p99)) },
    { label: "p50", look: 1, values: smooth.map((one) => inMs(one?.p50)) },
  ], 0.1));
  show(byId("queue"), trend("Waiting", "requests", ages, [{ label: "waiting", look: 3, values: places.map((i) => named(samples[i], chosen)?.waiting ?? null) }], 10));
  show(byId("losses"), trend("Refused and failed", "requests/s", ages, [
    { label: "503 refused", look: 2, values: losing("refused") },
    { label: "504 timed out", look: 4, values: losing("expired") },
    { label: "other", look: 6, values: losing("failed") },
  ]));
  const long = named(samples[0], chosen) ? between(found, named(samples[0], chosen), bounds, 1) : null;
  const whole = long?.answered > 0 ? long : between(found, null, bounds, 0);
  show(byId("latencies"), latencies("Latency of the answered requests", whole.counts, bounds));
  show(byId("batches"), batchSizes("Rows in a batch", whole.batches));
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
