// What the page remembers: the last frames, as rates. Bounded: the oldest point goes when a new one comes.

export const POINTS = 180;
const FEWEST = 60; // shown, also of a page that was just opened
export const PARTS = ["wait", "attention", "dispatch", "experts", "combine", "rest"];

// Totals of a process that was started again begin at zero.
const grown = (now, before) => Math.max(0, now - (before ?? 0));

function splitOf(now, before) {
  const steps = grown(now.steps, before?.steps);
  if (!before || !steps) return null;
  const parts = PARTS.map((part) => (1000 * grown(now[part], before[part])) / steps);
  const mean = grown(now.mean_tokens, before.mean_tokens);
  return { steps, parts, imbalance: mean > 0 ? grown(now.busiest_tokens, before.busiest_tokens) / mean : null };
}

export class History {
  constructor() {
    this.points = []; // {at, ranks: {rank: {tokens, steps, split}}, experts: {expert: {rate, ranks}}}
    this.marks = []; // resumes and detections: {at, event, text}
    this.last = null;
  }

  add(frame) {
    const dt = this.last ? frame.at - this.last.at : 0;
    const point = { at: frame.at, ranks: {}, experts: {} };
    const before = new Map((this.last?.instances ?? []).map((one) => [one.instance, one.told]));
    for (const one of frame.instances) {
      const told = one.told, old = before.get(one.instance);
      if (!told) continue;
      const rate = (name) => (dt > 0 && old ? grown(told[name], old[name]) / dt : 0);
      const split = told.lockstep ? splitOf(told.lockstep, old?.lockstep) : null;
      point.ranks[one.rank] = { tokens: rate("generation_tokens"), steps: rate("steps"), split };
      for (const [expert, tokens] of Object.entries(told.lockstep?.tokens_per_expert ?? {})) {
        const was = old?.lockstep?.tokens_per_expert[expert];
        const now = dt > 0 && was !== undefined ? grown(tokens, was) / dt : 0;
        const other = point.experts[expert]; // a second copy of an expert adds to it
        point.experts[expert] = { rate: now + (other?.rate ?? 0), ranks: [...(other?.ranks ?? []), one.rank] };
      }
    }
    this.points.push(point);
    if (this.points.length > POINTS) this.points.shift();
    const since = this.points[0].at;
    this.marks = frame.faults.filter((fault) => fault.at >= since);
    this.last = frame;
    return point;
  }

  // How many points the charts have room for.
  width() {
    return Math.max(FEWEST, this.points.length);
  }

  ranks() {
    return [...new Set(this.points.flatMap((point) => Object.keys(point.ranks).map(Number)))].sort((a, b) => a - b);
  }

  experts() {
    return [...new Set(this.points.flatMap((point) => Object.keys(point.experts).map(Number)))].sort((a, b) => a - b);
  }

  // The busiest instance's tokens over the mean, of the newest steps; 1 is even.
  imbalance() {
    const found = Object.values(this.points.at(-1)?.ranks ?? {}).map((one) => one.split?.imbalance).filter(Boolean);
    return found.length > 1 ? Math.max(...found) : null;
  }

  // Milliseconds per step by part, of one instance, or the mean of all that stepped; null where none did.
  split(point, rank) {
    const found = Object.entries(point.ranks)
      .filter(([number, one]) => one.split && (rank === null || Number(number) === rank))
      .map(([, one]) => one.split);
    if (!found.length) return null;
    return PARTS.map((_, index) => found.reduce((sum, one) => sum + one.parts[index], 0) / found.length);
  }
}
