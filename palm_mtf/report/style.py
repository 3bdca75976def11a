# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How the page looks, in light and in dark.

The colors of the runs are those of Okabe and Ito, which people with any kind of
color blindness can tell apart; in dark they are lighter.
"""

from collections.abc import Mapping

LIGHT = {
  "paper": "#ffffff",
  "ink": "#1d2126",
  "muted": "#667079",
  "grid": "#e4e7ea",
  "card": "#f7f8f9",
  "run-0": "#0072b2",
  "run-1": "#d55e00",
  "run-2": "#009e73",
  "run-3": "#b0558f",
  "run-4": "#c48a00",
  "run-5": "#3d9bd1",
  "run-6": "#7a6a53",
  "run-7": "#1d2126",
}
_DARK = {
  "paper": "#14171a",
  "ink": "#e6e9ec",
  "muted": "#98a2ab",
  "grid": "#2c3238",
  "card": "#1b1f23",
  "run-0": "#4fb0ea",
  "run-1": "#ff8a3d",
  "run-2": "#2ccfa0",
  "run-3": "#e59ccb",
  "run-4": "#f0c040",
  "run-5": "#9bd4f5",
  "run-6": "#c9b79c",
  "run-7": "#e6e9ec",
}


def _defined(colors: Mapping[str, str]) -> str:
  return " ".join(f"--{name}: {color};" for name, color in colors.items())


STYLE = (
  f"""
:root {{ color-scheme: light dark; {_defined(LIGHT)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ {_defined(_DARK)} }}
}}
"""
  + """
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 76rem; padding: 1.5rem;
  background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial,
    "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 1.2rem 0 .4rem; }
header p { margin: .2rem 0; color: var(--muted); }
footer { margin: 3rem 0 1rem; color: var(--muted); font-size: .85rem; }
.unit { color: var(--muted); font-weight: normal; font-size: .85em; }
.swatch { width: 1.5em; height: .5em; vertical-align: middle; }
.run { white-space: nowrap; font-weight: 600; }
.legend {
  position: sticky; top: 0; margin: .4rem 0; padding: .4rem 0; list-style: none;
  display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; background: var(--paper);
}
header:has(.legend) { display: contents; }
.panels {
  display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(16rem, 100%), 1fr));
}
figure {
  margin: 0; padding: .8rem .9rem .5rem; border-radius: .5rem;
  background: var(--card); border: 1px solid var(--grid);
}
figure.wide { grid-column: 1 / -1; overflow-x: auto; }
figure.wide > svg { min-width: 58rem; }
figure > svg {
  display: block; width: 100%; height: auto; stroke-linejoin: round;
}
figcaption { font-weight: 600; margin-bottom: .3rem; }
.key {
  font-weight: normal; font-size: .85em; color: var(--muted);
  margin-left: 1.2rem; white-space: nowrap;
}
.key::before {
  content: ""; display: inline-block; width: 1.6em; margin-right: .4em;
  vertical-align: middle; border-top: 2px solid currentcolor;
}
.key.level::before { border-top-style: dotted; }
.key.dots::before {
  width: .55em; height: .55em; border: 0; border-radius: 50%;
  background: currentcolor;
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td {
  padding: .3rem 1.6rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--grid);
}
th { font-weight: 600; }
th[scope=row] { font-weight: normal; white-space: nowrap; }
.settings td, .settings th[scope=row] {
  font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
}
.none { color: var(--muted); }
.events { padding-left: 1.2rem; }
.samples {
  display: grid; gap: .2rem 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr));
}
.sample p { margin: .4rem 0 .2rem; color: var(--muted); font-size: .9rem; }
pre {
  margin: 0; padding: .7rem .9rem; border-radius: .5rem; overflow-x: auto;
  white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--card); border: 1px solid var(--grid);
  font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace;
}
summary { cursor: pointer; font-weight: 600; margin: 2rem 0 .6rem; }
@media print { .legend { position: static; } }
"""
)
