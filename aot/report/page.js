// Unpacks the cells (data.py), filters, sorts, draws and lists them. Loads and sends nothing.
const at = id => document.getElementById(id);
async function unpacked() {
  const bytes = Uint8Array.from(atob(at("data").textContent), one => one.charCodeAt(0));
  const stream = new Response(bytes).body.pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}
function start(data) {
const safe = text => String(text).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const MEASURED = 0, MISSING = 2, column = data.columns;
const cells = column.gemm.map((gemm, i) => {
  const us = column.us[i] || null, torch = column.torch[i] || null, rows = 2 ** column.log2_rows[i];
  const state = column.state[i], least = column.least[i];
  const times = name => us && column[name][i] && us * column[name][i] / 1000;
  return {
    gemm, form: column.form[i], rows, state, us, torch, least, bound: column.bound[i], gpu: column.gpu[i],
    model: times("model"), config: column.config[i], second: column.second[i], second_us: times("second_us"),
    tried: column.tried[i], spread: column.spread[i] / 1000, failures: data.failures[i], plan: data.plans[column.plan[i]],
    part: us && least / us, rate: us && rows * data.flop[gemm] / us,
    gain: torch && us && state === MEASURED ? torch / us : null,
  };
});
const num = (value, digits) => value === null || value === undefined ? "" : value.toFixed(digits);
const us = value => value === null || value === undefined ? "" : num(value, value < 100 ? 2 : 1);
const short = value => value >= 1e4 ? +(value / 1e3).toPrecision(3) + "k" : +value.toPrecision(3);
const UNITS = {
  part: {title: "Fraction of the roofline, in percent, by rows", value: one => one.part && 100 * one.part, log: false},
  us: {title: "Microseconds of one launch, by rows", value: one => one.us, log: true},
  rate: {title: "TFLOP/s, by rows", value: one => one.rate, log: true},
};
const ORDERS = {
  torch: ["slowest against torch", one => one.gain === null ? Infinity : one.gain],
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
const users = data.gemms.map((_, i) => data.models.filter(one => one[1].includes(i)).map(one => one[0]));
const names = users.map(some => some.join(", "));
function gemm(one) {  // of many models that share it the one that was asked for, or the first
  const some = users[one.gemm], asked = at("model").value, name = asked === "" ? some[0] : data.models[asked][0];
  const more = some.length > 1 ? ` +${some.length - 1}` : "", sizes = safe(data.gemms[one.gemm]);
  if (!name) return sizes;
  return `<span title="${safe(names[one.gemm])}">${safe(name.split("/").pop())}${more}</span><br>${sizes}`;
}
let shown = [], most = 50;
const sorted = {};  // all cells, by each order that was asked for

function chosen() {
  const [model, gemm, form, state, gpu] = ["model", "gemm", "form", "state", "gpu"].map(id => at(id).value);
  const gemms = model === "" ? null : new Set(data.models[model][1]);
  const order = at("order").value, [, key] = ORDERS[order];
  sorted[order] ||= cells.map((one, i) => [key(one), i, one]).sort((a, b) => a[0] - b[0] || a[1] - b[1])
    .map(one => one[2]);
  return sorted[order].filter(one => (!gemms || gemms.has(one.gemm)) && (gemm === "" || one.gemm === +gemm) &&
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
  const left = 40, right = 8, top = 8, bottom = 34;
  const most = (of, sign) => sign * points.reduce((so_far, one) => Math.max(so_far, sign * of(one)), -Infinity);
  const from = Math.log2(most(one => one.rows, -1)) - .5, to = Math.log2(most(one => one.rows, 1)) + .5;
  let least = most(value, -1), largest = most(value, 1);
  if (log) { least = Math.min(least, line || least) / 1.1; largest = Math.max(largest, line || largest) * 1.1; }
  else { least = 0; largest = Math.max(100, largest * 1.05); }
  const scale = log ? Math.log : x => x;
  const x = row => left + (row - from) / (to - from) * (wide - left - right);
  const y = v => top + (scale(largest) - scale(v)) / (scale(largest) - scale(least)) * (high - top - bottom);
  const parts = [];
  for (const tick of ticks(least, largest, log)) parts.push(
    `<line class="grid" x1="${left}" x2="${wide - right}" y1="${y(tick).toFixed(1)}" y2="${y(tick).toFixed(1)}"/>`,
    `<text x="${left - 5}" y="${(y(tick) + 4).toFixed(1)}" text-anchor="end">${short(tick)}</text>`);
  const step = Math.max(1, Math.ceil((to - from) / (wide / 55)));
  for (let power = Math.ceil(from); power <= to; power += step) {
    const M = 2 ** power, text = M >= 1048576 ? M / 1048576 + "M" : M >= 1024 ? M / 1024 + "k" : M;
    parts.push(`<text x="${x(power).toFixed(1)}" y="${high - 18}" text-anchor="middle">${text}</text>`);
  }
  parts.push(`<text x="${wide / 2}" y="${high - 3}" text-anchor="middle">rows M (near)</text>`);
  if (line) parts.push(`<line class="one" x1="${left}" x2="${wide - right}" y1="${y(line)}" y2="${y(line)}"/>`);
  const used = [...new Set(points.map(one => one.form))].sort((a, b) => a - b);
  const key = used.map(form => `<span class="key"><i style="background:var(--c${form % 9})"></i>` +
    `${safe(data.forms[form])}</span>`).join("");
  into.innerHTML = `<div class="plot"><svg viewBox="0 0 ${wide} ${high}" role="img" aria-label="chart">` +
    `${parts.join("")}</svg><canvas></canvas></div>${key}`;
  const last = data.forms.length - 1, aside = one => last ? (one.form / last - .5) * .6 : 0;
  const xs = points.map(one => x(Math.log2(one.rows) + aside(one))), ys = points.map(one => y(value(one)));
  marks(into.querySelector("canvas"), points, xs, ys, wide, high);
}
const SQUARE = 8;  // pixels: marks near the pointer are looked for in the squares around it
function marks(canvas, points, xs, ys, wide, high) {
  const zoom = window.devicePixelRatio || 1, radius = points.length > 1500 ? 2 : 3;
  canvas.width = Math.round(wide * zoom); canvas.height = Math.round(high * zoom);
  const paint = canvas.getContext("2d"), stamps = {}, near = new Map(), side = Math.ceil(2 * radius + 2);
  const stamp = (form, hollow) => stamps[2 * form + hollow] ||= (() => {
    const one = document.createElement("canvas"), brush = one.getContext("2d");
    one.width = one.height = Math.ceil(side * zoom);
    brush.scale(zoom, zoom);
    brush.strokeStyle = brush.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--c${form % 9}`);
    brush.arc(side / 2, side / 2, radius, 0, 7);
    if (hollow) brush.stroke(); else brush.fill();
    return one;
  })();
  const spots = new Map();  // what lies on one pixel is drawn once, the darker the more it is
  points.forEach((one, i) => {
    const place = (xs[i] | 0) * 4096 + (ys[i] | 0), square = (xs[i] / SQUARE | 0) * 4096 + (ys[i] / SQUARE | 0);
    const hollow = +(one.state !== MEASURED), key = place * 64 + 2 * (one.form % 32) + hollow, spot = spots.get(key);
    if (spot) spot.count++; else spots.set(key, {x: xs[i], y: ys[i], form: one.form, hollow, count: 1});
    if (near.has(square)) near.get(square).push(i); else near.set(square, [i]);
  });
  for (const {x, y, form, hollow, count} of spots.values()) {
    paint.globalAlpha = 1 - (hollow ? .2 : .55) ** count;
    paint.drawImage(stamp(form, hollow), (x - side / 2) * zoom, (y - side / 2) * zoom);
  }
  canvas.marks = {points, xs, ys, near};
}
function pointed(canvas, event) {
  const box = canvas.getBoundingClientRect(), {points, xs, ys, near} = canvas.marks;
  const x = event.clientX - box.left, y = event.clientY - box.top;
  let best = null, least = SQUARE ** 2;
  for (const across of [-1, 0, 1]) for (const down of [-1, 0, 1])
    for (const i of near.get(((x / SQUARE | 0) + across) * 4096 + (y / SQUARE | 0) + down) || []) {
      const far = (xs[i] - x) ** 2 + (ys[i] - y) ** 2;
      if (far < least) { best = i; least = far; }
    }
  return best === null ? null : {one: points[best], left: box.left + xs[best], top: box.top + ys[best]};
}
const COLUMNS = [
  ["model and GEMM", gemm], ["op", one => safe(data.forms[one.form])],
  ["M near", one => one.rows, 1], ["source", one => `<span class="dot ${data.states[one.state]}"></span>` +
    data.states[one.state]],
  ["x torch", one => num(one.gain, 2), 1], ["us", one => us(one.us), 1], ["TFLOP/s", one => num(one.rate, 1), 1],
  ["% of roofline", one => one.part ?
    `<span class="bar" style="width:${num(2 * Math.min(1, one.part), 2)}rem"></span>${num(100 * one.part, 0)}` : "", 1],
  ["roofline us", one => us(one.least), 1], ["bound by", one => one.bound ? "compute" : "memory"],
  ["torch us", one => us(one.torch), 1], ["modelled us", one => us(one.model), 1],
  ["GPU", one => safe(data.short_gpus[one.gpu])], ["variant", one => safe(data.configs[one.config])],
  ["runner-up", one => one.second_us ? `${safe(data.configs[one.second])} (${one.second_us < one.us ? "" : "+"}${
    (100 * (one.second_us / one.us - 1)).toFixed(1)}&nbsp;%)` : ""],
  ["plan", one => safe(one.plan)],
  ["tried", one => one.tried || "", 1], ["median / fastest", one => one.tried > 1 ? num(one.spread, 2) : "", 1],
  ["failed", one => one.failures ? safe(one.failures.join("; ")) : ""],
];
function list() {
  const some = shown.slice(0, most), hidden = {us: "TFLOP/s", rate: "us"}[at("unit").value];
  const columns = COLUMNS.filter(([name, value]) => name !== hidden && shown.some(one => value(one) !== ""));
  const line = (tag, texts) => "<tr>" + columns.map((one, i) =>
    `<${tag}${one[2] ? " class=n" : one[0] === "source" ? " class=word" : ""}>${texts[i]}</${tag}>`).join("") + "</tr>";
  at("rows").innerHTML = `<table><thead>${line("th", columns.map(one => one[0]))}</thead><tbody>` +
    some.map(one => line("td", columns.map(([, value]) => value(one)))).join("") + "</tbody></table>";
  at("more").hidden = shown.length <= most;
}
function draw() {
  const unit = UNITS[at("unit").value];
  shown = chosen();
  const gains = shown.map(one => one.gain).filter(Boolean);
  const mean = gains.length && Math.exp(gains.reduce((sum, gain) => sum + Math.log(gain), 0) / gains.length);
  const beside = gains.length ? `; ${mean.toFixed(2)} x torch over ${gains.length.toLocaleString("en")} of them, ` +
    `worst ${gains.reduce((a, b) => Math.min(a, b)).toFixed(2)}` : "";
  at("said").textContent = `${shown.length.toLocaleString("en")} cells${beside}. Filled: measured; hollow: modelled.`;
  at("above").textContent = unit.title;
  chart(at("chart"), unit.value, unit.log);
  if (at("torch")) chart(at("torch"), one => one.gain, true, 1);
  list();
}
for (const id of ["model", "gemm", "form", "state", "gpu", "unit", "order"])
  at(id).onchange = () => { most = 50; draw(); };
at("more").onclick = () => { most += 500; list(); };
function point(event) {
  const found = event.target.marks ? pointed(event.target, event) : null, tip = at("tip"), ring = at("ring");
  tip.textContent = found ? about(found.one) : "";
  ring.hidden = !found;
  if (!found) return;
  ring.style.left = found.left - 5 + "px"; ring.style.top = found.top - 5 + "px";
  tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8) + "px";
}
for (const name of ["pointermove", "pointerdown", "scroll"]) addEventListener(name, point);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let waiting; addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
const all = () => document.querySelectorAll("details");
addEventListener("beforeprint", () => all().forEach(one => { one.dataset.was = one.open; one.open = true; }));
addEventListener("afterprint", () => all().forEach(one => { one.open = one.dataset.was === "true"; }));
draw();
}
unpacked().then(start, error => { at("said").textContent = `This browser can't unpack the cells: ${error}`; });
