"""How the report's page looks: one style sheet for light, dark, narrow and print.

Series colours are Okabe and Ito's, a little darker or lighter where a theme needs it: graphics keep
3:1 against their ground, text keeps 4.5:1.
"""

from __future__ import annotations

from collections.abc import Mapping

# c0 to c7 are the looks of charts.py; 0 is the baseline, and quieter than what it is held against
LIGHT: Mapping[str, str] = {
    "ground": "#ffffff",
    "card": "#f6f7f8",
    "ink": "#14181d",
    "quiet": "#56606b",
    "line": "#d5dade",
    "grid": "#e6e9ec",
    "accent": "#005a8f",
    "good": "#00694d",
    "bad": "#b03a00",
    "c0": "#56606b",
    "c1": "#0072b2",
    "c2": "#d55e00",
    "c3": "#008f68",
    "c4": "#b5558a",
    "c5": "#7a6a00",
    "c6": "#6a4fb3",
    "c7": "#8c4a1f",
}
DARK: Mapping[str, str] = {
    "ground": "#12161b",
    "card": "#1a2027",
    "ink": "#e9edf1",
    "quiet": "#a3aeb9",
    "line": "#333c46",
    "grid": "#262d35",
    "accent": "#7cc4f0",
    "good": "#35c49a",
    "bad": "#ff9a5c",
    "c0": "#a3aeb9",
    "c1": "#56b4e9",
    "c2": "#e69f00",
    "c3": "#00b285",
    "c4": "#cc79a7",
    "c5": "#d8cb3c",
    "c6": "#b79cf2",
    "c7": "#d9a074",
}


def _variables(theme: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in theme.items())


_SERIES = "".join(
    f".s{i}{{stroke:var(--c{i});fill:var(--c{i})}}"
    for i in range(sum(k[1:].isdigit() for k in LIGHT))
)
_BODY = """
*{box-sizing:border-box}
html{background:var(--ground);color:var(--ink);-webkit-text-size-adjust:100%}
body{margin:0;font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,
sans-serif}
main{max-width:64rem;margin:0 auto;padding:3rem 1.5rem 5rem}
header{border-bottom:1px solid var(--line);padding-bottom:1.5rem}
h1{font-size:1.55rem;line-height:1.25;margin:.2rem 0 1.2rem;letter-spacing:-.01em;font-weight:650}
h2{font-size:1.2rem;margin:3rem 0 1rem;letter-spacing:-.005em;font-weight:650}
h3{font-size:1rem;margin:0 0 .5rem;font-weight:650}
p,ul,pre{margin:0 0 .75rem}
header p,header li,figcaption,.note{max-width:46rem}
.over{color:var(--quiet);font-size:.85rem;margin:0}
.verdict{font-size:1.2rem;line-height:1.45;border-left:4px solid var(--accent);padding-left:1rem}
.tag{border:1px solid var(--line);border-radius:1em;padding:.05em .6em;margin-left:.4em;
color:var(--bad)}
.gates{list-style:none;padding:0;margin:1.2rem 0 0;display:grid;gap:.3rem}
.gates span{color:var(--quiet)}
.met strong{color:var(--good)}
.unmet strong{color:var(--bad)}
.note,figcaption{color:var(--quiet);font-size:.88rem}
.note{margin-top:.5rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;line-height:1.4;
font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.4rem 0}
th,td{text-align:left;vertical-align:top;padding:.45rem .9rem .45rem 0;
border-bottom:1px solid var(--line)}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--quiet);font-weight:500;vertical-align:bottom;border-bottom-color:var(--quiet)}
tbody th{font-weight:600}
.n{text-align:right;white-space:nowrap}
thead .n{white-space:normal}
td small{display:block;white-space:normal;color:var(--quiet);font-size:.92em}
figure{margin:0 0 2.5rem;padding:1.25rem 1.25rem 1rem;background:var(--card);border-radius:8px}
.plot{overflow-x:auto}
svg{display:block;width:100%;min-width:36rem;height:auto;margin:0 0 .6rem;
font:12px/1 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
svg text{fill:var(--ink);font-variant-numeric:tabular-nums}
svg .tick,svg .name,svg .small{fill:var(--quiet)}
svg .small{paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
svg .label{font-weight:600}
.grid{stroke:var(--grid);fill:none}
.axis{stroke:var(--quiet);fill:none}
.flag{stroke:var(--quiet);fill:none;stroke-dasharray:3 3}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round}
.thin{stroke-width:1.1}
.band{stroke:none;opacity:.13}
.whisker{fill:none;stroke-width:1.4}
.leader{fill:none;stroke-width:1;stroke-dasharray:1 3}
.open{fill:none}
details{border-top:1px solid var(--line);padding:.6rem 0}
figure details{border:0;padding:.3rem 0 0;font-size:.88rem}
summary{cursor:pointer;font-weight:550}
summary:focus-visible,[tabindex]:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
pre{background:var(--card);border-radius:6px;padding:.8rem 1rem;overflow-x:auto;font-size:.85rem}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media (max-width:40rem){main{padding:1.5rem 1rem 3rem}figure{padding:1rem .75rem}}
@page{size:A4;margin:16mm}
@media print{
body{font-size:10pt}
main{max-width:none;padding:0}
h2{margin-top:1.6rem}
h2,h3{break-after:avoid}
figure,tr{break-inside:avoid}
figure{background:none;padding:0}
svg{min-width:0}
.wide,.plot{overflow:visible}
table{font-size:8pt}
}
"""
CSS = (
    f":root{{color-scheme:light dark;{_variables(LIGHT)}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    f"{_BODY}{_SERIES}"
)
