// One search on the page: what came of it, its tree, its memory, and the step that is read.

import { MemoryChart } from "./chart.js";
import { showDetails } from "./details.js";
import { counted, fromTemplate, scoreText } from "./dom.js";
import { answerParts, withFormulas } from "./formula.js";
import { labelsFit, layOut } from "./layout.js";
import { TreeView } from "./tree.js";

const REASONS = {
  finished: "",
  budget: "cut short by a token budget",
  deadline: "cut short by the time limit",
  cancelled: "cancelled",
  failed: "failed",
};

export const CANCELLED = "cancelled";

export class Panel {
  constructor(search, title) {
    this.search = search;
    this.selected = null; // id of the node that somebody chose
    this.element = fromTemplate("panel");
    this.element.querySelector("h2").textContent = title;
    this.scroll = this.element.querySelector(".scroll");
    this.tree = new TreeView(this.scroll, `The search tree of ${title}`, (id) => this.select(id));
    this.chart = new MemoryChart(this.element.querySelector(".memory"));
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.select(null);
    });
  }

  select(id) {
    this.selected = id;
    this.show(this.shown);
  }

  // Shows a frame; `scale` is that of the memory chart, `labels` whether to write steps (null: where they fit),
  // and `follow` whether to keep what grows in view. Returns the layout.
  show({ index, scale, labels, follow = false }) {
    this.shown = { index, scale, labels };
    const { search } = this;
    const width = this.scroll.clientWidth;
    const layout = this.#layout(width, labels);
    const marks = search.marksAt(index);
    this.tree.show(search, marks, layout, this.selected);
    if (follow) this.#bringIntoView(layout);
    this.chart.show(search, index, width, scale);
    this.#showDetails(marks);
    this.showOutcome();
    return layout;
  }

  // Where everything known so far is drawn; a replay changes nothing of it.
  #layout(width, labels) {
    const key = [this.search.frames.length, width, labels].join();
    if (this.layout?.key !== key) {
      const whole = this.search.marksAt(this.search.lastFrame);
      this.layout = { key, ...layOut(whole, width, labels ?? labelsFit(whole, width)) };
    }
    return this.layout;
  }

  // Scrolls to the end of the selected path, or of the best so far.
  #bringIntoView({ places, width }) {
    const end = places.get(this.search.bestId);
    this.scroll.scrollLeft = this.search.ended && end ? end.x : width;
    if (end) this.scroll.scrollTop = end.y - this.scroll.clientHeight / 2;
  }

  #showDetails(marks) {
    const picked = marks.get(this.selected);
    const best = [...marks.values()].filter((mark) => mark.chosen && mark.node.parent).at(-1);
    const section = this.element.querySelector(".details");
    showDetails(section, this.search, marks, picked ?? best, picked !== undefined, (id) => this.tree.focus(id));
  }

  // The answer and what it cost; also before there is a tree to show.
  showOutcome() {
    const { search } = this;
    const [answer, remark] = outcomeOf(search);
    setText(this.element.querySelector(".outcome strong"), answer, answerParts);
    this.element.querySelector(".outcome").classList.toggle("failed", Boolean(search.error) && search.error !== CANCELLED);
    setText(this.element.querySelector(".outcome span"), remark);
    const steps = Math.max(search.nodes.size - 1, 0);
    setText(this.element.querySelector(".usage"), search.usage ? costs(search.usage).join(" · ") : counted(steps, "step"));
    setText(this.element.querySelector(".own-problem"), search.problem, withFormulas);
    const warnings = this.element.querySelector(".warnings");
    const said = search.ended?.warnings ?? [];
    warnings.hidden = !said.length;
    setText(warnings, said.join("\n"));
  }
}

// The answer so far or at the end, and what is to be said of it.
function outcomeOf(search) {
  if (search.ended) {
    const { answer, score, reason, probed } = search.ended;
    const said = probed ? `answer of probes, with ${Math.round(100 * probed.share)}% of their vote` : answer && "answer";
    const remarks = [said, score !== null && `score ${scoreText(score)}`, REASONS[reason] ?? reason];
    return [answer || "no answer", remarks.filter(Boolean).join(", ")];
  }
  const best = search.answers.get(search.bestId);
  const state = search.error ?? (search.frames.length ? "searching" : "waiting for the server");
  return [best ?? "…", best ? `best so far, ${state}` : state];
}

export function titleOf({ algorithm, beam_width: n, expansion: m }) {
  const uses = usesOf(algorithm);
  return [algorithm, uses.includes("N") && `N = ${n}`, uses.includes("M") && `M = ${m}`].filter(Boolean).join(", ");
}

// Those of N and M that an algorithm uses, as the form's choices say; both of one that is unknown here.
export function usesOf(algorithm) {
  const choices = document.getElementById("wish").content.querySelectorAll("[name=algorithm] option");
  return [...choices].find((choice) => choice.value === algorithm)?.dataset.uses ?? "NM";
}

function costs(usage) {
  return [
    `${counted(usage.nodes, "step")}, ${usage.pruned.toLocaleString("en")} pruned, ${usage.duplicates.toLocaleString("en")} merged`,
    `${counted(usage.generated_tokens, "token")} sampled, ${usage.generator_tokens.toLocaleString("en")} computed`,
    `verifier read ${usage.verifier_tokens.toLocaleString("en")}`,
    `${(usage.peak_kv_bytes / 2 ** 20).toFixed(1)} MiB of KV`,
    `${usage.seconds.toFixed(2)} s`,
  ];
}

// Sets a text that has changed, so that nothing is announced twice; `partsOf` draws its formulas.
function setText(element, text, partsOf = (plain) => [plain]) {
  if (element.dataset.text === text) return;
  element.dataset.text = text;
  element.replaceChildren(...partsOf(text));
}
