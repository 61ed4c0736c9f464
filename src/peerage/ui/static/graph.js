// The network on a canvas. Places come from the server; here they are only scaled, coloured and drawn.
import { ABSENT, COLOURS, viridis } from "./colours.js";

export const MISSING = 255, STEPS = 250;
const PAD = 26;

export class Graph {
  constructor(canvas, choose) {
    this.canvas = canvas;
    this.choose = choose;
    this.data = null;
    this.frame = null;
    this.selected = null;
    this.view = { scale: 1, x: 0, y: 0 };
    this.waiting = false;
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); this.zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.offsetX, event.offsetY); }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { this.drag = { x: event.offsetX, y: event.offsetY, moved: false }; canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => { if (this.drag && !this.drag.moved) this.click(event.offsetX, event.offsetY); this.drag = null; });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  load(data) {
    this.data = data;
    const most = Math.max(...(data.examples.length ? data.examples.slice(0, 20000) : [1]), 1);
    const base = Math.max(2.2, Math.min(10, 130 / Math.sqrt(data.count)));
    this.radius = Array.from({ length: data.count }, (_, node) => base * (data.examples.length ? 0.55 + 0.75 * Math.sqrt((data.examples[node] || 0) / most) : 1));
    this.draw();
  }

  // `colours` has a colour for each node, or null for one without a value; `gone` has the nodes
  // that do not take part.
  paint(colours, cut = [], gone = []) {
    this.colours = colours;
    this.gone = new Set(gone);
    this.cut = new Set(cut.map(([a, b]) => (a < b ? `${a}-${b}` : `${b}-${a}`)));
    this.draw();
  }

  at(node) {
    const [x, y] = this.data.places[node], { scale, x: dx, y: dy } = this.view;
    return [(PAD + x * (this.width - 2 * PAD)) * scale + dx, (PAD + y * (this.height - 2 * PAD)) * scale + dy];
  }

  draw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.render(); });
  }

  render() {
    const canvas = this.canvas, ratio = devicePixelRatio || 1;
    this.width = canvas.clientWidth;
    this.height = canvas.clientHeight;
    if (!this.data || !this.width) return;
    if (canvas.width !== Math.round(this.width * ratio) || canvas.height !== Math.round(this.height * ratio)) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(this.height * ratio);
    }
    const style = getComputedStyle(canvas), pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    const places = Array.from({ length: this.data.count }, (_, node) => this.at(node));
    const cut = [], many = this.data.links > 1500;
    pen.beginPath();
    for (const [u, v] of this.data.edges) {
      if (this.cut?.size && this.cut.has(u < v ? `${u}-${v}` : `${v}-${u}`)) { cut.push([u, v]); continue; }
      pen.moveTo(...places[u]);
      pen.lineTo(...places[v]);
    }
    pen.strokeStyle = style.getPropertyValue("--link");
    pen.lineWidth = many ? 0.5 : 1;
    pen.stroke();
    if (this.selected !== null) this.highlight(pen, places, style);
    if (cut.length) {
      pen.beginPath();
      for (const [u, v] of cut) { pen.moveTo(...places[u]); pen.lineTo(...places[v]); }
      pen.setLineDash([5, 4]);
      pen.strokeStyle = "#D55E00";
      pen.lineWidth = 1.6;
      pen.stroke();
      pen.setLineDash([]);
    }
    const small = this.data.count > 3000, edge = style.getPropertyValue("--node-edge");
    for (let node = 0; node < this.data.count; node += 1) {
      const [x, y] = places[node], r = this.radius[node];
      if (x < -r || y < -r || x > this.width + r || y > this.height + r) continue;
      const colour = this.colours?.[node] ?? null;
      if (small) { pen.fillStyle = colour || ABSENT; pen.fillRect(x - r / 1.4, y - r / 1.4, 1.4 * r, 1.4 * r); continue; }
      if (this.gone?.has(node)) { this.cross(pen, x, y, r); continue; }
      pen.beginPath();
      pen.arc(x, y, r, 0, 7);
      if (colour) { pen.fillStyle = colour; pen.fill(); pen.strokeStyle = edge; pen.lineWidth = 1; pen.stroke(); }
      else { pen.fillStyle = edge; pen.fill(); pen.strokeStyle = ABSENT; pen.lineWidth = 1.5; pen.stroke(); }
    }
    if (this.data.count <= 30 && this.width > 300) {
      pen.fillStyle = style.getPropertyValue("--quiet");
      pen.font = "11px system-ui, sans-serif";
      pen.textAlign = "center";
      for (let node = 0; node < this.data.count; node += 1) pen.fillText(this.data.names[node] || String(node), places[node][0], places[node][1] + this.radius[node] + 12);
    }
  }

  cross(pen, x, y, r) {
    pen.beginPath();
    pen.moveTo(x - r, y - r); pen.lineTo(x + r, y + r);
    pen.moveTo(x - r, y + r); pen.lineTo(x + r, y - r);
    pen.strokeStyle = ABSENT;
    pen.lineWidth = 2;
    pen.stroke();
  }

  highlight(pen, places, style) {
    pen.beginPath();
    for (const [u, v] of this.data.edges) if ((u === this.selected || v === this.selected) && !this.cut?.has(u < v ? `${u}-${v}` : `${v}-${u}`)) { pen.moveTo(...places[u]); pen.lineTo(...places[v]); }
    pen.strokeStyle = style.getPropertyValue("--accent");
    pen.lineWidth = 1.6;
    pen.stroke();
    pen.beginPath();
    pen.arc(...places[this.selected], this.radius[this.selected] + 4, 0, 7);
    pen.lineWidth = 2.5;
    pen.stroke();
  }

  nearest(x, y, within = 22) {
    let best = null, least = within ** 2;
    for (let node = 0; node < this.data.count; node += 1) {
      const [a, b] = this.at(node), far = (a - x) ** 2 + (b - y) ** 2;
      if (far < least) { least = far; best = node; }
    }
    return best;
  }

  click(x, y) {
    if (this.data) this.select(this.nearest(x, y));
  }

  select(node) {
    this.selected = node;
    this.draw();
    this.choose(node);
  }

  move(event) {
    if (!this.drag) return;
    const dx = event.offsetX - this.drag.x, dy = event.offsetY - this.drag.y;
    if (!this.drag.moved && Math.hypot(dx, dy) < 4) return;
    this.drag = { x: event.offsetX, y: event.offsetY, moved: true };
    this.view.x += dx;
    this.view.y += dy;
    this.draw();
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const scale = Math.min(Math.max(this.view.scale * factor, 0.5), 40), by = scale / this.view.scale;
    this.view = { scale, x: x - (x - this.view.x) * by, y: y - (y - this.view.y) * by };
    this.draw();
  }

  key(event) {
    if (!this.data?.count) return;
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in ways) this.step(...ways[event.key]);
    else if (event.key === "+") this.zoom(1.2);
    else if (event.key === "-") this.zoom(1 / 1.2);
    else if (event.key === "0") { this.view = { scale: 1, x: 0, y: 0 }; this.draw(); }
    else if (event.key === "Escape") this.select(null);
    else return;
    event.preventDefault();
  }

  // To the next node in a direction, by distance and angle.
  step(dx, dy) {
    if (this.selected === null) return this.select(0);
    const [x, y] = this.at(this.selected);
    let best = null, least = Infinity;
    for (let node = 0; node < this.data.count; node += 1) {
      const [a, b] = this.at(node), along = (a - x) * dx + (b - y) * dy, across = Math.abs((a - x) * dy) + Math.abs((b - y) * dx);
      if (along > 1 && along + 2 * across < least) { least = along + 2 * across; best = node; }
    }
    return best === null ? null : this.select(best);
  }
}

export function unpack(text) {
  const raw = atob(text), found = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) found[i] = raw.charCodeAt(i);
  return found;
}
export const shade = (value, low, high) => (value === MISSING ? null : viridis(high > low ? (value - low) / (high - low) : 0.5));
export const category = (number) => (number === null || number === undefined || number === MISSING ? null : COLOURS[number % COLOURS.length]);
