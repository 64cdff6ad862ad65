// The KV blocks of both models over the time of a search, stacked, with a line at the frame that is shown.

import { setAll, svg } from "./dom.js";

const HEIGHT = 64;
const HIGHEST = 58;

const ROLES = ["generator", "verifier"];

export class MemoryChart {
  constructor(figure) {
    this.caption = figure.querySelector("figcaption");
    this.svg = svg("svg", { height: HEIGHT, role: "img" });
    this.areas = ROLES.map((role) => svg("path", { class: `blocks ${role}` }));
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT });
    this.svg.append(...this.areas, this.cursor);
    figure.prepend(this.svg);
  }

  // `scale` has the seconds and blocks at the ends of the axes, the same for searches side by side.
  show(search, index, width, scale) {
    const frames = search.frames;
    const x = (frame) => 1 + (frame.seconds / (scale.seconds || 1)) * (width - 2);
    const y = (blocks) => HEIGHT - (blocks / (scale.blocks || 1)) * HIGHEST;
    const most = mostBlocks(search);
    setAll(this.svg, { width, viewBox: `0 0 ${width} ${HEIGHT}` });
    this.svg.setAttribute("aria-label", `KV blocks over time, ${most} at the most`);
    const edges = [frames.map(() => 0), frames.map((frame) => held(frame, "generator")), frames.map(total)];
    for (const [role, area] of this.areas.entries()) {
      const points = (edge) => frames.map((frame, i) => `${x(frame).toFixed(1)},${y(edge[i]).toFixed(1)}`);
      area.setAttribute("d", `M${[...points(edges[role]), ...points(edges[role + 1]).reverse()].join("L")}Z`);
    }
    const at = x(frames[index]);
    setAll(this.cursor, { x1: at, x2: at });
    const now = ROLES.map((role) => held(frames[index], role));
    this.caption.replaceChildren(
      ...caption("KV blocks", String(now[0] + now[1])),
      ...ROLES.flatMap((role, i) => caption(role, String(now[i]), role)),
      ...caption("most", String(most)),
    );
  }
}

// The most blocks that a search held at one of its frames.
export function mostBlocks(search) {
  return Math.max(0, ...search.frames.map(total));
}

function held(frame, role) {
  return frame.blocks[role] ?? 0;
}

function total(frame) {
  return ROLES.reduce((sum, role) => sum + held(frame, role), 0);
}

function caption(name, value, role) {
  const [term, number] = ["span", "b"].map((tag) => document.createElement(tag));
  term.textContent = name;
  if (role) term.className = `key ${role}`;
  number.textContent = value;
  return [term, number];
}
