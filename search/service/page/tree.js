// Draws one search's tree as SVG and moves a focus through it. Elements stay; only what changed is touched.

import { answerText, scoreText, setAll, setScore, svg } from "./dom.js";

const DOT = 5;
const MERGED_DOT = 8; // it has the number of samples in it
const THIN_DOT = 2.5;
const LABEL_AFTER = 13; // from the parent's step to the text
const OVERHANG = 9; // of the text beyond its own step

const KINDS = {
  root: "the problem",
  inner: "goes on",
  living: "may still grow",
  complete: "complete",
  pruned: "pruned",
  ended: "cut off",
};

export class TreeView {
  // `onSelect` is called with the id of the node that was clicked, or that the keyboard moved to.
  constructor(container, title, onSelect) {
    this.container = container;
    this.drawn = new Map(); // by node id: elements, and what they show
    this.marks = new Map();
    this.focusId = 0;
    this.onSelect = onSelect;
    this.svg = svg("svg", { role: "tree", "aria-label": title, class: "tree" });
    this.layers = ["shared", "branches", "steps"].map((name) => svg("g", { class: name }));
    this.svg.append(...this.layers);
    this.svg.addEventListener("click", (event) => this.#pick(event));
    this.svg.addEventListener("keydown", (event) => this.#press(event));
    container.append(this.svg);
  }

  show(search, marks, layout, selectedId) {
    this.marks = marks;
    this.layout = layout;
    setAll(this.svg, { width: layout.width, height: layout.height, viewBox: `0 0 ${layout.width} ${layout.height}` });
    this.svg.classList.toggle("still", marks.size > 400); // too many to move at the same time
    for (const id of this.drawn.keys()) if (!marks.has(id)) this.#remove(id);
    if (!marks.has(this.focusId)) this.focusId = 0;
    for (const mark of marks.values()) this.#draw(search, mark, mark.node.id === selectedId);
  }

  #draw(search, mark, selected) {
    const { node, record, kind, chosen, leads } = mark;
    const place = this.layout.places.get(node.id);
    const answer = kind === "complete" ? answerText(search.answers.get(node.id) ?? "") : null;
    const won = answer !== null && node.id === search.bestId;
    const key = JSON.stringify([
      place, this.layout.column, this.layout.labelled, record.score, record.text, record.multiplicity,
      kind, chosen, leads, mark.sharing, answer, won, selected, node.id === this.focusId,
    ]);
    let drawn = this.drawn.get(node.id);
    if (drawn?.key === key) return;
    if (!drawn) this.drawn.set(node.id, (drawn = this.#create(node)));
    drawn.key = key;
    this.#drawBranch(drawn, mark, place);
    const { step, halo, dot, label, samples, hit } = drawn;
    const merged = record.multiplicity > 1 && !place.thin;
    const radius = place.thin ? THIN_DOT : merged ? MERGED_DOT : DOT;
    const labelled = this.layout.labelled && !place.thin && node.parent;
    const names = ["step", kind, leads ? "leads" : "dead", chosen && "chosen", won && "won", selected && "selected"];
    if (isPale(record.score)) names.push("pale");
    setAll(step, {
      class: names.filter(Boolean).join(" "),
      transform: `translate(${place.x} ${place.y})`,
      tabindex: node.id === this.focusId ? 0 : -1,
      "aria-selected": selected,
      "aria-label": describe(mark, answer),
    });
    setScore(dot, record.score);
    dot.setAttribute("r", radius);
    halo.setAttribute("r", radius + 3.5);
    samples.textContent = merged ? record.multiplicity : "";
    const before = this.layout.column - LABEL_AFTER;
    label.textContent = labelled ? shorten(oneLine(record), before + OVERHANG) : "";
    label.setAttribute("x", -before);
    const room = place.thin ? 4.5 : 9.5;
    setAll(hit, { x: labelled ? -before : -room, width: (labelled ? before : room) + room, y: labelled ? -18 : -room, height: labelled ? 28 : 2 * room });
    this.#drawAnswer(drawn, answer, radius);
  }

  #create(node) {
    const step = svg("g", { role: "treeitem", "aria-level": node.depth + 1 });
    step.dataset.id = node.id;
    const parts = {
      hit: svg("rect", { class: "hit" }),
      halo: svg("circle", { class: "halo" }),
      dot: svg("circle", { class: "dot" }),
      label: svg("text", { class: "label", y: -10 }),
      samples: svg("text", { class: "samples", y: 3.2 }),
    };
    step.append(...Object.values(parts));
    this.layers[2].append(step);
    const branch = node.parent && svg("path", { class: "branch" });
    if (branch) this.layers[1].append(branch);
    return { step, branch, shared: null, answer: null, ...parts };
  }

  #drawBranch(drawn, { node, chosen, leads, sharing }, place) {
    if (!node.parent) return;
    const from = this.layout.places.get(node.parent.id);
    const turn = bend(this.layout.column);
    const curve = `C${from.x + turn / 2} ${from.y} ${from.x + turn / 2} ${place.y} ${from.x + turn} ${place.y}`;
    const d = `M${from.x} ${from.y}${curve}H${place.x}`;
    setAll(drawn.branch, { d, class: `branch ${leads ? "leads" : "dead"}${chosen ? " chosen" : ""}` });
    if (sharing > 1) {
      if (!drawn.shared) this.layers[0].append((drawn.shared = svg("path")));
      setAll(drawn.shared, { d, "stroke-width": Math.min(4 + 1.6 * Math.log2(sharing), 13) });
    } else {
      drawn.shared?.remove();
      drawn.shared = null;
    }
  }

  #drawAnswer(drawn, answer, radius) {
    if (!answer) {
      drawn.answer?.remove();
      drawn.answer = null;
      return;
    }
    if (!drawn.answer) {
      drawn.answer = svg("g", { class: "answer" });
      drawn.answer.append(svg("rect", { rx: 4, y: -8, height: 16 }), svg("text", { y: 4, x: 6 }), svg("title"));
      drawn.step.append(drawn.answer);
    }
    const [box, text, title] = drawn.answer.children;
    title.textContent = answer;
    text.textContent = shorten(answer, 40);
    box.setAttribute("width", textWidth(text.textContent) + 12);
    drawn.answer.setAttribute("transform", `translate(${radius + 5} 0)`);
  }

  #remove(id) {
    const { step, branch, shared } = this.drawn.get(id);
    for (const element of [step, branch, shared]) element?.remove();
    this.drawn.delete(id);
  }

  // ---- the focus

  #pick(event) {
    const step = event.target.closest("[data-id]");
    if (step) this.focus(Number(step.dataset.id));
  }

  #press(event) {
    const next = event.key === "Enter" ? this.focusId : this.#neighbour(event.key);
    if (next === null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.focus(next);
  }

  focus(id) {
    this.focusId = id;
    this.onSelect(id);
    const { step } = this.drawn.get(id);
    step.focus({ preventScroll: true });
    step.scrollIntoView({ block: "nearest", inline: "nearest" });
  }

  // The node that an arrow key leads to; null for another key.
  #neighbour(key) {
    const { node } = this.marks.get(this.focusId);
    const { y } = this.layout.places.get(node.id);
    const nearest = (nodes) => {
      const far = (other) => Math.abs(this.layout.places.get(other.id).y - y);
      return nodes.reduce((best, other) => (best && far(best) <= far(other) ? best : other), null)?.id ?? node.id;
    };
    const shown = (nodes) => nodes.filter((other) => this.marks.has(other.id));
    const column = [...this.marks.values()].map((mark) => mark.node).filter((other) => other.depth === node.depth);
    const height = (other) => this.layout.places.get(other.id).y;
    switch (key) {
      case "ArrowLeft":
        return node.parent?.id ?? node.id;
      case "ArrowRight": {
        const below = shown(node.children);
        const leading = below.filter((child) => this.marks.get(child.id).leads);
        return nearest(leading.length ? leading : below);
      }
      case "ArrowUp":
        return nearest(column.filter((other) => height(other) < y));
      case "ArrowDown":
        return nearest(column.filter((other) => height(other) > y));
      case "Home":
        return 0;
      default:
        return null;
    }
  }
}

function bend(column) {
  return Math.min(20, column * 0.55);
}

// Whether dark writing is read better on the colour of a score, in light surroundings.
function isPale(score) {
  return score !== null && score > 0.08 && score < 0.92;
}

function describe({ node, record, kind, sharing, chosen }, answer) {
  if (!node.parent) return "The problem";
  const said = [`Step ${node.depth}: ${oneLine(record)}`, KINDS[kind]];
  if (record.score !== null) said.push(`score ${scoreText(record.score)}`);
  if (record.multiplicity > 1) said.push(`${record.multiplicity} samples`);
  if (answer) said.push(`answer ${answer}`);
  if (sharing > 1) said.push(`KV shared by ${sharing} paths`);
  if (chosen) said.push("on the selected path");
  return said.join(", ");
}

function oneLine(record) {
  return record.text.trim().replace(/\s+/g, " ") || "(end)";
}

const ruler = document.createElement("canvas").getContext("2d");
const widths = new Map();

function textWidth(text) {
  if (!widths.has(text)) {
    if (widths.size > 20_000) widths.clear();
    ruler.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    widths.set(text, ruler.measureText(text).width);
  }
  return widths.get(text);
}

// The text, or as much of it as fits into a width, with a mark that it was cut.
function shorten(text, width) {
  if (textWidth(text) <= width) return text;
  let [fits, tooLong] = [0, Math.min(text.length, Math.ceil(width / 2))];
  while (tooLong - fits > 1) {
    const middle = (fits + tooLong) >> 1;
    if (textWidth(`${text.slice(0, middle)}…`) <= width) fits = middle;
    else tooLong = middle;
  }
  return `${text.slice(0, fits).replace(/[\ud800-\udbff]$/, "").trimEnd()}…`;
}
