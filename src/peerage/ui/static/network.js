import { $, badge, get, h, number, percent, report } from "./common.js";

const INTERVAL = 3000; // milliseconds between two questions
async function follow() {
  try {
    const { peers } = await get("/api/network");
    const there = peers.filter((peer) => !peer.error);
    report(null);
    $("about").textContent = `${there.length} of ${peers.length} peers answered`;
    $("peers").tBodies[0].replaceChildren(...peers.map((peer) => h("tr", {},
      h("td", {}, h("span", { class: "name" }, peer.name)),
      h("td", {}, badge(peer.error ? "failed" : peer.state)),
      h("td", { class: "number" }, peer.error ? "-" : `${number(peer.round)} of ${number(peer.rounds)}`),
      h("td", { class: "number" }, percent(peer.accuracy)),
      h("td", { class: "number" }, peer.error ? "-" : `${peer.heard.length} of ${peer.heard.length + peer.missing.length}`),
      h("td", {}, peer.peerage || "-"),
      h("td", {}, peer.error || (peer.missing.length ? `did not hear ${peer.missing.join(", ")}` : peer.by_way_of ? `by way of ${peer.by_way_of}` : "")))));
  } catch (error) { report(error); }
  setTimeout(follow, INTERVAL);
}
follow();
