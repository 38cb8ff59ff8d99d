"""The page's script: filters and sorts the cells (data.py), draws and lists them. It loads and sends nothing."""

from __future__ import annotations

SCRIPT = r"""
const data = JSON.parse(document.getElementById("data").textContent);
const at = id => document.getElementById(id);
const safe = text => String(text).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const cells = data.cells.map(row => Object.fromEntries(data.fields.map((name, i) => [name, row[i]])));
const MEASURED = 0, MISSING = 2;
for (const one of cells) {
  one.part = one.us && one.least / one.us;
  one.rate = one.us && one.flop / one.us;
  one.gain = one.torch && one.us && one.state === MEASURED ? one.torch / one.us : null;
}
const num = (value, digits) => value === null || value === undefined ? "" : value.toFixed(digits);
const us = value => value === null || value === undefined ? "" : num(value, value < 100 ? 2 : 1);
const UNITS = {
  part: {title: "Fraction of the roofline, in percent, by rows", value: one => one.part && 100 * one.part, log: false},
  us: {title: "Microseconds of one launch, by rows", value: one => one.us, log: true},
  rate: {title: "TFLOP/s, by rows", value: one => one.rate, log: true},
};
const ORDERS = {
  torch: ["slowest beside torch", one => one.gain === null ? Infinity : one.gain],
  part: ["furthest from the roofline", one => one.part || (one.state === MISSING ? -1 : Infinity)],
  us: ["longest time", one => -(one.us || 0)],
  rows: ["fewest rows", one => one.rows],
};
if (!cells.some(one => one.gain)) { delete ORDERS.torch; at("against").remove(); }
const fill = (id, options) => { at(id).innerHTML = options.map(([value, text]) =>
  `<option value="${safe(value)}">${safe(text)}</option>`).join(""); };
fill("model", [["", "all"], ...data.models.map((one, i) => [i, one[0]])]);
fill("gemm", [["", "all"], ...data.gemms.map((one, i) => [i, one])]);
fill("form", [["", "all"], ...data.forms.map((one, i) => [i, one])]);
fill("state", [["", "all"], ...data.states.map((one, i) => [i, one])]);
fill("gpu", [["", "all"], ...data.gpus.map((one, i) => [i, one || "none"])]);
at("gpus").hidden = data.gpus.filter(one => one).length < 2;
fill("order", Object.entries(ORDERS).map(([key, [text]]) => [key, text]));
const colour = one => `var(--c${one.form % 9})`;
const names = data.gemms.map((_, i) => data.models.filter(one => one[1].includes(i)).map(one => one[0]).join(", "));
let shown = [], most = 50, dots = [];

function chosen() {
  const [model, gemm, form, state, gpu] = ["model", "gemm", "form", "state", "gpu"].map(id => at(id).value);
  const gemms = model === "" ? null : new Set(data.models[model][1]);
  return cells.filter(one => (!gemms || gemms.has(one.gemm)) && (gemm === "" || one.gemm === +gemm) &&
    (form === "" || one.form === +form) && (state === "" || one.state === +state) && (gpu === "" || one.gpu === +gpu));
}
function about(one) {
  const lines = [`${data.gemms[one.gemm]}, ${data.forms[one.form]}, M near ${one.rows}`, names[one.gemm]];
  const gpu = data.gpus[one.gpu] && ` on ${data.gpus[one.gpu]}`;
  if (one.us) lines.push(`${us(one.us)} us ${data.states[one.state]}${gpu}, ${num(one.rate, 1)} TFLOP/s`,
    `${num(100 * one.part, 0)} % of the roofline (${us(one.least)} us, ${one.bound ? "compute" : "memory"})`);
  if (one.torch) lines.push(`torch ${us(one.torch)} us` + (one.gain ? `: ${num(one.gain, 2)} x` : ""));
  if (one.config) lines.push(data.configs[one.config] || "");
  return lines.filter(Boolean).join("\n");
}
function ticks(low, high, log) {
  const found = [];
  if (log) {
    for (let tens = Math.floor(Math.log10(low)); tens <= Math.ceil(Math.log10(high)); tens++)
      for (const part of high / low > 100 ? [1] : [1, 1.5, 2, 3, 5, 7])
        if (part * 10 ** tens >= low && part * 10 ** tens <= high) found.push(part * 10 ** tens);
  } else for (let tick = 0; tick <= high; tick += 20) found.push(tick);
  return found;
}
function chart(into, value, log, line) {
  const points = shown.filter(one => value(one) > 0);
  const wide = Math.max(into.clientWidth, 280), high = Math.min(320, Math.max(200, wide * .4));
  if (!points.length) { into.innerHTML = '<p class="soft">Nothing to draw.</p>'; return; }
  const left = 40, right = 8, top = 8, bottom = 34, rows = points.map(one => Math.log2(one.rows));
  const from = Math.min(...rows) - .5, to = Math.max(...rows) + .5;
  const values = points.map(value);
  let least = values.reduce((a, b) => Math.min(a, b)), largest = values.reduce((a, b) => Math.max(a, b));
  if (log) { least = Math.min(least, line || least) / 1.1; largest = Math.max(largest, line || largest) * 1.1; }
  else { least = 0; largest = Math.max(100, largest * 1.05); }
  const scale = log ? Math.log : x => x;
  const x = row => left + (row - from) / (to - from) * (wide - left - right);
  const y = v => top + (scale(largest) - scale(v)) / (scale(largest) - scale(least)) * (high - top - bottom);
  const parts = [];
  for (const tick of ticks(least, largest, log)) parts.push(
    `<line class="grid" x1="${left}" x2="${wide - right}" y1="${y(tick).toFixed(1)}" y2="${y(tick).toFixed(1)}"/>`,
    `<text x="${left - 5}" y="${(y(tick) + 4).toFixed(1)}" text-anchor="end">${+tick.toPrecision(3)}</text>`);
  const step = Math.max(1, Math.ceil((to - from) / (wide / 55)));
  for (let power = Math.ceil(from); power <= to; power += step) {
    const M = 2 ** power, text = M >= 1048576 ? M / 1048576 + "M" : M >= 1024 ? M / 1024 + "k" : M;
    parts.push(`<text x="${x(power).toFixed(1)}" y="${high - 18}" text-anchor="middle">${text}</text>`);
  }
  parts.push(`<text x="${wide / 2}" y="${high - 3}" text-anchor="middle">rows M (near)</text>`);
  if (line) parts.push(`<line class="one" x1="${left}" x2="${wide - right}" y1="${y(line)}" y2="${y(line)}"/>`);
  const count = data.forms.length;
  for (const one of points) {
    const aside = count > 1 ? (one.form / (count - 1) - .5) * .6 : 0;
    const hollow = one.state !== MEASURED, hue = colour(one);
    parts.push(`<circle data-n="${dots.push(one) - 1}" r="${points.length > 1500 ? 2 : 3}" ` +
      `cx="${x(Math.log2(one.rows) + aside).toFixed(1)}" cy="${y(value(one)).toFixed(1)}" ` +
      (hollow ? `class="hollow" style="stroke:${hue}"/>` : `style="fill:${hue}"/>`));
  }
  const used = [...new Set(points.map(one => one.form))].sort((a, b) => a - b);
  const key = used.map(form => `<span class="key"><i style="background:var(--c${form % 9})"></i>` +
    `${safe(data.forms[form])}</span>`).join("");
  into.innerHTML = `<svg viewBox="0 0 ${wide} ${high}" role="img" aria-label="chart">${parts.join("")}</svg>${key}`;
}
const COLUMNS = [
  ["product", one => safe(data.gemms[one.gemm])], ["op", one => safe(data.forms[one.form])],
  ["M near", one => one.rows, 1], ["source", one => `<span class="dot ${data.states[one.state]}"></span>` +
    data.states[one.state]],
  ["x torch", one => num(one.gain, 2), 1], ["us", one => us(one.us), 1], ["TFLOP/s", one => num(one.rate, 1), 1],
  ["% of the roofline", one => one.part ?
    `<span class="bar" style="width:${num(4 * Math.min(1, one.part), 2)}rem"></span>${num(100 * one.part, 0)}` : "", 1],
  ["roofline us", one => us(one.least), 1], ["bound by", one => one.bound ? "compute" : "memory"],
  ["torch us", one => us(one.torch), 1], ["modelled us", one => us(one.model), 1],
  ["GPU", one => safe(data.gpus[one.gpu])], ["variant", one => safe(data.configs[one.config])],
  ["runner-up", one => one.second_us ? `${safe(data.configs[one.second])} (${(100 * (one.second_us / one.us - 1))
    .toFixed(1)} % more)` : ""],
  ["tried", one => one.tried || "", 1], ["median / fastest", one => one.tried > 1 ? num(one.spread, 2) : "", 1],
  ["failed", one => one.failures ? safe(one.failures.join("; ")) : ""], ["models", one => safe(names[one.gemm])],
];
function list() {
  const some = shown.slice(0, most), hidden = {us: "TFLOP/s", rate: "us"}[at("unit").value];
  const columns = COLUMNS.filter(([name, value]) => name !== hidden && shown.some(one => value(one) !== ""));
  const line = (tag, texts) => "<tr>" + columns.map((one, i) =>
    `<${tag}${one[2] ? " class=n" : ""}>${texts[i]}</${tag}>`).join("") + "</tr>";
  at("rows").innerHTML = `<table><thead>${line("th", columns.map(one => one[0]))}</thead><tbody>` +
    some.map(one => line("td", columns.map(([, value]) => value(one)))).join("") + "</tbody></table>";
  at("more").hidden = shown.length <= most;
}
function draw() {
  const unit = UNITS[at("unit").value], [, key] = ORDERS[at("order").value];
  shown = chosen().map((one, i) => [key(one), i, one]).sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(one => one[2]);
  dots = [];
  const gains = shown.map(one => one.gain).filter(Boolean);
  const mean = gains.length && Math.exp(gains.reduce((sum, gain) => sum + Math.log(gain), 0) / gains.length);
  const beside = gains.length ? `; ${mean.toFixed(2)} x torch over ${gains.length.toLocaleString("en")} of them, ` +
    `worst ${Math.min(...gains).toFixed(2)}` : "";
  at("said").textContent = `${shown.length.toLocaleString("en")} cells${beside}. Filled: measured; hollow: modelled.`;
  at("above").textContent = unit.title;
  chart(at("chart"), unit.value, unit.log);
  if (at("torch")) chart(at("torch"), one => one.gain, true, 1);
  list();
}
for (const id of ["model", "gemm", "form", "state", "gpu", "unit", "order"])
  at(id).onchange = () => { most = 50; draw(); };
at("more").onclick = () => { most += 500; list(); };
addEventListener("mousemove", event => {
  const one = event.target.dataset && event.target.tagName === "circle" ? dots[event.target.dataset.n] : null;
  const tip = at("tip");
  tip.textContent = one ? about(one) : "";
  if (one) { tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + "px"; }
});
let waiting; addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
const all = () => document.querySelectorAll("details");
addEventListener("beforeprint", () => all().forEach(one => { one.dataset.was = one.open; one.open = true; }));
addEventListener("afterprint", () => all().forEach(one => { one.open = one.dataset.was === "true"; }));
draw();
"""
