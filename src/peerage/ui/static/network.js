import { $, badge, get, h, number, percent, report } from "./common.js";
import { COLOURS, VIRIDIS, viridis } from "./colours.js";
import { Chart } from "./chart.js";
import { Graph } from "./graph.js";

const INTERVAL = 3000; // milliseconds between two questions
const graph = new Graph($("graph"), (chosen) => { selected = chosen; details(); });
const chart = new Chart($("chart"), { title: "Mean accuracy of the peers" });
let peers = [], selected = null, drawn = "";

const heard = (peer) => `${peer.heard.length} of ${peer.heard.length + peer.missing.length}`;
const round = (peer) => `${number(peer.round)} of ${number(peer.rounds)}`;
function remark(peer) {
  if (peer.error) return peer.error;
  const parts = [peer.missing.length ? `did not hear ${peer.missing.join(", ")}` : "", peer.not_reached_by.length ? `cannot be reached by ${peer.not_reached_by.join(", ")}` : "", peer.by_way_of ? `by way of ${peer.by_way_of}` : ""];
  return parts.filter(Boolean).join("; ");
}
function table() {
  $("peers").tBodies[0].replaceChildren(...peers.map((peer) => h("tr", {},
    h("td", {}, h("span", { class: "name" }, peer.name)),
    h("td", {}, peer.error ? badge("unreachable") : badge(peer.state)),
    h("td", { class: "number" }, peer.error ? "-" : round(peer)),
    h("td", { class: "number" }, percent(peer.accuracy)),
    h("td", { class: "number" }, peer.error ? "-" : heard(peer)),
    h("td", {}, peer.peerage || "-"),
    h("td", {}, remark(peer)))));
}
function draw(drawing) {
  const shape = JSON.stringify([drawing.edges, drawing.names]);
  if (shape !== drawn) { graph.load(drawing); drawn = shape; }
  const known = peers.map((peer) => peer.accuracy).filter((value) => value !== null && value !== undefined);
  const low = Math.min(...known), high = Math.max(...known);
  graph.paint(peers.map((peer) => (peer.accuracy === null || peer.accuracy === undefined ? null : viridis(high > low ? (peer.accuracy - low) / (high - low) : 0.5))), drawing.cut, drawing.gone);
  $("graph").setAttribute("aria-label", `Network of ${drawing.count} peers and ${drawing.links} links`);
  const ramp = h("span", { class: "ramp" });
  ramp.style.background = `linear-gradient(90deg, ${VIRIDIS.join(",")})`;
  $("legend").replaceChildren(...(known.length ? [percent(low), ramp, percent(high)] : []),
    ...(drawing.gone.length ? [h("span", {}, `\u2715 gone (${drawing.gone.length})`)] : []),
    ...(drawing.cut.length ? [h("span", {}, `- - cut (${drawing.cut.length})`)] : []));
}
function details() {
  const peer = selected === null ? null : peers[selected];
  if (!peer) { $("peer").replaceChildren(h("p", { class: "empty" }, "Select a peer to see what it reports.")); return; }
  const rows = peer.error ? [["address", peer.address || "dials out"], ["error", peer.error]] : [
    ["state", peer.state], ["address", peer.address || "dials out"], ["round", round(peer)], ["accuracy", percent(peer.accuracy)],
    ["hears", peer.heard.join(", ") || "-"], ["did not hear", peer.missing.join(", ") || "-"],
    peer.epsilon === null ? null : ["epsilon", number(peer.epsilon)], ["certificate until", (peer.expires || "-").slice(0, 10)],
    ["versions", `peerage ${peer.peerage}, torch ${peer.torch}, wire ${peer.schema}`], ["network file", `revision ${peer.revision}`]].filter(Boolean);
  $("peer").replaceChildren(h("h2", { id: "peer-title" }, peer.name), h("table", { class: "facts" }, h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text) => h("td", {}, text)))))));
}
async function follow() {
  try {
    const found = await get("/api/network");
    peers = found.peers;
    report(null);
    $("about").textContent = `${peers.filter((peer) => !peer.error).length} of ${peers.length} peers answered`;
    $("live").hidden = false;
    table();
    draw(found.drawing);
    details();
    chart.show([{ ...found.curve, label: "", colour: COLOURS[0] }], "fraction");
  } catch (error) { report(error); }
  setTimeout(follow, INTERVAL);
}
follow();
