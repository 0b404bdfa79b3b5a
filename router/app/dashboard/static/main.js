// Puts frames on the page.

import { Chart, showSteps, showThroughput } from "./charts.js";
import { showModel, showPlace } from "./chat.js";
import { follow } from "./feed.js";
import { showExperts } from "./heat.js";
import { History } from "./history.js";
import { showEvents, showInstances, showRequests, showTiles } from "./tables.js";

const byId = (id) => document.getElementById(id);
const history = new History();
const throughput = new Chart(byId("throughput"), history, "");
const steps = new Chart(byId("steps"), history, " ms");
const stepsOf = byId("steps-of");

function offerRanks() {
  const wanted = ["", ...history.ranks().map(String)];
  if ([...stepsOf.options].map((option) => option.value).join() === wanted.join()) return;
  const chosen = stepsOf.value;
  stepsOf.replaceChildren(...wanted.map((rank) => new Option(rank ? `instance ${rank}` : "mean of all", rank)));
  stepsOf.value = wanted.includes(chosen) ? chosen : "";
}

function draw() {
  if (!history.last) return;
  offerRanks();
  showThroughput(throughput, byId("throughput-legend"), history);
  showSteps(steps, byId("steps-legend"), history, stepsOf.value ? Number(stepsOf.value) : null);
  showExperts(byId("experts"), byId("experts-legend"), history);
}

function onFrame(frame) {
  const point = history.add(frame);
  showTiles(frame, point);
  showInstances(frame, point);
  showRequests(frame);
  showEvents(frame);
  showPlace(frame);
  showModel(frame);
  if (!document.hidden) draw();
  document.body.dataset.frames = String(Number(document.body.dataset.frames ?? 0) + 1);
}

function onLink(state, text) {
  byId("link").dataset.state = state;
  byId("link").textContent = text;
}

const THEME = "lockstep-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme() {
  document.documentElement.dataset.theme = localStorage.getItem(THEME) ?? (dark.matches ? "dark" : "light");
  throughput.shape = steps.shape = "";
  draw();
}
byId("theme").addEventListener("click", () => {
  localStorage.setItem(THEME, document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  setTheme();
});
dark.addEventListener("change", setTheme);
stepsOf.addEventListener("change", draw);
document.addEventListener("visibilitychange", () => !document.hidden && draw());

setTheme();
follow(onFrame, onLink);
