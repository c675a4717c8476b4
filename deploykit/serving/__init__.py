"""The server: the extra [serve]. Importing it reports what to install if that is missing."""

from deploykit.core.extras import installed, missing, require

for _module in ("orjson", "uvloop", "httptools"):
    require(_module)
for _module in ("google.protobuf", "hpack", "prometheus_client"):  # imported on first use
    if not installed(_module):
        raise missing(_module.partition(".")[0])
