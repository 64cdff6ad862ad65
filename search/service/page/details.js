// The text of a path, step by step, and what is known of its last step.

import { counted, html, scoreText, setScore } from "./dom.js";
import { answerParts, withFormulas } from "./formula.js";

const ENDED = {
  root: "the problem itself",
  inner: "grew on",
  living: "may still grow",
  eos: "complete: the generator ended its answer",
  boxed: "complete: it has a boxed answer",
  pruned: "pruned: others were preferred",
  length: "cut off at a limit of tokens or steps",
  budget: "cut off by a budget",
  degenerate: "cut off: it repeats itself or says nothing",
  cancelled: "cut off when the search was stopped",
  unclosed: "ended within its thought: no answer",
};

// Fills `section` with the path to `mark`; `picked` says whether somebody chose it, or it is the search's best.
export function showDetails(section, search, marks, mark, picked, onPick) {
  if (!mark) {
    section.replaceChildren(html("p", "hint", "Choose a step to read it."));
    return;
  }
  const path = lineage(mark.node).map((node) => marks.get(node.id));
  const title = mark.node.parent ? `Step ${mark.node.depth}` : "The problem";
  const finished = search.ended ? "Selected path" : "Best path so far";
  section.replaceChildren(
    html("h3", "", picked ? title : finished),
    facts(search, mark),
    ...(mark.node.parent ? [steps(path, mark, onPick)] : [html("p", "text", ...withFormulas(search.problem))]),
  );
}

function facts(search, { node, record, kind, sharing }) {
  const list = html("dl", "facts");
  const say = (name, ...parts) => list.append(html("div", "", html("dt", "", name), html("dd", "", ...parts)));
  if (!node.parent) return list;
  say("Score", scoreText(record.score));
  say("Tokens", String(record.tokens));
  if (record.multiplicity > 1) say("Samples", String(record.multiplicity));
  const answer = search.answers.get(node.id);
  if (answer) say("Answer", ...answerParts(answer));
  if (record.probe) say("Probe", probeText(record.probe));
  say("State", ENDED[record.termination || kind] ?? (kind === "ended" ? "stopped before its end" : record.termination));
  if (sharing > 1) say("KV", `in memory once for ${counted(sharing, "path")}`);
  return list;
}

// The steps of a path; those of its thought are folded unless the marked one is among them.
function steps(path, mark, onPick) {
  const list = html("ol", "steps");
  const ends = new Map(); // tokens of the path up to each step
  path.reduce((tokens, { node, record }) => (ends.set(node, tokens + record.tokens), tokens + record.tokens), 0);
  const shown = (each) => step(each, ends.get(each.node), mark, onPick);
  const thought = path.filter(({ record }) => record.thought_chars);
  if (thought.length) {
    const fold = html("details", "thought", html("summary", "", `Thought: ${counted(thought.length, "step")}`));
    fold.open = thought.some(({ node }) => node === mark.node);
    fold.append(html("ol", "steps", ...thought.map(shown)));
    list.append(html("li", "folded", fold));
  }
  list.append(...path.filter(({ record }) => !record.thought_chars).map(shown));
  return list;
}

// A step of the model's, with what the host wrote behind it, and what a probe at its end, `tokens` into the path, read.
function step({ node, record }, tokens, mark, onPick) {
  const button = html("button", "", ...withFormulas(record.text.trim() || "(end)"));
  button.type = "button";
  button.addEventListener("click", () => onPick(node.id));
  const score = html("span", "score", scoreText(record.score));
  setScore(score, record.score);
  const item = html("li", node === mark.node ? "here" : "", score, button);
  if (record.probe) item.append(html("p", "probe", `Probe at token ${tokens.toLocaleString("en")}: ${probeText(record.probe)}`));
  if (record.appended) item.append(html("p", "appended", html("b", "", "Written by the host: "), ...withFormulas(record.appended)));
  return item;
}

function probeText({ answer, certainty }) {
  return answer ? `${answer}, ${Math.round(100 * certainty)}% sure` : "no answer";
}

function lineage(node) {
  const path = [];
  for (let at = node; at.parent; at = at.parent) path.unshift(at);
  return path;
}
