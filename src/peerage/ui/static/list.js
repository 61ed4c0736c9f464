import { $, ago, badge, get, h, number, path, percent, runAddress, studyAddress } from "./common.js";

const INTERVAL = 2000; // milliseconds between two looks
const chosen = new Set();
let limit = 200, shown = "";
const filters = $("filters");
const state = { status: "" };

function row(entry) {
  const facts = entry.facts, study = entry.kind === "study";
  const name = entry.path.startsWith(`${path}/`) ? entry.path.slice(path.length + 1) : entry.path;
  const box = study ? null : h("input", {
    type: "checkbox", "aria-label": `Select ${entry.path}`, onchange: (event) => pick(entry.path, event.target.checked),
  });
  if (box) box.checked = chosen.has(entry.path);
  const planned = facts.rounds_planned;
  const rounds = facts.rounds === null || facts.rounds === undefined ? "-" : number(facts.rounds);
  return h("tr", {},
    h("td", { class: "pick" }, box),
    h("td", {}, h("a", { class: "name", href: study ? studyAddress(entry.path) : runAddress(entry.path) }, name),
      entry.kind === "run" ? null : h("span", { class: "tag" }, entry.kind),
      facts.message ? h("span", { class: "note", title: facts.message }, facts.message) : null),
    h("td", {}, badge(entry.status)),
    h("td", { class: "c-algorithm" }, facts.label || facts.algorithm || "-"),
    h("td", { class: "c-data" }, facts.dataset || "-"),
    h("td", { class: "number c-nodes" }, study ? "" : number(facts.nodes)),
    h("td", { class: "number c-rounds" }, study ? `${rounds} of ${planned} runs` : planned && facts.rounds !== planned ? `${rounds} of ${number(planned)}` : rounds),
    h("td", { class: "number c-accuracy" }, percent(facts.accuracy)),
    h("td", { class: "number c-started quiet" }, entry.started ? ago(entry.started) : "-"));
}

function pick(name, wanted) {
  if (wanted) chosen.add(name); else chosen.delete(name);
  const query = new URLSearchParams([...chosen].map((one) => ["path", one]));
  const button = $("compare");
  button.href = `/compare?${query}`;
  button.setAttribute("aria-disabled", chosen.size < 1);
  button.textContent = chosen.size ? `Compare ${chosen.size} selected` : "Compare selected";
}

function chips(found) {
  const all = Object.values(found.statuses).reduce((a, b) => a + b, 0);
  const buttons = [["", `all ${all}`], ...Object.entries(found.statuses).filter(([, n]) => n).map(([name, n]) => [name, `${name} ${n}`])];
  $("chips").replaceChildren(...buttons.map(([name, text]) => h("button", {
    type: "button", "aria-pressed": String(state.status === name), onclick: () => { state.status = name; update(); },
  }, text)));
}

async function update() {
  try {
    const found = await get("/api/list", { q: filters.q.value, status: state.status, within: path, limit });
    const text = JSON.stringify(found);
    if (text === shown) return;
    shown = text;
    chips(found);
    $("runs").tBodies[0].replaceChildren(...found.entries.map(row));
    $("count").textContent = `${number(found.total)} ${found.total === 1 ? "entry" : "entries"}, newest first`;
    $("empty").hidden = found.total > 0;
    $("runs").hidden = found.total === 0;
    $("empty").textContent = filters.q.value || state.status ? "Nothing matches the filter." : "There are no runs yet. Start one with “New run”, or with `peerage run`.";
    $("more").hidden = found.total <= found.entries.length;
  } catch (error) {
    $("count").textContent = `The dashboard does not answer (${error.message}).`;
  }
}

filters.addEventListener("submit", (event) => event.preventDefault());
filters.q.addEventListener("input", update);
$("more").addEventListener("click", () => { limit += 500; update(); });
async function follow() {
  if (!document.hidden) await update();
  setTimeout(follow, INTERVAL);
}
follow();
