// Line charts as SVG: axes, bands, a cursor for mouse and arrow keys.
import { duration, h, number, percent, s, size } from "./common.js";

const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 30;
const TEXTS = { fraction: percent, bytes: size, number, log: number };
const DASHES = { "-": null, "--": "7 4", "-.": "7 3 2 3", ":": "2 3" };

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) found.push(+value.toPrecision(12));
  return found;
}

// Powers of ten and, if these are few, 2 and 5 times them; as logarithms.
function logTicks(low, high, count) {
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) for (const step of steps) {
      const tick = power + Math.log10(step);
      if (tick >= low - 1e-9 && tick <= high + 1e-9) found.push(tick);
    }
    if (found.length <= 2 * count || steps.length === 1) return found;
  }
  return [];
}

export class Chart {
  constructor(box, options = {}) {
    this.box = box;
    this.options = options;
    this.series = [];
    this.cursor = null;
    box.tabIndex = 0;
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerleave", () => this.place(null));
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("blur", () => this.place(null));
    this.width = 0;
    new ResizeObserver(() => { if (box.clientWidth !== this.width) this.draw(); }).observe(box);
  }

  show(series, scale = "number") {
    this.scale = scale;
    const positive = scale === "log";
    this.series = series.map((one) => {
      const kept = one.x.map((_, i) => i).filter((i) => !positive || one.y[i] > 0);
      const take = (values) => values && kept.map((i) => values[i]);
      return { ...one, x: take(one.x), y: take(one.y), low: take(one.low), high: take(one.high) };
    });
    this.draw();
  }

  bounds() {
    const x = this.series.flatMap((one) => one.x);
    const y = this.series.flatMap((one) => [...one.y, ...(this.scale === "log" ? [] : [...(one.low || []), ...(one.high || [])])]);
    let low = Infinity, high = -Infinity, last = 1, first = Infinity;
    for (const value of y) { if (value < low) low = value; if (value > high) high = value; }
    for (const value of x) { if (value > last) last = value; if (value < first) first = value; }
    if (!y.length) [low, high, first] = [0, 1, 0];
    if (this.scale === "log") return { first: Math.min(first, last - 1), last, low: Math.log10(low), high: Math.log10(high) + (low === high ? 1 : 0) };
    if (this.scale === "fraction") { low = low > 0.5 ? low : 0; high = Math.min(Math.max(high, low + 0.02), 1); }
    if (this.scale === "bytes" || (low > 0 && low < 0.5 * high)) low = Math.min(low, 0);
    if (low === high) high = low + 1;
    return { first: Math.min(first, last - 1), last, low, high: high + (this.scale === "fraction" && high >= 1 ? 0 : 0.04 * (high - low)) };
  }

  draw() {
    const width = this.width = this.box.clientWidth, height = this.box.clientHeight;
    if (!width || !height) return;
    const b = this.limits = this.bounds(), text = TEXTS[this.scale] || number;
    this.px = (x) => LEFT + ((x - b.first) / (b.last - b.first)) * (width - LEFT - RIGHT);
    const py = (y) => height - BOTTOM - (((this.scale === "log" ? Math.log10(y) : y) - b.low) / (b.high - b.low)) * (height - TOP - BOTTOM);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.summary() });
    const rows = Math.max(Math.floor(height / 42), 2);
    for (const tick of this.scale === "log" ? logTicks(b.low, b.high, rows) : ticks(b.low, b.high, rows)) {
      const y = height - BOTTOM - ((tick - b.low) / (b.high - b.low)) * (height - TOP - BOTTOM);
      const label = this.scale === "log" ? number(10 ** tick) : this.scale === "fraction" ? `${+(100 * tick).toPrecision(4)} %` : text(tick);
      svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), s("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, label));
    }
    for (const tick of ticks(b.first, b.last, Math.max(Math.floor(width / 90), 2))) {
      if (Number.isInteger(tick)) svg.append(s("text", { x: this.px(tick), y: height - 12, "text-anchor": "middle" }, number(tick)));
    }
    svg.append(s("text", { x: width - RIGHT, y: height, "text-anchor": "end" }, "round"));
    for (const one of this.series) {
      if (one.low && this.scale !== "log" && one.x.length > 1) {
        const up = one.x.map((x, i) => `${this.px(x).toFixed(1)},${py(one.high[i]).toFixed(1)}`);
        const down = one.x.map((x, i) => `${this.px(x).toFixed(1)},${py(one.low[i]).toFixed(1)}`).reverse();
        svg.append(s("polygon", { points: [...up, ...down].join(" "), fill: one.colour, class: "band" }));
      }
    }
    for (const one of this.series) {
      const points = one.x.map((x, i) => `${this.px(x).toFixed(1)},${py(one.y[i]).toFixed(1)}`);
      if (points.length === 1) svg.append(s("circle", { cx: this.px(one.x[0]), cy: py(one.y[0]), r: 3, fill: one.colour }));
      else svg.append(s("polyline", { points: points.join(" "), fill: "none", stroke: one.colour, "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": DASHES[one.dash] }));
    }
    this.line = s("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
    svg.append(this.line);
    this.tip = h("div", { class: "tip", hidden: true });
    this.box.replaceChildren(svg, this.tip);
    this.place(this.cursor);
  }

  summary() {
    const text = TEXTS[this.scale] || number;
    const ends = this.series.filter((one) => one.y.length).map((one) => `${one.label || ""} ${text(one.y.at(-1))} in round ${one.x.at(-1)}`);
    return `${this.options.title || "Chart"}: ${ends.join("; ") || "no values yet"}`;
  }

  get rounds() {
    return [...new Set(this.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  }

  point(event) {
    if (!this.limits) return;
    const at = event.clientX - this.box.getBoundingClientRect().left;
    let best = null;
    for (const round of this.rounds) if (best === null || Math.abs(this.px(round) - at) < Math.abs(this.px(best) - at)) best = round;
    this.place(best);
  }

  key(event) {
    const rounds = this.rounds;
    if (!rounds.length || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(event.key)) return;
    event.preventDefault();
    if (event.key === "Escape") return this.place(null);
    const here = this.cursor === null ? rounds.length : rounds.indexOf(this.cursor);
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: rounds.length - 1 }[event.key];
    return this.place(rounds[Math.min(Math.max(next, 0), rounds.length - 1)]);
  }

  place(round) {
    this.cursor = round;
    if (!this.line) return;
    const known = round === null ? [] : this.series.map((one) => [one, one.x.indexOf(round)]).filter(([, i]) => i >= 0);
    this.tip.hidden = !known.length;
    this.line.setAttribute("visibility", known.length ? "visible" : "hidden");
    if (!known.length) return;
    const x = this.px(round), text = TEXTS[this.scale] || number;
    this.line.setAttribute("x1", x);
    this.line.setAttribute("x2", x);
    this.tip.replaceChildren(h("div", { class: "quiet" }, `round ${number(round)}`), ...known.slice(0, 12).map(([one, i]) => {
      const dot = h("span", { class: "swatch" });
      dot.style.background = one.colour;
      return h("div", {}, dot, `${one.label ? `${one.label}: ` : ""}${text(one.y[i])}`);
    }));
    this.tip.style.left = `${x > this.box.clientWidth / 2 ? Math.max(x - this.tip.offsetWidth - 10, 0) : x + 10}px`;
  }
}

export function keys(series) {
  return h("div", { class: "keys" }, series.map((one) => {
    const line = s("svg", { width: 22, height: 8, "aria-hidden": "true" }, s("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: one.colour, "stroke-width": 2.5, "stroke-dasharray": DASHES[one.dash] }));
    return h("span", {}, line, ` ${one.label}`);
  }));
}

export function bars(values, colours, text = duration) {
  const most = Math.max(...values.map(([, value]) => value), 1e-12);
  return h("div", { class: "bars" }, values.flatMap(([name, value]) => [
    h("span", {}, name),
    s("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { x: 0, y: 1, height: 10, rx: 1, width: (100 * value) / most, fill: colours[name] || "#0072B2" })),
    h("span", { class: "number" }, text(value)),
  ]));
}
