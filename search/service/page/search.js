// One search as the page knows it: its nodes with all their changes, and its frames, the moments it can be shown at.
//
// A search is filled by the events of a running search (`take`) or from a trace (`fromTrace`); both give the same frames:
// the start, one for each report or moment of a round, and the result.

const COMPLETE = new Set(["eos", "boxed"]);

export class Search {
  constructor() {
    this.configuration = null;
    this.nodes = new Map(); // by id, parents before children
    this.frames = [];
    this.answers = new Map(); // of complete paths, by the id of their last node
    this.usage = null;
    this.ended = null; // how it ended, once it has: {answer, score, reason, warnings, probed}
    this.bestId = null; // last node of the selected path, or of the best one so far
    this.error = null;
  }

  get problem() {
    return this.configuration?.problem ?? "";
  }

  get lastFrame() {
    return this.frames.length - 1;
  }

  // Takes one event of the service's stream: its name and its data.
  take(name, data) {
    if (name === "started") this.#start(data.configuration);
    else if (name === "candidate") this.answers.set(data.candidate.node_id, data.candidate.answer);
    else if (name === "step") this.#step(data);
    else if (name === "result") this.#finish(data.result ?? data);
  }

  static fromTrace(trace) {
    const search = new Search();
    search.#start(trace.configuration);
    search.#replayRounds(trace);
    search.#finish({ ...trace, best: trace.best === null ? null : { node_id: trace.best } });
    return search;
  }

  #start(configuration) {
    this.configuration = configuration;
    this.#addFrame({ name: "start", seconds: 0, blocks: {}, kept: [] });
    this.#change({ node_id: 0, parent_id: null, path: [], text: "", score: null, termination: "", multiplicity: 1, tokens: 0 });
  }

  #step(report) {
    const round = this.frames.filter((frame) => frame.round && !frame.partial).length + 1;
    const { seconds, blocks, partial } = report;
    const kept = partial ? null : report.kept.map((node) => node.node_id);
    this.#addFrame({ name: `round ${round}`, round, partial, seconds, blocks, kept });
    for (const record of report.nodes) this.#change(record);
    this.bestId = report.best?.node_id ?? this.bestId;
  }

  #replayRounds(trace) {
    const ids = new Map(trace.nodes.map((node) => [node.path.join(), node.node_id]));
    const idOf = (path) => ids.get(path.join());
    const ended = new Map(); // how nodes had ended when the algorithm was told of them
    const standing = new Set(); // kept so far
    let born = 1;
    for (const [index, round] of trace.rounds.entries()) {
      for (const told of round.told) ended.set(idOf(told.path), told.termination);
      for (const [place, moment] of round.moments.entries()) {
        const partial = place < round.moments.length - 1;
        const kept = partial ? null : round.kept.map(idOf);
        this.#addFrame({ name: `round ${index + 1}`, round: index + 1, partial, kept, ...moment });
        for (; born < moment.nodes; born++) {
          const node = trace.nodes[born];
          this.#change({ ...node, termination: ended.get(born) ?? asSampled(node) });
        }
      }
      for (const told of round.told) standing.add(idOf(told.path));
      const kept = new Set(round.kept.map(idOf));
      for (const id of standing) {
        if (kept.has(id)) continue;
        standing.delete(id);
        this.#change(trace.nodes[id]);
      }
    }
  }

  #finish(result) {
    const seconds = result.usage.seconds;
    this.#addFrame({ name: "result", seconds, blocks: {}, kept: [] });
    for (const record of result.nodes) this.#change(record);
    for (const candidate of result.candidates) this.answers.set(candidate.node_id, candidate.answer);
    this.configuration = result.configuration;
    this.usage = result.usage;
    const { answer, score, stop_reason: reason, warnings, probed } = result;
    this.ended = { answer, score, reason, warnings, probed };
    this.bestId = result.best?.node_id ?? null;
  }

  #addFrame(frame) {
    this.frames.push({ partial: false, round: 0, ...frame });
  }

  // Notes in the latest frame that a node is new or has changed.
  #change(record) {
    const id = record.node_id;
    let node = this.nodes.get(id);
    if (!node) {
      const parent = this.nodes.get(record.parent_id) ?? null;
      if (id !== 0 && !parent) return; // a report was cut; the result has it
      node = { id, parent, children: [], born: this.lastFrame, history: [] };
      this.nodes.set(id, node);
      parent?.children.push(node);
    }
    const latest = node.history.at(-1);
    if (latest && sameRecord(latest.record, record)) return;
    if (latest?.frame === this.lastFrame) node.history.pop();
    node.history.push({ frame: this.lastFrame, record });
    node.record = record;
    node.depth = record.path.length;
  }

  // What there is to draw at a frame: a list of marks, parents before children.
  //
  // A mark has the node, its record at that time, and:
  //   kind      root, inner, living (it may grow), complete, pruned, ended (cut off)
  //   leads     whether a living or complete path goes through it
  //   sharing   how many living paths stand on it
  //   chosen    whether it is on the selected path
  marksAt(index) {
    const frame = this.frames[index];
    const marks = new Map();
    for (const node of this.nodes.values()) {
      if (node.born > index) continue;
      const record = node.history.findLast((change) => change.frame <= index).record;
      if (record.termination === "duplicate" || (node.parent && !marks.has(node.parent.id))) continue;
      marks.set(node.id, { node, record, kind: "inner", leads: false, sharing: 0, chosen: false });
    }
    const kept = frame.kept && new Set(frame.kept);
    for (const mark of marks.values()) {
      mark.kind = kindOf(mark, marks, kept);
      const living = mark.kind === "living";
      if (!living && mark.kind !== "complete") continue;
      for (let node = mark.node; node; node = node.parent) {
        const above = marks.get(node.id);
        above.leads = true;
        if (living) above.sharing += mark.record.multiplicity;
      }
    }
    for (let node = this.nodes.get(this.bestId); node; node = node.parent) {
      if (marks.has(node.id)) marks.get(node.id).chosen = true;
    }
    return marks;
  }
}

function kindOf({ node, record }, marks, kept) {
  if (!node.parent) return "root";
  if (COMPLETE.has(record.termination)) return "complete";
  if (record.termination === "pruned") return "pruned";
  if (record.termination) return "ended";
  const leaf = !node.children.some((child) => marks.has(child.id));
  if (kept ? kept.has(node.id) : leaf) return "living";
  return leaf ? "ended" : "inner";
}

// How a node stood before it was pruned, for one that the algorithm was not told of: within a path.
function asSampled(node) {
  return node.termination === "pruned" ? "" : node.termination;
}

function sameRecord(one, other) {
  return (
    one.score === other.score &&
    one.termination === other.termination &&
    one.multiplicity === other.multiplicity &&
    one.text === other.text &&
    one.tokens === other.tokens
  );
}
