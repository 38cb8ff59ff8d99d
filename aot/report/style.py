"""How the page looks: by day and by night, on paper, and on a screen of 420 pixels."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --wash: #f6f8fa; --paper: #fff;
        --measured: #1a7f37; --modelled: #bf8700; --missing: #cf222e; --bar: #b6c7d9;
        --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #8a6d00; --c5: #5b6bd6;
        --c6: #00868b; --c7: #a4303f; --c8: #6b8e23; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --wash: #151b23;
        --paper: #0d1117; --measured: #3fb950; --modelled: #d29922; --missing: #f85149; --bar: #39506b;
        --c0: #58a6ff; --c1: #ff8c42; --c2: #34c99b; --c3: #e0a0c5; --c4: #e3c341; --c5: #a5b0ff;
        --c6: #4fd3d8; --c7: #ff7b8a; --c8: #b5d45c; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: var(--ink);
       background: var(--paper); max-width: 80rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; } .soft { color: var(--soft); }
.headline { font-size: 1.25rem; font-weight: 600; }
table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .18rem .7rem .18rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom-color: var(--soft); } td.n, th.n { text-align: right; }
td.n { white-space: nowrap; }
.wide { overflow-x: auto; } .wide table { font-size: .8rem; } #rows td { white-space: nowrap; }
details td { overflow-wrap: anywhere; }
figure { margin: .6rem 0; } figcaption { font-weight: 600; font-size: .9rem; }
.chart { width: 100%; } svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--line); } svg .one { stroke: var(--ink); }
.plot { position: relative; } canvas { position: absolute; inset: 0; width: 100%; height: 100%; }
#ring { position: fixed; width: 10px; height: 10px; border: 2px solid var(--ink); border-radius: 50%;
        pointer-events: none; }
.key { font-size: .8rem; margin-right: .9rem; white-space: nowrap; } .key i { display: inline-block; width: .7em;
       height: .7em; border-radius: 50%; margin-right: .3em; }
#tip { position: fixed; z-index: 1; background: var(--wash); border: 1px solid var(--line); border-radius: 6px;
       padding: .3rem .6rem; font-size: .8rem; pointer-events: none; white-space: pre-line; max-width: 22rem; }
#tip:empty { display: none; }
.controls { display: flex; flex-wrap: wrap; gap: .4rem .9rem; margin: .4rem 0; } .controls label { font-size: .85rem; }
select { font: inherit; font-size: .85rem; max-width: 15rem; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: 0 .8rem; }
details[open] { padding-bottom: .6rem; } summary { cursor: pointer; padding: .4rem 0; font-weight: 600; }
.strip { display: inline-flex; width: 9rem; height: .7rem; border-radius: 3px; overflow: hidden;
         background: var(--wash); vertical-align: middle; }
.strip i { display: block; height: 100%; }
.measured { background: var(--measured); } .modelled { background: var(--modelled); }
.missing { background: var(--missing); }
.dot { display: inline-block; width: .65em; height: .65em; border-radius: 50%; margin-right: .35em; }
.bar { display: inline-block; height: .55rem; background: var(--bar); vertical-align: middle; margin-right: .4rem; }
button { font: inherit; font-size: .85rem; color: inherit; border: 1px solid var(--line); border-radius: 6px;
         background: var(--wash); padding: .15rem .7rem; cursor: pointer; }
@media (max-width: 30rem) { body { padding: .6rem; font-size: 14px; } .headline { font-size: 1.05rem; }
         .controls label { width: 100%; display: flex; justify-content: space-between; } }
@media print { :root { color-scheme: light; } body { max-width: none; padding: 0; font-size: 11px; }
               button, .controls { display: none; } details, tr, svg { break-inside: avoid; }
               .wide { overflow: visible; } #rows td { white-space: normal; } }
"""
