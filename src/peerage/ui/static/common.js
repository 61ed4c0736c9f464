// What all pages share: elements without markup from data, requests, and numbers as text.
const SVG = "http://www.w3.org/2000/svg";

// Text is always set as text, so that names and logs of others cannot become markup.
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}
function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
export const $ = (id) => document.getElementById(id);
export const path = document.body.dataset.path;
const token = document.querySelector("meta[name=peerage-token]").content;

export async function get(address, values = {}) {
  const query = new URLSearchParams(values);
  return read(await fetch(`${address}?${query}`));
}
export async function post(address, body) {
  const headers = { "content-type": "application/json", "x-peerage-token": token };
  return read(await fetch(address, { method: "POST", headers, body: JSON.stringify(body) }));
}
async function read(answer) {
  const type = answer.headers.get("content-type") || "";
  const found = type.includes("json") ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw new Error(found.error || `the dashboard answered ${answer.status}`);
  return found;
}
export function report(error) {
  const box = $("message");
  box.textContent = error ? error.message || String(error) : "";
  box.hidden = !error;
}
let timer = 0;
export function toast(text) {
  $("toast").textContent = text;
  clearTimeout(timer);
  timer = setTimeout(() => ($("toast").textContent = ""), 4000);
}

export const runAddress = (name) => `/run/${name.split("/").map(encodeURIComponent).join("/")}`;
export const studyAddress = (name) => `/study/${name.split("/").map(encodeURIComponent).join("/")}`;
export const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`);
export function number(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return value.toLocaleString("en-GB").replaceAll(",", "\u202f");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(+value.toPrecision(3));
}
export function size(value) {
  if (value === null || value === undefined) return "-";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (value >= 999.5 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${place === 0 ? Math.round(value) : value >= 99.95 ? value.toFixed(0) : value.toPrecision(3)} ${units[place]}`;
}
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 100) return `${seconds.toPrecision(3)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
export function ago(time) {
  const seconds = Math.max(Date.now() / 1000 - time, 0);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return new Date(time * 1000).toISOString().slice(0, 10);
}
export const badge = (status) => h("span", { class: `badge ${status}` }, status);
for (const link of document.querySelectorAll("nav a")) {
  if (link.getAttribute("href") === location.pathname) link.setAttribute("aria-current", "page");
}
