// Tokens per second of every expert over time: a row per expert, beside it the colours of the instances that hold it.

import { color, colorOf, empty } from "./charts.js";

const STRIPE = 6, LEFT = 34, BOTTOM = 2; // CSS pixels

function mix(low, high, part) {
  const read = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const [a, b] = [read(low), read(high)];
  return `rgb(${a.map((value, index) => Math.round(value + (b[index] - value) * part)).join(" ")})`;
}

// How the load of experts is balanced, with --enable-eplb.
function balanceOf(balance) {
  if (!balance) return [];
  const held = Object.entries(balance.held).map(([rank, copies]) => `${copies} on ${rank}`).join(", ");
  const measured = balance.windows ? `balancedness ${balance.balancedness.toFixed(2)}` : "loads not counted yet";
  const changes = `${balance.changes} changes moved ${balance.moves} copies`;
  const busiest = balance.busiest.slice(0, 3)
    .map((one) => `${one.expert} (${(100 * one.share).toFixed(0)} %, on ${one.ranks.join(", ") || "none"})`).join("; ");
  const failing = balance.is_failing ? ["not balanced of late: the coordinator's log says why"] : [];
  return [measured, changes, ...failing, ...(held ? [`copies: ${held}`] : []), ...(busiest ? [`busiest: ${busiest}`] : [])]
    .map((textContent) => Object.assign(document.createElement("span"), { textContent }));
}

export function showExperts(element, legendElement, history) {
  const canvas = element.querySelector("canvas");
  const experts = history.experts();
  empty(element, experts.length ? "" : "No experts are spread over the instances of this mesh.");
  legendElement.replaceChildren();
  const scale = devicePixelRatio, width = element.clientWidth, height = element.clientHeight;
  if (canvas.width !== width * scale || canvas.height !== height * scale) {
    canvas.width = width * scale;
    canvas.height = height * scale;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  if (!experts.length) return;

  let most = 0;
  for (const point of history.points) for (const one of Object.values(point.experts)) most = Math.max(most, one.rate);
  const row = (height - BOTTOM) / experts.length, column = (width - LEFT - STRIPE) / history.width();
  const gap = row > 6 ? 1 : 0;
  const [low, high] = [color("heat-low"), color("heat-high")];
  const first = history.width() - history.points.length;
  const now = history.points.at(-1);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  experts.forEach((expert, index) => {
    const top = index * row;
    context.fillStyle = low;
    context.fillRect(LEFT + STRIPE, top, width - LEFT - STRIPE, row - gap);
    history.points.forEach((point, at) => {
      const rate = point.experts[expert]?.rate ?? 0;
      if (!rate) return;
      context.fillStyle = mix(low, high, most ? Math.sqrt(rate / most) : 0);
      context.fillRect(LEFT + STRIPE + (first + at) * column, top, column + 0.6, row - gap);
    });
    const here = now.experts[expert];
    (here?.ranks ?? []).forEach((rank, place, all) => {
      context.fillStyle = colorOf(rank);
      context.fillRect(LEFT - 4 + (place * STRIPE) / all.length, top, STRIPE / all.length, row - gap);
    });
    const every = Math.ceil(12 / row);
    if (index % every === 0) {
      context.fillStyle = color("soft");
      context.fillText(String(expert), 8, top + row / 2);
    }
  });
  const ranks = [...new Set(Object.values(now.experts).flatMap((one) => one.ranks))].sort((a, b) => a - b);
  legendElement.append(...ranks.map((rank) => {
    const chip = Object.assign(document.createElement("span"), { className: "chip", textContent: `instance ${rank}` });
    chip.style.setProperty("--chip", colorOf(rank));
    return chip;
  }), ...balanceOf(history.last.balance), Object.assign(document.createElement("span"), { textContent: `strongest colour: ${most.toFixed(0)} tokens/s of an expert` }));
}
