"""How the page looks, and the few lines of script that open and close its parts."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --wash: #f6f8fa;
        --measured: #1a7f37; --modelled: #bf8700; --missing: #cf222e; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: var(--ink);
       background: #fff; max-width: 80rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
p { margin: .4rem 0; max-width: 60rem; } .soft { color: var(--soft); }
table { border-collapse: collapse; font-size: .85rem; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .18rem .7rem .18rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom-color: var(--soft); } td.n, th.n { text-align: right; }
.none { margin: .4rem 0 .4rem 1.8rem; } .none .soft { font-weight: 400; }
.wide { overflow-x: auto; } .wide table { font-size: .8rem; }
.wide td { white-space: nowrap; } .wrap { display: inline-block; white-space: normal; min-width: 11rem; }
svg { display: block; height: auto; margin: .4rem 0; }
.side { display: flex; flex-wrap: wrap; gap: 1rem; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; padding: 0 .8rem; }
details[open] { padding-bottom: .6rem; } summary { cursor: pointer; padding: .4rem 0; font-weight: 600; }
summary .soft { font-weight: 400; } details details { border-width: 0 0 0 2px; border-radius: 0; }
.strip { display: inline-flex; width: 9rem; height: .7rem; border-radius: 3px; overflow: hidden;
         background: var(--wash); vertical-align: middle; }
.strip i { display: block; height: 100%; }
.measured { background: var(--measured); } .modelled { background: var(--modelled); }
.missing { background: var(--missing); }
.dot { display: inline-block; width: .65em; height: .65em; border-radius: 50%; margin-right: .35em; }
.box { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: 2px; vertical-align: -1px; }
.bar { display: inline-block; height: .55rem; background: #b6c7d9; vertical-align: middle; margin-right: .4rem; }
button { font: inherit; font-size: .85rem; border: 1px solid var(--line); border-radius: 6px; background: var(--wash);
         padding: .15rem .7rem; cursor: pointer; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } button { display: none; }
               h2, h3, summary { break-after: avoid; } details, tr, svg, .side > div { break-inside: avoid; }
               details:has(details) { break-inside: auto; } .wide { overflow: visible; }
               .wide table { font-size: 8px; } .wide td { white-space: normal; } }
"""

SCRIPT = """
const all = () => document.querySelectorAll("details");
document.getElementById("open").onclick = () => all().forEach(one => one.open = true);
document.getElementById("close").onclick = () => all().forEach(one => one.open = false);
addEventListener("beforeprint", () => all().forEach(one => { one.dataset.was = one.open; one.open = true; }));
addEventListener("afterprint", () => all().forEach(one => { one.open = one.dataset.was === "true"; }));
const reveal = () => { let one = location.hash && document.getElementById(location.hash.slice(1));
  for (let at = one; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  if (one) one.scrollIntoView(); };
addEventListener("hashchange", reveal); reveal();
"""
