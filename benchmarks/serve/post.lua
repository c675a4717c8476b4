-- wrk's part of the comparison: one fixed POST, and one line of JSON at the end.
-- Arguments: the file with the body, "times" or "no-times", then headers as Name=Value.
-- "times" also prints when each answer came, for servers so slow that the edges of the run count.

local ffi = require("ffi")
ffi.cdef("struct moment { long s; long ns; }; int clock_gettime(int clock, struct moment *now);")

local function now_s()
  local moment = ffi.new("struct moment")
  ffi.C.clock_gettime(1, moment) -- CLOCK_MONOTONIC
  return tonumber(moment.s) + tonumber(moment.ns) / 1e9
end

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method, wrk.body = "POST", file:read("*a")
  file:close()
  for i = 3, #args do
    local name, value = args[i]:match("^(.-)=(.*)$")
    wrk.headers[name] = value
  end
  times = {}
  if args[2] == "times" then
    local started_s = now_s()
    response = function(status)
      if status == 200 then
        times[#times + 1] = string.format("%.6f", now_s() - started_s)
      end
    end
  end
end

function done(summary, latency)
  local errors = summary.errors
  print(string.format(
    '{"requests": %d, "duration_us": %d, "refused": %d, "errors": %d, "p50_us": %d, "p99_us": %d, "times_s": [%s]}',
    summary.requests, summary.duration, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50), latency:percentile(99), table.concat(threads[1]:get("times"), ", ")
  ))
end
