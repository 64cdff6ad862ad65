// Elements made by hand: text is only ever set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

// An HTML element with a class and children, which are elements or text.
export function html(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// An SVG element with attributes.
export function svg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  setAll(element, attributes);
  return element;
}

export function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

// The content of a <template>, to be filled in.
export function fromTemplate(id) {
  return document.getElementById(id).content.firstElementChild.cloneNode(true);
}

const STOPS = 4; // between the five colours --score-0 to --score-4 of page.css

// Gives an element the colour of a score in [0, 1], as --score.
export function setScore(element, score) {
  if (score === null || score === undefined) {
    element.style.setProperty("--score", "var(--unscored)");
    return;
  }
  const place = Math.min(Math.max(score, 0), 1) * STOPS;
  const from = Math.min(Math.floor(place), STOPS - 1);
  const share = Math.round((place - from) * 100);
  element.style.setProperty(
    "--score",
    `color-mix(in oklab, var(--score-${from + 1}) ${share}%, var(--score-${from}))`,
  );
}

// A score to three places.
export function scoreText(score) {
  if (score === null || score === undefined) return "–";
  if (score > 0 && score < 0.001) return "<0.001";
  if (score < 1 && score > 0.999) return ">0.999";
  return score.toFixed(3);
}

// An answer as it is read: calls of tools, which are JSON, as name(argument=value); any other is its own text.
export function answerText(answer) {
  try {
    const { tool_calls: calls } = answer.startsWith('{"tool_calls":[') ? JSON.parse(answer) : {};
    return calls?.map((call) => `${call.name}(${pairsOf(call.arguments).join(", ")})`).join("; ") || answer;
  } catch {
    return answer; // it only begins like calls
  }
}

const pairsOf = (values) => Object.entries(values).map(([name, value]) => `${name}=${JSON.stringify(value)}`);

export const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
