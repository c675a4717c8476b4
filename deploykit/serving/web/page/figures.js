// Numbers out of two looks at the server's counters, and how they are written.

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

const BAD = ["rejected", "expired", "bad_request", "failed"];
const errors = (model) => BAD.reduce((sum, name) => sum + model.outcomes[name], 0);
const minus = (now, then) => now - (then ?? 0);

/** What a model did between two looks; `then` null means since the start. */
export function between(now, then, bounds, seconds) {
  const counts = now.request.counts.map((count, i) => minus(count, then?.request.counts[i]));
  const answered = counts.reduce((a, b) => a + b, 0);
  const success = minus(now.outcomes.success, then?.outcomes.success);
  const runs = minus(now.runs, then?.runs);
  const stages = Object.entries(now.stages_us)
    .map(([name, us]) => ({ name, us: success > 0 ? minus(us, then?.stages_us[name]) / success : 0 }));
  const mean = answered > 0 ? minus(now.request.us, then?.request.us) / answered : null;
  const batches = Object.entries(now.batches)
    .map(([rows, count]) => [Number(rows), minus(count, then?.batches[rows])]).filter(([, count]) => count > 0);
  return {
    perSecond: seconds > 0 ? success / seconds : null,
    errorsPerSecond: seconds > 0 ? (errors(now) - (then ? errors(then) : 0)) / seconds : null,
    p50: quantile(counts, bounds, 0.5),
    p99: quantile(counts, bounds, 0.99),
    rowsPerRun: runs > 0 ? minus(now.rows, then?.rows) / runs : null,
    waited: success > 0 ? minus(now.idle_us, then?.idle_us) / success : null,
    success, answered, mean, stages, batches,
  };
}

export const errorsOf = errors;

/** Three digits, with a thin space between thousands. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1000) return String(value);
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** A round number beside an axis. */
export const tick = (value) => (value >= 1000 ? short(value) : String(Number(value.toPrecision(3))));

export const ms = (us) => (us === null || us === undefined ? "–" : short(us / 1000));

export function time(us) {
  if (us === null || us === undefined) return "–";
  return us < 1000 ? `${us < 10 ? us.toFixed(1) : us.toFixed(0)} µs` : `${short(us / 1000)} ms`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  return count >= 1 << 30 ? `${(count / (1 << 30)).toFixed(1)} GiB` : `${Math.round(count / (1 << 20))} MiB`;
}

export function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  const [days, hours, minutes] = [Math.floor(s / 86400), Math.floor(s / 3600) % 24, Math.floor(s / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${s % 60} s` : `${s} s`;
}
