#!/bin/sh
# Wait until the server is ready, then send it one recorded sample: ./smoke-test.sh [URL] [SECONDS]
set -eu
url="${1:-http://127.0.0.1:${DEPLOYKIT_HTTP:-8000}}"
limit_s="${2:-1800}"
cd "$(dirname "$0")"

command -v curl > /dev/null || { echo "error: curl is not installed" >&2; exit 3; }
waited_s=0
until curl --silent --fail --max-time 5 --output /dev/null "$url/v2/health/ready"; do
  if [ "$waited_s" -ge "$limit_s" ]; then
    echo "error: $url is not ready after $limit_s s; see: docker compose logs" >&2
    exit 1
  fi
  if [ "$waited_s" -eq 0 ]; then
    echo "waiting for $url; the first start builds the engine" >&2
  fi
  sleep 2
  waited_s=$((waited_s + 2))
done

answer="$(mktemp)"
trap 'rm -f "$answer"' EXIT
status="$(curl --silent --show-error --max-time 60 --output "$answer" --write-out '%{http_code}' \
  --header 'Content-Type: application/octet-stream' \
  --header 'Inference-Header-Content-Length: @HEADER_BYTES@' \
  --data-binary @smoke-test.request "$url/v2/models/@NAME@/infer")"
if [ "$status" != 200 ]; then
  echo "error: $url answered $status: $(head -c 500 "$answer")" >&2
  exit 1
fi
echo "ok: @NAME@ answered with $(wc -c < "$answer") bytes"
