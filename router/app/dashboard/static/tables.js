// Tables, tiles and the list of events. All text goes in as text, never as HTML.

import { colorOf } from "./charts.js";

const MAX_EVENTS = 30;

export function cell(content, className = "") {
  const found = document.createElement("td");
  found.className = className;
  found.append(content);
  return found;
}

// On a narrow screen rows are cards: each cell then shows the head of its column.
function nameCells(table) {
  const heads = [...document.querySelectorAll(`#${table} th`)].map((head) => head.textContent);
  for (const row of document.querySelectorAll(`#${table} tbody tr`)) {
    [...row.cells].forEach((one, column) => { if (one.colSpan === 1) one.dataset.head = heads[column]; });
  }
}

function chip(rank) {
  const found = document.createElement("span");
  found.className = "chip";
  if (rank !== null) found.style.setProperty("--chip", colorOf(rank));
  found.textContent = rank === null ? "waits" : String(rank);
  return found;
}

function meter(part, text, fill) {
  const found = document.createElement("div");
  found.className = "meter";
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  bar.setAttribute("width", `${100 * Math.min(1, part)}%`);
  bar.setAttribute("height", "100%");
  bar.setAttribute("fill", fill);
  svg.append(bar);
  found.append(svg, Object.assign(document.createElement("span"), { textContent: text }));
  return found;
}

const STALLED = 5; // seconds without a step

function stateOf(one) {
  const found = document.createElement("span");
  found.className = "state";
  const stalled = one.load.stalled_for > STALLED;
  found.dataset.state = stalled ? "stalled" : one.odd ? "odd" : one.state;
  found.textContent = stalled ? `no step for ${one.load.stalled_for.toFixed(0)} s`
    : [one.state, "serving"].includes(one.phase) ? one.state : `${one.state}: ${one.phase}`;
  if (one.role !== "mixed") found.textContent += `, ${one.role}`;
  if (one.odd) found.textContent += `, odd in ${one.odd} shadow check${one.odd > 1 ? "s" : ""}`;
  return found;
}

// The kernels that an instance computes with; its system_fingerprint as the tooltip.
function numericsOf(one) {
  const found = cell(one.numerics ? one.numerics.kernels : "–", "name");
  found.title = one.numerics ? one.numerics.fingerprint : "";
  return found;
}

export function showInstances(frame, point) {
  const rows = frame.instances.map((one) => {
    const { running, waiting, blocks_used: used, blocks_total: total } = one.told ?? one.load;
    const now = point.ranks[one.rank];
    const row = document.createElement("tr");
    row.dataset.rank = one.rank;
    row.dataset.running = running;
    row.append(
      cell(chip(one.rank)), cell(stateOf(one)), cell(String(frame.epoch)),
      cell(meter(frame.max_num_seqs ? running / frame.max_num_seqs : 0, `${running} running, ${waiting} waiting`, colorOf(one.rank))),
      cell(meter(total ? used / total : 0, total ? `${((100 * used) / total).toFixed(1)}%` : "–", colorOf(one.rank))),
      cell(now ? now.tokens.toFixed(0) : "–", "number"), cell(now ? now.steps.toFixed(1) : "–", "number"),
      numericsOf(one), cell(`${one.host} ${one.pid}`, "name"),
    );
    return row;
  });
  if (frame.num_instances > frame.instances.length) {
    const more = cell(`and ${frame.num_instances - frame.instances.length} more`, "none");
    more.colSpan = 9;
    rows.push(document.createElement("tr"));
    rows.at(-1).append(more);
  }
  document.querySelector("#instances tbody").replaceChildren(...rows);
  nameCells("instances");
  document.getElementById("load-head").title = frame.max_num_seqs
    ? `part of the ${frame.max_num_seqs} requests that an instance runs at once (--max-num-seqs)` : "";
}

export function showRequests(frame) {
  document.querySelector("#requests tbody").replaceChildren(...frame.requests.map((one) => {
    const row = document.createElement("tr");
    row.dataset.request = one.request_id;
    const resumed = Math.max(0, one.attempts - 1);
    row.append(
      cell(one.request_id, "name"), cell(chip(one.rank)), cell(String(one.prompt_tokens), "number"),
      cell(String(one.output_tokens), "number"), cell(`${one.age.toFixed(0)} s`, "number"),
      cell(resumed ? `${resumed}×` : "", "number"),
    );
    return row;
  }));
  nameCells("requests");
  const elsewhere = frame.num_requests - frame.num_requests_here;
  const hidden = frame.num_requests_here - frame.requests.length;
  document.getElementById("requests-note").textContent = [
    frame.num_requests_here ? "" : "none now",
    hidden > 0 ? `the oldest of ${frame.num_requests_here}` : "",
    elsewhere > 0 ? `${elsewhere} more at other front ends` : "",
  ].filter(Boolean).join(", ");
}

export function showEvents(frame) {
  const list = document.getElementById("events");
  list.replaceChildren(...frame.faults.slice(-MAX_EVENTS).reverse().map((fault) => {
    const row = document.createElement("li");
    row.dataset.event = fault.event;
    const time = document.createElement("time");
    time.textContent = new Date(1000 * fault.at).toLocaleTimeString([], { hour12: false });
    const word = { detection: "lost", restart: "started", resume: "resumed" }[fault.event];
    row.append(time, Object.assign(document.createElement("b"), { textContent: word }), ` ${fault.text}`);
    return row;
  }));
  if (!frame.faults.length) {
    list.append(Object.assign(document.createElement("li"), { className: "none", textContent: "Nothing went wrong so far." }));
  }
}

export function showTiles(frame, point) {
  const put = (name, text) => { document.getElementById(`tile-${name}`).textContent = text; };
  const ready = frame.instances.filter((one) => one.state === "ready").length;
  const sum = (read) => frame.instances.reduce((total, one) => total + read(one), 0);
  put("instances", frame.size ? `${ready} of ${Math.max(frame.size, frame.num_instances)}` : String(ready));
  put("epoch", frame.epoch ?? "–");
  put("requests", String(frame.num_requests));
  put("tokens", Object.values(point.ranks).reduce((total, one) => total + one.tokens, 0).toFixed(0));
  const blocks = sum((one) => one.load.blocks_total);
  put("kv", blocks ? `${((100 * sum((one) => (one.told ?? one.load).blocks_used)) / blocks).toFixed(1)}%` : "–");
  const looked = sum((one) => one.told?.cache_queries ?? 0);
  put("hits", looked ? `${((100 * sum((one) => one.told?.cache_hits ?? 0)) / looked).toFixed(0)}%` : "–");
  put("resumes", String(frame.resumes));
  const wrong = frame.answers.wrong + sum((one) => one.load.cache_wrong);
  put("checked", `${frame.answers.checked} answers, ${sum((one) => one.load.cache_checked)} cache pieces, ${wrong} wrong`);
  document.getElementById("model").textContent = frame.model ?? "no model yet";
  const silent = frame.coordinator_silent_for;
  const notice = document.getElementById("notice");
  notice.textContent = [
    frame.waiting_for ? `Waiting for ${frame.waiting_for}.` : "",
    silent !== null && silent > 5 ? `The coordinator has been silent for ${silent.toFixed(0)} s; serving goes on without it.` : "",
  ].filter(Boolean).join(" ");
  notice.hidden = !notice.textContent;
}
