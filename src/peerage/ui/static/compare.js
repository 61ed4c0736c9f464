import { $, get, h, number, report } from "./common.js";
import { Chart, keys } from "./chart.js";

const query = new URLSearchParams(location.search);
const chart = new Chart($("chart"), { title: "Comparison" });
let lines = [], sorted = { column: -1, up: true };

const value = (text) => { const found = /-?\d[\d\u202f.]*(e[-+]?\d+)?/.exec(text); return found ? +found[0].replaceAll("\u202f", "") : NaN; };
function order(column) {
  sorted = { column, up: sorted.column === column ? !sorted.up : true };
  const words = lines.every((line) => Number.isNaN(value(line[column])) || column < 2);
  const units = { kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, ms: 1e-3 };
  const numeric = (text) => value(text) * (Object.entries(units).find(([unit]) => text.endsWith(` ${unit}`))?.[1] ?? 1);
  lines.sort((a, b) => {
    if (words) return (sorted.up ? 1 : -1) * a[column].localeCompare(b[column], "en", { numeric: true });
    const [x, y] = [numeric(a[column]), numeric(b[column])];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y); // unknown values last
    return sorted.up ? x - y : y - x;
  });
  body();
  document.querySelectorAll("#table th").forEach((cell, i) => {
    if (i === column) cell.setAttribute("aria-sort", sorted.up ? "ascending" : "descending"); else cell.removeAttribute("aria-sort");
  });
}
function body() {
  $("table").tBodies[0].replaceChildren(...lines.map((line) => h("tr", {}, line.map((text) => h("td", {}, text)))));
}
async function update() {
  const key = $("key").value || "accuracy";
  const wanted = new URLSearchParams(query);
  wanted.set("key", key);
  try {
    const found = await get("/api/compare", wanted);
    report(found.failures.length ? new Error(found.failures.join("; ")) : null);
    const series = found.curves.map((one) => ({ ...one, label: one.seeds > 1 ? `${one.label} (${one.seeds} seeds)` : one.label }));
    $("chart-title").textContent = found.title;
    $("chart").parentElement.querySelector(".keys")?.remove();
    $("chart").after(keys(series));
    chart.show(series, found.scale);
    $("about").textContent = `${number(found.lines.length)} runs`;
    if (!$("key").options.length) $("key").replaceChildren(...Object.entries(found.keys).map(([name, text]) => h("option", { value: name }, text)));
    if (!lines.length) {
      lines = found.lines;
      $("table").tHead.replaceChildren(h("tr", {}, found.titles.map((text, i) => h("th", { scope: "col" }, h("button", { type: "button", onclick: () => order(i) }, text)))));
      body();
    }
  } catch (error) { report(error); $("about").textContent = ""; }
}
for (const [id, what] of [["csv", "table.csv"], ["report", "report.html"]]) {
  const address = new URLSearchParams(query);
  address.set("what", what);
  $(id).href = `/download?${address}`;
}
$("key").addEventListener("change", update);
update();
