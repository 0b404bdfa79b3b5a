// The two line charts, drawn by uPlot, and the marks of what went wrong.
/* global uPlot */

import { PARTS } from "./history.js";

export const PART_NAMES = {
  wait: "wait for headers", attention: "attention", dispatch: "dispatch",
  experts: "experts", combine: "combine", rest: "rest",
};

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const colorOf = (rank) => color(`i${rank % 8}`);

export function legend(element, entries) {
  element.replaceChildren(...entries.map(([name, value]) => {
    const chip = document.createElement("span");
    chip.className = "chip";
    chip.style.setProperty("--chip", value);
    chip.textContent = name;
    return chip;
  }));
}

export function empty(element, text) {
  let note = element.querySelector(".empty");
  if (!note) {
    note = document.createElement("div");
    note.className = "empty";
    element.append(note);
  }
  note.textContent = text;
  note.hidden = !text;
  note.style.display = text ? "" : "none";
}

function drawMarks(history) {
  return (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color("mark");
    ctx.lineWidth = devicePixelRatio;
    for (const mark of history.marks) {
      const x = plot.valToPos(mark.at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const solid = mark.event === "resume";
      ctx.setLineDash(solid ? [] : [3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (solid) {
        const size = 5 * devicePixelRatio;
        ctx.beginPath();
        ctx.moveTo(x - size, bbox.top);
        ctx.lineTo(x + size, bbox.top);
        ctx.lineTo(x, bbox.top + 1.6 * size);
        ctx.fill();
      }
    }
    ctx.restore();
  };
}

export class Chart {
  // `series`: [{name, color, fill}]; a new list means a new plot.
  constructor(element, history, unit) {
    this.element = element;
    this.history = history;
    this.unit = unit;
    this.plot = null;
    this.shape = "";
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(element);
  }

  size() {
    return { width: this.element.clientWidth, height: this.element.clientHeight };
  }

  show(series, columns) {
    const shape = JSON.stringify(series);
    const times = this.history.points.map((point) => point.at);
    if (shape !== this.shape || !this.plot) this.build(series);
    this.shape = shape;
    const last = times.at(-1) ?? Date.now() / 1000;
    this.plot.setData([times, ...columns], false);
    this.plot.batch(() => {
      this.plot.setScale("x", { min: last - this.history.width(), max: last });
      let most = 0;
      for (const column of columns) for (const value of column) most = Math.max(most, value ?? 0);
      this.plot.setScale("y", { min: 0, max: 1.1 * most || 1 });
    });
  }

  build(series) {
    this.plot?.destroy();
    const axis = {
      stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("line"), width: 1 },
      font: "11px system-ui, sans-serif",
    };
    const when = (plot, values) => values.map((value) => new Date(1000 * value).toLocaleTimeString([], { hour12: false }));
    this.plot = new uPlot({
      ...this.size(),
      padding: [10, 8, 0, 0],
      cursor: { drag: { x: false, y: false }, y: false },
      legend: { show: false },
      scales: { x: { time: true, auto: false }, y: { auto: false } },
      axes: [
        { ...axis, values: when, space: 80 },
        { ...axis, size: 56, values: (plot, values) => values.map((value) => `${+value.toFixed(2)}${this.unit}`) },
      ],
      series: [{}, ...series.map((one) => ({
        label: one.name, stroke: one.color, width: one.fill ? 1 : 2, fill: one.fill, points: { show: false },
      }))],
      hooks: { draw: [drawMarks(this.history)] },
    }, [[], ...series.map(() => [])], this.element);
  }
}

export function showThroughput(chart, legendElement, history) {
  const ranks = history.ranks();
  const series = ranks.map((rank) => ({ name: `instance ${rank}`, color: colorOf(rank) }));
  chart.show(series, ranks.map((rank) => history.points.map((point) => point.ranks[rank]?.tokens ?? null)));
  const now = history.points.at(-1);
  legend(legendElement, ranks.map((rank) => {
    const here = now.ranks[rank];
    return [`instance ${rank}: ${here ? here.tokens.toFixed(0) : "–"}`, colorOf(rank)];
  }));
  if (history.marks.length) {
    legendElement.append(Object.assign(document.createElement("span"), { textContent: "▼ resumed   ┆ found lost" }));
  }
}

export function showSteps(chart, legendElement, history, rank) {
  // Stacked: each series is the sum up to its part, the largest drawn first.
  const splits = history.points.map((point) => history.split(point, rank));
  const sums = splits.map((split) => split && split.map((_, index) => split.slice(0, index + 1).reduce((a, b) => a + b)));
  const order = PARTS.map((_, index) => PARTS.length - 1 - index);
  chart.show(
    order.map((index) => ({ name: PARTS[index], color: color(PARTS[index]), fill: color(PARTS[index]) })),
    order.map((index) => sums.map((sum) => (sum ? sum[index] : null))),
  );
  const isSpread = history.last.instances.some((one) => one.told?.lockstep);
  empty(chart.element, !isSpread ? "Instances step on their own here: only experts that are spread over instances make them take steps together."
    : splits.some(Boolean) ? "" : "All sleep: nobody has work.");
  const last = splits.findLast(Boolean);
  legend(legendElement, PARTS.map((part, index) => {
    return [`${PART_NAMES[part]}${last ? ` ${last[index].toFixed(1)} ms` : ""}`, color(part)];
  }));
  const imbalance = history.imbalance();
  if (imbalance) {
    legendElement.append(Object.assign(document.createElement("span"), {
      textContent: `imbalance ${imbalance.toFixed(2)}`, title: "The busiest instance's tokens over the mean of all",
    }));
  }
}
