// Figures out of two samples of the server's counters, and their units.

import { count, number } from "./charts.js";

/** The q-th quantile (0 to 1) in µs of a histogram's counts; null when it is empty. */
export function quantile(counts, bounds, q) {
  const total = counts.reduce((a, b) => a + b, 0);
  if (total === 0) return null;
  let seen = 0;
  for (let i = 0; i < counts.length; i++) {
    if (counts[i] > 0 && seen + counts[i] >= q * total) {
      const low = i === 0 ? 0 : bounds[i - 1];
      const high = i < bounds.length ? bounds[i] : low;
      return low + ((high - low) * (q * total - seen)) / counts[i];
    }
    seen += counts[i];
  }
  return bounds[bounds.length - 1];
}

/** What went wrong, by kind: refused with 503, timed out with 504, any other error. */
export const losses = ({ outcomes }) => ({
  refused: outcomes.rejected, expired: outcomes.expired, failed: outcomes.bad_request + outcomes.failed,
});

const minus = (now, then) => now - (then ?? 0);

/** What a model did between two samples; `then` null means since the start. */
export function between(now, then, bounds, seconds) {
  const counts = now.request.counts.map((each, i) => minus(each, then?.request.counts[i]));
  const answered = counts.reduce((a, b) => a + b, 0);
  const success = minus(now.outcomes.success, then?.outcomes.success);
  const runs = minus(now.runs, then?.runs);
  const lostNow = losses(now), lostThen = then ? losses(then) : {};
  const stages = Object.entries(now.stages_us)
    .map(([name, us]) => ({ name, us: success > 0 ? minus(us, then?.stages_us[name]) / success : 0 }));
  const batches = Object.entries(now.batches)
    .map(([rows, each]) => [Number(rows), minus(each, then?.batches[rows])]).filter(([, each]) => each > 0);
  return {
    perSecond: seconds > 0 ? success / seconds : null,
    lostPerSecond: Object.fromEntries(Object.entries(lostNow)
      .map(([kind, each]) => [kind, seconds > 0 ? minus(each, lostThen[kind]) / seconds : null])),
    p50: quantile(counts, bounds, 0.5),
    p99: quantile(counts, bounds, 0.99),
    mean: answered > 0 ? minus(now.request.us, then?.request.us) / answered : null,
    rowsPerRun: runs > 0 ? minus(now.rows, then?.rows) / runs : null,
    waited: success > 0 ? minus(now.idle_us, then?.idle_us) / success : null,
    counts, success, answered, stages, batches,
  };
}

export const ms = (us) => number(us === null || us === undefined ? null : us / 1000);

export function time(us) {
  if (us === null || us === undefined) return "–";
  return us < 1000 ? `${number(us)} µs` : us < 1e6 ? `${number(us / 1000)} ms` : `${number(us / 1e6)} s`;
}

/** A round time on an axis: 50 µs, 2 ms, 10 s. */
export const timeTick = (us) => (us < 1000 ? `${us} µs` : us < 1e6 ? `${us / 1000} ms` : `${us / 1e6} s`);

export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const [unit, name] = size >= 1 << 30 ? [1 << 30, "GiB"] : size >= 1 << 20 ? [1 << 20, "MiB"] : [1 << 10, "KiB"];
  return `${number(size / unit)} ${name}`;
}

export function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  const [days, hours, minutes] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (days) return `${count(days)} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${s % 60} s` : `${s} s`;
}
