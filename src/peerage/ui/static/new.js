import { $, get, h, post, report, runAddress } from "./common.js";

const TITLES = { local: "Local training", init: "Initial models", evaluation: "Evaluation", faults: "Faults", noise: "Privacy", clusters: "Clusters", engine: "Engine" };
const inputs = new Map();
let timer = 0, asked = 0;

function input(field) {
  const id = `field-${field.name}`, help = `${id}-help`, error = `${id}-error`;
  const about = { id, name: field.name, "aria-describedby": `${help} ${error}` };
  let control;
  if (field.kind === "switch") control = h("select", about, h("option", { value: "" }, "default"), h("option", { value: "on" }, "on"), h("option", { value: "off" }, "off"));
  else {
    const list = field.choices.length ? `${id}-list` : null;
    control = h("input", { ...about, type: "text", inputmode: field.kind === "whole" ? "numeric" : field.kind === "number" ? "decimal" : null, placeholder: field.default, list, autocomplete: "off", spellcheck: "false" });
  }
  control.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(check, 350); });
  inputs.set(field.name, { control, field, error: h("span", { class: "error", id: error }) });
  return h("label", { class: "field", for: id }, field.name, control,
    field.choices.length ? h("datalist", { id: `${id}-list` }, field.choices.map((name) => h("option", { value: name }))) : null,
    inputs.get(field.name).error, h("span", { class: "help", id: help }, field.help));
}
function body() {
  const values = {};
  for (const [name, { control }] of inputs) if (control.value.trim()) values[name] = control.value.trim();
  return { recipe: $("recipe").value, values };
}
function mark(messages) {
  for (const [name, { control, error }] of inputs) {
    error.textContent = messages[name] || "";
    control.setAttribute("aria-invalid", name in messages);
    if (messages[name]) control.closest("details")?.setAttribute("open", "");
  }
  report(messages[""] ? new Error(messages[""]) : null);
}
async function check() {
  const number = (asked += 1);
  try {
    const found = await post("/api/check", body());
    if (number !== asked) return; // a later answer is on its way
    mark(found.messages);
    $("command").textContent = ["peerage run", ...found.arguments.map((text) => (/^[\w=.:,@%+/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`))].join(" ");
  } catch (error) { report(error); }
}
async function recipe() {
  const found = await get("/api/form", { recipe: $("recipe").value });
  for (const [name, { control, field }] of inputs) if (field.kind !== "switch") control.placeholder = found.starting[name] ?? field.default;
  check();
}
async function start(event) {
  event.preventDefault();
  $("start").disabled = true;
  asked += 1;
  try {
    const found = await post("/api/start", body());
    if (found.path) { location.href = runAddress(found.path); return; }
    mark(found.messages);
    [...inputs.values()].find(({ control }) => control.getAttribute("aria-invalid") === "true")?.control.focus();
  } catch (error) { report(error); }
  $("start").disabled = false;
}

const found = await get("/api/form");
$("recipe").replaceChildren(h("option", { value: "" }, "none (defaults)"), ...Object.keys(found.recipes).map((name) => h("option", { value: name }, name)));
$("main-fields").replaceChildren(...found.fields.filter((field) => !field.section).map(input));
for (const section of new Set(found.fields.map((field) => field.section).filter(Boolean))) {
  $("sections").append(h("details", { class: "panel" }, h("summary", {}, TITLES[section] || section), h("div", { class: "fields" }, found.fields.filter((field) => field.section === section).map(input))));
}
$("recipe").addEventListener("change", () => recipe().catch(report));
$("form").addEventListener("submit", start);
document.body.dataset.ready = "yes";
