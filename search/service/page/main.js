// The page: shows the traces that it carries, or else asks what to search.

import { mostBlocks } from "./chart.js";
import { Form } from "./form.js";
import { withFormulas } from "./formula.js";
import { servedModels, solve } from "./live.js";
import { CANCELLED, Panel, titleOf } from "./panel.js";
import { Search } from "./search.js";
import { Timeline } from "./timeline.js";

const byId = (id) => document.getElementById(id);

let panels = [];
let frames = [];
let labels = null; // whether to write the steps' texts; null: where they fit
let running = null; // an AbortController while searches run
let scheduled = false;
let fresh = false; // whether the panels have not been drawn yet

const timeline = new Timeline(byId("controls"), (shown) => {
  frames = shown;
  schedule();
});

// Draws once before the browser paints, however many events came in.
function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    const follow = fresh || (running !== null && timeline.atEnd);
    fresh = false;
    const layouts = [];
    const scale = { seconds: timeline.seconds, blocks: Math.max(...panels.map(({ search }) => mostBlocks(search))) };
    for (const [i, panel] of panels.entries()) {
      if (!panel.search.frames.length) panel.showOutcome();
      else layouts.push(panel.show({ index: frames[i], scale, labels, follow }));
    }
    byId("labels").checked = layouts.every((layout) => layout.labelled);
    const height = Math.max(0, ...layouts.map((layout) => layout.height));
    byId("panels").style.setProperty("--tree-height", `${height}px`);
  });
}

function setUp(searches, titles) {
  fresh = true;
  panels = searches.map((search, i) => new Panel(search, titles[i]));
  byId("panels").replaceChildren(...panels.map((panel) => panel.element));
  byId("panels").classList.toggle("two", panels.length > 1);
  byId("legend").hidden = false;
  notify("");
  timeline.pause();
  timeline.update(searches);
}

function showTraces(traces) {
  const searches = traces.map((trace) => Search.fromTrace(trace));
  const problems = new Set(searches.map((search) => search.problem));
  setUp(searches, searches.map((search) => titleOf(search.configuration)));
  const [problem] = problems;
  byId("problem").replaceChildren(...withFormulas(problem));
  byId("problem").hidden = problems.size > 1;
  for (const panel of panels) panel.element.querySelector(".own-problem").hidden = problems.size === 1;
  document.title = `${problem.slice(0, 60)} – Espalier`;
}

async function openFiles(files) {
  try {
    const traces = await Promise.all(files.slice(0, 2).map(async (file) => readTrace(file.name, await file.text())));
    if (files.length > 2) throw new Error("Choose one trace, or two to compare.");
    cancel();
    tryToShow(traces);
  } catch (error) {
    notify(error.message);
  }
}

function tryToShow(traces) {
  try {
    showTraces(traces);
  } catch (error) {
    throw new Error("A trace contradicts itself and cannot be shown.", { cause: error });
  }
}

function readTrace(name, text) {
  let trace;
  try {
    trace = JSON.parse(text);
  } catch {
    throw new Error(`${name} is not JSON.`);
  }
  if (trace.schema !== "espalier.trace" || trace.version !== 2) throw new Error(`${name} is no trace of version 2.`);
  return trace;
}

async function start(form, requests) {
  cancel();
  const controller = (running = new AbortController());
  const searches = requests.map(() => new Search());
  setUp(searches, requests.map(titleOf));
  byId("problem").hidden = true;
  form.running = true;
  if (byId("panels").getBoundingClientRect().top > innerHeight / 2) byId("panels").scrollIntoView();
  const runs = requests.map(async (request, i) => {
    try {
      await solve(request, form.token, controller.signal, (name, data) => {
        searches[i].take(name, data);
        if (running === controller) timeline.update(searches);
      });
    } catch (error) {
      searches[i].error = error.name === "AbortError" ? CANCELLED : error.message; // which its panel shows
    }
  });
  await Promise.all(runs);
  if (running !== controller) return;
  running = null;
  form.running = false;
  schedule();
}

// Shows what the server has, and offers what runs there.
async function learn(form) {
  const served = await servedModels(form.token);
  if (!served) return;
  const { generator, verifier } = served.model_names;
  const told = [["generator", generator], ["verifier", verifier]].filter(([, name]) => name).map((each) => each.join(" "));
  const lines = [told.join(", "), served.notice].filter(Boolean).map((line) => `${line[0].toUpperCase()}${line.slice(1)}.`);
  byId("models").textContent = lines.join(" ");
  byId("models").hidden = false;
  form.offer(served);
}

function cancel() {
  running?.abort();
}

function notify(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = text === "";
}

byId("labels").addEventListener("change", (event) => {
  labels = event.target.checked;
  schedule();
});
new ResizeObserver(schedule).observe(byId("panels"));
addEventListener("pagehide", cancel);

const embedded = byId("traces");
if (embedded) {
  try {
    tryToShow(JSON.parse(embedded.textContent));
  } catch (error) {
    notify(error.message);
  }
} else {
  const form = new Form(byId("form"), {
    onStart: (requests) => start(form, requests),
    onCancel: cancel,
    onOpen: openFiles,
  });
  if (!form.asksToken) learn(form);
  byId("token").addEventListener("change", () => learn(form));
}
