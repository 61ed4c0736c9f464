import { $, ago, duration, get, h, number, path, percent, post, report, size, studyAddress, toast } from "./common.js";
import { COLOURS, PHASES, VIRIDIS } from "./colours.js";
import { Chart, bars, keys } from "./chart.js";
import { category, Graph, MISSING, shade, STEPS, unpack } from "./graph.js";

const charts = new Map();
const graph = new Graph($("graph"), (node) => select(node));
let drawing = null, frames = [], latest = null, place = -1, playing = 0, source = null, detailed = null, shownNode = null;

function figure(id, title) {
  let chart = charts.get(id);
  if (!chart) {
    const box = h("div", { class: "chart" }), legend = h("div", {});
    $("charts").append(h("section", { class: "panel", id: `chart-${id.replaceAll(/[^a-z0-9]/gi, "-")}` }, h("div", { class: "panel-head" }, h("h2", {}, title)), box, legend));
    chart = { draw: new Chart(box, { title }), legend };
    charts.set(id, chart);
  }
  return chart;
}

function show(run) {
  const status = $("status");
  status.textContent = run.status;
  status.className = `badge ${run.status}`;
  report(run.message && run.status !== "running" ? new Error(run.message) : null);
  log(run.log || {});
  if (run.version === -2) return;
  if (run.version === -1) { $("about").textContent = run.message; $("below").hidden = false; $("stop").hidden = run.status !== "running"; return; }
  $("about").textContent = [run.label, run.dataset, run.nodes ? `${number(run.nodes)} nodes` : "", run.kind === "network" ? "real peers" : "", `started ${ago(run.started)}`].filter(Boolean).join(" · ");
  $("stop").hidden = !(run.can_stop && run.status === "running");
  $("resume").hidden = !run.can_resume;
  const cells = [
    ["Round", h("dd", {}, number(run.rounds), run.planned ? h("small", {}, ` of ${number(run.planned)}`) : null)],
    ["Accuracy", h("dd", {}, percent(run.accuracy), run.accuracy_std ? h("small", {}, ` ± ${(100 * run.accuracy_std).toFixed(1)}`) : null)],
    ["Best", h("dd", {}, percent(run.best))],
    ["Sent", h("dd", {}, size(run.bytes))],
    ["Time", h("dd", {}, duration(run.seconds))],
  ];
  $("figures").replaceChildren(...cells.map(([name, value]) => h("div", {}, h("dt", {}, name), value)));
  for (const curve of run.curves) figure(curve.key, curve.title).draw.show([{ ...curve, label: "", colour: COLOURS[0] }], curve.scale);
  for (const [by, found] of Object.entries(run.groups)) {
    const series = Object.entries(found).map(([label, curve], i) => ({ ...curve, label, colour: COLOURS[i % COLOURS.length], dash: ["-", "--", "-.", ":"][Math.floor(i / COLOURS.length) % 4] }));
    const chart = figure(`by-${by}`, `Accuracy by ${by}`);
    chart.draw.show(series, "fraction");
    chart.legend.replaceChildren(keys(series));
  }
  if (run.traffic.y.length && run.bytes > 0) figure("traffic", "Sent in total").draw.show([{ ...run.traffic, label: "", colour: COLOURS[2] }], "bytes");
  if (Object.keys(run.phases).length) {
    if (!$("phases")) $("charts").append(h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Time per round")), h("div", { id: "phases" })));
    $("phases").replaceChildren(bars(Object.entries(run.phases), PHASES));
  }
  $("below").hidden = false;
  $("live").hidden = false;
  $("commands").replaceChildren(...run.commands.map((text) => h("div", { class: "command" }, h("code", {}, text),
    h("button", { type: "button", onclick: () => navigator.clipboard?.writeText(text).then(() => toast("Copied"), () => toast("The browser does not allow copying")) }, "Copy"))));
  peers(run.peers);
  latest = run.frame;
  if (run.frame && (!drawing || !drawing.count)) loadGraph();
  if (place < 0 || place >= frames.length - 1) paint();
  if (run.status !== "running") whole(run);
}

// After the end of a run: the frames of the replay, and what needs the whole record.
async function whole(run) {
  if (detailed === run.version) return;
  detailed = run.version;
  try {
    frames = (await get("/api/frames", { path })).frames.map(decode);
    $("replay").hidden = frames.length < 2;
    $("slider").max = Math.max(frames.length - 1, 0);
    seek(frames.length - 1);
  } catch (error) { report(error); }
  if (run.status === "damaged") return;
  try {
    const found = await get("/api/details", { path });
    $("warnings").replaceChildren(...found.notes.filter((text) => !run.message || !text.includes(run.message)).map((text) => h("li", {}, text)));
    $("warnings").hidden = !$("warnings").children.length;
    facts($("facts"), Object.entries(found.facts));
    facts($("settings"), Object.entries(found.settings));
    const tables = [["Groups", found.groups], ["Fairness between clusters", found.fairness], ["Peers", found.peers]];
    $("tables").replaceChildren(...tables.filter(([, lines]) => lines.length > 1).map(([title, lines]) => table(title, lines)));
    const titles = { allocation: "Data of each node", "head-choice": "Head choice", "fair-accuracy": "Fair accuracy" };
    $("report-figures").replaceChildren(...found.figures.map((name) => h("section", { class: `panel ${name === "fair-accuracy" ? "" : "wide"}` },
      h("div", { class: "panel-head" }, h("h2", {}, titles[name] || name)),
      h("div", { class: "picture" }, h("img", { src: `/figure?${new URLSearchParams({ path, name })}`, alt: titles[name] || name, loading: "lazy" })))));
  } catch (error) { toast(error.message); }
}

function facts(box, entries) {
  box.replaceChildren(h("tbody", {}, entries.map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", {}, value)))));
}
function table(title, lines) {
  // One line reads better as a column, also on a phone.
  const turned = lines.length === 2 ? lines[0].map((_, i) => lines.map((line) => line[i])) : null;
  const body = turned ? h("table", { class: "facts" }, h("tbody", {}, turned.slice(1).map((line) => h("tr", {}, line.map((text) => h("td", {}, text))))))
    : h("table", {}, h("thead", {}, h("tr", {}, lines[0].map((text) => h("th", {}, text)))), h("tbody", {}, lines.slice(1).map((line) => h("tr", {}, line.map((text) => h("td", {}, text))))));
  return h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, title)), h("div", { class: "table-panel" }, body));
}
function peers(found) {
  if (!found?.length || detailed) return;
  const lines = [["peer", "state", "round", "accuracy", "sent", "did not hear"], ...found.map((one) => [one.name, one.state, number(one.round), percent(one.accuracy), size(one.bytes), (one.missing || []).join(", ") || "-"])];
  $("tables").replaceChildren(table("Peers", lines));
}
function log(logs) {
  const texts = Object.entries(logs).map(([name, lines]) => (name ? `${name}\n` : "") + lines.join("\n"));
  const box = $("log"), end = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.textContent = texts.join("\n\n") || "No log: the run was started elsewhere.";
  if (end) box.scrollTop = box.scrollHeight;
}

const decode = (frame) => ({ ...frame, accuracy: unpack(frame.accuracy), head: frame.head ? unpack(frame.head) : null });

async function loadGraph() {
  if (drawing) return;
  drawing = {};
  try {
    drawing = await get("/api/graph", { path });
    graph.load(drawing);
    const choices = [["accuracy", "accuracy"]];
    if (drawing.cluster.length) choices.push(["cluster", "cluster"]);
    if (latest?.head || frames.some((frame) => frame.head)) choices.push(["head", "head"]);
    if (drawing.architectures.length) choices.push(["architecture", "architecture"]);
    $("colour").replaceChildren(...choices.map(([value, text]) => h("option", { value }, text)));
    $("number").max = drawing.count - 1;
    $("graph").setAttribute("aria-label", `Network of ${drawing.count} nodes and ${drawing.links} links`);
    paint();
  } catch (error) { drawing = null; report(error); }
}

function current() {
  return place >= 0 && frames[place] ? frames[place] : latest ? decode(latest) : null;
}
function bounds() {
  let low = STEPS, high = 0;
  for (const frame of frames.length ? frames : [current()]) for (const value of frame.accuracy) if (value !== MISSING) { if (value < low) low = value; if (value > high) high = value; }
  return [low, Math.max(high, low)];
}
function paint() {
  const frame = current();
  if (!frame || !drawing?.count) return;
  const by = $("colour").value || "accuracy", nodes = Array.from({ length: drawing.count });
  const there = (node) => frame.accuracy[node] !== MISSING;
  let colours, legend;
  if (by === "accuracy") {
    const [low, high] = bounds();
    colours = nodes.map((_, node) => shade(frame.accuracy[node], low, high));
    const ramp = h("span", { class: "ramp" });
    ramp.style.background = `linear-gradient(90deg, ${VIRIDIS.join(",")})`;
    legend = [percent(low / STEPS), ramp, percent(high / STEPS)];
  } else {
    const values = by === "head" ? frame.head : drawing[by];
    colours = nodes.map((_, node) => (values && (by === "head" || there(node)) ? category(values[node]) : null));
    const names = by === "cluster" ? drawing.clusters : by === "architecture" ? drawing.architectures : [...new Set(frame.head || [])].filter((v) => v !== MISSING).sort((a, b) => a - b).map((v) => [v, `head ${v}`]);
    legend = names.map((name, i) => { const [index, text] = Array.isArray(name) ? name : [i, name]; const dot = h("span", { class: "swatch" }); dot.style.background = category(index); return h("span", {}, dot, text); });
  }
  const gone = new Set(frame.gone);
  if (gone.size) legend.push(h("span", {}, `✕ gone (${gone.size})`));
  if (nodes.some((_, node) => !there(node) && !gone.has(node))) legend.push(h("span", {}, "○ no record of this round"));
  if (frame.cut.length) legend.push(h("span", {}, `- - cut (${number(frame.cut.length)})`));
  if (drawing.edges.length < drawing.links) legend.push(h("span", {}, `${number(drawing.edges.length)} of ${number(drawing.links)} links drawn`));
  $("legend").replaceChildren(...legend);
  graph.paint(colours, frame.cut, frame.gone);
  $("round").textContent = `round ${number(frame.round)}`;
}

function seek(to) {
  place = Math.min(Math.max(to, 0), frames.length - 1);
  $("slider").value = place;
  $("slider").setAttribute("aria-valuetext", frames[place] ? `round ${frames[place].round}` : "");
  paint();
}
function play(wanted) {
  clearInterval(playing);
  playing = 0;
  if (wanted) {
    if (place >= frames.length - 1) seek(0);
    playing = setInterval(() => { if (place >= frames.length - 1) play(false); else seek(place + 1); }, Math.max(60, Math.min(400, 8000 / frames.length)));
  }
  $("play").textContent = playing ? "❚❚" : "▶";
  $("play").setAttribute("aria-label", playing ? "Pause" : "Play");
}

async function select(node) {
  shownNode = node;
  $("number").value = node === null ? "" : node;
  if (node === null) return $("node-body").replaceChildren(h("p", { class: "empty" }, "Select a node to see its curves, data and neighbours."));
  try {
    const found = await get("/api/node", { path, node });
    if (shownNode === node) showNode(found);
  } catch (error) { toast(error.message); }
  return null;
}
function showNode(found) {
  const name = found.messages.name || `Node ${found.node}`;
  const sent = found.messages.sent !== undefined ? ["sent", size(found.messages.sent)] : ["sent per node (mean)", size(found.messages.mean)];
  const rows = [["examples", number(found.examples)], ["parameters", number(found.parameters)], found.cluster ? ["cluster", found.cluster] : null,
    found.architecture ? ["architecture", found.architecture] : null, sent,
    found.messages.missing?.length ? ["did not hear", found.messages.missing.join(", ")] : null].filter(Boolean);
  const list = found.neighbours.slice(0, 60).map((other) => h("button", { type: "button", class: "tag", onclick: () => graph.select(other) }, String(other)));
  const parts = [];
  for (const curve of [...found.curves, ...found.notes].slice(0, 8)) {
    const box = h("div", { class: "chart low" });
    parts.push(h("h2", { class: "small" }, curve.title), box);
    queueMicrotask(() => new Chart(box, { title: `${curve.title} of ${name}` }).show([{ ...curve, label: "", colour: COLOURS[0] }], curve.scale));
  }
  const labels = found.labels.map((count, i) => [found.classes[i] ?? String(i), count]);
  $("node-title").textContent = name;
  $("node-body").replaceChildren(h("table", { class: "facts" }, h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text) => h("td", {}, text)))))),
    h("p", { class: "small quiet" }, `${found.neighbours.length} ${found.neighbours.length === 1 ? "neighbour" : "neighbours"} `, ...list, found.neighbours.length > 60 ? " …" : ""), ...parts.slice(0, 4),
    labels.length && labels.length <= 200 ? h("h2", { class: "small" }, "Examples by label") : "", labels.length && labels.length <= 200 ? bars(labels.slice(0, 40), {}, number) : "",
    ...(parts.length > 4 ? [h("details", {}, h("summary", { class: "small" }, "More curves"), ...parts.slice(4))] : []));
}

function follow() {
  source?.close();
  source = new EventSource(`/api/events?${new URLSearchParams({ path })}`);
  let ended = false;
  source.onmessage = (event) => {
    const run = JSON.parse(event.data);
    ended = run.status !== "running";
    show(run);
    document.body.dataset.version = run.version;
  };
  source.onerror = () => { if (ended) source.close(); };
}
async function act(address, text) {
  try {
    await post(address, { path });
    toast(text);
    if (address.endsWith("resume")) { detailed = null; frames = []; place = -1; $("replay").hidden = true; }
    follow();
  } catch (error) { report(error); }
}

const parts = path.split("/");
if (parts.length > 1) $("crumbs").append(" / ", h("a", { href: studyAddress(parts.slice(0, -1).join("/")) }, parts.slice(0, -1).join("/")));
for (const [what, text] of [["report.html", "Report (HTML)"], ["table.csv", "Table (CSV)"], ["curves.json", "Curves (JSON)"], ["experiment", "Experiment (TOML)"], ["model", "Best model (safetensors)"]]) {
  $("downloads").append(h("a", { href: `/download?${new URLSearchParams({ path, what })}`, download: true }, text));
}
$("colour").addEventListener("change", paint);
$("slider").addEventListener("input", () => { play(false); seek(+$("slider").value); });
$("play").addEventListener("click", () => play(!playing));
$("number").addEventListener("change", () => { const n = $("number").valueAsNumber; if (drawing?.count && Number.isInteger(n) && n >= 0 && n < drawing.count) graph.select(n); });
$("stop").addEventListener("click", () => act("/api/stop", "The run is asked to stop"));
$("resume").addEventListener("click", () => act("/api/resume", "The run is resumed"));
addEventListener("pagehide", () => source?.close());
follow();
